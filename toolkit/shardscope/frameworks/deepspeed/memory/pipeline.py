"""Additional memory of DeepSpeed's ``PipelineEngine``, besides a stage's weights and activations.

Source: ``deepspeed/runtime/pipe/engine.py``, DeepSpeed 0.19. There is one permanent receive buffer for each
side; per micro-batch in flight, the received and the sent tensors until its backward; on the last stage, the
output with its graph until the next one replaces it. ``reduce_gradients`` allocates a second bucket besides
backward's (runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import group_equal, minimum
from shardscope.core.precision import widths
from shardscope.memory.activations.stage_activations import count_in_flight
from shardscope.memory.report import Term, zero_term
from shardscope.memory.state.training_state import PeakCandidate

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState


class PipelineBuffers(NamedTuple):
    """Buffers, sent tensors and outputs of a pipeline stage, in bytes; 0 without stages."""

    at_rest: int = 0
    in_step: int = 0
    in_backward: int = 0
    """During backward: the last stage's output stays alive."""


def compute_pipeline_buffers(plan: Plan, stage: Stage) -> PipelineBuffers:
    """Return the pipeline's buffers on one rank of ``stage``, for a plan with pp > 1."""
    recipe, arch = plan.recipe, plan.architecture
    tokens, width = group_equal(recipe.micro_batch_size * recipe.seq_len), widths[recipe.precision].compute
    hidden, logits = tokens * arch.hidden_size * width, stage.is_last * tokens * arch.vocab_size * width
    num_sides = 2 - stage.is_first - stage.is_last
    _, num_in_flight = count_in_flight(plan, stage.number)
    # The stage's input, the input's gradient and the logits: the graph of an output that is still referenced.
    output_graph = logits + 2 * stage.is_last * hidden
    num_outputs = minimum(2, plan.num_micro_batches)
    in_step = num_sides * hidden + num_in_flight * num_sides * hidden + (num_outputs - 1) * output_graph
    return PipelineBuffers(num_sides * hidden + num_outputs * output_graph, in_step, in_step + logits)


def add_pipeline_buffers(
    state: TrainingState, buffers: PipelineBuffers, reduction_bytes: int
) -> TrainingState:
    """Return the state of a plan with pp > 1 with ``buffers`` added, but for those in backward's candidates.

    ``reduction_bytes`` is the size of all buckets while gradients are reduced after the schedule.
    """
    at_rest, in_step = buffers.at_rest, buffers.in_step
    find_stage_peaks = state.find_backward_peaks
    assert find_stage_peaks is not None

    def find_peaks(backward: StageBackward) -> list[PeakCandidate]:
        reduction = Term(
            at_rest + reduction_bytes,
            lambda: f"{format_gib(reduction_bytes)} GiB in buckets + {explain_buffers(at_rest)}",
        )
        no_activations = zero_term("activations: all are freed")
        at_reduction = PeakCandidate.from_terms(0.985, no_activations, reduction, state.gradients)
        return [*find_stage_peaks(backward), at_reduction]

    forward = state.gather_forward
    return state._replace(
        gather_forward=Term(
            forward.num_bytes + in_step, lambda: f"{forward.explain()} + {explain_buffers(in_step)}"
        ),
        gather_rest=Term(at_rest, lambda: explain_buffers(at_rest)),
        find_backward_peaks=find_peaks,
    )


def explain_buffers(num_bytes: int) -> str:
    """Return the explanation of bytes in :class:`PipelineBuffers`."""
    return f"{format_gib(num_bytes)} GiB that stages send, and outputs that stay referenced"
