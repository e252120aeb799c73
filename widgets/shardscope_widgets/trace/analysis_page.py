"""One page of the analysis: its sentence, its table, and the intervals that its rows show in the view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.trace import Trace
from shardscope_widgets.kit.numbers import keep_units
from shardscope_widgets.run.recording_panel import TITLE as PROFILE_TITLE

MAX_ROWS = 12
"""Maximum rows of a table: a trace has thousands of kernels, of which only the first ones matter."""
NONE = "–"
NO_GPU = "This is a trace of CPU ranks"
TORCH_OPTIONS = {"stacks": "with_stack", "shapes": "record_shapes", "memory": "profile_memory"}
"""Options of the panel that profiles the next steps, and torch.profiler's names of them."""


def describe_option(option: str) -> str:
    """Return how a recording with an ``option`` of the panel "Profile the next steps" is made."""
    return (
        f'To record it, open a run in the Runs tab while it trains, check "{option}" under '
        f'"{PROFILE_TITLE}", and press the button there; or record with torch.profiler\'s '
        f"{TORCH_OPTIONS[option]}=True."
    )


class Interval(NamedTuple):
    """Interval that the view shows when a row is pressed."""

    start_seconds: float
    end_seconds: float
    rank: int | None = None
    track: str | None = None


class Heading(NamedTuple):
    """The heading of one column."""

    title: str
    hint: str = ""
    """Longer text, shown on hover."""
    is_text: bool = False
    """Whether its cells are words, aligned left."""
    swatch: str = ""
    """CSS of the colour that the column has in the chart above the table; empty without one."""
    pattern: str = ""
    """CSS class of its pattern."""


class Row(NamedTuple):
    """One row: plain text for each column, and the interval that it shows in the view."""

    cells: Sequence[str]
    interval: Interval | None = None
    note: str = ""
    """Text below the first cell."""
    swatch: tuple[str, str] | None = None
    """CSS of its colour in the chart above the table, and CSS class of its pattern."""
    is_total: bool = False


@dataclass(frozen=True, kw_only=True)
class AnalysisPage:
    """Content of one tab of the analysis."""

    sentences: Sequence[str] = ()
    """Plain text above the table."""
    tables: Sequence[str] = ()
    """HTML of each table."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """Action of a row -> what it shows in the view."""
    figures: Sequence[go.Figure] = ()
    """Charts above the table."""
    path: Sequence[Mapping[str, object]] = ()
    """Parts of the critical path, which the view can draw."""
    may_change: bool = False
    """Whether it depends on more than the trace, so that it is computed again when it is shown again."""
    has_rates: bool = False
    """Whether the trace can give measured rates to the calibration."""
    uses_rates: bool = False
    """Whether predictions use measured rates."""

    @property
    def text(self) -> str:
        """The sentences as HTML."""
        return "".join(f"<p>{keep_units(escape(sentence))}</p>" for sentence in self.sentences)


class TableWriter:
    """Writes the tables of one page, with a separate action for each row that shows an interval."""

    def __init__(self) -> None:
        self.intervals: dict[str, Interval] = {}

    def write(
        self, headings: Sequence[Heading], rows: Iterable[Row], *, title: str = "", most: int = MAX_ROWS
    ) -> str:
        """Return a table of the first ``most`` rows as HTML; a line below it says how many there are."""
        all_rows = list(rows)
        head = "".join(_render_heading(heading) for heading in headings)
        body = "".join(self._render_row(row, headings) for row in all_rows[:most])
        more = (
            f"<p class='ss-hint'>The first {most} of {len(all_rows):,}.</p>" if len(all_rows) > most else ""
        )
        caption = f"<h2>{escape(title)}</h2>" if title else ""
        return (
            f"{caption}<div class='ss-scroll'><table class='ss-table ss-analysed' data-roving>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"
        )

    def _render_row(self, row: Row, headings: Sequence[Heading]) -> str:
        first, *rest = row.cells
        name = f"<span class='ss-cut' title='{escape(first, quote=True)}'>{escape(first)}</span>"
        act = ""
        if row.interval is not None:
            key = f"look:{len(self.intervals)}"
            self.intervals[key] = row.interval
            act = f" data-act='{key}'"
            # The whole row can be pressed; the button is for the keyboard and screen readers.
            name = f"<button type='button'{act} title='Show in the trace'>{name}</button>"
        if row.swatch is not None:
            name = _render_swatch(*row.swatch) + name
        note = f"<div class='ss-hint'>{escape(row.note)}</div>" if row.note else ""
        cells = "".join(
            f"<td{_get_alignment(heading)}>{_render_cell(text, heading)}</td>"
            for text, heading in zip(rest, headings[1:], strict=True)
        )
        kind = " class='ss-total'" if row.is_total else ""
        return f"<tr{act}{kind}><td>{name}{note}</td>{cells}</tr>"


def _render_heading(heading: Heading) -> str:
    hint = f" title='{escape(heading.hint, quote=True)}'" if heading.hint else ""
    title = escape(heading.title)
    if heading.swatch:
        # In a narrow column the title continues in the next line, but not without its swatch.
        first, _, rest = title.partition(" ")
        mark = _render_swatch(heading.swatch, heading.pattern)
        title = f"<span class='ss-unbroken'>{mark}{first}</span> {rest}".rstrip()
    return f"<th scope='col'{_get_alignment(heading)}{hint}>{title}</th>"


def _render_swatch(colour: str, pattern: str) -> str:
    return f"<i class='ss-mark {pattern}' style='background-color:{colour}'></i>"


def _render_cell(text: str, heading: Heading) -> str:
    if not heading.is_text:
        return escape(text)
    return f"<span class='ss-cut' title='{escape(text, quote=True)}'>{escape(text)}</span>"


def _get_alignment(heading: Heading) -> str:
    return " class='ss-text'" if heading.is_text else ""


# ---- Words and numbers that several pages have


def has_gpu_work(trace: Trace) -> bool:
    """Return whether the work of a GPU was recorded."""
    return any(rank.on_gpu for rank in trace.activity.ranks)


def has_steps(trace: Trace) -> bool:
    """Return whether the steps of a rank are marked."""
    return trace.activity.has_steps


def name_total(trace: Trace) -> str:
    """Return the heading of sums: those of a step, or of the whole recording if no steps are marked."""
    return "per step" if has_steps(trace) else "total"


def name_kind(kind: str) -> str:
    """Return the class of a kernel or collective as the page spells it."""
    return "unclassified" if kind == "other" else kind.replace("_", "-")


def format_calls(number: float) -> str:
    """Return a number of calls, which is a fraction if it is a mean over steps and ranks."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.3g}"


def format_share(share: float) -> str:
    """Return a share as a percentage, with a decimal below 10 %."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.095 or not share else f"{100 * share:.1f} %"
