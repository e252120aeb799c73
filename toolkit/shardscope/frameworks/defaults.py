"""Framework defaults that preflight checks depend on: the interface of each framework's ``defaults.py``, and
the defaults that the plain PyTorch engines (DDP and FSDP2) share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from shardscope.core.number_format import format_count
from shardscope.core.precision import FP32, widths

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

ReduceType = Literal["fp32", "bf16", "fp16"]


DEGREE_NAMES: Mapping[str, str] = {
    "data_parallel": "data-parallel rank",
    "tp": "tensor-parallel rank",
    "pp": "pipeline stage",
    "ep": "expert-parallel rank",
}


@dataclass(frozen=True, kw_only=True)
class CheckpointRequirement:
    """Property of a plan that must be the same when its checkpoint is loaded with optimizer state."""

    value: object
    """Value that is compared."""
    text: str
    """Display text of the value: "8 data-parallel ranks", "ZeRO stage 3"."""
    layout: Mapping[str, object] = field(default_factory=dict)
    """Layout fields that give a plan this value; empty if only the cluster can."""
    recipe: Mapping[str, object] = field(default_factory=dict)
    """Recipe fields that give a plan this value."""
    num_ranks: int = 1
    """Number of ranks that a run needs for this value; 1 if any number will do."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """Checkpoint format of a plan's run, with the properties that must match when it is loaded."""

    name: str
    """Display name."""
    requirements: Mapping[str, CheckpointRequirement] = field(default_factory=dict)
    """Properties that must match on loading; empty if it loads over any ranks. Plans with the same format
    have the same keys, whichever their framework."""
    remedy: str = ""
    """Another way to load it with other properties, as text; empty if there is none."""
    source: str
    """Source of the rules: upstream file and version."""


def require_degrees(plan: Plan, names: Iterable[str]) -> dict[str, CheckpointRequirement]:
    """Return a requirement for each of the degrees ``names``, 1 included: a file of one rank fits one."""
    degrees = {name: int(getattr(plan.degrees, name)) for name in names}
    return {
        name: CheckpointRequirement(
            value=number,
            text=format_count(number, DEGREE_NAMES[name]),
            # Data parallelism is what the other degrees leave of the cluster: no layout field sets it.
            layout={} if name == "data_parallel" else {name: number},
            num_ranks=number,
        )
        for name, number in degrees.items()
    }


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


# ---- Defaults of the plain PyTorch engines


def get_weight_reduce_type(plan: Plan) -> ReduceType:
    """Return the type in which the plain PyTorch engines reduce gradients: fp32 in mixed precision.

    With DDP it is the type of the weights, which autocast leaves in fp32. With FSDP2 it is
    ``MixedPrecisionPolicy.reduce_dtype``, which Shardscope's engine sets to fp32 in mixed precision.
    """
    # Never fp16: in fp16-mixed gradients are reduced in fp32, and pure fp16 is not a precision of a recipe.
    return "fp32" if widths[plan.recipe.precision].reduce == FP32 else "bf16"


def has_fp32_weights(plan: Plan) -> bool:
    """Return whether the weights that the optimizer updates are fp32.

    In mixed precision they are: DDP's autocast casts copies of them, and FSDP2's ``param_dtype`` is the type
    of the all-gathered copies only.
    """
    return widths[plan.recipe.precision].original == FP32


def suggest_mixed_precision(plan: Plan) -> tuple[str, Plan | None]:
    """Return the suggested fix, bf16 mixed precision, and the plan with it; None if that plan is invalid."""
    text = "Mixed precision (bf16)"
    try:
        return text, replace(plan, recipe=replace(plan.recipe, precision="bf16-mixed"))
    except ValueError:  # Mixed precision conflicts with another field of the recipe.
        return text, None


def get_vocab_size(plan: Plan) -> int:
    """Return the vocabulary size, unpadded: DDP replicates it, a DTensor's last shards may be shorter."""
    return plan.architecture.vocab_size


def find_no_options(plan: Plan) -> Mapping[str, str]:
    """Return an empty mapping: all options have an effect, and overlap needs no option."""
    return {}


def describe_torch_checkpoint(plan: Plan) -> CheckpointFormat:
    """Return the checkpoint format of the plain PyTorch engines, under the model's own parameter names.

    With pipeline stages the optimizer state is saved by parameter, without them by parameter group.
    """
    # Stages have different parameters in the same list of parameter groups, so their groups are saved by
    # parameter, too (torch 2.13, checkpoint/state_dict.py, flatten_optimizer_state_dict).
    has_stages = plan.degrees.pp > 1
    text = "pipeline stages" if has_stages else "no pipeline stages"
    stages = CheckpointRequirement(value=has_stages, text=text, layout={"pp": plan.degrees.pp})
    return CheckpointFormat(
        name="torch.distributed.checkpoint",
        requirements={"stages": stages},
        source="torch.distributed.checkpoint: loads over any number of ranks; with pipeline "
        "stages optimizer state has other names",
    )
