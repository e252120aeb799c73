"""How much of a training step a rehearsal plays, and about how long that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NUM_STEPS = 2
"""The first step makes the optimizer's state; the second is what all others are like."""
MAX_MICRO_BATCHES = 3
"""The first leaves gradients, the second adds to them, the last reduces them; more repeat the second."""
START_SECONDS = 8.0
"""To import PyTorch and the framework, and to build the model."""
LAYER_SECONDS = 0.17
"""Of one layer in one micro-batch, forward and backward."""


def expected_seconds(plan: Plan) -> float:
    """About how long ``plan.rehearse()`` takes on one idle core.

    Of seven plans of 1B to 70B under all four frameworks it was between 0.7 and 2.4 times the processor time
    that they took on a Xeon server; Megatron's, which call fewer operators for a layer, took least. Once a
    rehearsal has begun, its own progress says more.
    """
    played = NUM_STEPS * min(plan.num_micro_batches, MAX_MICRO_BATCHES)
    return START_SECONDS + LAYER_SECONDS * played * plan.architecture.num_hidden_layers
