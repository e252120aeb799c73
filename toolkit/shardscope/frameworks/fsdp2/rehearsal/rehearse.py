"""FSDP2 rehearsal: torch's ``fully_shard`` on fake tensors, for one rank of any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
from shardscope.rehearsal.patching import methods_in_context, patch_attributes
from shardscope.rehearsal.torch_step import FakeContext, rehearse_engine

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.engine.engine import Fsdp2Engine
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.rehearsal.tracker import Tracker

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
            methods_in_context(
                FSDPParamGroup, _COLLECTIVES, lambda arguments: _label_allocations(tracker, arguments[0])
            ),
            _meshes_with_values(tracker),
            _all_gathers_to(engine.ctx.device),
            _untracked_build(engine, tracker),
        ):
            on_host = not is_initialized_sharded(plan) or plan.recipe.base_quantization is not None
            if isinstance(engine, PipelinedEngine):
                return rehearse_pipeline_stage(engine, tracker, note_progress, built_on_host=on_host)
            return rehearse_engine(engine, tracker, note_progress, built_on_host=on_host)


@contextmanager
def _label_allocations(tracker: Tracker, group: object) -> Iterator[None]:
    """Label new tensors and unsharded gradients as buffers, and HSDP's partial reduce output as gradients.

    autograd and FSDP2's backward hooks create the gradients before the collectives run.
    """
    assert isinstance(group, FSDPParamGroup)
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
    with tracker.label_new_storages("gather_buffers"):
        yield


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
    with patch_attributes([(engine, "build_on_host", tracker.pause()(engine.build_on_host))]):
        yield


@contextmanager
def _meshes_with_values(tracker: Tracker) -> Iterator[None]:
    """Let ``fully_shard`` create its meshes (to reshard to, and with tp's axis) with real tensors.

    A mesh is a tensor of ranks, whose values are read to create process groups.
    """
    get_post_forward = real_tensors(tracker)(_fully_shard._get_post_forward_mesh_info)
    concatenate = real_tensors(tracker)(DeviceMesh._concatenate)
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
