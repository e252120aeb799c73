"""ZeRO's training state on one rank, as of DeepSpeed 0.19.

Source: ``deepspeed/runtime``, and Rajbhandari et al. 2020, section 5. Each stage and precision has its own
optimizer (``engine.py: _do_optimizer_sanity_check``), and a file here that is named after it: its flat
buffers and padding, buckets, all-gathers and the copies that each of them makes. Compared with DeepSpeed's
own engine in ``tests/unit/frameworks/deepspeed/test_deepspeed_memory.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import all_true
from shardscope.frameworks.deepspeed.layout import (
    check_not_quantized,
    get_cast_width,
    get_layout,
    get_reduction_width,
)
from shardscope.frameworks.deepspeed.memory.element_counts import RankCounts, count_rank
from shardscope.frameworks.deepspeed.memory.fp16_optimizer import (
    compute_stage_0_state,
)
from shardscope.frameworks.deepspeed.memory.offload_config import offload_state
from shardscope.frameworks.deepspeed.memory.pipeline import (
    PipelineBuffers,
    add_pipeline_buffers,
    compute_pipeline_buffers,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage3 import (
    compute_stage_3_state,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import (
    compute_stage_1_or_2_state,
    count_bucket_elements,
    is_contiguous,
)
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_stage_weights,
    find_stage_shapes,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.training_state import TrainingState

counts_neighbours = True
branches_on_stages = True


def find_shapes(plan: Plan) -> StageShapes:
    """Return the stage shapes of DeepSpeed's pipeline module, or the one shape of the whole model."""
    return find_stage_shapes(plan.architecture, plan.stage_layers)


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return the weights of one stage."""
    return count_stage_weights(plan, shape)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return one rank's training state on the device, on the host and on NVMe, in bytes."""
    layout = get_layout(plan)
    check_not_quantized(layout)
    rank = count_rank(plan, stage)
    # PipelineEngine's receive buffers and outputs.
    is_pipelined = all_true(plan.degrees.pp > 1)
    pipeline = compute_pipeline_buffers(plan, stage) if is_pipelined else PipelineBuffers()
    # The optimizer of this ZeRO stage, its buckets and all-gathers.
    if layout.stage == 3:
        state = compute_stage_3_state(plan, stage, rank)
    elif layout.stage > 0:
        state = compute_stage_1_or_2_state(plan, stage, rank, pipeline.in_backward)
    else:
        state = compute_stage_0_state(plan, stage, rank, pipeline.in_backward)
    if is_pipelined:
        state = add_pipeline_buffers(state, pipeline, _compute_pipeline_reduction_bytes(plan, rank))
    # What offload_optimizer and offload_param move to the host or to NVMe.
    if layout.offload_optimizer or layout.offload_params:
        state = offload_state(plan, stage, state, rank)
    return state


def _compute_pipeline_reduction_bytes(plan: Plan, rank: RankCounts) -> int:
    """Return the bytes of buckets and copies while a pipeline stage reduces its gradients, in stage 1.

    With contiguous gradients there is a second bucket besides backward's, in the reduction type
    (``reduce_gradients``).
    """
    layout = get_layout(plan)
    bucket = count_bucket_elements(plan, rank.counts)
    if is_contiguous(layout):
        buckets = (rank.half + get_reduction_width(layout, plan.recipe)) * bucket
        copies = rank.half * rank.counts.final_reduction[1].staging
        return (layout.stage == 1) * (buckets + copies)
    # A flattened copy, and its cast.
    return (layout.stage == 1) * rank.half * (1 + get_cast_width(layout, plan.recipe)) * bucket
