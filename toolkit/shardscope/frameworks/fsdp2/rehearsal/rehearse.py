"""FSDP2 rehearsal: torch's ``fully_shard`` on fake tensors, for one rank of any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div
from shardscope.frameworks.fsdp2.engine.create_engine import create_engine
from shardscope.frameworks.fsdp2.engine.pipeline import PipelinedEngine
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.frameworks.fsdp2.limits import SPLIT_TRAINED, check_pipeline, check_tensor_parallel
from shardscope.frameworks.fsdp2.rehearsal.pipeline import check_staged, rehearse_pipeline_stage
from shardscope.frameworks.limits import check_recipe
from shardscope.frameworks.limits import check_rehearsed as check_rehearsed_recipe
from shardscope.memory.overheads.building import is_initialized_sharded
from shardscope.rehearsal.fake_world import fake_ranks, fake_tensors, real_tensors
from shardscope.rehearsal.patching import patch_attributes
from shardscope.rehearsal.torch_step import FakeContext, labelled_methods, rehearse_engine

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker
    from shardscope.training.engine import BuildModel

P = ParamSpec("P")
R = TypeVar("R")

_COLLECTIVES = ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward")
"""Methods of ``FSDPParamGroup`` that allocate all-gathered parameters and reduce-scatter buffers."""


def rehearse(plan: Plan, note_progress: NoteProgress) -> list[RehearsedStage]:
    """Rehearse every pipeline stage of ``plan``. Raises ``ValueError`` for plans that cannot be rehearsed."""
    check_rehearsed(plan)
    pp, stages = plan.degrees.pp, []
    for number in range(pp):

        def note_stage_progress(activity: str, done: float, number: int = number) -> None:
            note_progress(activity if pp == 1 else f"stage {number}: {activity}", (number + done) / pp)

        stages.append(_rehearse_stage(plan, number, note_stage_progress))
    return stages


def _rehearse_stage(plan: Plan, number: int, note_progress: NoteProgress) -> RehearsedStage:
    """Rehearse one stage, on its rank that is first in all other groups."""
    degrees = plan.degrees
    # With offloading on a GPU the fake tensors have two devices; CPU ranks have only one.
    is_offloaded = get_layout(plan).offload == "cpu" or plan.recipe.recompute == "offload"
    separate_host = plan.on_gpu and is_offloaded
    # Stages are consecutive ranks: pp is the outermost axis of the engine's mesh.
    with fake_ranks(plan.world_size, number * (plan.world_size // degrees.pp)):
        engine = create_engine(FakeContext(plan, "cpu:0" if separate_host else "cpu"))
        # The mesh needs real tensors, so it is created before fake tensor mode starts.
        engine.mesh = engine.make_mesh()
        # The tracker recognizes logits by their last dimension.
        logit_width = ceil_div(plan.architecture.vocab_size, degrees.tp)
        has_flash = plan.cluster.gpu.has_flash_attention
        with (
            fake_tensors(
                plan.on_gpu, {logit_width}, separate_host=separate_host, has_flash=has_flash
            ) as tracker,
            labelled_methods(
                tracker, FSDPParamGroup, _COLLECTIVES, before=lambda group: _label_gradients(tracker, group)
            ),
            _meshes_with_values(tracker),
            _all_gathers_to(engine.ctx.device),
            _untracked_build(engine, tracker),
        ):
            on_host = not is_initialized_sharded(plan) or plan.recipe.base_quantization is not None
            if isinstance(engine, PipelinedEngine):
                return rehearse_pipeline_stage(engine, tracker, note_progress, built_on_host=on_host)
            return rehearse_engine(engine, tracker, note_progress, built_on_host=on_host)


def _label_gradients(tracker: Tracker, group: FSDPParamGroup) -> None:
    """Label unsharded gradients as buffers, and HSDP's partial reduce output as gradients.

    autograd and FSDP2's backward hooks create them outside of the labelled methods.
    """
    for parameter in group.fsdp_params:
        # The attribute exists from the first all-gather on.
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None and unsharded.grad is not None:
            tracker.label([unsharded.grad], "gather_buffers")
        # Gradients that are not reduced yet, in reduce_dtype (torch 2.13, _fsdp_param.py,
        # to_accumulated_grad_if_needed).
        if parameter.unsharded_accumulated_grad is not None:
            tracker.label([parameter.unsharded_accumulated_grad], "gather_buffers")
    # Reduce-scattered sums that wait for the last micro-batch's all-reduce between replicas.
    if group._partial_reduce_output is not None:
        tracker.label([group._partial_reduce_output], "gradients")


def check_rehearsed(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that cannot be rehearsed, naming the field."""
    layout = get_layout(plan)
    if layout.cp > 1:
        why = "1 in a rehearsal: context parallelism communicates between attention kernels, which do not run"
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


@contextmanager
def _untracked_build(engine: Fsdp2Engine, tracker: Tracker) -> Iterator[None]:
    """Exclude the build from tracking: modules are built in host memory, then moved to meta."""
    build_on_host = engine.build_on_host

    def build_untracked(build_model: BuildModel) -> torch.nn.Module:
        with tracker.pause():
            return build_on_host(build_model)

    with patch_attributes([(engine, "build_on_host", build_untracked)]):
        yield


@contextmanager
def _meshes_with_values(tracker: Tracker) -> Iterator[None]:
    """Let ``fully_shard`` create its meshes (to reshard to, and with tp's axis) with real tensors.

    A mesh is a tensor of ranks, whose values are read to create process groups.
    """

    def use_real_tensors(create_mesh: Callable[P, R]) -> Callable[P, R]:
        def create_with_values(*args: P.args, **kwargs: P.kwargs) -> R:
            with real_tensors(tracker):
                return create_mesh(*args, **kwargs)

        return create_with_values

    get_post_forward = use_real_tensors(_fully_shard._get_post_forward_mesh_info)
    concatenate = use_real_tensors(DeviceMesh._concatenate)
    with patch_attributes([
        (_fully_shard, "_get_post_forward_mesh_info", get_post_forward),
        (DeviceMesh, "_concatenate", staticmethod(concatenate)),
    ]):  # fmt: skip
        yield


@contextmanager
def _all_gathers_to(device: torch.device) -> Iterator[None]:
    """Set the device of all-gathers: a mesh of CPU ranks has no device but the host's."""
    with patch_attributes([(_fully_shard, "_get_device_from_mesh", lambda mesh: device)]):
        yield
