"""Framework defaults that preflight checks depend on: the type of each framework's ``defaults.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

ReduceType = Literal["fp32", "bf16", "fp16"]


DEGREE_NAMES = {
    "data_parallel": "data-parallel ranks",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks",
}


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Property of a plan that must be the same when its checkpoint is loaded with optimizer state."""

    value: object
    """Value that is compared."""
    words: str
    """Display text of the value: "8 data-parallel ranks", "ZeRO stage 3"."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Layout fields that give a plan this value; empty if only the cluster can."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Recipe fields that give a plan this value."""
    num_ranks: int = 1
    """Number of ranks that a run needs for this value; 1 if any number will do."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """Checkpoint format of a plan's run, with the properties that must match when it is loaded."""

    name: str
    """Display name."""
    ties: Mapping[str, Tie] = field(default_factory=dict)
    """Properties that must match on loading; empty if it loads over any ranks. Plans with the same format
    have the same keys, whichever their framework."""
    remedy: str = ""
    """Another way to load it with other properties, as text; empty if there is none."""
    source: str
    """Source of the rules: upstream file and version."""


def tie_degrees(plan: Plan, names: Iterable[str]) -> dict[str, Tie]:
    """Return a tie for each of the degrees ``names``, 1 included: one rank's file does not fit two ranks."""
    degrees = {name: int(getattr(plan.degrees, name)) for name in names}
    return {
        name: Tie(
            value=number,
            words=f"{number} {DEGREE_NAMES[name] if number != 1 else DEGREE_NAMES[name].removesuffix('s')}",
            layout={} if name == "data_parallel" else {name: number},
            num_ranks=number,
        )
        for name, number in degrees.items()
    }


def describe_torch_checkpoint(plan: Plan) -> CheckpointFormat:
    """Return the checkpoint format of the plain PyTorch engines, under the model's own parameter names.

    With pipeline stages the optimizer state is saved by parameter, without them by parameter group.
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


class FrameworkDefaults(Protocol):
    """Interface of every framework's ``defaults.py``."""

    def get_reduce_type(self, plan: Plan) -> ReduceType:
        """Return the type in which gradients are reduced over data-parallel ranks."""

    def keeps_fp32_weights(self, plan: Plan) -> bool:
        """Return whether the optimizer updates fp32 weights, whatever the compute type."""

    def suggest_fp32_reduction(self, plan: Plan) -> tuple[str, Plan | None]:
        """Return the suggested fix for fp32 reduction, and the plan with it; None if no field sets it."""

    def pad_vocab_size(self, plan: Plan) -> int:
        """Return the rows of the embedding after the framework's padding."""

    def get_checkpoint_format(self, plan: Plan) -> CheckpointFormat:
        """Return the checkpoint format that its engine saves."""

    def find_unused_options(self, plan: Plan) -> Mapping[str, str]:
        """Return layout fields that are set but have no effect, with where they would: "in stage 3"."""

    def find_overlap_options(self, plan: Plan) -> Mapping[str, object]:
        """Return the options that are off and would overlap collectives of ``plan`` with compute."""
