"""What DDP sends in one step: gradients, averaged once, while the last backward goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.precision import widths
from shardscope.timing.traffic import StateTraffic, Transfer, weights_of

if TYPE_CHECKING:
    from shardscope.plan import Plan

BUCKET_BYTES = 25 * 2**20


def state_traffic(plan: Plan) -> StateTraffic:
    """One all-reduce of all trained weights, in buckets (Li et al. 2020, section 3.2)."""
    weights, ranks = weights_of(plan), plan.degrees.data_parallel
    num_bytes = weights.trained * widths[plan.recipe.precision].original
    # Backward is two thirds of a micro-batch, and only the last one's is left to hide in.
    hidden = 2 / 3 / max(1, plan.num_micro_batches)
    messages = max(1.0, num_bytes / BUCKET_BYTES)
    return StateTraffic((Transfer("all_reduce", num_bytes, ranks, 1, 1, messages, hidden, part="gradients"),))
