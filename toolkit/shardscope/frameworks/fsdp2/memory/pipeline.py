"""Additional memory of FSDP2 under ``torch.distributed.pipelining``, compared to one stage.

A pipeline stage reduces its gradients once, when the schedule has ended, and keeps its parameters
all-gathered after a backward (torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``,
``perform_reduce_grad``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.number_format import gib
from shardscope.core.ops import all_true, ceil_div, group_equal, where
from shardscope.core.precision import FP32, widths
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.head import compute_final_norm_saved, compute_head_input
from shardscope.memory.activations.stage_activations import count_in_flight
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage


class Waiting(NamedTuple):
    """Pipeline buffers and unreduced gradients of a stage, in bytes; all 0 without pipeline parallelism."""

    received: Any = 0
    """Receive buffers: torch allocates them once, for every micro-batch of a step."""
    all_gradients: Any = 0
    """Unsharded gradients of the stage in the reduction type, after the first backward."""
    repeats: Any = False
    """Whether a forward follows a backward, so that later forwards run with ``all_gradients`` allocated."""
    hidden: Any = 0
    """Hidden states sent to the next stage per micro-batch; 0 on the last stage."""
    ended: Any = 0
    """Saved tensors of the last stage's norm, head and loss per micro-batch, with its output; 0 on others."""
    hidden_back: Any = 0
    """Gradient sent to the previous stage per micro-batch; 0 on the first stage."""
    logits: Any = 0
    """Output of the last stage: the schedule keeps one until the next, or the end of the step."""
    chunks: Any = 1
    """Micro-batches in flight, counted in model chunks of the stage."""
    adds: Any = True
    """Whether a backward's new gradients are separate tensors from the accumulated ones: types differ."""

    @property
    def gradients(self) -> Any:
        """Unreduced gradients while micro-batches are in flight. Bytes."""
        return self.repeats * self.all_gradients

    @property
    def sent(self) -> Any:
        """Sent hidden states, or the last stage's saved tensors, of all micro-batches in flight but one."""
        return (self.chunks - 1) * (self.hidden + self.ended)

    @property
    def gathered(self) -> Any:
        """Receive buffers and unreduced gradients during the step. Bytes."""
        return self.received + self.gradients

    def with_output(self, logits: Term) -> Term:
        """Return ``logits`` plus the previous output that the schedule still references."""
        held = self.logits
        return Term(logits[0] + held, lambda: f"{logits.explain()} + {gib(held)} GiB the stage's own output")

    def output(self, copies: int) -> Term:
        """Return the bytes of the last stage's output; with ``copies=2`` its gradient is included."""
        held = copies * self.logits
        what = "the stage's output, its gradient" if copies > 1 else "the output of the last forward"
        return Term(held, lambda: f"{gib(held)} GiB {what}")

    def words(self) -> str:
        """Return the explanation of ``gathered``, as a suffix; empty if it is 0."""
        if not self.gathered:
            return ""
        return (
            f" + {gib(self.gradients)} GiB whole gradients until the schedule ends + "
            f"{gib(self.received)} GiB received"
        )


NOTHING_WAITS = Waiting()


def is_pipelined(plan: Plan) -> bool:
    """Return whether pp > 1; the plans of one array agree on it (prediction/batch/memory.py)."""
    return all_true(plan.degrees.pp > 1)


def waiting(plan: Plan, stage: Stage) -> Waiting:
    """Return the pipeline buffers and unreduced gradients of ``stage``."""
    degrees, recipe, width = plan.degrees, plan.recipe, widths[plan.recipe.precision]
    several = degrees.pp > 1
    tokens = group_equal(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
    hidden = several * tokens * plan.architecture.hidden_size * width.compute
    num_sides = 2 - stage.is_first - stage.is_last
    per_micro_batch, chunks = count_in_flight(plan, stage.number)
    vocab = ceil_div(plan.architecture.vocab_size, degrees.tp)
    arch, modules = plan.architecture, find_modules(plan)
    # The loss saves its log-softmax in fp32, and the schedule keeps the logits.
    left = (
        compute_final_norm_saved(arch, modules)
        + compute_head_input(arch, modules)
        + vocab * (FP32 + width.compute)
    )
    return Waiting(
        received=plan.num_micro_batches * hidden * num_sides,
        all_gradients=several * width.reduce * stage.trainable,
        repeats=several & (plan.num_micro_batches * per_micro_batch > chunks),
        hidden=(1 - stage.is_last) * hidden,
        # Only GPipe has several micro-batches alive at the head: with 1F1B, interleaved or not, the chunk
        # with the head runs its backward right after its forward.
        ended=several * stage.is_last * tokens * left if plan.layout.runs_all_forwards_first else 0,
        hidden_back=(1 - stage.is_first) * hidden,
        logits=several * stage.is_last * tokens * vocab * width.compute,
        chunks=where(several, chunks, 1),
        adds=width.reduce != width.compute,
    )


def received(waits: Waiting, plan: Plan) -> Term:
    """Return the receive buffers, which stay allocated between steps."""
    return Term(
        waits.received,
        lambda: (
            f"{gib(waits.received)} GiB for what other stages send, of all "
            f"{plan.num_micro_batches:,} micro-batches of a step (torch.distributed.pipelining)"
        ),
    )


def unreduced(plan: Plan, trained: Any) -> Term:
    """Return the gradient shards of earlier micro-batches; 0 with pp > 1, which reduces after the last."""
    held = (plan.degrees.pp == 1) * trained
    return Term(held, lambda: f"{gib(held)} GiB reduced after earlier micro-batches")
