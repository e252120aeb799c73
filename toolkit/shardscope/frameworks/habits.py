"""What a framework does by itself that a preflight must know: the type of each framework's ``habits.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from shardscope.plan import Plan
    from shardscope.planner.preflight.finding import Finding
    from shardscope.planner.preflight.script import Script

ReduceType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """How a framework's training loop saves, and what may differ when it loads."""

    name: str
    """What people call it."""
    tied_to: tuple[str, ...]
    """Names of :class:`~shardscope.layout.Degrees` that must be the same when it is loaded with its
    optimizer; empty: it loads over any ranks."""
    remedy: str
    """What loosens it, in words; empty where nothing ties it."""
    source: str
    """Where that is written."""


TORCH_CHECKPOINT = CheckpointFormat(
    name="torch.distributed.checkpoint",
    tied_to=(),
    remedy="",
    source="torch.distributed.checkpoint: loads over any number of ranks",
)
"""What the engines of plain PyTorch save, under the model's own names."""


class Habits(Protocol):
    """What every framework's ``habits.py`` offers."""

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

    def in_script(self, script: Script) -> Iterator[Finding]:
        """What of this framework a person's own script does badly, or in ways that are gone."""
