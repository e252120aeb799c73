"""Feasibility of the plans of a search: if a plan can run here and, if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.number_format import format_gib

if TYPE_CHECKING:
    from shardscope.planner.search.ranking import Ranking

Kind = Literal["fits", "may not fit", "does not fit", "cannot be launched here"]


class Feasibility(NamedTuple):
    """The state of one plan, with the reasons (none for a plan that fits and can be launched)."""

    kind: Kind
    reasons: tuple[str, ...] = ()


def judge_plan(ranking: Ranking, index: int) -> Feasibility:
    """Return the state of plan ``index``: memory first, then whether an engine supports it."""
    # Listed also for a plan that does not fit: more memory alone would not let it run here.
    refused = why_not_launched(ranking, index)
    if not ranking.is_feasible[index]:
        lacks = ranking.why_not(index)
        return Feasibility("does not fit", (f"Does not fit: {lacks}.", *filter(None, [refused])))
    unknown = why_unknown(ranking, index)
    reasons = tuple(filter(None, [unknown, refused]))
    if unknown:
        return Feasibility("may not fit", reasons)
    return Feasibility("cannot be launched here" if refused else "fits", reasons)


def why_not_launched(ranking: Ranking, index: int) -> str:
    """Return why no engine here supports plan ``index``, as a sentence; "" if one does."""
    refusal = ranking.why_not_launched(index)
    return f"Cannot be launched here: {refusal}" if refusal else ""


def why_unknown(ranking: Ranking, index: int) -> str:
    """Return the memory that plan ``index`` needs and whose capacity is unknown; "" if there is none."""
    needs = [
        f"{format_gib(int(needed[index]))} GiB of {name}"
        for name, needed in (("host memory", ranking.host_bytes), ("NVMe", ranking.nvme_bytes))
        if name not in ranking.rooms and needed[index] > 0
    ]
    if not needs:
        return ""
    return f"May not fit: needs {' and '.join(needs)} on each node, whose capacity is not known."
