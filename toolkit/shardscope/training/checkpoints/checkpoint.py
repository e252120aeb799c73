"""Checkpoints of DDP and FSDP2 in one format: torch.distributed.checkpoint with the model's parameter names.

Both engines write the same keys, so each loads the other's checkpoints, with any number of ranks. The
format's metadata and non-tensor items are pickles, which ``pickles.py`` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardscope.core.errors import refuse
from shardscope.training.checkpoints import random_state
from shardscope.training.checkpoints.pickles import (
    CheckedReader,
    checked_loading,
    is_trusted,
    list_pickled_ranges,
)
from shardscope.training.checkpoints.position import read_position, write_position
from shardscope.training.checkpoints.temporary_folder import (
    as_os_error,
    create_temporary,
    delete_temporary,
    raise_if_a_rank_failed,
    raise_on_all_ranks,
    raising_on_all_ranks,
    replace_on_all_nodes,
    replace_when_complete,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import OptimizerStateType, ValueType

    from shardscope.core.plan import Plan
    from shardscope.training.checkpoints.position import Position


def save(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Mapping[str, object],
    only_trained: bool,
) -> None:
    """Write the folder ``path``, all ranks together; ``position`` is stored as JSON.

    ``only_trained`` leaves out frozen weights: adapters are megabytes, their base is much larger.
    """
    with replace_when_complete(path) as temporary:
        random_state.write_states(temporary)
        model_state = _collect_model_state(model, only_trained)
        optimizer_state = _collect_optimizer_state(model, optimizer, only_trained)
        try:
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(temporary))
        except CheckpointException as error:
            # Its text does not begin with the cause. All ranks have the errors of all of them.
            cause = as_os_error(error, temporary)
            if cause is None:
                raise
            raise cause from error
        if dist.get_rank() == 0:
            write_position(temporary, position, list_pickled_ranges(temporary))


def begin_save(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Mapping[str, object],
    only_trained: bool,
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """Save like :func:`save`, but return once the state is copied to host memory; a thread writes it.

    ``group`` is a gloo group of all ranks for these threads alone. Return a function that waits, on all
    ranks, until ``path`` is complete, and raises the error of the write. The folder gets its name as soon as
    it is complete, whether or not that function is called.
    """
    temporary = create_temporary(path)
    with raising_on_all_ranks():
        random_state.write_states(temporary)
    state = {
        "model": _collect_model_state(model, only_trained),
        "optimizer": _collect_optimizer_state(model, optimizer, only_trained),
    }
    # Returns once the state is copied to host memory; the write continues in a thread.
    future = dcp.async_save(state, checkpoint_id=str(temporary), process_group=group)
    assert isinstance(future, Future)
    completed: Future[None] = Future()

    def finish(_: object) -> None:
        # On rank 0 async_save finishes last: it writes the metadata after all ranks have written their parts.
        error: BaseException | None = None
        try:
            future.result()
            if dist.get_rank() == 0:
                write_position(temporary, position, list_pickled_ranges(temporary))
        except BaseException as raised:
            # Before the folder is deleted at once, so that the space is there for metrics.
            error = as_os_error(raised, temporary) or raised
        try:
            # Nodes that share no folder each rename their own: all of them, or none.
            raise_if_a_rank_failed(error, path, group)
            raise_together = partial(raise_if_a_rank_failed, path=path, group=group)
            replace_on_all_nodes(temporary, path, raise_together)
            completed.set_result(None)
        except BaseException as raised:
            delete_temporary(path)
            completed.set_exception(raised)

    def wait() -> None:
        raise_on_all_ranks(completed.exception(), group)

    future.add_done_callback(finish)
    return wait


def load(path: Path, plan: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Load ``path`` into ``model`` and ``optimizer`` of ``plan``. Return its position.

    Random states are restored if the number of ranks is the same. Raises as :func:`read_position` does, and
    ``ValueError`` if it was saved by another kind of optimizer, if only one of it and ``model`` has pipeline
    stages, or if its pickles contain a class that is not allowed.
    """
    only_trained = plan.recipe.has_adapters
    position = read_position(path, plan)
    if bool(position.get("in_stages")) != _is_stage(model):
        refuse(
            "checkpoint",
            str(path),
            f"one that was saved {'with' if _is_stage(model) else 'without'} pipeline stages: with them the "
            "optimizer state is stored under other names",
            "the pp of the run that saved it, or a fine-tune of its export",
        )
    saved_optimizer = position.get("optimizer", get_optimizer_class_name(optimizer))
    if saved_optimizer != get_optimizer_class_name(optimizer):
        # Some optimizers have state of the same name and another meaning, which would load silently.
        refuse(
            "optimizer of the engine that loads",
            get_optimizer_class_name(optimizer),
            f"{saved_optimizer!r}: {path} holds its state",
            "the same build_optimizer or Recipe.optimizer, or a fine-tune of its export",
        )
    # dcp.load writes into the tensors of these dicts and replaces their other values.
    model_state = _collect_model_state(model, only_trained)
    optimizer_state = _collect_optimizer_state(model, optimizer, only_trained)
    trusted = is_trusted(path)
    reader = CheckedReader(path, trusted=trusted)
    with checked_loading(trusted=trusted):
        dcp.load({"model": model_state, "optimizer": optimizer_state}, storage_reader=reader)
    options = StateDictOptions(
        strict=not only_trained,
        ignore_frozen_params=only_trained,
        flatten_optimizer_state_dict=_is_stage(model),
    )
    # Adapters' own tensors are in the state (_collect_model_state), so they are loaded by now.
    if not only_trained:
        set_model_state_dict(model, model_state, options=options)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    random_state.restore_states(path)
    return position


def get_optimizer_class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's class name: fused and foreach implementations have the same class and state."""
    return type(optimizer).__name__


def _collect_model_state(model: torch.nn.Module, only_trained: bool) -> dict[str, ValueType]:
    if only_trained:
        # get_model_state_dict fails on bitsandbytes' Linears: their state dict has scales that are not
        # attributes of the module.
        return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    model_state: dict[str, ValueType] = get_model_state_dict(model)
    return model_state


def _collect_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, only_trained: bool
) -> OptimizerStateType:
    # Stages have different parameters in the same list of parameter groups. Flattened, also the groups are
    # stored by parameter name (torch 2.13, checkpoint/state_dict.py, _flatten_optim_state_dict).
    options = StateDictOptions(
        ignore_frozen_params=only_trained, flatten_optimizer_state_dict=_is_stage(model)
    )
    optimizer_state: OptimizerStateType = get_optimizer_state_dict(model, optimizer, options=options)
    return optimizer_state


def _is_stage(model: torch.nn.Module) -> bool:
    """Return whether ``model`` is a pipeline stage, so that ranks have different parameter names."""
    return bool(getattr(model, "in_stages", False))
