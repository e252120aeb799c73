"""Nearest misses of a search: plans that almost fit, and their missing memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib
from shardscope.frameworks.search_grid import DEGREES, MICRO_BATCH_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.planner.search.ranking import Ranking

MISSES = 5
"""Number of nearest misses that are reported."""


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A plan that almost fits."""

    index: int
    """Row of the plan; :meth:`Ranking.plan` creates it."""
    framework: str
    lacks: Mapping[str, int]
    """Missing bytes: "GPU memory" of the worst rank, "host memory", "NVMe" and "host memory while the model
    is built" of the node that needs most."""
    text: str
    """Description of the plan and of its missing memory."""


def find_nearest_misses(ranking: Ranking) -> tuple[Miss, ...]:
    """Return the nearest misses, one of each framework first; empty if all plans fit or none was
    evaluated."""
    rows = np.flatnonzero(~ranking.is_feasible)
    if not len(rows):
        return ()
    # The nearest of each framework first, then the nearest of all.
    owners = ranking.owners(rows)
    names = [candidate.layout.framework for candidate in ranking.candidates]
    firsts = np.concatenate(
        [
            _choose_nearest(ranking, rows[np.array([name == framework for framework in names])[owners]], 1)
            for name in dict.fromkeys(names)
        ]
    )
    firsts = _choose_nearest(ranking, firsts, len(firsts))
    nearest = _choose_nearest(ranking, rows, MISSES)
    chosen = list(dict.fromkeys([*firsts.tolist(), *nearest.tolist()]))[:MISSES]
    return tuple(_build_miss(ranking, row) for row in chosen)


def list_nearest_misses(ranking: Ranking, limit: int) -> NDArray[np.int64]:
    """Return the rows of the plans that do not fit, at most ``limit``, the nearest misses first."""
    return _choose_nearest(ranking, np.flatnonzero(~ranking.is_feasible), limit)


def _choose_nearest(ranking: Ranking, rows: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Return those of ``rows`` that miss least, at most ``limit``, in order."""
    if not len(rows) or limit < 1:
        return rows[:0]
    # Rank by the missing share, not by bytes: 10 GiB of a node's memory is a smaller miss than 10 GiB of a
    # GPU's. Partition instead of sorting: there may be half a million rows, of which five are reported.
    short = ranking.missing_share[rows]
    last = min(limit, len(rows)) - 1
    rows = rows[short <= np.partition(short, last)[last]]
    # Many plans lack the same share of host memory: what else they lack decides, then speed.
    keys = (
        ranking.get_step_seconds(rows),
        ranking.total_missing_share[rows],
        ranking.missing_share[rows],
    )
    return rows[np.lexsort(keys)][:limit]


def list_refusals(ranking: Ranking) -> list[str]:
    """Return why frameworks have no plan; those with the same reason together."""
    refused: dict[str, list[str]] = {}
    for name, why in ranking.refused.items():
        refused.setdefault(why, []).append(name)
    return [f"{', '.join(names)}: {why}" for why, names in refused.items()]


def explain_no_plan(ranking: Ranking) -> str:
    """Return the error message if nothing fits: the nearest misses, and why frameworks have no plan, a line
    each."""
    reasons = [miss.text for miss in ranking.misses] + list_refusals(ranking)
    other = describe_other_recipe(ranking)
    other = f"\n{other}" if other else ""
    lines = "".join(f"\n- {reason}" for reason in reasons)
    model, cluster = ranking.architecture.name, ranking.cluster
    if not ranking.num_evaluated:
        return f"No layout runs {model} with this recipe on {cluster}:{lines}{other}"
    return f"No plan of {ranking.num_evaluated:,} for {model} fits {cluster}. Nearest misses:{lines}{other}"


def describe_other_recipe(ranking: Ranking) -> str:
    """Return the text on ``ranking.alternative``, its recipe and its best plan or nearest miss; empty without
    one."""
    alternative, device = ranking.alternative, name_device(ranking.cluster)
    if alternative is None:
        return ""
    batch = alternative.recipe.global_batch_size
    changed = (
        "the loss in chunks (Recipe.loss='chunked'), which learns the same"
        if batch == ranking.recipe.global_batch_size
        else f"a global batch of {batch:,}, the nearest that every {device} has an equal part of"
    )
    if not alternative.num_feasible:
        nearest = (
            f"the nearest is {alternative.misses[0].text}"
            if alternative.misses
            else "no framework here has it"
        )
        return f"With {changed}, nothing fits either: {nearest}."
    row = int(alternative.order[0])
    rate = float(alternative.get_tokens_per_second_per_gpu(alternative.order[:1])[0])
    return f"With {changed}: {_describe_plan(alternative, row)}, {rate:,.0f} tokens/s per {device}."


def _build_miss(ranking: Ranking, row: int) -> Miss:
    lacks = {name: int(short[row]) for name, short in ranking.lacks.items() if short[row] > 0}
    missing = " and ".join(f"{format_gib(short)} GiB of {name}" for name, short in lacks.items())
    text = f"{_describe_plan(ranking, row)}: lacks {missing}"
    return Miss(index=int(row), framework=str(ranking.framework[row]), lacks=lacks, text=text)


def _describe_plan(ranking: Ranking, row: int) -> str:
    numbers = [
        f"{name.replace('_', ' ')} {int(ranking.column(name)[row])}"
        for name in (*DEGREES, MICRO_BATCH_SIZE)
        if ranking.column(name)[row] > 1
    ]
    options = ranking.options(np.array([row]))[0]
    return ", ".join([f"{options}, recompute {ranking.recompute[row]}", *numbers])
