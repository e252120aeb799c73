"""Checkpoints in DeepSpeed's own format, and whole weights out of its parts.

DeepSpeed writes a file for each rank and pickles in it, which :func:`checked_files` has read with care.
What one number of ranks at one stage wrote, only the same number at the same stage reads back.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from shardscope.core.errors import refuse
from shardscope.training.checkpoints import random_state
from shardscope.training.checkpoints.pickles import checked_loading, is_trusted, load_file
from shardscope.training.checkpoints.position import read_position, write_position
from shardscope.training.checkpoints.temporary_folder import (
    create_temporary,
    replace_folder,
    replace_when_complete,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.training.weights.pretrained import FullTensors

TAG = "zero"
"""DeepSpeed's name for the one state that a folder holds."""


def save(path: Path, engine: Any, position: dict[str, Any], only_trained: bool) -> None:
    """Write ``path`` (a folder), all ranks together; ``position`` goes in as readable JSON."""
    with replace_when_complete(path) as aside:
        _save(aside, engine, only_trained)
        dist.barrier()  # Rank 0 signs what all have written.
        if dist.get_rank() == 0:
            write_position(aside, position)


class Writing:
    """A checkpoint whose bytes are in host memory, and which a thread of each rank writes beside steps.

    All ranks together. ``group`` is a gloo group of them that nothing else uses: the threads meet in it.
    """

    def __init__(
        self, path: Path, engine: Any, position: dict[str, Any], only_trained: bool, group: Any
    ) -> None:

        self._path, self._position, self._group = path, position, group
        self._aside = create_temporary(path)
        self._files = StagedFiles()
        own, engine.checkpoint_engine = engine.checkpoint_engine, self._files
        try:
            _save(self._aside, engine, only_trained)
        finally:
            engine.checkpoint_engine = own
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Come back when it is whole; raises what kept it from that."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        dist.barrier(self._group)

    def _write(self) -> None:
        try:
            problem: BaseException | None = None
            try:
                self._files.write()
            except OSError as error:
                problem = error
            # Nobody names what another has not written.
            failed = torch.tensor(int(problem is not None))
            dist.all_reduce(failed, group=self._group)
            if problem is not None:
                raise problem
            if int(failed):
                raise RuntimeError(f"other ranks could not write their part of {self._path}")
            if dist.get_rank() == 0:
                write_position(self._aside, self._position)
                replace_folder(self._aside, self._path)
        except BaseException as error:
            self._error = error


def _save(aside: Path, engine: Any, only_trained: bool) -> None:
    random_state.write_states(aside)
    engine.save_checkpoint(str(aside), tag=TAG, save_latest=False, exclude_frozen_parameters=only_trained)


def load(path: Path, plan: Plan, engine: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Read ``path`` into DeepSpeed's engine; return its position, which fits this run's ``own``.

    Raises as :func:`read_position` does, and ``ValueError`` for one of another stage or number of ranks, or
    one that asks for a class that a stranger's may not have.
    """
    # DeepSpeed must know its accelerator before its classes are imported.

    only_trained = plan.recipe.has_adapters
    position = read_position(path, plan)
    _check_fits(path, position, own)
    with _own_settings(engine.optimizer), checked_files(engine, path):
        engine.load_checkpoint(str(path), tag=TAG, load_module_strict=not only_trained)
    random_state.restore_states(path)
    return position


@contextmanager
def _own_settings(optimizer: Any) -> Iterator[None]:
    """Settings that what is loaded inside does not know stay.

    torch's Adam saves none of ``bias_correction``, without which DeepSpeed's own, on the host, takes no step.
    """
    own = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        for name, value in settings.items():
            group.setdefault(name, value)


def _check_fits(path: Path, position: dict[str, Any], own: dict[str, Any]) -> None:
    if position.get("framework") != own["framework"]:  # One of before its format was told.
        refuse(
            "checkpoint of",
            position.get("framework"),
            "'deepspeed': ZeRO reads its own format alone",
            "Engine.export of the run that saved it, and these weights as the model to start from",
        )
    for field, words in (
        ("stage", "ZeRO stage"),
        ("world_size", "number of ranks"),
        ("tp", "number of parts of each matrix"),
        ("pp", "number of pipeline stages"),
        ("ep", "number of ranks that share out experts"),
    ):
        # Older checkpoints tell only what was more than one.
        saved = position.get(field, 1)
        if saved != own[field]:
            refuse(
                f"{field} of this run",
                own[field],
                f"{saved}, the {words} that saved {path.name}: DeepSpeed cannot join its parts "
                "anew; fsdp2 and ddp resume over any number of ranks",
                {field: saved},
            )


def full_tensors(engine: Any, *, main: bool, only_trained: bool) -> FullTensors:
    """The parameters one by one, gathered on all ranks; of rank 0 they come in host memory.

    ``main``: in fp32, out of the main copies, where DeepSpeed keeps such; else as forward reads them. A tied
    weight comes once, under its first name, and a persistent buffer under its own.
    """
    gather = gathering(engine, main=main)
    for name, parameter in engine.module.named_parameters():
        if only_trained and not parameter.requires_grad:
            continue
        whole = gather(parameter)
        yield name, whole.cpu() if dist.get_rank() == 0 else None
    if not only_trained:
        kept = engine.module.state_dict().keys()
        for name, buffer in engine.module.named_buffers():
            if name in kept:
                yield name, buffer.cpu() if dist.get_rank() == 0 else None


def gathering(
    engine: Any, *, main: bool, device: torch.device | None = None
) -> Callable[[Any], torch.Tensor]:
    """What gathers a parameter on all ranks with parts of it; ``main``: its main copy, if there is one.

    On ``device``, from which it can be sent; without, wherever it lies.
    """
    copies = _unflattened(engine.optimizer) if main and engine.zero_optimization_stage() == 0 else {}

    def gather(parameter: Any) -> torch.Tensor:
        whole = copies.get(id(parameter))
        if whole is None and main and parameter.requires_grad:
            whole = _main_copy(parameter)
        found = (_as_read(parameter) if whole is None else whole).detach()
        return found if device is None else found.to(device)

    return gather


def _main_copy(parameter: Any) -> torch.Tensor | None:
    from deepspeed.utils import safe_get_full_fp32_param

    found: torch.Tensor | None = safe_get_full_fp32_param(parameter)
    return found


def _as_read(parameter: Any) -> torch.Tensor:
    if not hasattr(parameter, "ds_tensor"):
        found: torch.Tensor = parameter.data
        return found
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        whole: torch.Tensor = parameter.data.clone()
    return whole


def _unflattened(optimizer: Any) -> dict[int, torch.Tensor]:
    """Stage 0's fp32 main copies, by the parameter whose they are; none where weights are fp32 themselves."""
    halves = getattr(optimizer, "fp16_groups", ())
    if hasattr(optimizer, "fp32_groups_flat"):
        from torch._utils import _unflatten_dense_tensors

        mains = [
            _unflatten_dense_tensors(flat, group)
            for flat, group in zip(optimizer.fp32_groups_flat, halves, strict=True)
        ]
    else:
        mains = getattr(optimizer, "fp32_groups", [])
    return {
        id(half): main
        for group, copies in zip(halves, mains, strict=True)
        for half, main in zip(group, copies, strict=True)
    }


# ---- DeepSpeed's files read without running what a stranger pickled, as one of its own checkpoint engines
#
# Imported once ``deepspeed`` knows its accelerator.


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
    if is_trusted(checkpoint):
        yield
        return
    files, engine.checkpoint_engine = engine.checkpoint_engine, CheckedFiles()
    try:
        with checked_loading(CLASSES, trusted=False):
            yield
    finally:
        engine.checkpoint_engine = files


# ---- DeepSpeed's checkpoints kept in host memory first, as one of its own checkpoint engines
#
# Imported once ``deepspeed`` knows its accelerator. DeepSpeed 0.19.8 ships an engine that writes beside steps
# (``DecoupledCheckpointEngine``), and it is not used: it hands tensors to its process as they are, not
# copies, so the next update has to wait for it after all (``DeepSpeedEngine.step`` commits before it); its
# fast writer compiles libaio's extension; and it reads with ``torch.load``'s default, which refuses what it
# wrote.


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
