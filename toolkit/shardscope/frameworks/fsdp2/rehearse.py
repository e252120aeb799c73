"""FSDP2 rehearsed: ``fully_shard`` itself over fake tensors, one rank of any mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardscope.frameworks.fsdp2.engine import Fsdp2Engine
from shardscope.frameworks.fsdp2.limits import HOST_BUILD_BYTES, check_plan
from shardscope.rehearsal.torch_step import FakeContext, labelled_methods, play
from shardscope.rehearsal.world import fake_ranks, fake_tensors, real_numbers

if TYPE_CHECKING:
    from shardscope.plan import Plan
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker

_COLLECTIVES = ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward")


def rehearse(plan: Plan, note_progress: NoteProgress) -> list[RehearsedStage]:
    """The one stage of ``plan``. Raises ``ValueError`` for what the engine does not run."""
    check_plan(plan)
    with fake_ranks(plan.world_size):
        engine = Fsdp2Engine(FakeContext(plan))
        # The mesh is made of real numbers, so before tensors stop having any.
        engine.mesh = engine.make_mesh()
        with fake_tensors(plan.on_gpu, {plan.architecture.vocab_size}) as tracker:

            def gradients_here(group: Any) -> None:
                """Whole ones, which autograd made, wait for their reduce-scatter; HSDP's parts add up."""
                for parameter in group.fsdp_params:
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is not None and whole.grad is not None:
                        tracker.label([whole.grad], "gather_buffers")
                if group._partial_reduce_output is not None:
                    tracker.label([group._partial_reduce_output], "gradients")

            with (
                labelled_methods(tracker, FSDPParamGroup, _COLLECTIVES, before=gradients_here),
                _smaller_meshes_of_real_numbers(tracker),
            ):
                on_host = 4 * plan.architecture.num_parameters <= HOST_BUILD_BYTES
                return [play(engine, tracker, note_progress, built_on_host=on_host)]


@contextlib.contextmanager
def _smaller_meshes_of_real_numbers(tracker: Tracker) -> Iterator[None]:
    """``reshard_after_forward=int`` makes a mesh of its own inside of ``fully_shard``."""
    before = _fully_shard._get_post_forward_mesh_info

    def info(*args: Any, **kwargs: Any) -> Any:
        with real_numbers(tracker):
            return before(*args, **kwargs)

    _fully_shard._get_post_forward_mesh_info = info
    try:
        yield
    finally:
        _fully_shard._get_post_forward_mesh_info = before
