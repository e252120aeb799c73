"""``Claim``: what is said of these frameworks, what the formulas say of it, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.html_table import NO_VALUE, html_table

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["right", "wrong", "half right", "depends"]
"""``half right``: the number is, what it is said of is not. ``depends``: on a size that the claim leaves
out."""


TOLERANCE = 0.1
"""A claim holds within so much of its number: published rows of one configuration differ by about as much."""


class Number(NamedTuple):
    """One number of a claim beside ours."""

    what: str
    claimed: float | None
    """None: the claim has no number for it."""
    ours: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """Ours over the claim's."""
        return None if self.claimed is None else self.ours / self.claimed

    @property
    def holds(self) -> bool:
        """Whether the claim has this number, within :data:`TOLERANCE`."""
        return self.ratio is not None and abs(self.ratio - 1) <= TOLERANCE

    def __str__(self) -> str:
        said = "" if self.claimed is None else f", said {_written(self.claimed)}"
        return f"{self.what}: {_written(self.ours)} {self.unit}{said}"


class Numbers(tuple[Number, ...]):
    """Numbers of a claim that show themselves as a table at the end of a notebook cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [(one.what, _written(one.ours), _claimed(one), one.unit) for one in self]
        return html_table(("number", "computed", "claimed", "unit"), rows)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that is said, checked."""

    name: str
    """In kebab-case."""
    said: str
    """The claim, in the words that are used."""
    numbers: tuple[Number, ...]
    """What it says and what we compute."""
    verdict: Verdict
    """Whether it holds."""
    why: str
    """Why, in a sentence or two."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", Numbers(self.numbers))

    def _repr_html_(self) -> str:
        return to_html([self])

    def number(self, what: str) -> Number:
        """One of :attr:`numbers`. Raises ``LookupError`` for another name."""
        for number in self.numbers:
            if number.what == what:
                return number
        raise LookupError(f"{self.name} has no number {what!r}")


class Claims(tuple[Claim, ...]):
    """All claims; the last line of a cell shows them as a table."""

    __slots__ = ()

    def named(self, name: str) -> Claim:
        """The claim of that name. Raises ``LookupError`` for another."""
        for claim in self:
            if claim.name == name:
                return claim
        raise LookupError(f"no claim {name!r}; there are {', '.join(claim.name for claim in self)}")

    def to_frame(self) -> pd.DataFrame:
        """One row a number."""
        import pandas as pd

        rows = [
            {
                "claim": claim.name,
                "verdict": claim.verdict,
                "what": number.what,
                "claimed": number.claimed,
                "ours": number.ours,
                "unit": number.unit,
            }
            for claim in self
            for number in claim.numbers
        ]
        return pd.DataFrame(rows).set_index(["claim", "what"])

    def to_html(self) -> str:
        """Claim, our numbers, verdict and why, as a plain table without scripts."""
        return to_html(self)

    def _repr_html_(self) -> str:
        return self.to_html()


def to_html(claims: Sequence[Claim]) -> str:
    """See :meth:`Claims.to_html`."""
    cell = "<td style='text-align:left;vertical-align:top'>"
    rows = "".join(
        f"<tr>{cell}{escape(claim.said)}</td>{cell}{'<br>'.join(escape(str(n)) for n in claim.numbers)}</td>"
        f"{cell}<b>{claim.verdict}</b></td>{cell}{escape(claim.why)}</td></tr>"
        for claim in claims
    )
    head = "".join(
        f"<th style='text-align:left'>{word}</th>" for word in ("claim", "computed", "verdict", "why")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _claimed(number: Number) -> str:
    return NO_VALUE if number.claimed is None else _written(number.claimed)


def _written(value: float) -> str:
    """Three significant digits, with separators: ``1,130``, ``16.7``, ``0.404``."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
