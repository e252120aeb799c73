"""Checkpoints in DeepSpeed's own format, and full weights gathered from ZeRO partitions.

DeepSpeed writes one file per rank, with pickles in it, which :func:`restrict_pickles` loads safely. A
checkpoint loads only with the number of ranks and the ZeRO stage that wrote it.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.tensor_fragment import fragment_address
from torch._utils import _unflatten_dense_tensors

from shardscope.core.errors import refuse
from shardscope.training.checkpoints import random_state
from shardscope.training.checkpoints.pickles import checked_loading, is_trusted, load_file
from shardscope.training.checkpoints.position import read_position, write_position
from shardscope.training.checkpoints.temporary_folder import (
    create_temporary,
    delete_temporary,
    failing_alone,
    raise_if_a_rank_failed,
    raise_on_all_ranks,
    raising_on_all_ranks,
    replace_on_all_nodes,
    replace_when_complete,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from shardscope.core.plan import Plan
    from shardscope.training.weights.pretrained import FullTensors

TAG = "zero"
"""DeepSpeed's name for the one state that a folder holds."""


def save_checkpoint(
    path: Path, engine: DeepSpeedEngine, position: dict[str, object], *, only_trained: bool
) -> None:
    """Write a checkpoint folder, with ``position`` as JSON. Collective."""
    with replace_when_complete(path) as folder:
        _save_state(folder, engine, only_trained)
        dist.barrier()  # Rank 0 signs the files of all ranks.
        if dist.get_rank() == 0:
            write_position(folder, position)


class AsyncSave:
    """Asynchronous save: each rank copies its state to host memory, and a thread writes it during steps.

    Collective. ``group`` is a gloo group of all ranks that nothing else uses: the threads synchronize with
    it.
    """

    def __init__(
        self,
        path: Path,
        engine: DeepSpeedEngine,
        position: dict[str, object],
        group: dist.ProcessGroup,
        *,
        only_trained: bool,
    ) -> None:
        self._path, self._position, self._group = path, position, group
        self._temporary = create_temporary(path)
        self._files = StagedFiles()
        original, engine.checkpoint_engine = engine.checkpoint_engine, self._files
        engine._copy_recovery_script = partial(self._files.write_later, engine._copy_recovery_script)
        try:
            _save_state(self._temporary, engine, only_trained)
        finally:
            engine.checkpoint_engine = original
            del engine._copy_recovery_script
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error of the writing thread."""
        self._thread.join()
        raise_on_all_ranks(self._error, self._group)

    def _write(self) -> None:
        try:
            # Rank 0 signs the files of all ranks. Nodes that share no folder each rename their own: all of
            # them, or none.
            raise_if_a_rank_failed(_try_to(self._files.write), self._path, self._group)
            complete = partial(write_position, self._temporary, self._position)
            error = _try_to(complete) if dist.get_rank() == 0 else None
            raise_if_a_rank_failed(error, self._path, self._group)
            raise_together = partial(raise_if_a_rank_failed, path=self._path, group=self._group)
            replace_on_all_nodes(self._temporary, self._path, raise_together)
        except BaseException as error:
            self._error = error
            delete_temporary(self._path)


def _try_to(write: Callable[[], None]) -> Exception | None:
    """Call ``write``. Return its error, for which the other ranks would wait; None without."""
    try:
        write()
    except Exception as error:
        return error
    return None


def _save_state(folder: Path, engine: DeepSpeedEngine, only_trained: bool) -> None:
    with raising_on_all_ranks():
        random_state.write_states(folder)
    # DeepSpeed would copy its NVMe files without the other ranks, which wait for this one if they do not fit.
    has_nvme_files = engine.zero_nvme_offload_optimizer()
    engine.zero_nvme_offload_optimizer = lambda: False
    try:
        with failing_alone(folder):
            engine.save_checkpoint(
                str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=only_trained
            )
    finally:
        del engine.zero_nvme_offload_optimizer
    if has_nvme_files:
        with raising_on_all_ranks():
            _copy_nvme_files(Path(engine.optimizer.optimizer_swapper.swap_folder), folder, engine.global_rank)


def _copy_nvme_files(source: Path, folder: Path, rank: int) -> None:
    """Copy the files of the optimizer's state to where ``DeepSpeedEngine.load_checkpoint`` looks for them.

    As ``save_checkpoint`` does: without gradients, in a folder of each rank (runtime/engine.py).
    """
    target = folder / TAG / "offloaded_tensors" / f"rank{rank:0>2d}"
    # Also without files, if all partitions are so small that they stay in memory: it is read all the same.
    target.mkdir(parents=True)
    for path in source.rglob("*"):
        name = path.relative_to(source)
        if path.is_file() and not any("gradient" in part for part in name.parts):
            (target / name.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / name)


def load_checkpoint(
    path: Path, plan: Plan, engine: DeepSpeedEngine, run_position: Mapping[str, object]
) -> int:
    """Load a checkpoint folder into DeepSpeed's engine. Return the number of steps that it was saved after.

    Raises as :func:`read_position` does, and ``ValueError`` for another ZeRO stage or other degrees than
    ``run_position``'s, or if another user's checkpoint pickles a class outside of :data:`CLASSES`.
    """
    only_trained = plan.recipe.has_adapters
    position = read_position(path, plan)
    _check_fits(path, position, run_position)
    with _restore_missing_settings(engine.optimizer), restrict_pickles(engine, path):
        engine.load_checkpoint(str(path), tag=TAG, load_module_strict=not only_trained)
        if engine.zero_nvme_offload_optimizer():
            _load_partitions_in_memory(engine, path)
    random_state.restore_states(path)
    return int(position["num_steps_done"])


def _load_partitions_in_memory(engine: DeepSpeedEngine, path: Path) -> None:
    """Load the partitions that are too small for files on NVMe, such as those of norms.

    DeepSpeed 0.19.8 loads only the files, and of them only the weights: their Adam states begin again
    (runtime/engine.py, ``load_checkpoint``).
    """
    zero = engine.optimizer
    file = engine._get_zero_ckpt_name(str(path), TAG)
    saved = engine.checkpoint_engine.load(file, map_location="cpu")["optimizer_state_dict"]
    states = saved["optimizer_state_dict"]["state"]
    zero.checkpoint_event_prologue()
    for number, weights in enumerate(saved["fp32_flat_groups"]):
        if not zero._swappable_optimizer_subgroup(number):
            partition = zero.fp32_partitioned_groups_flat[number]
            partition.data.copy_(weights)
            zero.optimizer.state[partition] = {
                name: value.to(partition.device) if isinstance(value, torch.Tensor) else value
                for name, value in states[number].items()
            }
            zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()


@contextmanager
def _restore_missing_settings(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the optimizer settings that the checkpoint loaded inside does not contain.

    torch's AdamW saves no ``bias_correction``, without which DeepSpeed's CPU Adam cannot step.
    """
    before = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    yield
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        for name, value in settings.items():
            group.setdefault(name, value)


def _check_fits(path: Path, position: Mapping[str, object], run_position: Mapping[str, object]) -> None:
    # Checkpoints of the first versions do not name their framework.
    if position.get("framework") != run_position["framework"]:
        refuse(
            "checkpoint of",
            position.get("framework"),
            "'deepspeed': ZeRO loads only its own format",
            "Engine.export of the run that saved it, and these weights as the model to start from",
        )
    for field, description in (
        ("stage", "ZeRO stage"),
        ("world_size", "number of ranks"),
        ("tp", "tensor-parallel degree"),
        ("pp", "number of pipeline stages"),
        ("ep", "expert-parallel degree"),
    ):
        # Older checkpoints contain only degrees above 1.
        saved = position.get(field, 1)
        if saved != run_position[field]:
            refuse(
                f"{field} of this run",
                run_position[field],
                f"{saved}, the {description} that saved {path.name}: DeepSpeed cannot reshard partitions; "
                "fsdp2 and ddp resume on any number of ranks",
                {field: saved},
            )


def gather_tensors(engine: DeepSpeedEngine, *, main: bool, only_trained: bool) -> FullTensors:
    """Yield the full parameters and persistent buffers by name: on rank 0 in host memory, elsewhere None.

    Collective. ``main``: fp32 main weights, if DeepSpeed keeps them, else the weights that forward reads. A
    tied weight comes once, under its first name.
    """
    gather = build_gather(engine, main=main)
    for name, parameter in engine.module.named_parameters():
        if only_trained and not parameter.requires_grad:
            continue
        tensor = gather(parameter)
        yield name, tensor.cpu() if dist.get_rank() == 0 else None
    if not only_trained:
        persistent = engine.module.state_dict().keys()
        for name, buffer in engine.module.named_buffers():
            if name in persistent:
                yield name, buffer.cpu() if dist.get_rank() == 0 else None


def build_gather(
    engine: DeepSpeedEngine, *, main: bool, device: torch.device | None = None
) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """Return a function that gathers the full tensor of a parameter on the ranks with its partitions.

    ``main``: its fp32 main weights, if DeepSpeed keeps them. The result is on ``device``; without, on the
    device of the weights.
    """
    main_weights = {}
    if main and engine.zero_optimization_stage() == 0:
        main_weights = _unflatten_main_weights(engine.optimizer)

    def gather(parameter: torch.nn.Parameter) -> torch.Tensor:
        tensor = None
        if main:
            tensor = main_weights.get(id(parameter))
            if tensor is None and parameter.requires_grad:
                tensor = safe_get_full_fp32_param(parameter)
        if tensor is None:
            tensor = _gather_weights(parameter)
        tensor = tensor.detach()
        return tensor if device is None else tensor.to(device)

    return gather


def _gather_weights(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the weights that forward reads, all-gathered in stage 3."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.data
    with GatheredParameters([parameter]):
        return parameter.data.clone()


def _unflatten_main_weights(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return stage 0's fp32 main weights by the ``id`` of their parameter; none if the weights are fp32."""
    half_groups = getattr(optimizer, "fp16_groups", ())
    if hasattr(optimizer, "fp32_groups_flat"):
        main_groups = [
            _unflatten_dense_tensors(flat, group)
            for flat, group in zip(optimizer.fp32_groups_flat, half_groups, strict=True)
        ]
    else:
        main_groups = getattr(optimizer, "fp32_groups", [])
    return {
        id(parameter): main
        for group, main_group in zip(half_groups, main_groups, strict=True)
        for parameter, main in zip(group, main_group, strict=True)
    }


# ---- Safe loading of DeepSpeed's pickles


CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes that DeepSpeed 0.19.8 pickles besides tensors and plain values: their fields are numbers."""


class CheckedFiles(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine that loads only :data:`CLASSES`; DeepSpeed's own loads any class."""

    def create(self, info: object) -> None:
        """Do nothing: there is nothing to prepare."""

    def save(self, state_dict: object, path: str) -> None:
        raise NotImplementedError("DeepSpeed's own engine saves")

    def load(self, path: str, map_location: torch.device | str | None = None) -> object:
        return load_file(Path(path), CLASSES, map_location)

    def commit(self, info: object) -> bool:
        return True


@contextmanager
def restrict_pickles(engine: DeepSpeedEngine, checkpoint: Path) -> Iterator[None]:
    """Let ``engine`` unpickle only :data:`CLASSES` from ``checkpoint``, unless this user saved it."""
    if is_trusted(checkpoint):
        yield
        return
    original, engine.checkpoint_engine = engine.checkpoint_engine, CheckedFiles()
    try:
        with checked_loading(CLASSES, trusted=False):
            yield
    finally:
        engine.checkpoint_engine = original


# ---- Asynchronous saves
#
# DeepSpeed 0.19.8's own asynchronous engine (``DecoupledCheckpointEngine``) does not fit: it passes tensors
# to its process without copying them, so that the next update waits for it (``DeepSpeedEngine.step`` commits
# first); its fast writer compiles libaio's extension; and it loads with ``torch.load``'s default, which
# rejects the files that it wrote.


class StagedFiles(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine that keeps the bytes of DeepSpeed's files in host memory until :meth:`write`."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: list[tuple[str, io.BytesIO]] = []
        self._later: list[Callable[[], None]] = []

    def create(self, info: object) -> None:
        """Do nothing: there is nothing to prepare."""

    def save(self, state_dict: object, path: str) -> None:
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        self._staged.append((path, buffer))

    def write_later(self, write: Callable[[str], None], folder: str) -> None:
        """Call ``write`` in :meth:`write`: for rank 0's scripts, at whose error the others would wait."""
        self._later.append(partial(write, folder))

    def load(self, path: str, map_location: torch.device | str | None = None) -> object:
        raise NotImplementedError("DeepSpeed's own engine loads")

    def commit(self, info: object) -> bool:
        return True

    def write(self) -> None:
        """Write the files, and free the memory of each as soon as it is written."""
        while self._staged:
            path, buffer = self._staged.pop(0)
            Path(path).write_bytes(buffer.getbuffer())
        for write in self._later:
            write()
