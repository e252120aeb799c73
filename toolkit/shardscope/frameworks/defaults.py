"""Framework defaults that preflight checks depend on: the type of each framework's ``defaults.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

ReduceType = Literal["fp32", "bf16", "fp16"]


DEGREE_WORDS = {
    "data_parallel": "data-parallel ranks",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks",
}


@dataclass(frozen=True, kw_only=True)
class Tie:
    """One thing of a plan that must be the same when its checkpoint is loaded with its optimizer."""

    value: object
    """What is compared."""
    words: str
    """The same as people say it: "8 data-parallel ranks", "ZeRO stage 3"."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a layout that give a plan this value; empty where its cluster must."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The same of its recipe."""
    num_ranks: int = 1
    """Ranks that a run must have for it; 1 where it asks for none in particular."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """How Shardscope's engine saves a plan's run, and what may differ when it loads."""

    name: str
    """What people call it."""
    ties: Mapping[str, Tie] = field(default_factory=dict)
    """What must be the same when it is loaded; empty: it loads over any ranks. Two plans that save in one
    format have the same keys, whichever framework each is of."""
    remedy: str = ""
    """What else loosens it, in words; empty where nothing does."""
    source: str
    """Where that is written."""


def tied_degrees(plan: Plan, names: Iterable[str]) -> dict[str, Tie]:
    """A tie for each of these degrees of ``plan``, those of 1 too: one rank's file is no two ranks'."""
    degrees = {name: int(getattr(plan.degrees, name)) for name in names}
    return {
        name: Tie(
            value=number,
            words=f"{number} {DEGREE_WORDS[name] if number != 1 else DEGREE_WORDS[name].removesuffix('s')}",
            layout={} if name == "data_parallel" else {name: number},
            num_ranks=number,
        )
        for name, number in degrees.items()
    }


def torch_checkpoint(plan: Plan) -> CheckpointFormat:
    """What the engines of plain PyTorch save, under the model's own names.

    Over pipeline stages the optimizer's state is written by parameter, without them by group.
    """
    staged = plan.degrees.pp > 1
    words = f"{'' if staged else 'no '}pipeline stages"
    tie = Tie(value=staged, words=words, layout={"pp": plan.degrees.pp})
    return CheckpointFormat(
        name="torch.distributed.checkpoint",
        ties={"stages": tie},
        source="torch.distributed.checkpoint: loads over any number of ranks, and with stages names "
        "optimizer state otherwise",
    )


class Habits(Protocol):
    """What every framework's ``defaults.py`` offers."""

    def reduces_in(self, plan: Plan) -> ReduceType:
        """The type in which gradients are summed over data-parallel ranks."""

    def keeps_fp32_weights(self, plan: Plan) -> bool:
        """Whether the optimizer updates fp32 numbers, whatever type products read."""

    def reduce_remedy(self, plan: Plan) -> tuple[str, Plan | None]:
        """What makes it reduce in fp32, in words, and the plan that does where a field of it can."""

    def padded_vocab_size(self, plan: Plan) -> int:
        """Rows of the embedding once the framework has padded it."""

    def checkpoint(self, plan: Plan) -> CheckpointFormat:
        """What its training loop saves."""

    def unused(self, plan: Plan) -> Mapping[str, str]:
        """Fields of the layout that were set and change nothing -> where they would: "in stage 3"."""

    def overlaps(self, plan: Plan) -> Mapping[str, object]:
        """Options that are off and would let collectives of ``plan`` run beneath arithmetic."""
