"""Checkpoints of Megatron-core in its own format, ``megatron.core.dist_checkpointing``.

Weights and the optimizer's state are written under the whole model's names and sizes, so ranks of other
degrees (tp, pp, vpp, ep, data-parallel) read what they hold of them. The format pickles, and
``training/checkpoints/pickles.py`` checks it before megatron-core reads it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardscope.frameworks.megatron.engine import random_tracker
from shardscope.frameworks.megatron.weights.export import wait_for_weights
from shardscope.frameworks.megatron.weights.load import unwrapped
from shardscope.machine.processes import die_with_parent
from shardscope.training.checkpoints import random_state
from shardscope.training.checkpoints.pickles import (
    CheckedReader,
    checked_loading,
    is_own,
    load_file,
    pickled_items,
)
from shardscope.training.checkpoints.position import read_position, write_position
from shardscope.training.checkpoints.temporary_folder import begin_aside, replace, written_aside

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def save(path: Path, chunks: Sequence[Any], optimizer: Any, position: dict[str, Any]) -> None:
    """Write ``path`` (a folder), all ranks together: weights, optimizer, random states, ``position``.

    ``chunks``: the model chunks as they were made for the optimizer (``DistributedDataParallel``).
    ``position`` goes in as readable JSON. Written aside and renamed when it is whole.
    """
    with written_aside(path) as aside:
        _write(aside, chunks, optimizer, beside=False)
        if dist.get_rank() == 0:
            write_position(aside, position, pickled_items(aside))


class Writing:
    """A checkpoint that forked processes of the ranks are writing; named once all of them are done.

    Its state is in host memory already, so steps may go on. All ranks together.
    """

    def __init__(self, path: Path, chunks: Sequence[Any], optimizer: Any, position: dict[str, Any]) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._path, self._position, self.is_done = path, position, False
        self._aside = begin_aside(path)
        self._calls = AsyncCallsQueue()
        self._calls.schedule_async_request(_write(self._aside, chunks, optimizer, beside=True))

    def look(self) -> None:
        """Name it if it is written; else come back at once. Once a step: nothing else notices."""
        self._finish(blocking=False)

    def wait(self) -> None:
        """Come back when it is whole; raises what kept it from that."""
        self._finish(blocking=True)

    def _finish(self, *, blocking: bool) -> None:
        if self.is_done or not self._calls.maybe_finalize_async_calls(blocking=blocking):
            return
        if dist.get_rank() == 0:
            write_position(self._aside, self._position, pickled_items(self._aside))
            replace(self._aside, self._path)
        dist.barrier()
        self.is_done = True


def load(path: Path, plan: Plan, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Read ``path`` into ``chunks`` and ``optimizer``; return its position. Other degrees may have saved it.

    Random states go on where they were if ranks of the same degrees saved them. Raises as
    :func:`read_position` does, and ``ValueError`` if it asks for a class that a stranger's may not have.
    """
    position = read_position(path, plan)
    _make_state(optimizer)
    found = _load_checked(path, _state(chunks, optimizer, loading=True))
    for number, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(found[f"model{number}"])
    _load_optimizer(optimizer, found["optimizer"])
    _make_state(optimizer)
    random_state.restore(path)
    random_tracker.restore(path)
    return position


def _load_checked(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read the checkpoint through megatron-core, every pickle of it checked."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.dist_checkpointing.strategies import torch as sharded

    own = is_own(path)
    if not own:
        # Read here for the error that names the file and the class; megatron-core reads it again.
        load_file(path / common.COMMON_STATE_FNAME, (), "cpu")
    reader = CheckedReader(path, own=own)
    get_reader, sharded._get_filesystem_reader = sharded._get_filesystem_reader, lambda *_, **__: reader
    try:
        with checked_loading(own=own):
            found: dict[str, Any] = dist_checkpointing.load(state, str(path))
    finally:
        sharded._get_filesystem_reader = get_reader
    return found


def _write(aside: Path, chunks: Sequence[Any], optimizer: Any, *, beside: bool) -> Any:
    """All but the position; ``beside`` training, what comes back is still to be scheduled."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    random_state.write(aside)
    random_tracker.write(aside)
    _make_state(optimizer)
    wait_for_weights(chunks)
    filesystem_async._get_write_results_queue = _results_queue
    # The random states are in the folder already, which megatron-core only warns of.
    return dist_checkpointing.save(
        _state(chunks, optimizer, loading=False),
        str(aside),
        async_sharded_save=beside,
        content_metadata=_metadata_on_disk(),
    )


def _results_queue() -> Any:
    """megatron-core's ``_get_write_results_queue``, whose process ends with the rank, however the rank ends.

    Through it writers tell their rank what they wrote. megatron-core starts it on the first checkpoint and
    stops it as Python ends, so a rank that is killed would leave it behind for good.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(die_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


def _state(chunks: Sequence[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """What is written or read, every tensor with its place in the whole one."""
    metadata = _metadata()
    models = {
        f"model{number}": unwrapped(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    return {
        **models,
        "optimizer": optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata),
    }


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        **_metadata_on_disk(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _metadata_on_disk() -> dict[str, Any]:
    """Which of its formats (megatron/training/checkpointing.py): the one that any degrees can read."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers that ``get_megatron_optimizer`` chained, those of experts last."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_optimizer(optimizer: Any, found: dict[Any, Any]) -> None:
    """What ``optimizer.load_state_dict`` does, with torch's Adam too.

    The distributed optimizer copies every tensor of a parameter's state from what was loaded, where torch's
    step counters are not; and it gives all parameters one counter, which each of them would advance.
    """
    parts = _parts(optimizer)
    states = [found] if len(parts) == 1 else [found[number] for number in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        sharded = state.pop("param_state", None)
        part.load_state_dict(state)
        if sharded is None:
            continue
        kept = [own for own in part.optimizer.state.values() if "step" in own]
        steps = [own.pop("step") for own in kept]
        part.load_parameter_state_from_fully_reshardable(sharded)
        for own, step in zip(kept, steps, strict=True):
            own["step"] = step.clone()


def _make_state(optimizer: Any) -> None:
    """Give the optimizer the state that its first step would make.

    megatron-core reads torch's step counters off it before there are any, and has no way to make the
    momentum of its SGD (optimizer/__init__.py).
    """
    for part in _parts(optimizer):
        inner = part.optimizer
        if inner is None:
            continue
        if part.init_state_fn is None:
            part.init_state_fn = _nothing
        part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if isinstance(inner, torch.optim.Adam):
                    state.setdefault("step", torch.tensor(0.0))
                elif group.get("momentum") and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _nothing(*_: Any) -> None:
    return None
