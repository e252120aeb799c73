"""Additional memory of DeepSpeed's ``PipelineEngine``, besides a stage's weights and activations.

Source: ``deepspeed/runtime/pipe/engine.py``, DeepSpeed 0.19. There is one permanent receive buffer for each
side; per micro-batch in flight, the received and the sent tensors until its backward; on the last stage, the
output with its graph until the next one replaces it. ``reduce_gradients`` allocates a second bucket besides
backward's (runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.core.ops import group_equal, minimum
from shardscope.core.precision import widths
from shardscope.memory.activations.stage_activations import count_in_flight
from shardscope.memory.report import Term, zero_term
from shardscope.memory.state.training_state import PeakCandidate, PeakTerms

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState


def add_pipeline_buffers(
    plan: Plan, stage: Stage, state: TrainingState, reduction_bytes: int
) -> TrainingState:
    """Return the state of a plan with pp > 1 with the pipeline's buffers added.

    ``reduction_bytes`` is the size of all buckets while gradients are reduced after the schedule.
    """
    recipe, arch = plan.recipe, plan.architecture
    tokens, width = group_equal(recipe.micro_batch_size * recipe.seq_len), widths[recipe.precision].compute
    hidden, logits = tokens * arch.hidden_size * width, stage.is_last * tokens * arch.vocab_size * width
    num_sides = 2 - stage.is_first - stage.is_last
    _, num_in_flight = count_in_flight(plan, stage.number)
    # The stage's input, the input's gradient and the logits: the graph of an output that is still referenced.
    output_graph = logits + 2 * stage.is_last * hidden
    num_outputs = minimum(2, plan.num_micro_batches)
    at_rest = num_sides * hidden + num_outputs * output_graph
    in_step = num_sides * hidden + num_in_flight * num_sides * hidden + (num_outputs - 1) * output_graph

    def explain(num_bytes: int) -> str:
        return f"{format_gib(num_bytes)} GiB that stages send, and outputs that stay referenced"

    find_stage_peaks = state.find_backward_peaks
    assert find_stage_peaks is not None

    def find_peaks(backward: StageBackward) -> list[PeakCandidate]:
        # The last stage's output stays alive during the loss's backward.
        peaks = [_add_buffers(peak, in_step + logits, explain) for peak in find_stage_peaks(backward)]
        reduction = Term(
            at_rest + reduction_bytes,
            lambda: f"{format_gib(reduction_bytes)} GiB in buckets + {explain(at_rest)}",
        )
        no_activations = zero_term("activations: all are freed")
        return [*peaks, PeakCandidate.from_terms(0.985, no_activations, reduction, state.gradients)]

    forward = state.gather_forward
    return state._replace(
        gather_forward=Term(forward.num_bytes + in_step, lambda: f"{forward.explain()} + {explain(in_step)}"),
        gather_rest=Term(at_rest, lambda: explain(at_rest)),
        find_backward_peaks=find_peaks,
    )


def _add_buffers(peak: PeakCandidate, num_bytes: int, explain: Callable[[int], str]) -> PeakCandidate:
    def find_terms() -> PeakTerms:
        terms = peak.find_terms()
        staging = Term(
            terms.gather.num_bytes + num_bytes, lambda: f"{terms.gather.explain()} + {explain(num_bytes)}"
        )
        return terms._replace(gather=staging)

    return peak.replace_buffers(peak.gather + num_bytes, peak.gradients, find_terms)
