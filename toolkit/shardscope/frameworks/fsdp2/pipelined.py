"""What FSDP2 holds under ``torch.distributed.pipelining``, beside what it holds without stages.

A pipeline stage reduces its gradients once, when the schedule has ended, and keeps parameters gathered after
a backward (torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``, ``perform_reduce_grad``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.memory.arithmetic import ceil_div, where
from shardscope.memory.precision import widths
from shardscope.memory.report import Term
from shardscope.memory.step import in_flight
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan


class Waiting(NamedTuple):
    """Bytes that wait on a stage; all 0 where there are no stages."""

    received: Any = 0
    """Buffers for what other stages send: torch makes them once, for every micro-batch of a step."""
    gradients: Any = 0
    """Whole gradients of the stage, in the reduction type, that micro-batches have added to by then."""
    all_gradients: Any = 0
    """The same when the schedule ends."""
    output: Any = 0
    """Hidden states that the stage has sent, of each micro-batch in flight."""
    logits: Any = 0
    """The last stage's output, which its schedule holds through backward."""
    chunks: Any = 1
    """Micro-batches in flight, in chunks of a stage."""
    adds: Any = True
    """Whether a backward's own gradients stay beside those that wait, being of another type."""

    @property
    def gathered(self) -> Any:
        """All that is there while a step runs, less parameters."""
        return self.received + self.gradients

    def at_fullest(self, layers: Any) -> Waiting:
        """When a step holds most: with all micro-batches in flight, or after a backward without one of them.

        The latter only where all forwards come before the first backward, which finds no gradients yet.
        """
        chunk = layers // self.chunks
        later = (self.all_gradients > self.gradients) & (self.all_gradients > chunk)
        return self._replace(
            gradients=where(later, self.all_gradients, self.gradients),
            output=self.output - later * chunk,
        )

    def beside(self, layers: Any) -> Any:
        """What the micro-batches in flight hold of ``layers``, less the one that goes backward."""
        return (layers + self.output) // self.chunks * (self.chunks - 1)

    def with_output(self, logits: Term | None) -> Term | None:
        """Logits and loss, and the output that the schedule holds beside them."""
        if logits is None or self is NOTHING_WAITS:
            return logits
        held = self.logits
        return Term(logits[0] + held, lambda: f"{logits.explain()} + {gib(held)} GiB the stage's own output")

    def own_logits(self) -> Term | None:
        """The output and its gradient, once the loss has gone backward; nothing without stages."""
        if self is NOTHING_WAITS:
            return None
        return Term(2 * self.logits, lambda: f"{gib(2 * self.logits)} GiB the stage's output, its gradient")

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
    """Whether there are stages, in any of an array of plans."""
    pp = plan.degrees.pp
    return not isinstance(pp, int) or pp > 1


def waiting(plan: Plan, stage: Stage) -> Waiting:
    """What waits on ``stage``."""
    degrees, recipe, width = plan.degrees, plan.recipe, widths[plan.recipe.precision]
    several = degrees.pp > 1
    tokens = recipe.micro_batch_size * ceil_div(recipe.seq_len, degrees.cp)
    hidden = several * tokens * plan.architecture.hidden_size * width.compute
    num_sides = 2 - stage.is_first - stage.is_last
    per_micro_batch, chunks = in_flight(plan, stage.number)
    gradients = several * width.reduce * degrees.shard * degrees.cp * stage.trainable_shard
    vocab = ceil_div(plan.architecture.vocab_size, degrees.tp)
    return Waiting(
        received=plan.num_micro_batches * hidden * num_sides,
        gradients=(plan.num_micro_batches * per_micro_batch > chunks) * gradients,
        all_gradients=gradients,
        output=(1 - stage.is_last) * chunks * hidden,
        logits=several * stage.is_last * tokens * vocab * width.compute,
        chunks=where(several, chunks, 1),
        adds=(degrees.pp == 1) | (width.reduce != width.compute),
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
