"""FSDP2 rehearsal: torch's ``fully_shard`` on fake tensors, for one rank of any mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div
from shardscope.frameworks.fsdp2.engine.choice import create_engine
from shardscope.frameworks.fsdp2.engine.pipeline import PipelinedEngine
from shardscope.frameworks.fsdp2.limits import SPLIT_TRAINED, check_pipeline, check_tensor_parallel
from shardscope.frameworks.fsdp2.rehearsal.pipeline import check_staged, play_stage
from shardscope.frameworks.limits import check_recipe
from shardscope.frameworks.limits import check_rehearsed as check_rehearsed_recipe
from shardscope.memory.overheads.building import is_initialized_sharded
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors, real_tensors
from shardscope.rehearsal.torch_step import FakeContext, labelled_methods, rehearse_engine

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker
    from shardscope.training.engine import BuildModel

_COLLECTIVES = ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward")


def rehearse(plan: Plan, note_progress: NoteProgress) -> list[RehearsedStage]:
    """Rehearse every pipeline stage of ``plan``. Raises ``ValueError`` for plans that cannot be rehearsed."""
    check_rehearsed(plan)
    pp, found = plan.degrees.pp, []
    for number in range(pp):

        def note(words: str, done: float, number: int = number) -> None:
            note_progress(words if pp == 1 else f"stage {number}: {words}", (number + done) / pp)

        found.append(_stage(plan, number, note))
    return found


def _stage(plan: Plan, number: int, note_progress: NoteProgress) -> RehearsedStage:
    """Rehearse one stage, on its rank that is first in all other groups."""
    degrees = plan.degrees
    # With offloading on a GPU the fake tensors have two devices; CPU ranks have only one.
    away = getattr(plan.layout, "offload", None) == "cpu" or plan.recipe.recompute == "offload"
    apart = plan.on_gpu and away
    with fake_ranks(plan.world_size, number * (plan.world_size // degrees.pp)):
        engine = create_engine(FakeContext(plan, "cpu:0" if apart else "cpu"))
        # The mesh needs real tensors, so it is created before fake tensor mode starts.
        engine.mesh = engine.make_mesh()
        logits = ceil_div(plan.architecture.vocab_size, degrees.tp)
        has_flash = plan.cluster.gpu.has_flash_attention
        fake = fake_tensors(plan.on_gpu, {logits}, separate_host=apart, has_flash=has_flash)
        with fake as tracker:

            def gradients_here(group: Any) -> None:
                """Label unsharded gradients as buffers, and HSDP's partial reduce output as gradients."""
                for parameter in group.fsdp_params:
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is not None and whole.grad is not None:
                        tracker.label([whole.grad], "gather_buffers")
                    if parameter.unsharded_accumulated_grad is not None:
                        tracker.label([parameter.unsharded_accumulated_grad], "gather_buffers")
                if group._partial_reduce_output is not None:
                    tracker.label([group._partial_reduce_output], "gradients")

            with (
                labelled_methods(tracker, FSDPParamGroup, _COLLECTIVES, before=gradients_here),
                _meshes_of_real_numbers(tracker),
                _gathers_to(engine.ctx.device),
            ):
                on_host = not is_initialized_sharded(plan) or plan.recipe.base_quantization is not None
                _build_on_host(engine, tracker)
                if isinstance(engine, PipelinedEngine):
                    return play_stage(engine, tracker, note_progress, built_on_host=on_host)
                return rehearse_engine(engine, tracker, note_progress, built_on_host=on_host)


def check_rehearsed(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that cannot be rehearsed, naming the field."""
    layout: Any = plan.layout
    if layout.cp > 1:
        why = "1 in a rehearsal: context parallelism sends keys while attention runs, which is a GPU kernel's"
        refuse("Layout.cp", layout.cp, why, {"cp": 1})
    if layout.pp > 1:
        check_pipeline(plan)
        check_staged(plan)
    if layout.tp > 1:
        check_tensor_parallel(plan)
    if layout.pp == layout.tp == 1:
        check_rehearsed_recipe(plan.recipe, "torchao")
    else:
        # Pipeline schedules and sharded vocabularies compute their own loss.
        check_recipe(plan.recipe, SPLIT_TRAINED)


def _build_on_host(engine: Any, tracker: Tracker) -> None:
    """Exclude the build from tracking: modules are built in host memory, then moved to meta."""
    build = engine.build_on_host

    def build_unseen(build_model: BuildModel) -> torch.nn.Module:
        with tracker.paused():
            model: torch.nn.Module = build(build_model)
            return model

    engine.build_on_host = build_unseen


@contextlib.contextmanager
def _meshes_of_real_numbers(tracker: Tracker) -> Iterator[None]:
    """Let ``fully_shard`` create its meshes (to reshard to, and with tp's axis) with real tensors."""
    places: tuple[tuple[Any, str], ...] = (
        (_fully_shard, "_get_post_forward_mesh_info"),
        (DeviceMesh, "_concatenate"),
    )
    before = [vars(owner)[name] for owner, name in places]

    def on_real_numbers(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            with real_tensors(tracker):
                return make(*args, **kwargs)

        return made

    for owner, name in places:
        wrapped = on_real_numbers(getattr(owner, name))
        setattr(owner, name, staticmethod(wrapped) if isinstance(owner, type) else wrapped)
    try:
        yield
    finally:
        for (owner, name), was in zip(places, before, strict=True):
            setattr(owner, name, was)


@contextlib.contextmanager
def _gathers_to(device: torch.device) -> Iterator[None]:
    """Set the device of all-gathers: a mesh of CPU ranks has no device but the host's."""
    before = _fully_shard._get_device_from_mesh
    _fully_shard._get_device_from_mesh = lambda mesh: device
    try:
        yield
    finally:
        _fully_shard._get_device_from_mesh = before
