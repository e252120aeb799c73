"""Slightly wider or narrower models whose widths are aligned for matrix units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.serialization import replace_fields
from shardscope.planner.checks.other_frameworks import replace_parts

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

SPELLED = {"hidden_size": "hidden", "intermediate_size": "mlp", "head_dim": "head", "vocab_size": "vocab"}
"""Abbreviations of fields in the name of a widened model."""


def widen_model(plan: Plan, **fields: int) -> Plan | None:
    """Return ``plan`` with a model of other widths and another name; None if it is invalid, cannot run or no
    longer fits."""
    arch = plan.architecture
    name = "-".join([arch.name, *(f"{SPELLED[field]}-{value}" for field, value in fields.items())])
    try:
        other = replace_fields(arch, {"name": name, **_with_experts(plan, fields)})
    except ValueError:
        return None
    return replace_parts(plan, architecture=other)


def align_width(plan: Plan, width: str, multiple: int) -> tuple[str, Plan | None]:
    """Return the nearest model whose ``width`` is a multiple of ``multiple`` on every rank, as text and as a
    plan.

    ``width`` is a key of ``list_widths_on_rank``. Wider models come first, narrower ones if those do not fit;
    the plan is None if neither does.
    """
    # Prefer wider: it keeps the model's capacity, and costs at most a few more columns.
    both = (_list_candidates(plan, width, multiple, rounded) for rounded in (_round_up, _round_down))
    for fields in itertools.chain.from_iterable(both):
        plan_with_width = widen_model(plan, **fields)
        if plan_with_width is not None:
            widths = ", ".join(f"{field}={value:,}" for field, value in fields.items())
            return f"A model with {widths}", plan_with_width
    return f"A model of which the {width} is a multiple of {multiple}", None


def _list_candidates(
    plan: Plan, width: str, multiple: int, rounded: Callable[[int, int], int]
) -> Iterator[Mapping[str, int]]:
    arch, tp = plan.architecture, plan.degrees.tp
    moe = arch.mixture_of_experts
    # In some families the heads make up the hidden size, in others head_dim is a field of its own. Offer
    # both; the family's checks reject the one that is invalid.
    if width == "hidden size":
        hidden = rounded(arch.hidden_size, multiple)
        yield {"hidden_size": hidden}
        # If heads make up the hidden size, they have to be wider as well.
        head = rounded(arch.head_dim, multiple // math.gcd(multiple, arch.num_attention_heads))
        yield {"hidden_size": head * arch.num_attention_heads, "head_dim": head}
    elif width == "width of the MLP":
        yield {"intermediate_size": rounded(arch.intermediate_size, multiple * tp)}
    elif width == "width of an expert" and moe is not None:
        yield {"intermediate_size": rounded(moe.moe_intermediate_size, multiple * plan.layout.expert_tp)}
    elif width in ("width of the queries", "width of the keys"):
        heads = arch.num_attention_heads if width == "width of the queries" else arch.num_key_value_heads
        # A rank's width is its number of heads times head_dim, so the heads already contribute their factors
        # of the multiple.
        head = rounded(arch.head_dim, multiple // math.gcd(multiple, -(-heads // tp)))
        yield {"head_dim": head}
        yield {"head_dim": head, "hidden_size": head * arch.num_attention_heads}


def _with_experts(plan: Plan, fields: Mapping[str, int]) -> dict[str, object]:
    """Return the fields to replace; in a mixture of experts, the intermediate size is that of an expert."""
    moe, changes = plan.architecture.mixture_of_experts, dict[str, object](fields)
    if moe is not None and "intermediate_size" in fields:
        del changes["intermediate_size"]
        changes["mixture_of_experts"] = replace(moe, moe_intermediate_size=fields["intermediate_size"])
    return changes


def _round_down(value: int, multiple: int) -> int:
    """Return the largest multiple up to ``value``, at least one ``multiple``."""
    return max(1, value // multiple) * multiple


def _round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least ``value``."""
    return -(-value // multiple) * multiple
