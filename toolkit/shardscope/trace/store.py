"""``Trace``: all slices of all ranks as numpy columns on one time axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.files import refuse_file
from shardscope.trace.nesting import compute_nesting_depth, find_parents
from shardscope.trace.recordings import Recording, find_plan, read_recordings

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
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
    from shardscope.trace.analysis.summary import TraceSummary
    from shardscope.trace.table import Table

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

GPU_CATEGORIES = frozenset(
    {
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "gpu_user_annotation",
        "Kernel",
        "Memcpy",
        "Memset",
        "mtia_ccp_events",
    }
)
"""Categories of work on a device; torch wrote the capitalized ones before 1.11."""

PYTHON_CATEGORY = "python_function"
"""Python stack frames, recorded with ``with_stack=True``: 38 to 55 rows in real traces."""

WRAPPER_CATEGORIES = frozenset({"user_annotation", "gpu_user_annotation", PYTHON_CATEGORY, "Trace"})
"""Categories of slices around work (ProfilerStep, stack frames). They span idle time too: not busy time."""

_EPOCH_NS = 10**18  # the year 2001: times above it are wall clock, times below count from boot or zero
_FAR_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, kw_only=True)
class Track:
    """A GPU stream of one rank, the operators of one thread, or the Python stacks of one thread."""

    rank: int
    process: int | str
    thread: int | str
    kind: Literal["cpu", "gpu", "python"]
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
    ``depth`` (row inside its track).
    """

    def __init__(self, recordings: list[Recording]) -> None:
        """Build the columns; use :meth:`load`."""
        # Ranks first, since tracks are in their order; then one clock for all; then the columns.
        recordings = _assign_ranks(recordings)
        self.ranks: list[int] = [_require_rank(recording.rank) for recording in recordings]
        self.notes: list[str] = []
        """Messages about what was corrected, left out or assumed while loading."""
        self.names: list[str] = []
        self.categories: list[str] = []
        self.tracks: list[Track] = []
        builder = _Builder(self)
        starts, shifts = _align_clocks(recordings, self.notes)
        self.process_groups = {
            _require_rank(recording.rank): recording.process_groups for recording in recordings
        }
        """Process groups of each rank by name, as far as the files know them."""
        self.world_size = max([recording.world_size or 0 for recording in recordings] + [len(recordings)])
        """Ranks of the job, of which some may not be in the folder."""
        self.plan: Plan | None = None
        """The plan of the run that the trace belongs to; None if it is not in a run's folder."""
        self.trains_the_plan = False
        """Whether the run trained the plan's model, which the user's own function need not."""
        for recording, start_ns in zip(recordings, starts, strict=True):
            builder.add_recording(recording, start_ns)
        origin_ns = builder.store_columns()
        self.device_names = _find_device_names(recordings, self.tracks)
        """Name of each rank's GPU, as the driver spells it; ranks without one are left out."""
        self.memory_samples = _read_memory_samples(recordings, shifts, origin_ns)
        """``[memory]`` instants of each rank, undecoded."""
        _note_oddities(recordings, self.notes)
        _note_missing_ranks(recordings, self.notes)
        if not len(self):
            self.notes.append("no slices: the profiler recorded nothing in its active steps")

    start_ns: Int64s
    duration_ns: Int64s
    name_index: Int32s
    category_index: Int32s
    track_index: Int32s
    depth: Int32s
    _args: list[msgspec.Raw]

    @classmethod
    def load(cls, source: object) -> Self:
        """Read a trace file, a folder of ranks, or a run's traces.

        Kineto's microseconds count from ``baseTimeNanoseconds``, so ranks share the wall clock of their
        hosts. Without it every rank starts at 0, and ``notes`` has a message about that. Raises
        ``ValueError`` with the file, the problem and the fix.
        """
        trace = cls(read_recordings(source))
        trace.plan, trace.trains_the_plan = find_plan(source)
        return trace

    def __len__(self) -> int:
        return len(self.start_ns)

    def __repr__(self) -> str:
        return f"<Trace: {len(self):,} slices, {len(self.ranks)} ranks, {self.duration_seconds:.3g} s>"

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
        """What each slice is (compute, communication, copy), and the spans and steps of each rank."""
        from shardscope.trace.analysis.activity import Activity  # circular import

        return Activity(self)

    @property
    def duration_ns_total(self) -> int:
        """Nanoseconds from the first slice's start to the last slice's end."""
        return int((self.start_ns + self.duration_ns).max()) if len(self) else 0

    @property
    def duration_seconds(self) -> float:
        """Seconds from the first slice's start to the last slice's end, over all ranks."""
        return self.duration_ns_total / 1e9

    def args(self, index: int) -> dict[str, object]:
        """Return the profiler's args of slice ``index`` (shapes, stream, collective); empty if malformed."""
        try:
            value = msgspec.json.decode(self._args[index])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def slice(self, index: int) -> SliceFields:
        """Return all fields of one slice; seconds count from the trace's first slice."""
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

    def summary(self) -> TraceSummary:
        """Return what an expert would say first, times per rank, and names with most self time.

        Each of ``findings`` has its numbers, where to look and, for a run's trace, the change of its plan
        that is predicted to help.

        It is shown as HTML tables in notebooks and as text otherwise.
        """
        from shardscope.trace.analysis.summary import summarize  # circular import

        return summarize(self)

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

        ``plan`` tells the mesh's axis of a process group; default: the plan of the run that was traced. The
        result's ``sum_by_axis()`` adds up calls, and ``what_if(axis, link_speed)`` is the step without them.
        """
        from shardscope.trace.analysis.collectives import find_collectives  # circular import

        return find_collectives(self, plan)

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

        Its parts touch, so their seconds add up. ``step``: only of the step with this number. Raises
        ``ValueError`` for a step that was not recorded.
        """
        from shardscope.trace.analysis.critical_path import find_critical_path  # circular import

        return find_critical_path(self, step)

    def memory(self) -> Table[MemoryRow]:
        """Return each device's memory over time, if recorded with ``profile_memory=True``; else no rows.

        Of more than 2,000 records of a device, the highest of each equal part of the time.
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

        return compare_traces(self, other)

    def compare(self, plan: Plan | None = None) -> PlanComparison:
        """Return the parts of ``plan.step()`` beside what the trace measured of them.

        Default: the plan of the run that was traced. Raises ``ValueError`` if there is none or it has no
        prediction.
        """
        from shardscope.trace.analysis.plan_comparison import compare_with_plan  # circular import

        plan = plan or self.plan
        if plan is None:
            raise ValueError(
                "This trace belongs to no run, so its plan is unknown. Fix: trace.compare(plan)."
            )
        return compare_with_plan(self, plan)

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


class _Builder:
    """Builder of the columns: adds rank by rank, then sorts by track and row."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.columns: list[tuple[Int64s, Int64s, Int32s, Int32s, Int32s, Int32s]] = []
        self.args: list[msgspec.Raw] = []

    def add_recording(self, recording: Recording, start_ns: Int64s) -> None:
        # Drop slices without a usable time.
        duration_ns, keep = _read_durations(recording, start_ns)
        kept_index = np.flatnonzero(keep)
        events = [recording.slices[index] for index in kept_index.tolist()]
        start_ns, duration_ns = start_ns[kept_index], duration_ns[kept_index]
        # Intern strings: columns have integer indices into names, categories and (process, thread) keys.
        names, categories = self.names, self.categories
        name_index = _to_int32([names.setdefault(event.name, len(names)) for event in events])
        category_index = _to_int32([categories.setdefault(event.cat, len(categories)) for event in events])
        keys: dict[tuple[int | str, int | str], int] = {}
        key_index = _to_int32([keys.setdefault((event.pid, event.tid), len(keys)) for event in events])
        self._add_tracks(
            recording, list(keys), key_index, categories, (start_ns, duration_ns, name_index, category_index)
        )
        # Copied, because a view (msgspec.Raw) would keep the whole file's text in memory.
        self.args.extend(event.args.copy() for event in events)

    def _add_tracks(
        self,
        recording: Recording,
        keys: list[tuple[int | str, int | str]],
        key_index: Int32s,
        categories: dict[str, int],
        columns: tuple[Int64s, Int64s, Int32s, Int32s],
    ) -> None:
        start_ns, duration_ns, name_index, category_index = columns
        # A track is a GPU stream if most of its slices are GPU work, or if the metadata labels its process
        # so.
        gpu_categories = [index for name, index in categories.items() if name in GPU_CATEGORIES]
        on_gpu = np.isin(category_index, gpu_categories)
        slices = np.bincount(key_index, minlength=len(keys))
        gpu_share = np.bincount(key_index, weights=on_gpu, minlength=len(keys)) / np.maximum(slices, 1)
        gpu = [
            bool(gpu_share[i] > 0.5) or (process in recording.gpu_processes)
            for i, (process, _) in enumerate(keys)
        ]
        # Python frames get separate tracks and do not count as busy time.
        is_frame = category_index == categories.get(PYTHON_CATEGORY, -1)
        busy = np.bincount(key_index, weights=duration_ns * ~is_frame, minlength=len(keys))
        threads = sorted((i for i in range(len(keys)) if not gpu[i]), key=lambda i: -busy[i])
        streams = sorted((i for i in range(len(keys)) if gpu[i]), key=lambda i: _stream_sort_key(*keys[i]))
        names = _name_tracks(recording, keys, gpu)
        track_index = np.zeros(len(start_ns), dtype=np.int32)
        depth = np.zeros(len(start_ns), dtype=np.int32)
        end_ns = start_ns + duration_ns

        def add_track(key: int, mine: Int64s, kind: Literal["cpu", "gpu", "python"]) -> None:
            if not len(mine):
                return
            mine = mine[np.lexsort((-duration_ns[mine], start_ns[mine]))]
            depth[mine] = compute_nesting_depth(start_ns[mine], end_ns[mine])
            track_index[mine] = len(self.trace.tracks)
            process, thread = keys[key]
            self.trace.tracks.append(
                Track(
                    rank=_require_rank(recording.rank),
                    process=process,
                    thread=str(thread).removeprefix("stream ").strip(),
                    kind=kind,
                    name=f"Python stacks of {names[key]}" if kind == "python" else names[key],
                    num_rows=int(depth[mine].max()) + 1,
                    num_slices=len(mine),
                )
            )

        # GPU streams come first, by number: they are the purpose of the trace, and stacks would push them out
        # of view. Then threads by busy time, so that the training thread comes first.
        for key in streams:
            add_track(key, np.flatnonzero(key_index == key), "gpu")
        for key in threads:
            add_track(key, np.flatnonzero((key_index == key) & ~is_frame), "cpu")
            add_track(key, np.flatnonzero((key_index == key) & is_frame), "python")
        self.columns.append((start_ns, duration_ns, name_index, category_index, track_index, depth))

    def store_columns(self) -> int:
        """Sort the columns, shift them to begin at 0, and return what 0 is."""
        trace = self.trace
        trace.names, trace.categories = list(self.names), list(self.categories)
        start, duration, name, category, track, depth = (
            np.concatenate(column) for column in zip(*self.columns, strict=True)
        )
        # Sorted by row and start, the slices of any time range of a row are found by binary search.
        order = np.lexsort((start, depth, track))
        origin = start.min() if len(start) else 0
        trace.start_ns, trace.duration_ns = start[order] - origin, duration[order]
        trace.name_index, trace.category_index = name[order], category[order]
        trace.track_index, trace.depth = track[order], depth[order]
        trace._args = [self.args[index] for index in order.tolist()]
        return int(origin)


@dataclass(frozen=True, kw_only=True)
class MemorySamples:
    """``[memory]`` instants of one rank: one for each allocation and free."""

    rank: int
    time_ns: Int64s
    """On the trace's clock."""
    args: list[msgspec.Raw]


def _read_memory_samples(
    recordings: list[Recording], shifts: list[int], origin_ns: int
) -> list[MemorySamples]:
    """Return the memory samples of each rank on the trace's clock, by time."""
    samples = []
    for recording, shift_ns in zip(recordings, shifts, strict=True):
        readable = np.flatnonzero(
            np.isfinite(recording.memory_us) & (np.abs(recording.memory_us) < 2**62 / 1e3)
        )
        time_ns = _to_ns(recording.memory_us[readable], recording.base_ns) - shift_ns - origin_ns
        order = np.argsort(time_ns, kind="stable")
        args = [recording.memory[index].args.copy() for index in readable[order].tolist()]
        samples.append(MemorySamples(rank=_require_rank(recording.rank), time_ns=time_ns[order], args=args))
    return samples


def _find_device_names(recordings: list[Recording], tracks: list[Track]) -> dict[int, str]:
    """Return the name of each rank's GPU: the process id of its streams is the GPU's index."""
    names: dict[int, str] = {}
    known = {_require_rank(recording.rank): recording.device_names for recording in recordings}
    for track in tracks:
        devices = known[track.rank]
        if track.kind == "gpu" and track.rank not in names and devices:
            fallback = next(iter(devices.values()))
            names[track.rank] = (
                devices.get(track.process, fallback) if isinstance(track.process, int) else fallback
            )
    return names


def _assign_ranks(recordings: list[Recording]) -> list[Recording]:
    """Return the recordings by rank. Files without a rank get the free numbers in order of their names.

    Raises ``ValueError`` for two files of one rank.
    """
    seen: dict[int, Recording] = {}
    for recording in recordings:
        if recording.rank is None:
            continue
        if recording.rank in seen:
            refuse_file(
                recording.path,
                f"is of rank {recording.rank}, and so is {seen[recording.rank].path.name}",
                "keep one file per rank in the folder, or load one file",
            )
        seen[recording.rank] = recording
    free = iter(rank for rank in range(len(recordings)) if rank not in seen)
    for recording in recordings:
        if recording.rank is None:
            recording.rank = next(free)
            recording.oddities["file without a rank, numbered by order"] += 1
    return sorted(recordings, key=lambda recording: _require_rank(recording.rank))


def _align_clocks(recordings: list[Recording], notes: list[str]) -> tuple[list[Int64s], list[int]]:
    """Return the start of each slice on a common clock, for each recording, and the shift of its clock.

    It is the wall clock if all ranks have it and their recordings overlap; otherwise each rank starts at 0.
    """
    starts = [_read_start_ns(recording) for recording in recordings]
    spans = [
        (int(start[start != _ABSENT].min()), int(start.max())) for start in starts if np.any(start != _ABSENT)
    ]
    unshifted = [0] * len(recordings)
    if len(spans) < 2:
        return starts, unshifted
    # Files of one run overlap in time. Without an overlap they are of different runs, or of hosts whose
    # clocks differ, and a common axis would be mostly empty.
    on_wall_clock = all(first > _EPOCH_NS for first, _ in spans)
    together = max(first for first, _ in spans) <= min(last for _, last in spans)
    if on_wall_clock and together:
        return starts, unshifted
    notes.append(
        "ranks were recorded at times that do not overlap: each starts at 0, so skew between them is hidden"
        if on_wall_clock
        else "no wall clock in the files: each rank starts at 0, so skew between them is hidden"
    )
    shifts = [int(start[start != _ABSENT].min(initial=2**62)) for start in starts]
    shifted = [
        np.where(start == _ABSENT, _ABSENT, start - shift)
        for start, shift in zip(starts, shifts, strict=True)
    ]
    return shifted, shifts


_ABSENT = np.iinfo(np.int64).min


def _to_ns(time_us: npt.NDArray[np.float64], base_ns: int) -> Int64s:
    # Nanoseconds since 1970 exceed float64's 53 bits, so integer part and fraction are scaled separately.
    whole_us = np.floor(time_us)
    fraction_ns = np.rint((time_us - whole_us) * 1000).astype(np.int64)
    return np.asarray(whole_us.astype(np.int64) * 1000 + fraction_ns + base_ns, np.int64)


def _read_start_ns(recording: Recording) -> Int64s:
    """Return each slice's start in ns; ``_ABSENT`` if ``ts`` is missing or over a day from the median."""
    readable = np.isfinite(recording.start_us) & (np.abs(recording.start_us) < 2**62 / 1e3)
    start = np.full(len(readable), _ABSENT, dtype=np.int64)
    if not readable.any():
        _count_oddity(recording, "slices without a readable ts left out", len(readable))
        return start
    start[readable] = _to_ns(recording.start_us[readable], recording.base_ns)
    present = np.sort(start[readable])
    median = int(present[(len(present) - 1) // 2])  # lower median: with two slices, one of them is kept
    far = readable & (np.abs(start - median) > _FAR_NS)
    start[far] = _ABSENT
    _count_oddity(recording, "slices without a readable ts left out", int((~readable).sum()))
    _count_oddity(recording, "slices more than a day from the others left out", int(far.sum()))
    return start


def _read_durations(recording: Recording, start_ns: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Return durations in ns (negative and missing ones 0, and counted), and a mask of slices to keep."""
    keep = start_ns != _ABSENT
    duration = recording.duration_us * 1000
    # Slices without a usable duration are shown as points instead of being lost.
    absent, negative = np.isnan(duration), duration < 0
    huge = keep & (duration > _FAR_NS)
    _count_oddity(recording, "slices without dur shown with no length", int((absent & keep).sum()))
    _count_oddity(recording, "slices with a negative dur shown with no length", int((negative & keep).sum()))
    _count_oddity(recording, "slices longer than a day left out", int(huge.sum()))
    keep &= ~huge
    readable = np.where(absent | negative | ~keep, 0.0, duration)
    return np.rint(readable).astype(np.int64), keep


def _note_oddities(recordings: list[Recording], notes: list[str]) -> None:
    for what in dict.fromkeys(what for recording in recordings for what in recording.oddities):
        ranks = [recording.rank for recording in recordings if recording.oddities[what]]
        total = sum(recording.oddities[what] for recording in recordings)
        where = "" if len(ranks) == len(recordings) else f"rank {', '.join(map(str, ranks[:8]))}: "
        notes.append(f"{where}{total:,} {what}")


def _note_missing_ranks(recordings: list[Recording], notes: list[str]) -> None:
    # range() is bounded because the world size comes from the file.
    world_size = max((recording.world_size or 0 for recording in recordings), default=0)
    present_ranks = {recording.rank for recording in recordings}
    missing = [rank for rank in range(min(world_size, 10**6)) if rank not in present_ranks]
    if missing and len(present_ranks) > 1:
        shown = ", ".join(str(rank) for rank in missing[:8]) + (" ..." if len(missing) > 8 else "")
        notes.append(f"{len(missing):,} of {world_size:,} ranks are not in the folder: {shown}")
    elif missing:
        notes.append(f"one rank of {world_size:,}")


def _name_tracks(recording: Recording, keys: list[tuple[int | str, int | str]], gpu: list[bool]) -> list[str]:
    """Return a unique display name for each thread and stream of one rank."""
    # A number of a device or process is added to names only if there are several.
    devices = {process for (process, _), is_gpu in zip(keys, gpu, strict=True) if is_gpu}
    processes = {process for (process, _), is_gpu in zip(keys, gpu, strict=True) if not is_gpu}
    names = []
    for (process, thread), is_gpu in zip(keys, gpu, strict=True):
        number = str(thread).removeprefix("stream ").strip()
        known = recording.thread_names.get((process, thread), "")
        if is_gpu:
            # Kineto names streams "stream 7 7", which repeats the number.
            name = f"stream {number}" if known.startswith("stream") or not known else known
            names.append(f"GPU {process} {name}" if len(devices) > 1 else name)
            continue
        name = known if known and known != number else f"CPU thread {number}"
        if known and str(thread) == str(process) and "main" not in known:
            name = f"main thread ({known})"  # on Linux the main thread's id is the pid
        if len(processes) > 1:
            name = f"{recording.process_names.get(process, 'process')} {process} {name}"
        names.append(name)
    duplicates = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{name} {str(thread).removeprefix('stream ').strip()}" if name in duplicates else name
        for name, (_, thread) in zip(names, keys, strict=True)
    ]


def _stream_sort_key(process: int | str, stream: int | str) -> tuple[str, float, str]:
    # torch before 1.11 wrote "stream 7" as the thread of a stream.
    number = str(stream).removeprefix("stream ").strip()
    return (
        str(process).zfill(12),
        float(number) if number.isdigit() and len(number) < 20 else float("inf"),
        number,
    )


def _count_oddity(recording: Recording, what: str, count: int) -> None:
    if count:
        recording.oddities[what] += count


def _to_int32(values: list[int]) -> Int32s:
    return np.array(values, dtype=np.int32)


def _require_rank(rank: int | None) -> int:
    assert rank is not None  # set by _ranked
    return rank
