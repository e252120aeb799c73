"""Number of steps and micro-batches in a rehearsal, and its estimated duration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NUM_STEPS = 2
"""Steps: the first creates the optimizer state, the second is like all others."""
MAX_MICRO_BATCHES = 3
"""Micro-batches: the first creates gradients, the second accumulates, the last reduces;
further ones would repeat the second."""
START_SECONDS = 8.0
"""Seconds to import PyTorch and the framework and to build the model."""
LAYER_SECONDS = 0.17
"""Seconds per layer and micro-batch, forward and backward."""


def estimate_seconds(plan: Plan) -> float:
    """Estimate the seconds that ``plan.rehearse()`` takes on one idle core.

    For seven plans of 1B to 70B under all four frameworks the estimate was 0.7 to 2.4 times the CPU time
    measured on a Xeon server; Megatron's plans, with fewer operators per layer, took least. A running
    rehearsal's own progress is more precise.
    """
    num_micro_batches = NUM_STEPS * min(plan.num_micro_batches, MAX_MICRO_BATCHES)
    return START_SECONDS + LAYER_SECONDS * num_micro_batches * plan.architecture.num_hidden_layers
