"""``Trace``: all slices of all ranks as numpy columns on one time axis."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.core.errors import refuse
from shardscope.core.number_format import format_count, format_number
from shardscope.records.json_files import read_json
from shardscope.trace.argument_blocks import EventArguments
from shardscope.trace.loading.alignment import Align, align_ranks, check_align
from shardscope.trace.loading.chunks import INSTANT
from shardscope.trace.loading.rank_columns import RankColumns, get_rank
from shardscope.trace.loading.ranks import (
    Progress,
    list_cut_off,
    list_missing_ranks,
    list_missing_steps,
    list_oddities,
    read_ranks,
)
from shardscope.trace.loading.tracks import Kind
from shardscope.trace.marks import Marks, find_flows, find_slices_at
from shardscope.trace.nesting import find_parents
from shardscope.trace.rank_merger import RankMerger

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.timing.calibration.traced import TracedRates
    from shardscope.trace.analysis.activity import Activity
    from shardscope.trace.analysis.breakdown import BreakdownRow, IdleRow, OverlapRow, StepRow
    from shardscope.trace.analysis.collectives import Collectives
    from shardscope.trace.analysis.critical_path import CriticalPath
    from shardscope.trace.analysis.diff import Diff
    from shardscope.trace.analysis.kernels import Kernels
    from shardscope.trace.analysis.launches import LaunchRow
    from shardscope.trace.analysis.memory import MemoryRow
    from shardscope.trace.analysis.modules import ModuleRow
    from shardscope.trace.analysis.plan_comparison import PlanComparison
    from shardscope.trace.analysis.stragglers import Stragglers
    from shardscope.trace.summary.summary import TraceSummary
    from shardscope.trace.table import Table

Int16s = npt.NDArray[np.int16]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Track:
    """A GPU stream of one rank, the operators or Python stacks of one thread, or asynchronous work."""

    rank: int
    process: int | str
    thread: int | str
    kind: Kind
    name: str
    """ "pt_autograd_0", "CPU thread 123", "stream 7" or "Python stacks of CPU thread 123". """
    num_rows: int
    """Rows needed for its nested slices."""
    num_slices: int

    @property
    def label(self) -> str:
        """The name with its rank: "rank 0 · stream 7"."""
        return f"rank {self.rank} · {self.name}"


class SliceFields(TypedDict):
    """All fields of one slice; seconds count from the trace's first slice."""

    index: int
    name: str
    category: str
    rank: int
    track: str
    start_seconds: float
    duration_seconds: float
    args: dict[str, object]


class Trace:
    """All slices of all ranks, sorted by track, row and start. Slices of one row never overlap.

    Columns, one entry per slice: ``start_ns`` (from the trace's first slice) and ``duration_ns`` (int64),
    ``name_index`` into ``names``, ``category_index`` into ``categories``, ``track_index`` into ``tracks``,
    ``depth`` (row inside its track), ``correlation`` (what a kernel and its launch have in common; -1
    without one). ``marks`` has flows, counters and instants. Arguments stay compressed until asked for.
    """

    def __init__(
        self, ranks: list[RankColumns], notes: list[str], shifts: list[int], origin_ns: int | None = None
    ) -> None:
        """Put the ranks on one time axis; use :meth:`load`.

        ``shifts`` are subtracted from the times of each rank, and then ``origin_ns``; default: the start of
        the first slice.
        """
        self.ranks: list[int] = [get_rank(rank) for rank in ranks]
        self.notes: list[str] = notes
        """Messages about what was repaired, left out or assumed while loading, with counts."""
        documents = [rank.texts.document for rank in ranks]
        self.process_groups = {
            number: document.process_groups for number, document in zip(self.ranks, documents, strict=True)
        }
        """Process groups of each rank by name, as far as the files know them."""
        self.world_size = max([document.world_size or 0 for document in documents] + [len(ranks)])
        """Ranks of the job, of which some may not be in the folder."""
        self.name = ""
        """Name of the run that the trace belongs to, or of the file or folder that was loaded."""
        self.plan: Plan | None = None
        """The plan of the run that the trace belongs to; None if it is not in a run's folder."""
        self.trains_the_plan = False
        """Whether the run trained the plan's model, which the user's own function need not."""
        self.tracks: list[Track] = [
            Track(
                rank=get_rank(rank),
                process=rank.texts.keys[track.key][0],
                thread=str(rank.texts.keys[track.key][1]).removeprefix("stream ").strip(),
                kind=track.kind,
                name=track.name,
                num_rows=track.num_rows,
                num_slices=track.num_slices,
            )
            for rank in ranks
            for track in rank.texts.tracks
        ]
        # Columns of all ranks are put together when they are first asked for.
        self._columns = RankMerger(ranks, shifts, origin_ns)
        self.names = self._columns.names
        self.categories = self._columns.categories
        known_devices = {
            number: document.device_names for number, document in zip(self.ranks, documents, strict=True)
        }
        self.device_names = _find_device_names(known_devices, self.tracks)
        """Name of each rank's GPU, as the driver spells it; ranks without one are left out."""
        self.cut_off = list_cut_off(ranks)
        """Ranks whose files end in the middle: work that is missing there counts as idle time."""
        notes += [*list_oddities(ranks), *list_missing_ranks(ranks), *list_missing_steps(ranks)]
        if not len(self):
            notes.append("no slices: the profiler recorded nothing in its active steps")

    @classmethod
    def load(
        cls,
        source: object,
        *,
        align: Align = "clock",
        progress: Progress | None = None,
        cache: bool = True,
    ) -> Self:
        """Read a trace file, a folder of ranks, or a run's traces.

        ``align`` puts the ranks on one time axis: by the wall clock of their hosts ("clock"); so that they
        leave their collectives together ("collectives"), where clocks differ; or by the clock and by hand,
        ``{rank: seconds}`` to move it to later times. Without a common clock, "clock" falls back to
        collectives, and without these every rank starts at 0; ``notes`` says so, and also if collectives
        show that clocks differ.

        Damaged files are read as far as possible: ``notes`` counts what was left out. ``progress`` is called
        with the share of the files that was read; an exception that it raises ends the load. Large files are
        read in several processes, and ``cache`` keeps their columns in a folder beside them,
        ``.shardscope-cache``, for the next time.

        Raises ``ValueError`` with the file, the problem and the fix; also for files of different runs.
        """
        check_align(align)
        ranks, notes = read_ranks(source, progress, cache=cache)
        trace = cls(ranks, notes, align_ranks(ranks, align, notes))
        trace.name, trace.plan, trace.trains_the_plan = _find_run(source)
        return trace

    def select_ranks(self, ranks: Iterable[int]) -> Trace:
        """Return a trace of some ranks on the same time axis; the others stay unread.

        Raises ``ValueError`` for a rank that was not recorded.
        """
        if not isinstance(ranks, Iterable):
            refuse("select_ranks.ranks", ranks, "a list of numbers of ranks", f"[{ranks!r}]")
        numbers = set(ranks)
        if unknown := sorted(numbers - set(self.ranks)):
            raise ValueError(
                f"Rank {unknown[0]!r} was not recorded; allowed: those in trace.ranks. Fix: leave it out."
            )
        chosen = self._columns.select(numbers)
        trace = Trace(*chosen, self._columns.origin_ns)
        trace.world_size, trace.name = self.world_size, self.name
        trace.plan, trace.trains_the_plan = self.plan, self.trains_the_plan
        return trace

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a copy, which computes its own :attr:`activity`: that refers to its trace."""
        return {name: value for name, value in vars(self).items() if name != "activity"}

    def release(self) -> None:
        """Free all columns and what was derived from them; what is used again is read again."""
        for name, member in vars(Trace).items():
            if isinstance(member, cached_property):
                vars(self).pop(name, None)
        self._columns.release()

    @cached_property
    def start_ns(self) -> Int64s:
        """Start of each slice, from the trace's first slice."""
        return self._columns.merge_times()

    @cached_property
    def duration_ns(self) -> Int64s:
        """Duration of each slice."""
        return self._columns.merge("slices", "duration_ns")

    @cached_property
    def name_index(self) -> Int32s:
        """Index of each slice's name."""
        return self._columns.merge("slices", "name").astype(np.int32, copy=False)

    @cached_property
    def category_index(self) -> Int32s:
        """Index of each slice's category."""
        return self._columns.merge("slices", "category").astype(np.int32, copy=False)

    @cached_property
    def track_index(self) -> Int32s:
        """Index of each slice's track."""
        return self._columns.merge("slices", "track").astype(np.int32, copy=False)

    @cached_property
    def depth(self) -> Int16s:
        """Row of each slice inside its track."""
        return self._columns.merge("slices", "depth").astype(np.int16, copy=False)

    @cached_property
    def correlation(self) -> Int64s:
        """Id that a kernel and its launch have in common; -1 without one."""
        return self._columns.merge("slices", "id")

    @cached_property
    def arguments(self) -> EventArguments:
        """Arguments of the slices as JSON text."""
        return self._columns.merge_arguments("slices")

    @cached_property
    def marks(self) -> Marks:
        """Flows, counters and instants."""
        return self._columns.merge_marks()

    def __len__(self) -> int:
        return self._columns.num_slices

    def __repr__(self) -> str:
        slices, ranks = format_count(len(self), "slice"), format_count(len(self.ranks), "rank")
        return f"<Trace: {slices}, {ranks}, {format_number(self.duration_seconds)} s>"

    @property
    def end_ns(self) -> Int64s:
        """End of each slice."""
        return self.start_ns + self.duration_ns

    @cached_property
    def first_row_of_track(self) -> Int64s:
        """Number of rows above each track, and at the end the number of all rows."""
        rows = np.cumsum([track.num_rows for track in self.tracks], dtype=np.int64)
        return np.concatenate((np.zeros(1, np.int64), rows))

    @cached_property
    def parents(self) -> Int64s:
        """Slice around each slice in its track, one row above; -1 if there is none."""
        row = self.first_row_of_track[:-1][self.track_index] + self.depth if len(self) else np.zeros(0, int)
        num_rows = int(self.first_row_of_track[-1])
        is_first_row = np.zeros(num_rows, dtype=bool)
        is_first_row[self.first_row_of_track[:-1]] = True
        row_bounds = np.searchsorted(row, np.arange(num_rows + 1))
        return find_parents(self.start_ns, self.end_ns, row_bounds, is_first_row)

    @cached_property
    def activity(self) -> Activity:
        """Class of each slice (compute, communication, copy), and the spans and steps of each rank."""
        from shardscope.trace.analysis.activity import Activity  # circular import

        return Activity(self)

    @cached_property
    def flows(self) -> tuple[Int64s, Int64s]:
        """Slices where flow arrows start and end (launch to kernel, forward to backward), one entry each."""
        marks = self.marks
        starts, ends = find_flows(marks)
        sources = find_slices_at(self, marks.track_index[starts], marks.time_ns[starts])
        targets = find_slices_at(self, marks.track_index[ends], marks.time_ns[ends])
        known = (sources >= 0) & (targets >= 0)
        return sources[known], targets[known]

    @property
    def memory_samples(self) -> list[MemorySamples]:
        """``[memory]`` instants of each rank, undecoded."""
        marks = self.marks
        is_memory = np.array([name == "[memory]" for name in self.names], dtype=bool)
        instants = marks.select(INSTANT)
        instants = instants[is_memory[marks.name_index[instants]]] if len(instants) else instants
        samples = []
        for position, rank in enumerate(self.ranks):
            rank_instants = instants[marks.rank_position[instants] == position]
            args = [b""] * len(rank_instants)
            for sample, text in marks.arguments.iterate(rank_instants):
                args[sample] = text
            samples.append(MemorySamples(rank=rank, time_ns=marks.time_ns[rank_instants], args=args))
        return samples

    @property
    def duration_ns_total(self) -> int:
        """Nanoseconds from the first slice's start to the last slice's end."""
        return int((self.start_ns + self.duration_ns).max()) if len(self) else 0

    @property
    def duration_seconds(self) -> float:
        """Seconds from the first slice's start to the last slice's end, over all ranks."""
        return self.duration_ns_total / 1e9

    def args(self, index: int) -> dict[str, object]:
        """Return the profiler's args of slice ``index`` (shapes, stream, collective); empty if malformed.

        Raises ``IndexError`` for an invalid index.
        """
        self._check_slice(index)
        try:
            value = msgspec.json.decode(self.arguments[index])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def slice(self, index: int) -> SliceFields:
        """Return all fields of one slice; seconds count from the trace's first slice.

        Raises ``IndexError`` for an invalid index.
        """
        self._check_slice(index)
        track = self.tracks[self.track_index[index]]
        return {
            "index": int(index),
            "name": self.names[self.name_index[index]],
            "category": self.categories[self.category_index[index]],
            "rank": track.rank,
            "track": track.name,
            "start_seconds": int(self.start_ns[index]) / 1e9,
            "duration_seconds": int(self.duration_ns[index]) / 1e9,
            "args": self.args(index),
        }

    def _check_slice(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"slice {index} of {len(self):,} slices")

    def summary(self) -> TraceSummary:
        """Return the main findings as sentences, the times of each rank, and the names with most self time.

        Each of ``findings`` has its numbers, where to look and, for a run's trace, the change of its plan
        that is predicted to help.

        It is shown as HTML tables in notebooks and as text otherwise. More than 32 ranks are read one after
        the other, in the memory of a few: the tables are of all, the sentences of some.
        """
        from shardscope.trace.summary.many_ranks import MAX_TOGETHER, summarize_many  # circular import
        from shardscope.trace.summary.summary import summarize

        return summarize_many(self) if len(self.ranks) > MAX_TOGETHER else summarize(self)

    def breakdown(self) -> Table[BreakdownRow]:
        """Return where each rank's time went: compute, communication, copies, idle. The parts add up.

        ``compute + exposed communication + copies + idle = span``, the time from the rank's first slice to
        its last. Of a rank with GPU streams, only they count; of a CPU rank, operators and collectives.
        """
        from shardscope.trace.analysis.breakdown import compute_breakdown  # circular import

        return compute_breakdown(self)

    def steps(self) -> Table[StepRow]:
        """Return the columns of :meth:`breakdown` for each rank and ``ProfilerStep``; marks outliers."""
        from shardscope.trace.analysis.breakdown import compute_steps  # circular import

        return compute_steps(self)

    def overlap(self) -> Table[OverlapRow]:
        """Return how much of each rank's communication is overlapped with compute."""
        from shardscope.trace.analysis.breakdown import compute_overlap  # circular import

        return compute_overlap(self)

    def idle(self) -> Table[IdleRow]:
        """Return idle time by cause: host-bound, waiting for a collective, data loading or other."""
        from shardscope.trace.analysis.breakdown import compute_idle  # circular import

        return compute_idle(self)

    def collectives(self, plan: Plan | None = None) -> Collectives:
        """Return every collective call, with its bytes, bandwidth, arrival skew and exposed time.

        ``plan`` gives the mesh axis of each process group; default: the plan of the run that was traced. The
        result's ``sum_by_axis()`` adds up calls, and ``what_if(axis, link_speed)`` is the step without them.
        """
        from shardscope.trace.analysis.collectives import find_collectives  # circular import

        return find_collectives(self, None if plan is None else self._choose_plan("collectives", plan))

    def stragglers(self) -> Stragglers:
        """Return how late each rank arrives at collectives, and whether that is more than chance."""
        from shardscope.trace.analysis.stragglers import find_stragglers  # circular import

        return find_stragglers(self)

    def kernels(self) -> Kernels:
        """Return kernels by rank and name: class, calls, time, TFLOP/s and bytes/s, most time first.

        Ranks without a GPU have operators, by self time. ``sum_by_kind()`` adds up the classes.
        """
        from shardscope.trace.analysis.kernels import find_kernels  # circular import

        return find_kernels(self)

    def launches(self) -> Table[LaunchRow]:
        """Return launch delays and queue lengths of each GPU stream: whether the host is ahead of it."""
        from shardscope.trace.analysis.launches import find_launches  # circular import

        return find_launches(self)

    def critical_path(self, step: int | None = None) -> CriticalPath:
        """Return the chain of work and waits that ends last, in order of time, across streams and ranks.

        Its parts touch, so their seconds add up. It spans the marked steps, or the whole recording without
        marks, from where the recording of the rank begins in which it starts. ``step``: only of the step with
        this number. Raises ``ValueError`` for a step that was not recorded.
        """
        from shardscope.trace.analysis.critical_path import find_critical_path  # circular import

        return find_critical_path(self, step)

    def memory(self) -> Table[MemoryRow]:
        """Return each device's memory over time, if recorded with ``profile_memory=True``; else no rows.

        A device with more than 2,000 records has the highest of each equal part of the time.
        """
        from shardscope.trace.analysis.memory import find_memory  # circular import

        return find_memory(self)

    def modules(self) -> Table[ModuleRow]:
        """Return the time of each ``nn.Module``, if recorded with ``with_stack=True``; else no rows."""
        from shardscope.trace.analysis.modules import find_modules  # circular import

        return find_modules(self)

    def diff(self, other: Trace) -> Diff:
        """Return the kernels, collectives and gaps of a step here and in ``other``, largest difference first.

        Traces of other hardware and other numbers of steps or ranks compare: seconds are the mean of a step
        of a rank, and kernels that only one has are counted under the operator that launched them.
        """
        from shardscope.trace.analysis.diff import compare_traces  # circular import

        if not isinstance(other, Trace):
            refuse("diff.other", other, "a Trace", "ss.Trace.load(path)")
        return compare_traces(self, other)

    def compare(self, plan: Plan | None = None) -> PlanComparison:
        """Return the predicted parts of ``plan.step()``, each with its measured time in the trace.

        Default: the plan of the run that was traced. Raises ``ValueError`` if there is none or it has no
        prediction.
        """
        from shardscope.trace.analysis.plan_comparison import compare_with_plan  # circular import

        return compare_with_plan(self, self._choose_plan("compare", plan))

    def measured_rates(self, plan: Plan | None = None) -> TracedRates:
        """Return the speeds of matmuls and collectives in this trace, for the calibration of its machine.

        ``rates.store()`` makes ``plan.step()`` use them until the next ``ss.calibrate()``. The speed of
        matmuls is the ratio of their predicted to their measured seconds; collectives of one size have the
        median of their transfer times, without waiting for the last rank, if the group is on one node.
        Default: the plan of the run that was traced. Raises ``ValueError`` if there is none, it has no
        prediction, or nothing was measured.
        """
        from shardscope.trace.analysis.measured_rates import measure_rates  # circular import

        return measure_rates(self, self._choose_plan("measured_rates", plan))

    def _choose_plan(self, method: str, plan: object) -> Plan:
        """Return ``plan``, or for None the plan of the run. Raises ``ValueError`` if there is none."""
        from shardscope.core.plan import Plan, check_type  # Imported late: reading a trace needs no plan.

        if plan is None and self.plan is None:
            raise ValueError(
                f"This trace belongs to no run, so its plan is unknown. Fix: trace.{method}(plan)."
            )
        plan = self.plan if plan is None else plan
        check_type(f"{method}.plan", plan, Plan)
        assert isinstance(plan, Plan)
        return plan

    def to_chrome(self, path: str | os.PathLike[str]) -> Path:
        """Write one Chrome trace of all ranks, for Perfetto; compressed if ``path``, the result, ends in .gz.

        Slices, flows, counters and instants have their arguments, and times on the common time axis.
        :meth:`load` of the file has the same ranks, without the plan of their run. Raises ``OSError`` if the
        file cannot be written.
        """
        from shardscope.trace.chrome_export import write_chrome  # circular import

        return write_chrome(self, path)

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


@dataclass(frozen=True, kw_only=True)
class MemorySamples:
    """``[memory]`` instants of one rank: one for each allocation and free, by time."""

    rank: int
    time_ns: Int64s
    """On the trace's clock."""
    args: list[bytes]


def _find_device_names(known: dict[int, dict[int, str]], tracks: list[Track]) -> dict[int, str]:
    """Return the name of each rank's GPU: the process id of its streams is the GPU's index."""
    names: dict[int, str] = {}
    for track in tracks:
        devices = known[track.rank]
        if track.kind == "gpu" and track.rank not in names and devices:
            fallback = next(iter(devices.values()))
            names[track.rank] = (
                devices.get(track.process, fallback) if isinstance(track.process, int) else fallback
            )
    return names


def _find_run(source: object) -> tuple[str, Plan | None, bool]:
    """Return name and plan of the run that ``source`` belongs to, and whether it trained the plan's model.

    Without a readable ``run.json`` the name is that of the file or folder, and the plan None.
    """
    from shardscope.core.plan import Plan

    folder = getattr(source, "folder", source)
    if not isinstance(folder, str | os.PathLike):
        return "", None, False
    path = Path(folder).absolute()
    # A run's folder, its "traces", or one file in there.
    for candidate in (path, path.parent, path.parent.parent):
        record = read_json(candidate / "run.json")
        if record is None:
            continue
        try:
            plan = Plan.from_json(json.dumps(record.get("plan")))
        except ValueError:
            return candidate.name, None, False  # of an older version, or damaged
        return candidate.name, plan, record.get("trains_the_plan") is True
    return path.name, None, False
