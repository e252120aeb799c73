"""Additional memory of DeepSpeed's ``PipelineEngine``, besides a stage's weights and activations.

Source: ``deepspeed/runtime/pipe/engine.py``. There is one permanent receive buffer for each side; per
micro-batch in flight, the received and the sent tensors until its backward; on the last stage, the output
with its graph until the next one replaces it. ``reduce_gradients`` allocates a second bucket besides
backward's (runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import gib
from shardscope.core.ops import all_true, group_equal, minimum
from shardscope.core.precision import widths
from shardscope.memory.activations.backward import PeakCandidate, PeakTerms
from shardscope.memory.activations.step import count_in_flight
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.backward import StageBackward
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState


def in_stages(plan: Plan, stage: Stage, state: TrainingState, buckets: Any) -> TrainingState:
    """Return ``state`` with the pipeline's buffers added; unchanged with pp = 1.

    ``buckets`` is the size of all buckets while gradients are reduced after the schedule, in bytes.
    """
    if not all_true(plan.degrees.pp > 1):
        return state
    recipe, arch = plan.recipe, plan.architecture
    tokens, width = group_equal(recipe.micro_batch_size * recipe.seq_len), widths[recipe.precision].compute
    hidden, logits = tokens * arch.hidden_size * width, stage.is_last * tokens * arch.vocab_size * width
    sides = 2 - stage.is_first - stage.is_last
    _, chunks = count_in_flight(plan, stage.number)
    # The stage's input, the input's gradient and the logits: the graph of an output that is still referenced.
    ended = logits + 2 * stage.is_last * hidden
    kept = minimum(2, plan.num_micro_batches)
    rest = sides * hidden + kept * ended
    busy = sides * hidden + chunks * sides * hidden + (kept - 1) * ended

    def received(num_bytes: Any) -> Term:
        return Term(num_bytes, lambda: f"{gib(num_bytes)} GiB that stages send, and outputs that stay")

    find_backward = state.find_backward
    assert find_backward is not None

    def backward(shape: StageBackward) -> list[PeakCandidate]:
        # The last stage's output stays alive during the loss's backward.
        found = [_beside(peak, busy + logits, received) for peak in find_backward(shape)]
        reducing = Term(rest + buckets, lambda: f"{gib(buckets)} GiB in buckets + {received(rest).explain()}")
        none = Term(0, lambda: "activations: all are used up")
        return [*found, PeakCandidate.of(0.985, none, reducing, state.gradients)]

    forward = state.gather_forward
    return state._replace(
        gather_forward=Term(forward[0] + busy, lambda: f"{forward.explain()} + {received(busy).explain()}"),
        gather_rest=received(rest),
        find_backward=backward,
    )


def _beside(peak: PeakCandidate, more: Any, received: Any) -> PeakCandidate:
    def terms() -> PeakTerms:
        own = peak.find_terms()
        gather = Term(own.gather[0] + more, lambda: f"{own.gather.explain()} + {received(more).explain()}")
        return own._replace(gather=gather)

    return PeakCandidate(
        peak.fraction, peak.activations, peak.gather + more, peak.gradients, terms, peak.logits, peak.phase
    )
