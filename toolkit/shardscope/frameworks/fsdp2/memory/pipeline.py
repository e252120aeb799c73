"""What FSDP2 holds under ``torch.distributed.pipelining``, beside what it holds without stages.

A pipeline stage reduces its gradients once, when the schedule has ended, and keeps parameters gathered after
a backward (torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``, ``perform_reduce_grad``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import by_value, ceil_div, holds, where
from shardscope.core.number_format import gib
from shardscope.core.precision import FP32, widths
from shardscope.memory.activations.forward import edge_activations, head_input, modules_of
from shardscope.memory.activations.step import in_flight
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage


class Waiting(NamedTuple):
    """Bytes that wait on a stage; all 0 where there are no stages."""

    received: Any = 0
    """Buffers for what other stages send: torch makes them once, for every micro-batch of a step."""
    all_gradients: Any = 0
    """Whole gradients of the stage, in the reduction type, once a micro-batch has gone backward."""
    repeats: Any = False
    """Whether a backward comes between two forwards, so that all later ones find these gradients."""
    hidden: Any = 0
    """Hidden states that the stage sends for one micro-batch; 0 on the last one."""
    ended: Any = 0
    """What the last stage's norm, head and loss leave of one micro-batch, its output too; 0 on others."""
    hidden_back: Any = 0
    """The gradient that it sends back for one; 0 on the first."""
    logits: Any = 0
    """The last stage's output: its schedule holds one until the next, or the step, is done."""
    chunks: Any = 1
    """Micro-batches in flight, in chunks of a stage."""
    adds: Any = True
    """Whether a backward's own gradients stay beside those that wait, being of another type."""

    @property
    def gradients(self) -> Any:
        """What waits while micro-batches are in flight."""
        return self.repeats * self.all_gradients

    @property
    def sent(self) -> Any:
        """Hidden states of all micro-batches in flight but one, or what their ends left."""
        return (self.chunks - 1) * (self.hidden + self.ended)

    @property
    def gathered(self) -> Any:
        """All that is there while a step runs, less parameters."""
        return self.received + self.gradients

    def with_output(self, logits: Term) -> Term:
        """Logits and loss, and the output that the schedule holds beside them."""
        held = self.logits
        return Term(logits[0] + held, lambda: f"{logits.explain()} + {gib(held)} GiB the stage's own output")

    def output(self, copies: int) -> Term:
        """The last stage's output while layers compute; and its gradient, once the loss has gone backward."""
        held = copies * self.logits
        what = "the stage's output, its gradient" if copies > 1 else "the output of the last forward"
        return Term(held, lambda: f"{gib(held)} GiB {what}")

    def words(self) -> str:
        """What comes on top of what is gathered, in words; empty: nothing."""
        if not self.gathered:
            return ""
        return (
            f" + {gib(self.gradients)} GiB whole gradients until the schedule ends + "
            f"{gib(self.received)} GiB received"
        )


NOTHING_WAITS = Waiting()


def is_pipelined(plan: Plan) -> bool:
    """Whether there are stages: in all of an array of plans, or in none (prediction/batch/memory.py)."""
    return holds(plan.degrees.pp > 1)


def waiting(plan: Plan, stage: Stage) -> Waiting:
    """What waits on ``stage``."""
    degrees, recipe, width = plan.degrees, plan.recipe, widths[plan.recipe.precision]
    several = degrees.pp > 1
    tokens = by_value(recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp))
    hidden = several * tokens * plan.architecture.hidden_size * width.compute
    num_sides = 2 - stage.is_first - stage.is_last
    per_micro_batch, chunks = in_flight(plan, stage.number)
    vocab = ceil_div(plan.architecture.vocab_size, degrees.tp)
    arch, modules = plan.architecture, modules_of(plan)
    # The loss keeps its log-softmax in fp32, and the schedule the logits.
    left = edge_activations(arch, modules) + head_input(arch, modules) + vocab * (FP32 + width.compute)
    return Waiting(
        received=plan.num_micro_batches * hidden * num_sides,
        all_gradients=several * width.reduce * stage.trainable,
        repeats=several & (plan.num_micro_batches * per_micro_batch > chunks),
        hidden=(1 - stage.is_last) * hidden,
        # Of a stage's interleaved chunks only the very last one has a head, and it waits for nobody.
        ended=several * stage.is_last * tokens * left if plan.layout.runs_all_forwards_first else 0,
        hidden_back=(1 - stage.is_first) * hidden,
        logits=several * stage.is_last * tokens * vocab * width.compute,
        chunks=where(several, chunks, 1),
        adds=width.reduce != width.compute,
    )


def received(waits: Waiting, plan: Plan) -> Term:
    """The receive buffers, which are there at rest too."""
    return Term(
        waits.received,
        lambda: (
            f"{gib(waits.received)} GiB for what other stages send, of all "
            f"{plan.num_micro_batches:,} micro-batches of a step (torch.distributed.pipelining)"
        ),
    )


def unreduced(plan: Plan, trained: Any) -> Term:
    """Shards of earlier micro-batches' gradients: none in stages, which reduce after the last."""
    held = (plan.degrees.pp == 1) * trained
    return Term(held, lambda: f"{gib(held)} GiB reduced after earlier micro-batches")
