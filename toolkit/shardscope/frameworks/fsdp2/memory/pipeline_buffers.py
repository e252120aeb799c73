"""FSDP2 in a pipeline stage: receive buffers, and gradients that are unsharded until the schedule has ended.

Source: ``torch.distributed.pipelining`` (torch 2.13, stage.py). ``backward_maybe_with_nosync`` neither
reduces gradients nor reshards a layer (``set_requires_gradient_sync(False)`` and
``set_reshard_after_backward(False)``), the following forward reshards the layers one by one, and
``perform_reduce_grad`` reduces every group when the schedule has ended, the root first.

So a stage has its gradients unsharded from the first backward to the end of the schedule, and after a
backward all of its parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import ceil_div, group_equal, where
from shardscope.core.precision import FP32, widths
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.head import compute_final_norm_saved, compute_head_input
from shardscope.memory.activations.stage_activations import count_in_flight
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage


class PipelineBuffers(NamedTuple):
    """Pipeline buffers and unreduced gradients of a stage, in bytes."""

    received: int
    """Receive buffers: torch allocates them once, for every micro-batch of a step."""
    all_gradients: int
    """Unsharded gradients of the stage in the reduction type, after the first backward."""
    repeats: bool
    """Whether a forward follows a backward, so that later forwards run with ``all_gradients`` allocated."""
    hidden: int
    """Hidden states sent to the next stage per micro-batch; 0 on the last stage."""
    saved_by_head: int
    """Saved tensors of the last stage's norm, head and loss per micro-batch, with its output; 0 on others."""
    hidden_gradient: int
    """Gradient sent to the previous stage per micro-batch; 0 on the first stage."""
    logits: int
    """Output of the last stage: the schedule keeps one until the next, or the end of the step."""
    chunks_in_flight: int
    """Micro-batches in flight, counted in model chunks of the stage."""
    adds_gradients: bool
    """Whether a backward's new gradients are separate tensors from the accumulated ones: types differ."""

    @property
    def unreduced(self) -> int:
        """Unreduced gradients while micro-batches are in flight. Bytes."""
        return self.repeats * self.all_gradients

    @property
    def sent(self) -> int:
        """Sent hidden states, or the last stage's saved tensors, of all micro-batches in flight but one."""
        return (self.chunks_in_flight - 1) * (self.hidden + self.saved_by_head)

    @property
    def allocated(self) -> int:
        """Receive buffers and unreduced gradients during the step. Bytes."""
        return self.received + self.unreduced

    def add_output(self, logits: Term) -> Term:
        """Return ``logits`` plus the previous output that the schedule still references."""
        output = self.logits
        return Term(
            logits.num_bytes + output,
            lambda: f"{logits.explain()} + {format_gib(output)} GiB the stage's own output",
        )

    def build_output(self, copies: int) -> Term:
        """Return the bytes of the last stage's output; with ``copies=2`` its gradient is included."""
        output = copies * self.logits
        text = "the stage's output, its gradient" if copies > 1 else "the output of the last forward"
        return Term(output, lambda: f"{format_gib(output)} GiB {text}")

    def explain(self) -> str:
        """Return the explanation of ``allocated``, as a suffix; empty if it is 0."""
        if not self.allocated:
            return ""
        return (
            f" + {format_gib(self.unreduced)} GiB unsharded gradients until the schedule ends + "
            f"{format_gib(self.received)} GiB receive buffers"
        )


def compute_pipeline_buffers(plan: Plan, stage: Stage) -> PipelineBuffers:
    """Return the pipeline buffers and unreduced gradients of ``stage``."""
    degrees, recipe, width = plan.degrees, plan.recipe, widths[plan.recipe.precision]
    is_pipelined = degrees.pp > 1
    tokens = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
    # One tensor between stages: in the compute type, whatever the type of the stage's residual stream.
    hidden = is_pipelined * tokens * plan.architecture.hidden_size * width.compute
    # Hidden states are received from the stage before, their gradients from the stage after it.
    num_neighbours = 2 - stage.is_first - stage.is_last
    num_chunks, chunks_in_flight = count_in_flight(plan, stage.number)
    vocab = ceil_div(plan.architecture.vocab_size, degrees.tp)
    # Only GPipe has several micro-batches alive at the head: with 1F1B, interleaved or not, the chunk with
    # the head runs its backward right after its forward.
    saved_by_head = 0
    if plan.layout.runs_all_forwards_first:
        arch, modules = plan.architecture, find_modules(plan)
        # The loss saves its log-softmax in fp32, and the schedule keeps the logits.
        loss = vocab * (FP32 + width.compute)
        head = compute_final_norm_saved(arch, modules) + compute_head_input(arch, modules) + loss
        saved_by_head = is_pipelined * stage.is_last * tokens * head
    return PipelineBuffers(
        received=plan.num_micro_batches * hidden * num_neighbours,
        all_gradients=is_pipelined * width.reduce * stage.trainable,
        # With all chunks of a step in flight at once, every forward comes before the first backward.
        repeats=is_pipelined & (plan.num_micro_batches * num_chunks > chunks_in_flight),
        hidden=(1 - stage.is_last) * hidden,
        saved_by_head=saved_by_head,
        hidden_gradient=(1 - stage.is_first) * hidden,
        logits=is_pipelined * stage.is_last * tokens * vocab * width.compute,
        chunks_in_flight=where(is_pipelined, chunks_in_flight, 1),
        adds_gradients=width.reduce != width.compute,
    )


def build_receive_buffers(buffers: PipelineBuffers, plan: Plan) -> Term:
    """Return the receive buffers, which stay allocated between steps."""
    return Term(
        buffers.received,
        lambda: (
            f"{format_gib(buffers.received)} GiB receive buffers for the tensors of other stages, of all "
            f"{plan.num_micro_batches:,} micro-batches of a step (torch.distributed.pipelining)"
        ),
    )


def build_accumulated_gradients(plan: Plan, trained: int) -> Term:
    """Return the gradient shards of earlier micro-batches; 0 with pp > 1, which reduces after the last."""
    shards = (plan.degrees.pp == 1) * trained
    return Term(shards, lambda: f"{format_gib(shards)} GiB reduced after earlier micro-batches")
