"""Checkpoints of Megatron-core in its own format, ``megatron.core.dist_checkpointing``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def save(path: Path, chunks: Sequence[torch.nn.Module], optimizer: Any, position: dict[str, Any]) -> None:
    """Write ``path`` (a folder), all ranks together: weights, optimizer, ``position`` as readable JSON.

    ``chunks``: the model chunks as they were made for the optimizer (``DistributedDataParallel``).
    Written aside and renamed when it is whole.
    """
    raise NotImplementedError


def load(path: Path, chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """Read ``path`` into ``chunks`` and ``optimizer``; return its position. Other degrees may have saved it.

    Raises ``FileNotFoundError`` if it is no checkpoint, ``PermissionError`` if another user owns it.
    """
    raise NotImplementedError
