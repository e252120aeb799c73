"""Stage 0: training state of ``FP16_Optimizer``, also for bf16, and of ``BF16_Optimizer`` in pipelines.

Source: deepspeed/runtime/engine.py (``_do_optimizer_sanity_check``), fp16/fused_optimizer.py,
fp16/unfused_optimizer.py and bf16_optimizer.py of DeepSpeed 0.19.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.core.ops import all_true
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.memory.activation_sizes import find_logits, list_activation_sizes
from shardscope.frameworks.deepspeed.memory.ipg_bucket import count_copy
from shardscope.frameworks.deepspeed.memory.peaks import find_backward_peaks
from shardscope.frameworks.deepspeed.memory.phases import ZeroBuffers
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import NOT_PARTITIONED
from shardscope.memory.report import Term
from shardscope.memory.state.optimizers import compute_flat_state, compute_flat_working
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.memory.element_counts import RankCounts
    from shardscope.memory.state.stages import Stage

ALL_REDUCE_ELEMENTS = 500_000_000
"""Elements that stage 0 flattens at once (``MEMORY_OPT_ALLREDUCE_SIZE``, deepspeed/runtime/engine.py)."""


@lru_cache(maxsize=1024)
def count_all_reduce_copy(
    sizes: tuple[int, ...], max_elements: int = ALL_REDUCE_ELEMENTS, cast_width: int = 0
) -> int:
    """Return the elements of stage 0's largest flattened copy and of its cast (``allreduce_bucket``)."""
    # As in ``find_largest_copy``: each copy ends with the tensor that exceeds the maximum.
    ends = list(accumulate(sizes))
    largest = first = before = 0
    while first < len(ends):
        last = min(bisect_right(ends, before + max_elements, first), len(ends) - 1)
        largest = max(largest, count_copy(ends[last] - before, last + 1 - first, cast_width))
        first, before = last + 1, ends[last]
    return largest


def compute_stage_0_state(plan: Plan, stage: Stage, rank: RankCounts, in_pipeline: int) -> TrainingState:
    """Return the state of stage 0: ``FP16_Optimizer``, also for bf16, or the optimizer itself for fp32.

    ``in_pipeline``: bytes of the pipeline's buffers during backward.
    """
    if all_true(plan.degrees.pp > 1) and plan.recipe.precision.startswith("bf16"):
        return _compute_bf16_optimizer_state(plan, stage, rank, in_pipeline)
    half, counts, name = rank.half, rank.counts, plan.recipe.optimizer
    # Weights, gradients and moments are full on every rank.
    trained = counts.trained
    moments = compute_flat_state(name, trained)
    parameters, gradients = half * trained + rank.frozen_bytes, half * trained
    if half == FP32:
        optimizer, update, first_step = moments, compute_flat_working(name, counts.largest_trained), 0
        source = "the optimizer's own state: fp32 weights are their own main copies"
    else:
        optimizer = FP32 * trained + moments
        # With FusedAdam fp32 gradients exist both separately and flattened; other optimizers have separate
        # main copies (FP16_UnfusedOptimizer), and so separate gradients only.
        is_fused = name == "adamw" and plan.on_gpu
        one_tensor = compute_flat_working(name, counts.largest_trained)
        update = (2 if is_fused else 1) * FP32 * trained + one_tensor
        # FP16_UnfusedOptimizer allocates zero gradients of both types.
        first_step = (FP32 if is_fused else FP32 + half) * trained + one_tensor
        source = "FP16_Optimizer's fp32 main copies and optimizer state, for bf16 too"
    buffers = ZeroBuffers(
        gradients_at_loss=rank.accumulates * gradients, trains_all=rank.trains_all, in_pipeline=in_pipeline
    )
    return TrainingState(
        parameters=rank.add_frozen(half * trained, lambda: f"{trained:,} on every rank × {half} bytes"),
        gradients=Term(gradients, lambda: f"{trained:,} on every rank × {half} bytes of gradients"),
        optimizer=Term(optimizer, lambda: f"{trained:,} on every rank · {source} ({name})"),
        gather_forward=NOT_PARTITIONED,
        group_sizes=rank.group_sizes,
        find_logits=find_logits,
        find_backward_peaks=lambda backward: find_backward_peaks(
            counts, backward, half, list_activation_sizes(plan, stage, backward.modules), buffers
        ),
        optimizer_working=Term(
            update,
            lambda: (
                f"{format_gib(update)} GiB fp32 gradients (FP16_Optimizer.step: separate, then flattened)"
            ),
        ),
        initialisation={
            # FP16_Optimizer runs a step with zero gradients before the first real one.
            "parameters": Term(parameters, lambda: "weights"),
            "optimizer": Term(
                optimizer + first_step,
                lambda: "fp32 main copies, optimizer state and gradients of zeros (DeepSpeed#1445)",
            ),
        },
    )


def _compute_bf16_optimizer_state(
    plan: Plan, stage: Stage, rank: RankCounts, in_pipeline: int
) -> TrainingState:
    """Return the state of stage 0 in bf16 with pp > 1: ``BF16_Optimizer``, partitioned like stage 1.

    Main copies and moments are partitioned. Gradients exist twice: each micro-batch's, and their sum in a
    flat buffer of the same type (bf16_optimizer.py, pipe/engine.py).
    """
    half, counts, name = rank.half, rank.counts, plan.recipe.optimizer
    partition = counts.partition
    # The flat buffer of sums is allocated once; each micro-batch's gradients are added to it.
    sums, micro_batch = half * counts.flat_buffers, half * counts.trained
    optimizer = FP32 * partition + compute_flat_state(name, partition)
    buffers = ZeroBuffers(
        earlier_gradients=sums,
        gradients_at_loss=sums + rank.accumulates * micro_batch,
        trains_all=rank.trains_all,
        in_pipeline=in_pipeline,
    )
    flat = f"in the flat buffer, padded to 2 × ranks, × {half} bytes"

    def explain_optimizer() -> str:
        width = rank.format_width(optimizer, partition)
        return (
            f"{counts.trained:,} / {rank.ranks} ranks = {partition:,} × {width} bytes: fp32 main copy and "
            f"{name} state"
        )

    return TrainingState(
        parameters=rank.add_frozen(sums, lambda: f"{counts.flat_buffers:,} {flat}"),
        gradients=Term(
            sums + micro_batch,
            lambda: (
                f"{counts.flat_buffers:,} sums {flat} + {counts.trained:,} × {half} bytes of a micro-batch"
            ),
        ),
        gradients_rest=Term(sums, lambda: f"{counts.flat_buffers:,} sums {flat}"),
        optimizer=Term(optimizer, explain_optimizer),
        optimizer_working=Term(
            FP32 * partition + compute_flat_working(name, partition),
            lambda: f"{partition:,} × {FP32} bytes · gradients of this rank's partition, cast for the update",
        ),
        gather_forward=NOT_PARTITIONED,
        group_sizes=rank.group_sizes,
        find_logits=find_logits,
        find_backward_peaks=lambda backward: find_backward_peaks(
            counts, backward, half, list_activation_sizes(plan, stage, backward.modules), buffers
        ),
    )
