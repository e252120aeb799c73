"""DeepSpeed's files read without running what a stranger pickled, as one of its own checkpoint engines.

Imported once ``deepspeed`` knows its accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from shardscope.training.checkpoints.pickles import checked_loading, is_own, load_file

CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""What DeepSpeed 0.19.8 pickles beside tensors and plain values, at every stage: numbers in fields."""


class CheckedFiles(CheckpointEngine):  # type: ignore[misc]
    """Reads what DeepSpeed's own engine does with ``torch.load(..., weights_only=False)``."""

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        raise NotImplementedError("DeepSpeed's own engine writes")

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_file(Path(path), CLASSES, map_location)

    def commit(self, info: Any) -> bool:
        return True


@contextmanager
def checked_files(engine: Any, checkpoint: Path) -> Iterator[None]:
    """Let ``engine`` load ``checkpoint`` inside: no more than :data:`CLASSES`, unless this user saved it."""
    if is_own(checkpoint):
        yield
        return
    files, engine.checkpoint_engine = engine.checkpoint_engine, CheckedFiles()
    try:
        with checked_loading(CLASSES, own=False):
            yield
    finally:
        engine.checkpoint_engine = files
