"""DeepSpeed's checkpoints kept in host memory first, as one of its own checkpoint engines.

Imported once ``deepspeed`` knows its accelerator. DeepSpeed 0.19.8 ships an engine that writes beside steps
(``DecoupledCheckpointEngine``), and it is not used: it hands tensors to its process as they are, not copies,
so the next update has to wait for it after all (``DeepSpeedEngine.step`` commits before it); its fast writer
compiles libaio's extension; and it reads with ``torch.load``'s default, which refuses what it wrote.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine


class StagedFiles(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed saves, as the bytes of its files: the same as its own engine writes at once."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: list[tuple[str, io.BytesIO]] = []

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        held = io.BytesIO()
        torch.save(state_dict, held)
        self._staged.append((path, held))

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError("DeepSpeed's own engine reads")

    def commit(self, info: Any) -> bool:
        return True

    def write(self) -> None:
        """Put the files where they belong; what was held of each is let go."""
        while self._staged:
            path, held = self._staged.pop(0)
            Path(path).write_bytes(held.getbuffer())
