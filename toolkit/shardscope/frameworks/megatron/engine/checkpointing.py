"""Checkpoints in Megatron-core's own format, ``megatron.core.dist_checkpointing``.

Weights and optimizer state are stored under the whole model's names and sizes, so they can be loaded with
other degrees (tp, pp, vpp, ep, data-parallel). The format contains pickles, which
``training/checkpoints/pickles.py`` checks before megatron-core reads them.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardscope.frameworks.megatron.engine import random_tracker
from shardscope.frameworks.megatron.weights.export import wait_for_weights
from shardscope.frameworks.megatron.weights.load import unwrap
from shardscope.machine.os_errors import is_disk_error
from shardscope.machine.processes import die_with_parent
from shardscope.training.checkpoints import random_state
from shardscope.training.checkpoints.pickles import (
    CheckedReader,
    checked_loading,
    is_trusted,
    list_pickled_ranges,
    load_file,
)
from shardscope.training.checkpoints.position import read_position, write_position
from shardscope.training.checkpoints.temporary_folder import (
    as_os_error,
    create_temporary,
    delete_temporary,
    failing_alone,
    raise_on_all_ranks,
    raising_on_all_ranks,
    replace_on_all_nodes,
    replace_when_complete,
)

if TYPE_CHECKING:
    from queue import Queue

    from megatron.core.dist_checkpointing.mapping import StateDict
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

    from shardscope.core.plan import Plan

P = ParamSpec("P")

FORMAT_OPTIONS = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""Options (megatron/training/checkpointing.py) with which the format can be resharded to any degrees."""
RESULTS_QUEUE_FUNCTIONS = ("_get_write_results_queue", "get_write_results_queue")
"""Names in ``filesystem_async`` of megatron-core 0.16 and of later releases."""


def save_checkpoint(
    path: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    position: dict[str, object],
) -> None:
    """Write weights, optimizer, random states and ``position`` to the folder ``path``. Collective.

    ``chunks``: the wrapped model chunks (``DistributedDataParallel``). ``position`` is written as readable
    JSON. Everything is written to a temporary folder, which is renamed when complete.
    """
    with replace_when_complete(path) as folder:
        _write_state(folder, chunks, optimizer, asynchronous=False)
        if dist.get_rank() == 0:
            write_position(folder, position, list_pickled_ranges(folder))


class AsyncSave:
    """An asynchronous checkpoint, written by forked processes and renamed once all of them are done.

    Its state is already in host memory, so training may continue. All methods are collective.
    """

    def __init__(
        self,
        path: Path,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        position: dict[str, object],
    ) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._path, self._position, self.is_done = path, position, False
        self._error: BaseException | None = None
        self._temporary = create_temporary(path)
        self._calls = AsyncCallsQueue()
        self._calls.schedule_async_request(
            _write_state(self._temporary, chunks, optimizer, asynchronous=True)
        )

    def poll(self) -> None:
        """Rename the checkpoint if it is complete, else return at once. Call this once per step."""
        self._finish(blocking=False)

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error that a writer had."""
        self._finish(blocking=True)
        if self._error is not None:
            raise self._error

    def _finish(self, *, blocking: bool) -> None:
        """Complete the checkpoint if it is written. Keep its error for :meth:`wait`: steps go on."""
        if self.is_done:
            return
        error: BaseException | None = None
        try:
            with failing_alone(self._temporary), _keeping_errors_of_rank_0(self._temporary) as errors:
                try:
                    if not self._calls.maybe_finalize_async_calls(blocking=blocking):
                        return
                except CheckpointException as raised:  # On all ranks.
                    error = raised
            error = error or next(iter(errors), None)
            if error is None and dist.get_rank() == 0:
                write_position(self._temporary, self._position, list_pickled_ranges(self._temporary))
        except OSError as raised:
            error = raised
        # No rank may see the checkpoint as done before rank 0 has renamed it.
        self.is_done = True
        try:
            raise_on_all_ranks(error, folder=self._temporary)
            # Nodes that share no folder each rename their own: all of them, or none.
            replace_on_all_nodes(self._temporary, self._path, raise_on_all_ranks)
        except (CheckpointException, OSError) as raised:
            self._error = raised
            delete_temporary(self._path)


def load_checkpoint(
    path: Path, plan: Plan, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> int:
    """Load ``path`` into ``chunks`` and ``optimizer``. Return the number of steps that it was saved after.

    Degrees may differ; random states are restored only if they are the same. Raises like
    :func:`read_position`, and ``ValueError`` if a pickle names a class that is not allowed in an untrusted
    checkpoint.
    """
    position = read_position(path, plan)
    _create_optimizer_state(optimizer)
    state = _load_checked(path, _build_state_dict(chunks, optimizer, loading=True))
    for number, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(state[f"model{number}"])
    _load_optimizer(optimizer, state["optimizer"])
    _create_optimizer_state(optimizer)
    random_state.restore_states(path)
    random_tracker.restore_states(path)
    return int(position["num_steps_done"])


def _load_checked(path: Path, state: dict[str, object]) -> StateDict:
    """Load the checkpoint with megatron-core, after checking every pickle in it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.dist_checkpointing.strategies import torch as sharded

    trusted = is_trusted(path)
    if not trusted:
        # Read here first, for an error that names the file and the class; megatron-core reads it again.
        load_file(path / common.COMMON_STATE_FNAME, (), "cpu")
    # megatron-core's own reader (_get_filesystem_reader) unpickles metadata with any class in it.
    reader = CheckedReader(path, trusted=trusted)
    get_reader, sharded._get_filesystem_reader = sharded._get_filesystem_reader, lambda *_, **__: reader
    try:
        with checked_loading(trusted=trusted):
            return dist_checkpointing.load(state, str(path))
    finally:
        sharded._get_filesystem_reader = get_reader


def _write_state(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    *,
    asynchronous: bool,
) -> AsyncRequest | None:
    """Write everything except the position. If ``asynchronous``, return the request to schedule."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with raising_on_all_ranks():
        random_state.write_states(folder)
        random_tracker.write_states(folder)
    _create_optimizer_state(optimizer)
    wait_for_weights(chunks)
    for name in RESULTS_QUEUE_FUNCTIONS:
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, _get_results_queue)
    # From 0.17 on its default is nvidia-resiliency-ext, a package that megatron-core does not install.
    has_strategies = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    # The folder already contains the random states; megatron-core only warns that it is not empty.
    with failing_alone(folder), _keeping_errors_of_rank_0(folder) as errors:
        request = dist_checkpointing.save(
            _build_state_dict(chunks, optimizer, loading=False),
            str(folder),
            async_sharded_save=asynchronous,
            content_metadata=FORMAT_OPTIONS,
            **({"async_strategy": "mcore"} if has_strategies else {}),
        )
    raise_on_all_ranks(next(iter(errors), None))
    return request


@contextmanager
def _keeping_errors_of_rank_0(folder: Path) -> Iterator[list[OSError]]:
    """Keep the disk errors of the files that rank 0 alone writes, in the list that is yielded.

    Raised at once they would leave the other ranks in megatron-core's next collective.
    """
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    # common.pt, .metadata and metadata.json. Later releases have no class for the first one.
    writers: list[tuple[object, str]] = [
        (serialization, "save_common"),
        (getattr(common, "TorchCommonSaveStrategy", None), "save_common"),
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
    ]
    errors: list[OSError] = []
    originals = [(owner, name, getattr(owner, name)) for owner, name in writers if hasattr(owner, name)]
    for owner, name, write in originals:
        setattr(owner, name, _keep_error(write, folder, errors))
    try:
        yield errors
    finally:
        for owner, name, write in originals:
            setattr(owner, name, write)


def _keep_error(write: Callable[P, None], folder: Path, errors: list[OSError]) -> Callable[P, None]:
    def write_or_keep_error(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            write(*arguments, **options)
        except Exception as raised:
            error = as_os_error(raised, folder)
            if error is None or not is_disk_error(error):
                raise
            errors.append(error)

    return write_or_keep_error


def _get_results_queue(*_: object) -> Queue[object]:
    """Replace megatron-core's function of this queue: this one's process always ends with the rank.

    Writers report their results through the queue. megatron-core starts its process at the first checkpoint
    and stops it when Python exits, so a killed rank would leave it running.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(die_with_parent, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
    queue: Queue[object] = filesystem_async._results_queue
    return queue


def _build_state_dict(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, loading: bool
) -> dict[str, object]:
    """Return the sharded state dict to write or read, each shard with its position in the whole tensor."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**FORMAT_OPTIONS, "dp_cp_group": group}
    models = {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    return {
        **models,
        "optimizer": optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata),
    }


def _list_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that ``get_megatron_optimizer`` chained, those of experts last."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_optimizer(optimizer: MegatronOptimizer, loaded: StateDict) -> None:
    """Load the optimizer state like ``optimizer.load_state_dict``, but support torch's Adam.

    The distributed optimizer copies every tensor of a parameter's state from the loaded one, which lacks
    torch's step counters. It also gives all parameters the same counter, which each of them would advance.
    """
    optimizers = _list_optimizers(optimizer)
    states = [loaded] if len(optimizers) == 1 else [loaded[number] for number in range(len(optimizers))]
    for single, state in zip(optimizers, states, strict=True):
        sharded = state.pop("param_state", None)
        single.load_state_dict(state)
        if sharded is None:
            continue
        # Take the step counters out while megatron-core loads the moments, and put copies back.
        counted = [values for values in single.optimizer.state.values() if "step" in values]
        steps = [values.pop("step") for values in counted]
        single.load_parameter_state_from_fully_reshardable(sharded)
        for values, step in zip(counted, steps, strict=True):
            values["step"] = step.clone()


def _create_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer state that its first step would create.

    megatron-core reads torch's step counters before they exist, and cannot create the momentum of its SGD
    (optimizer/__init__.py).
    """
    for single in _list_optimizers(optimizer):
        inner = single.optimizer
        if inner is None:
            continue
        # None with SGD: optimizer.py would call it when it builds the state dict to load into.
        if single.init_state_fn is None:
            single.init_state_fn = lambda *_: None
        single.init_state_fn(inner, single.config)
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if isinstance(inner, torch.optim.Adam):
                    state.setdefault("step", torch.tensor(0.0))
                elif group.get("momentum") and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
