"""``trace.summary()``: times of each rank, and the names with most self time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from shardscope.core.html_table import render_html_table
from shardscope.timing.report import format_seconds
from shardscope.trace.nesting import compute_union_ns
from shardscope.trace.store import WRAPPER_CATEGORIES, Trace
from shardscope.trace.table import Table
from shardscope.trace.tiles import COMMUNICATION_NAMES, COPY_CATEGORIES, NameTotals, Tiler

if TYPE_CHECKING:
    import pandas as pd

NO_BREAK = "\u00a0"
NUM_OPERATORS = 10
SHOWN_RANKS = 32
MAX_NAME_CHARACTERS = 120
Mask = npt.NDArray[np.bool_]


class RankTimes(TypedDict):
    """Times of one rank; None for the columns of GPU streams of a rank without any."""

    rank: int
    slices: int
    start_seconds: float
    span_seconds: float
    cpu_busy_seconds: float
    gpu_busy_seconds: float
    compute_seconds: float | None
    communication_seconds: float | None
    exposed_communication_seconds: float | None
    idle_seconds: float | None


TimeColumn = Literal[
    "span_seconds",
    "cpu_busy_seconds",
    "gpu_busy_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_communication_seconds",
    "idle_seconds",
]


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Sentences and numbers of a trace, shown as HTML tables in notebooks."""

    sentences: tuple[str, ...]
    """Main results as sentences, each with its number."""
    ranks: Table[RankTimes]
    """A row per rank: ``rank``, ``slices``, ``start_seconds``, ``span_seconds``, ``cpu_busy_seconds``,
    ``gpu_busy_seconds``, ``compute_seconds``, ``communication_seconds``,
    ``exposed_communication_seconds`` and ``idle_seconds``.

    The last four are of GPU streams, None for a rank without any. Busy means that at least one operator,
    runtime call or kernel ran; annotations and Python frames do not count, because they span idle time too.
    Exposed communication is not overlapped with any other kernel or copy. Idle is the rest of the span.
    """
    operators: Table[NameTotals]
    """Operators and kernels by self time: ``name``, ``slices``, ``self_seconds``, ``total_seconds``."""

    def to_frame(self) -> pd.DataFrame:
        """Return :attr:`ranks` as a pandas data frame."""
        return self.ranks.to_frame()

    def __str__(self) -> str:
        lines = [*self.sentences, "", "Most self time:"]
        for row in self.operators:
            name, seconds = row["name"][:MAX_NAME_CHARACTERS], format_seconds(row["self_seconds"])
            lines.append(f"  {name}: {seconds} in {row['slices']:,} calls")
        return "\n".join(lines if self.operators else self.sentences)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
        names = [
            (
                row["name"][:MAX_NAME_CHARACTERS],
                row["slices"],
                format_seconds(row["self_seconds"]),
                format_seconds(row["total_seconds"]),
            )
            for row in self.operators
        ]
        operators = (
            render_html_table(("name", "calls", "self", "total"), names, "Most self time") if names else ""
        )
        return f"<ul>{items}</ul>{self.render_rank_table()}{operators}"

    def render_rank_table(self) -> str:
        """Return the table of ranks, up to :data:`SHOWN_RANKS`, without the columns that are empty."""
        columns: dict[str, TimeColumn] = {
            "span": "span_seconds",
            "CPU busy": "cpu_busy_seconds",
            "GPU busy": "gpu_busy_seconds",
            "compute": "compute_seconds",
            "communication": "communication_seconds",
            "exposed communication": "exposed_communication_seconds",
            "GPU idle": "idle_seconds",
        }
        # A trace of CPU ranks has no GPU times: leave those columns out.
        shown = {title: key for title, key in columns.items() if any(row[key] for row in self.ranks)}
        rows = [
            (row["rank"], row["slices"], *(_format_seconds(row, key) for key in shown.values()))
            for row in self.ranks[:SHOWN_RANKS]
        ]
        caption = (
            f"The first {SHOWN_RANKS} of {len(self.ranks):,} ranks" if len(self.ranks) > SHOWN_RANKS else ""
        )
        return render_html_table(("rank", "slices", *shown), rows, caption)


def _format_seconds(row: RankTimes, key: TimeColumn) -> str | None:
    """Return seconds as text, with their share of the rank's span."""
    seconds, span = row[key], row["span_seconds"]
    if seconds is None:
        return None
    text = format_seconds(seconds)
    if key != "span_seconds" and span:
        text += f" ({100 * seconds / span:.0f} %)"
    return text.replace(" ", NO_BREAK)


def summarize(trace: Trace) -> TraceSummary:
    """Return the summary of ``trace``; see :meth:`Trace.summary`."""
    ranks = Table(_compute_rank_rows(trace))
    # All names, because annotations are removed from the list only afterwards.
    totals = Tiler(trace).sum_by_name(0, max(trace.duration_ns_total, 1), limit=len(trace.names))
    annotations = _list_annotation_names(trace)
    operators = Table([row for row in totals if row["name"] not in annotations][:NUM_OPERATORS])
    return TraceSummary(
        sentences=tuple(_write_sentences(trace, ranks, operators)), ranks=ranks, operators=operators
    )


def _list_annotation_names(trace: Trace) -> set[str]:
    """Return the names of annotations (``ProfilerStep``, ``record_function``) around other work."""
    return {trace.names[i] for i in np.unique(trace.name_index[_mask_categories(trace, WRAPPER_CATEGORIES)])}


def _compute_rank_rows(trace: Trace) -> list[RankTimes]:
    """Return one row per rank, in the order of :attr:`Trace.ranks`."""
    # Masks over all slices: annotations and frames, copies, collectives, GPU streams.
    end_ns = trace.start_ns + trace.duration_ns
    is_wrapper = _mask_categories(trace, WRAPPER_CATEGORIES)
    is_copy = _mask_categories(trace, COPY_CATEGORIES)
    named = np.array([bool(COMMUNICATION_NAMES.search(name)) for name in trace.names], dtype=bool)
    is_communication = named[trace.name_index] if len(trace) else np.zeros(0, dtype=bool)
    rank_of_track = np.array([track.rank for track in trace.tracks], dtype=np.int64)
    gpu_track = np.array([track.kind == "gpu" for track in trace.tracks], dtype=bool)
    rank_of_slice = rank_of_track[trace.track_index] if len(trace) else np.zeros(0, dtype=np.int64)
    on_gpu = gpu_track[trace.track_index] if len(trace) else np.zeros(0, dtype=bool)

    def sum_busy_seconds(mask: Mask) -> float:
        return compute_union_ns(trace.start_ns[mask], end_ns[mask]) / 1e9

    # One row per rank. Times are unions of intervals, because slices nest and streams run in parallel.
    rows: list[RankTimes] = []
    for rank_number in trace.ranks:
        of_rank = rank_of_slice == rank_number
        work = of_rank & ~is_wrapper
        kernels = work & on_gpu
        first = int(trace.start_ns[of_rank].min()) if of_rank.any() else 0
        span = (int(end_ns[of_rank].max()) - first) / 1e9 if of_rank.any() else 0.0
        busy = sum_busy_seconds(kernels)
        # The busy time that is not covered by other kernels is exposed communication.
        other_work = sum_busy_seconds(kernels & ~is_communication)
        rows.append(
            {
                "rank": rank_number,
                "slices": int(of_rank.sum()),
                "start_seconds": first / 1e9,
                "span_seconds": span,
                "cpu_busy_seconds": sum_busy_seconds(work & ~on_gpu),
                "gpu_busy_seconds": busy,
                "compute_seconds": None,
                "communication_seconds": None,
                "exposed_communication_seconds": None,
                "idle_seconds": None,
            }
        )
        if kernels.any():
            rows[-1] |= {
                # Only ranks with GPU streams: on CPU threads an operator and the collective in it cannot be
                # separated.
                "compute_seconds": sum_busy_seconds(kernels & ~is_communication & ~is_copy),
                "communication_seconds": sum_busy_seconds(kernels & is_communication),
                "exposed_communication_seconds": busy - other_work,
                "idle_seconds": span - busy,
            }
    return rows


def _mask_categories(trace: Trace, categories: frozenset[str]) -> Mask:
    wanted = np.array([name in categories for name in trace.categories], dtype=bool)
    return wanted[trace.category_index] if len(trace) else np.zeros(0, dtype=bool)


_GPU_SHARES: tuple[tuple[str, TimeColumn], ...] = (
    ("GPU idle", "idle_seconds"),
    ("Communication", "communication_seconds"),
    ("Exposed communication", "exposed_communication_seconds"),
)


def _write_sentences(trace: Trace, ranks: Table[RankTimes], operators: Table[NameTotals]) -> list[str]:
    num_ranks = "1 rank" if len(ranks) == 1 else f"{len(ranks):,} ranks"
    sentences = [f"{num_ranks}, {len(trace):,} slices in {format_seconds(trace.duration_seconds)}."]
    # The range over ranks, not the mean: one slow rank delays all others.
    on_gpu = [row for row in ranks if row["idle_seconds"] is not None and row["span_seconds"]]
    if on_gpu:
        for title, key in _GPU_SHARES:
            shares = [100 * (row[key] or 0.0) / row["span_seconds"] for row in on_gpu]
            low, high = f"{min(shares):.0f}", f"{max(shares):.0f}"
            share = f"{low} %" if low == high else f"{low} to {high} %"
            of_each_rank = " of each rank" if len(ranks) > 1 else ""
            sentences.append(f"{title}: {share} of the span{of_each_rank}.")
    elif len(trace):
        sentences.append("No GPU streams: compute and communication are separated on GPU streams only.")
    if operators:
        first = operators[0]
        name = first["name"][:MAX_NAME_CHARACTERS]
        sentences.append(f"Most self time: {name}, {format_seconds(first['self_seconds'])}.")
    return sentences
