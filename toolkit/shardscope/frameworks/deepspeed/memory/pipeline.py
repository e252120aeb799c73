"""What DeepSpeed's ``PipelineEngine`` holds beside a stage's weights and activations.

Read off ``deepspeed/runtime/pipe/engine.py``: one buffer for what comes from each side, kept for good; of
each micro-batch in flight what was received and what is sent, until its backward; on the last stage, whose
outputs nobody sends, the output with its graph, until another takes its place. ``reduce_gradients`` makes a
second bucket beside the one that backward began with (runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import by_value, holds, smallest
from shardscope.core.number_format import gib
from shardscope.core.precision import widths
from shardscope.memory.activations.backward import Peak, PeakTerms
from shardscope.memory.activations.step import in_flight
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.backward import Backward
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState


def in_stages(plan: Plan, stage: Stage, state: TrainingState, buckets: Any) -> TrainingState:
    """``state`` with the pipeline's own buffers; as it is where there are no stages.

    ``buckets``: bytes of those that are there when gradients are reduced, after the schedule's last backward.
    """
    if not holds(plan.degrees.pp > 1):
        return state
    recipe, arch = plan.recipe, plan.architecture
    tokens, width = by_value(recipe.micro_batch_size * recipe.seq_len), widths[recipe.precision].compute
    hidden, logits = tokens * arch.hidden_size * width, stage.is_last * tokens * arch.vocab_size * width
    sides = 2 - stage.is_first - stage.is_last
    _, chunks = in_flight(plan, stage.number)
    # Its input, the input's gradient and its logits: the graph of an output that nobody has let go of.
    ended = logits + 2 * stage.is_last * hidden
    kept = smallest(2, plan.num_micro_batches)
    rest = sides * hidden + kept * ended
    busy = sides * hidden + chunks * sides * hidden + (kept - 1) * ended

    def received(num_bytes: Any) -> Term:
        return Term(num_bytes, lambda: f"{gib(num_bytes)} GiB that stages send, and outputs that stay")

    find_backward = state.find_backward
    assert find_backward is not None

    def backward(shape: Backward) -> list[Peak]:
        # Of the last stage the output stays while its loss goes backward.
        found = [_beside(peak, busy + logits, received) for peak in find_backward(shape)]
        reducing = Term(rest + buckets, lambda: f"{gib(buckets)} GiB in buckets + {received(rest).explain()}")
        none = Term(0, lambda: "activations: all are used up")
        return [*found, Peak.of(0.985, none, reducing, state.gradients)]

    forward = state.gather_forward
    return state._replace(
        gather_forward=Term(forward[0] + busy, lambda: f"{forward.explain()} + {received(busy).explain()}"),
        gather_rest=received(rest),
        find_backward=backward,
    )


def _beside(peak: Peak, more: Any, received: Any) -> Peak:
    def terms() -> PeakTerms:
        own = peak.find_terms()
        gather = Term(own.gather[0] + more, lambda: f"{own.gather.explain()} + {received(more).explain()}")
        return own._replace(gather=gather)

    return Peak(
        peak.fraction, peak.activations, peak.gather + more, peak.gradients, terms, peak.logits, peak.phase
    )
