"""Weights of transformers into the model chunks of this rank, and out of those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardscope.architecture import Architecture


def load_hf(chunks: Sequence[torch.nn.Module], state: Mapping[str, torch.Tensor], arch: Architecture) -> None:
    """Copy this rank's part of ``state`` (a transformers model's ``state_dict()``) into its model chunks.

    ``chunks`` are ``GPTModel``s or what wraps them (``DistributedDataParallel``, ``Float16Module``), after
    ``initialize_model_parallel``. Call it before the optimizer is made, or ``optimizer.reload_model_params()``
    after it. Raises ``RuntimeError`` if a parameter gets no value, or one of another shape.
    """
    raise NotImplementedError


def to_hf(chunks: Sequence[torch.nn.Module], arch: Architecture) -> dict[str, torch.Tensor]:
    """The whole model's state as transformers names it, on the CPU of rank 0; empty on the others.

    All ranks together. For small models: :func:`export_hf` never holds more than a file's worth.
    """
    raise NotImplementedError


def export_hf(chunks: Sequence[torch.nn.Module], arch: Architecture, hf_config: Any, path: Path) -> None:
    """A folder (config.json, model*.safetensors) that ``AutoModelForCausalLM.from_pretrained`` opens.

    All ranks together; weights in the type that the chunks have. ``hf_config``: the transformers config of
    the model that was loaded. Written aside and renamed when it is whole; an older folder is replaced.
    """
    raise NotImplementedError
