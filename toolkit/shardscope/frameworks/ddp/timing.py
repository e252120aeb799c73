"""DDP communication of one step: one gradient all-reduce, overlapped with the last backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import maximum, minimum
from shardscope.core.precision import FP32, widths
from shardscope.timing.traffic import Overlap, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES: dict[str, str] = {}
"""Pipeline schedules: none."""
BUCKET_BYTES = 25 * 2**20
"""Bucket size that the engine sets (engine/engine.py, ``BUCKET_CAP_MIB``)."""
OVERLAP = Overlap()


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """Return the traffic of one step: a bucketed all-reduce of all gradients (Li et al. 2020, section 3.2).

    The first micro-batch's gradients become ``.grad``, later ones are added to it; autocast casts them from
    half precision. The reducer averages views of its buckets. Bytes.

    The embedding's gradient is the last one, and its bucket is at least as large: backward ends before its
    all-reduce starts (``mark_variable_ready``, torch/csrc/distributed/c10d/reducer.cpp).
    """
    width, weights = widths[plan.recipe.precision], stage.trainable
    num_bytes = weights * width.original
    messages = maximum(1.0, num_bytes / BUCKET_BYTES)
    cast = width.compute + FP32 if width.compute < width.original else 0
    # An addition reads two gradients and writes their sum; averaging reads and writes the bucket once.
    added = 3 * width.original * (plan.num_micro_batches - 1) + 2 * width.original
    # A tied head is the embedding: its gradient is complete with the embedding's.
    untied_head = 0 if plan.architecture.tie_word_embeddings else stage.head
    embedding = 0 if plan.recipe.has_adapters else width.original * (stage.edges - untied_head)
    last_bucket = minimum(num_bytes, maximum(embedding, BUCKET_BYTES))
    transfer = Transfer(
        "gradients",
        "all_reduce",
        num_bytes,
        plan.world_size,
        1,
        1,
        messages,
        "last_backward",
        exposed_share=last_bucket / num_bytes,
    )
    return StateTraffic(
        (transfer,),
        copied_for_gradients=weights * (plan.num_micro_batches * cast + added),
        # Autocast casts every trained matrix once per micro-batch; a frozen base is half precision already.
        copied_for_gathers=(cast > 0) * plan.num_micro_batches * weights * (FP32 + width.compute),
        updated=weights,
    )


def overlap(plan: Plan) -> Overlap:
    """Return the overlap of other collectives: DDP has none."""
    return OVERLAP
