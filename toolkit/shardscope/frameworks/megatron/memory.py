"""Megatron-core's training state: half-precision weights, fp32 main gradients, fp32 main copies and moments.

Per weight 18 bytes without, 6 + 12 / data-parallel ranks with the distributed optimizer (Megatron-LM,
docs/source/api-guide/dist_optimizer.md). The vocabulary is padded to 128 x tp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.precision import FP32, num_moments, widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import Stage, stages_of
from shardscope.memory.state import TrainingState
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.plan import Plan

MAKE_VOCAB_SIZE_DIVISIBLE_BY = 128


def stages(plan: Plan) -> list[Stage]:
    """Stages with the padded vocabulary."""
    return stages_of(plan, vocab_multiple=MAKE_VOCAB_SIZE_DIVISIBLE_BY * plan.degrees.tp)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """What one rank keeps after tp, pp and ep have cut the model."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    half = widths[recipe.precision].compute
    main = FP32 if half < FP32 else 0
    kept = main + num_moments[recipe.optimizer] * FP32
    replicas = degrees.data_parallel * degrees.cp
    dense_ranks = replicas if layout.distributed_optimizer else 1
    # An expert has fewer replicas than a dense weight: ep of them were spent on other experts.
    expert_ranks = max(1, replicas // degrees.ep) if layout.distributed_optimizer else 1
    dense = stage.layers + stage.edges
    weights = dense + stage.experts
    optimizer = kept * (ceil_div(dense, dense_ranks) + ceil_div(stage.experts, expert_ranks))
    head = half * stage.edges

    def optimizer_words() -> str:
        split = f" / {dense_ranks} data- and context-parallel ranks" if layout.distributed_optimizer else ""
        experts = f" + {stage.experts:,} of experts / {expert_ranks}" if stage.experts else ""
        return (
            f"({dense:,}{split}{experts}) × {kept} bytes · fp32 main copy and {recipe.optimizer} moments "
            f"(distributed_optimizer={layout.distributed_optimizer})"
        )

    return TrainingState(
        parameters=Term(
            weights * half, lambda: f"{weights:,} parameters of this rank × {half} bytes{_cut(plan)}"
        ),
        gradients=Term(
            weights * FP32,
            lambda: (
                f"{weights:,} × {FP32} bytes · fp32 main gradients in one contiguous buffer, kept all along"
            ),
        ),
        optimizer=Term(optimizer, optimizer_words),
        gather_forward=no_bytes("parameters are gathered in place after the optimizer step"),
        gather_backward=Term(
            head, lambda: f"{gib(head)} GiB half-precision gradient of the embedding or head"
        ),
        group_sizes=(degrees.data_parallel * degrees.cp, degrees.tp, degrees.pp, degrees.ep),
        gradients_stay=True,
    )


def _cut(plan: Plan) -> str:
    names = [f"{name} {value}" for name in ("tp", "pp", "ep") if (value := getattr(plan.degrees, name)) > 1]
    return f" (after {', '.join(names)})" if names else ""
