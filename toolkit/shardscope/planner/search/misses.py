"""Plans of a search that do not fit and come nearest to it, and what each of them lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.number_format import gib
from shardscope.frameworks.grid import DEGREES, MICRO_BATCH_SIZE

if TYPE_CHECKING:
    from shardscope.planner.search.ranking import Ranking

MISSES = 5
"""Nearest misses that are told."""


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A plan that lacks the least."""

    index: int
    """Its row; :meth:`Ranking.plan` makes it."""
    framework: str
    lacks: Mapping[str, int]
    """Bytes that are missing: of "GPU memory" on the worst rank, of "host memory", "NVMe" and "host memory
    while the model is made" on the node that needs most."""
    words: str
    """The plan and what it lacks, in words."""


def nearest(ranking: Ranking) -> tuple[Miss, ...]:
    """Those that lack the least, of each framework one first; none where all fit or none was made."""
    rows = np.flatnonzero(~ranking.feasible)
    if not len(rows):
        return ()
    short, seconds, owners = ranking.missing_share[rows], ranking.step_seconds[rows], ranking.owners(rows)
    names = [found.layout.framework for found in ranking.candidates]
    # Of each framework the nearest, and then whatever is nearest of all.
    firsts = []
    for name in dict.fromkeys(names):
        places = np.flatnonzero(np.array([name == own for own in names])[owners])
        if len(places):
            places = places[short[places] == short[places].min()]
            firsts.append(int(places[np.argmin(seconds[places])]))
    firsts.sort(key=lambda place: float(short[place]))
    last = min(MISSES, len(rows)) - 1
    near = np.flatnonzero(short <= np.partition(short, last)[last])
    near = near[np.lexsort((seconds[near], short[near]))]
    chosen = rows[list(dict.fromkeys([*firsts, *near.tolist()]))[:MISSES]].tolist()
    return tuple(_miss(ranking, row) for row in chosen)


def why_none(ranking: Ranking) -> str:
    """That nothing fits, what comes nearest, and why frameworks have no plan at all."""
    refused: dict[str, list[str]] = {}
    for name, why in ranking.refused.items():
        refused.setdefault(why, []).append(name)
    told = [miss.words for miss in ranking.misses]
    told += [f"{', '.join(names)}: {why}" for why, names in refused.items()]
    other = f" {instead_words(ranking.instead)}" if ranking.instead is not None else ""
    return (
        f"No plan of {ranking.num_evaluated:,} for {ranking.architecture.name} fits {ranking.cluster}. "
        f"Nearest misses: {'; '.join(told) or 'none, for no layout runs this recipe here'}.{other}"
    )


def instead_words(instead: Ranking) -> str:
    """What the nearest recipe that may have plans does."""
    recipe = instead.recipe
    changed = (
        f"a global batch of {recipe.global_batch_size:,}, the nearest that every GPU has an equal part of"
    )
    if recipe.loss == "chunked":
        changed = "the loss in chunks (Recipe.loss='chunked'), which learns the same"
    if not instead.num_feasible:
        misses = "; ".join(miss.words for miss in instead.misses)
        return f"With {changed}, nothing fits either: {misses or 'no framework here has it'}."
    row = int(instead.order[0])
    rate = instead.tokens_per_second_per_gpu[row]
    return f"With {changed}: {_what(instead, row)}, {rate:,.0f} tokens/s a GPU."


def _miss(ranking: Ranking, row: int) -> Miss:
    lacks = {name: int(short[row]) for name, short in ranking.lacks.items() if short[row] > 0}
    missing = " and ".join(f"{gib(short)} GiB of {name}" for name, short in lacks.items())
    words = f"{_what(ranking, row)}: lacks {missing}"
    return Miss(index=int(row), framework=str(ranking.framework[row]), lacks=lacks, words=words)


def _what(ranking: Ranking, row: int) -> str:
    numbers = [
        f"{name.replace('_', ' ')} {int(ranking.column(name)[row])}"
        for name in (*DEGREES, MICRO_BATCH_SIZE)
        if ranking.column(name)[row] > 1
    ]
    options = ranking.options(np.array([row]))[0]
    return ", ".join([f"{options}, recompute {ranking.recompute[row]}", *numbers])
