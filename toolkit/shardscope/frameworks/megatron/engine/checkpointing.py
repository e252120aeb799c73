"""Checkpoints in Megatron-core's own format, ``megatron.core.dist_checkpointing``.

Weights and optimizer state are stored under the whole model's names and sizes, so they can be loaded with
other degrees (tp, pp, vpp, ep, data-parallel). The format contains pickles, which
``training/checkpoints/pickles.py`` checks before megatron-core reads them.
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
    is_trusted,
    load_file,
    pickled_items,
)
from shardscope.training.checkpoints.position import read_position, write_position
from shardscope.training.checkpoints.temporary_folder import (
    create_temporary,
    replace_folder,
    replace_when_complete,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def save(path: Path, chunks: Sequence[Any], optimizer: Any, position: dict[str, Any]) -> None:
    """Write weights, optimizer, random states and ``position`` to the folder ``path``. Collective.

    ``chunks``: the wrapped model chunks (``DistributedDataParallel``). ``position`` is written as readable
    JSON. Everything is written to a temporary folder, which is renamed when complete.
    """
    with replace_when_complete(path) as aside:
        _write(aside, chunks, optimizer, beside=False)
        if dist.get_rank() == 0:
            write_position(aside, position, pickled_items(aside))


class Writing:
    """An asynchronous checkpoint, written by forked processes and renamed once all of them are done.

    Its state is already in host memory, so training may continue. All methods are collective.
    """

    def __init__(self, path: Path, chunks: Sequence[Any], optimizer: Any, position: dict[str, Any]) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._path, self._position, self.is_done = path, position, False
        self._aside = create_temporary(path)
        self._calls = AsyncCallsQueue()
        self._calls.schedule_async_request(_write(self._aside, chunks, optimizer, beside=True))

    def look(self) -> None:
        """Rename the checkpoint if it is complete, else return at once. Call this once per step."""
        self._finish(blocking=False)

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error that a writer had."""
        self._finish(blocking=True)

    def _finish(self, *, blocking: bool) -> None:
        if self.is_done or not self._calls.maybe_finalize_async_calls(blocking=blocking):
            return
        if dist.get_rank() == 0:
            write_position(self._aside, self._position, pickled_items(self._aside))
            replace_folder(self._aside, self._path)
        dist.barrier()
        self.is_done = True


def load(path: Path, plan: Plan, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Load ``path`` into ``chunks`` and ``optimizer``, and return its position. Degrees may differ.

    Random states are restored only if the degrees are the same. Raises like :func:`read_position`, and
    ``ValueError`` if a pickle names a class that is not allowed in an untrusted checkpoint.
    """
    position = read_position(path, plan)
    _make_state(optimizer)
    found = _load_checked(path, _state(chunks, optimizer, loading=True))
    for number, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(found[f"model{number}"])
    _load_optimizer(optimizer, found["optimizer"])
    _make_state(optimizer)
    random_state.restore_states(path)
    random_tracker.restore(path)
    return position


def _load_checked(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint with megatron-core, after checking every pickle in it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.dist_checkpointing.strategies import torch as sharded

    trusted = is_trusted(path)
    if not trusted:
        # Read here first, for an error that names the file and the class; megatron-core reads it again.
        load_file(path / common.COMMON_STATE_FNAME, (), "cpu")
    reader = CheckedReader(path, trusted=trusted)
    get_reader, sharded._get_filesystem_reader = sharded._get_filesystem_reader, lambda *_, **__: reader
    try:
        with checked_loading(trusted=trusted):
            found: dict[str, Any] = dist_checkpointing.load(state, str(path))
    finally:
        sharded._get_filesystem_reader = get_reader
    return found


def _write(aside: Path, chunks: Sequence[Any], optimizer: Any, *, beside: bool) -> Any:
    """Write everything except the position. With ``beside``, return the asynchronous request to schedule."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    random_state.write_states(aside)
    random_tracker.write(aside)
    _make_state(optimizer)
    wait_for_weights(chunks)
    filesystem_async._get_write_results_queue = _results_queue
    # The folder already contains the random states; megatron-core only warns that it is not empty.
    return dist_checkpointing.save(
        _state(chunks, optimizer, loading=False),
        str(aside),
        async_sharded_save=beside,
        content_metadata=_metadata_on_disk(),
    )


def _results_queue() -> Any:
    """Replace megatron-core's ``_get_write_results_queue``: this one's process always ends with the rank.

    Writers report their results through the queue. megatron-core starts its process at the first checkpoint
    and stops it when Python exits, so a killed rank would leave it running.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(die_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


def _state(chunks: Sequence[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """Return the sharded state dict to write or read, each shard with its position in the whole tensor."""
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
    """Return the format options (megatron/training/checkpointing.py) that reshard to any degrees."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _parts(optimizer: Any) -> list[Any]:
    """Return the optimizers that ``get_megatron_optimizer`` chained, those of experts last."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_optimizer(optimizer: Any, found: dict[Any, Any]) -> None:
    """Load the optimizer state like ``optimizer.load_state_dict``, but support torch's Adam.

    The distributed optimizer copies every tensor of a parameter's state from the loaded one, which lacks
    torch's step counters. It also gives all parameters the same counter, which each of them would advance.
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
    """Create the optimizer state that its first step would create.

    megatron-core reads torch's step counters before they exist, and cannot create the momentum of its SGD
    (optimizer/__init__.py).
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
