"""Scores of estimators, and where one of them is better than ours."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from tests.accuracy.scoring import compute_percentile
from tests.leaderboard.estimators import Answers
from tests.leaderboard.tables import Table, TableRow


class Score(NamedTuple):
    """Errors on some rows."""

    num_rows: int
    median: float
    p90: float
    under: float
    """Share of estimates below the measured figure."""


class Comparison(NamedTuple):
    """One estimator beside ours on the same rows."""

    name: str
    where: str
    """Table, and source or sample if it is of one only."""
    theirs: Score
    ours: Score
    nearer: int
    """Rows on which its estimate is nearer than ours."""

    @property
    def is_win(self) -> bool:
        """Return whether its median or 90th percentile is below ours, as the page shows them."""
        pairs = ((self.theirs.median, self.ours.median), (self.theirs.p90, self.ours.p90))
        return any(round(theirs, 3) < round(ours, 3) for theirs, ours in pairs)


class Standing(NamedTuple):
    """One estimator in one table."""

    name: str
    estimates: Mapping[str, float]
    """Plan -> the estimate."""
    refusals: Counter[str]
    """Reason -> rows."""
    whole: Comparison | None
    """On all rows that it answered; None without any."""
    groups: tuple[Comparison, ...]
    """The same by source or sample, where a table has several."""


def rank_estimator(name: str, table: Table, answers: Answers) -> Standing:
    """Return how one estimator stands in ``table``."""
    estimates: dict[str, float] = {}
    refusals: Counter[str] = Counter()
    groups: dict[str, list[TableRow]] = defaultdict(list)
    for row in table.rows:
        value = answers.find(row.plan, table.quantity)
        if isinstance(value, str):
            refusals[value] += 1
            continue
        estimates[row.plan] = value
        groups[row.group].append(row)
    rows = [row for group in groups.values() for row in group]
    several = len({row.group for row in table.rows}) > 1
    parts = sorted(groups.items()) if several else []
    return Standing(
        name,
        estimates,
        refusals,
        compare(name, table.title, estimates, rows) if rows else None,
        tuple(compare(name, f"{table.title}, {group}", estimates, some) for group, some in parts),
    )


def compare(name: str, where: str, estimates: Mapping[str, float], rows: Sequence[TableRow]) -> Comparison:
    """Compare ``estimates`` with ours on ``rows``, all of which they have."""
    theirs = [estimates[row.plan] for row in rows]
    nearer = sum(
        abs(value - row.measured) < abs(row.ours - row.measured)
        for value, row in zip(theirs, rows, strict=True)
    )
    ours = compute_score([row.ours for row in rows], rows)
    return Comparison(name, where, compute_score(theirs, rows), ours, nearer)


def compute_score(estimates: Sequence[float], rows: Sequence[TableRow]) -> Score:
    """Score ``estimates``, one for each row."""
    errors = [value / row.measured - 1 for value, row in zip(estimates, rows, strict=True)]
    absolute = sorted(map(abs, errors))
    under = sum(error < 0 for error in errors) / len(errors)
    return Score(len(rows), median(absolute), compute_percentile(absolute, 0.9), under)


def find_common_rows(table: Table, standings: Sequence[Standing]) -> list[TableRow]:
    """Return the rows that all estimators answered which answered any."""
    some = [standing.estimates for standing in standings if standing.estimates]
    return [row for row in table.rows if all(row.plan in estimates for estimates in some)]
