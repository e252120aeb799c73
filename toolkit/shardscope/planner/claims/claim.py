"""``Claim``: a common claim about these frameworks, the computed numbers and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.html_table import NO_VALUE, render_html_table
from shardscope.core.number_format import format_number

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["right", "wrong", "half right", "depends"]
"""``half right``: the number is right, its subject is not. ``depends``: on a size that the claim omits."""


TOLERANCE = 0.1
"""Relative tolerance of a claim's number: published results of one configuration differ by about as much."""


class Number(NamedTuple):
    """One number of a claim, with the computed one."""

    name: str
    claimed: float | None
    """The claim's number; None if it has none."""
    computed: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """Return the computed number divided by the claimed one; None if there is no claimed one."""
        return None if self.claimed is None else self.computed / self.claimed

    @property
    def holds(self) -> bool:
        """Return whether the claimed number is within :data:`TOLERANCE`."""
        return self.ratio is not None and abs(self.ratio - 1) <= TOLERANCE

    def __str__(self) -> str:
        claimed_text = "" if self.claimed is None else f", claimed {format_number(self.claimed)}"
        return f"{self.name}: {format_number(self.computed)} {self.unit}{claimed_text}"


class Numbers(tuple[Number, ...]):
    """Numbers of a claim, displayed as a table at the end of a notebook cell."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(one.name, format_number(one.computed), _format_claimed(one), one.unit) for one in self]
        return render_html_table(("number", "computed", "claimed", "unit"), rows)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim, with the computed numbers and the verdict."""

    name: str
    """Name in kebab-case."""
    statement: str
    """The claim, in its usual wording."""
    numbers: tuple[Number, ...]
    """Claimed and computed numbers."""
    verdict: Verdict
    """Whether the claim holds."""
    why: str
    """The reason, in one or two sentences."""

    def __post_init__(self) -> None:
        # Frozen, and constructed with a plain tuple; Numbers is shown as a table.
        object.__setattr__(self, "numbers", Numbers(self.numbers))

    def __str__(self) -> str:
        numbers = "".join(f"\n  {number}" for number in self.numbers)
        return f"{self.statement}: {self.verdict}. {self.why}{numbers}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html([self])

    def get_number(self, name: str) -> Number:
        """Return one of :attr:`numbers`. Raises ``LookupError`` for another name."""
        for number in self.numbers:
            if number.name == name:
                return number
        raise LookupError(f"{self.name} has no number {name!r}")


class Claims(tuple[Claim, ...]):
    """All claims, displayed as a table at the end of a notebook cell."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    __repr__ = __str__

    def named(self, name: str) -> Claim:
        """Return the claim with a name. Raises ``LookupError`` for an unknown name."""
        for claim in self:
            if claim.name == name:
                return claim
        raise LookupError(f"no claim {name!r}; there are {', '.join(claim.name for claim in self)}")

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with one row for each number."""
        import pandas as pd

        rows = [
            {
                "claim": claim.name,
                "verdict": claim.verdict,
                "number": number.name,
                "claimed": number.claimed,
                "computed": number.computed,
                "unit": number.unit,
            }
            for claim in self
            for number in claim.numbers
        ]
        return pd.DataFrame(rows).set_index(["claim", "number"])

    def to_html(self) -> str:
        """Return claims, computed numbers, verdicts and reasons as a plain HTML table without scripts."""
        return to_html(self)

    def _repr_html_(self) -> str:
        return self.to_html()


def to_html(claims: Sequence[Claim]) -> str:
    """Return claims as an HTML table; see :meth:`Claims.to_html`."""
    # Plain HTML with inline styles: saved notebooks keep it, and no script may be needed to read it.
    cell = "<td style='text-align:left;vertical-align:top'>"
    rows = "".join(
        f"<tr>{cell}{escape(claim.statement)}</td>"
        f"{cell}<ul style='margin:0;padding-left:1em'>{''.join(map(_render_number, claim.numbers))}</ul></td>"
        f"{cell}<b>{claim.verdict}</b></td>{cell}{escape(claim.why)}</td></tr>"
        for claim in claims
    )
    head = "".join(
        f"<th style='text-align:left;width:{width}'>{word}</th>"
        for word, width in (("claim", "22%"), ("computed", "40%"), ("verdict", "8%"), ("why", "30%"))
    )
    return f"<table style='width:100%'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _render_number(number: Number) -> str:
    claimed = "" if number.claimed is None else f", claimed {format_number(number.claimed)}"
    value = f"{format_number(number.computed)} {escape(number.unit)}"
    return f"<li>{escape(number.name)}: <b style='white-space:nowrap'>{value}</b>{claimed}</li>"


def _format_claimed(number: Number) -> str:
    return NO_VALUE if number.claimed is None else format_number(number.claimed)
