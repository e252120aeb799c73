"""Whether a plan of a search can be run here, and if not, why: what chart and table say of each plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

import shardscope as ss
from shardscope.frameworks.registry import why_not_trained
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.planner.ranking import Ranking

Kind = Literal["fits", "may not fit", "does not fit", "cannot be launched here"]


class Standing(NamedTuple):
    """The state of one plan, and the sentence behind it (empty for a plan that fits and can be launched)."""

    kind: Kind
    reasons: tuple[str, ...] = ()


def is_feasible(ranking: Ranking) -> npt.NDArray[np.bool_]:
    """Return which plans fit in memory whose size is known: GPU, host and NVMe."""
    return np.asarray(ranking.feasible & ranking.is_room_known)


def why_not(ranking: Ranking, index: int) -> str | None:
    """Return the memory that plan ``index`` lacks, as a sentence; None if it fits."""
    lacks = [
        f"{gib(int(short[index]))} GiB of {name}" for name, short in ranking.lacks.items() if short[index] > 0
    ]
    return f"Does not fit: {' and '.join(lacks)} missing." if lacks else None


def why_unknown(ranking: Ranking, index: int) -> str | None:
    """Return the memory that plan ``index`` needs and whose size is not known; None if there is none."""
    needs = [
        f"{gib(int(needed[index]))} GiB of {name}"
        for name, needed in (("host memory", ranking.host_bytes), ("NVMe", ranking.nvme_bytes))
        if name not in ranking.rooms and needed[index] > 0
    ]
    if not needs:
        return None
    return f"May not fit: needs {' and '.join(needs)} a node, and how much a node has is not known."


def why_not_launched(plan: ss.Plan) -> str | None:
    """Return why no engine here trains ``plan``, as a sentence; None if one does."""
    refusal = why_not_trained(plan)
    return None if refusal is None else f"Cannot be launched here: {refusal}"


def standing(ranking: Ranking, index: int) -> Standing:
    """Return the state of plan ``index``: memory first, then whether an engine trains it."""
    lacks, unknown = why_not(ranking, index), why_unknown(ranking, index)
    refused = why_not_launched(ranking.plan(index))
    reasons = tuple(reason for reason in (lacks, unknown, refused) if reason is not None)
    if lacks is not None:
        return Standing("does not fit", reasons)
    if unknown is not None:
        return Standing("may not fit", reasons)
    return Standing("fits" if refused is None else "cannot be launched here", reasons)
