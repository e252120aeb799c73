"""Classification of slices as compute, communication, copies or wrappers; spans and steps of each rank.

For a rank with GPU streams, only work on them counts. For a rank without any (gloo, CPU), operators are
compute and the backend's annotations (``gloo:all_reduce``) are communication.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardscope.trace.analysis.intervals import Int64s, Intervals, Mask, merge_intervals
from shardscope.trace.arguments import WorkArgs, decode_arguments
from shardscope.trace.categories import (
    COMMUNICATION_KERNELS,
    COPY_CATEGORIES,
    HOST_COLLECTIVES,
    PYTHON_CATEGORY,
    RUNTIME_CATEGORIES,
    STEP,
    WRAPPER_CATEGORIES,
)
from shardscope.trace.store import Trace

Slices: TypeAlias = "slice[int, int, None]"

DATA_LOADING = re.compile(r"DataLoader|data_loading|load_batch|next_batch|wait_for_batch", re.IGNORECASE)

# Operators that only call others: their own time is dispatch, Python or blocking, not arithmetic.
_AUTOGRAD_NODES = re.compile(r"autograd::engine::|torch::autograd::|.*Backward\d*$")
_COLLECTIVE_CALLS = re.compile(r"c10d::|_c10d_functional::|record_param_comms$")
_MESSAGES = re.compile(r":(?:send|recv)", re.IGNORECASE)
_CONTAINERS = re.compile(rf"{_AUTOGRAD_NODES.pattern}|{_COLLECTIVE_CALLS.pattern}")
# The C++ kernels of torch.compile are in no recording: they run between the operators of this annotation.
_COMPILED_GRAPHS = re.compile(r"## Call CompiledFxGraph")
_COMPILED_CALLS = re.compile(r"Torch-Compiled Region|CompiledFunction$")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one rank, in nanoseconds of the trace's clock."""

    number: int
    start_ns: int
    end_ns: int
    host_end_ns: int
    """End on the host; earlier than :attr:`end_ns` for a last step that the GPU is behind with."""


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """Work of one rank as sets of intervals."""

    rank: int
    index: Slices
    """Slices of the rank, which are contiguous."""
    on_gpu: bool
    """Whether the rank has GPU streams; otherwise its CPU threads count."""
    start_ns: int
    end_ns: int
    """From the first slice to the end of the last."""
    steps: tuple[Step, ...]
    compute: Intervals
    communication: Intervals
    copies: Intervals


class Activity:
    """Masks over all slices of a trace, and the activity of each rank."""

    def __init__(self, trace: Trace) -> None:
        # A strong reference would be a cycle: an unused trace would live on, with gigabytes and an open file
        # for each rank, until Python looks for cycles. It counts objects, and not their size.
        self._trace = weakref.ref(trace)
        self._masks: dict[object, Mask] = {}
        self.idle_of_ranks: dict[int, dict[str, Intervals]] = {}
        """Idle time of ranks by cause, filled by :func:`shardscope.trace.analysis.breakdown.find_idle`."""
        self.end_ns = trace.end_ns
        tracks = trace.tracks
        self.rank_of_track = np.array([track.rank for track in tracks], dtype=np.int64)
        is_gpu_track = np.array([track.kind == "gpu" for track in tracks], dtype=bool)
        is_async_track = np.array([track.kind == "async" for track in tracks], dtype=bool)
        self.on_gpu: Mask = is_gpu_track[trace.track_index] if len(trace) else np.zeros(0, bool)
        # Before 1.11 torch wrote steps as operators.
        self.is_wrapper = self.mask_categories(WRAPPER_CATEGORIES) | self.mask_names(STEP, "match")
        # A track of asynchronous work is not a thread: its work is recorded on a thread's track, too.
        self.is_wrapper |= self._expand_to_slices(is_async_track, trace.track_index)
        self.is_copy = self.on_gpu & self.mask_categories(COPY_CATEGORIES)
        self.is_kernel = self.on_gpu & ~self.is_wrapper & ~self.is_copy
        self.is_gpu_work = self.is_kernel | self.is_copy

    @property
    def trace(self) -> Trace:
        """The trace, whose :attr:`~shardscope.trace.Trace.activity` this is.

        Raises ``ReferenceError`` if the trace is freed: the activity alone does not keep it.
        """
        trace = self._trace()
        if trace is None:
            raise ReferenceError(
                "The trace of this activity is freed. Fix: keep it in a variable, trace = ss.Trace.load(...)."
            )
        return trace

    def mask_categories(self, categories: frozenset[str]) -> Mask:
        """Return a mask of the slices of these categories."""
        # Cached, because analyses request it once per rank.
        if categories not in self._masks:
            is_listed = np.array([name in categories for name in self.trace.categories], dtype=bool)
            self._masks[categories] = self._expand_to_slices(is_listed, self.trace.category_index)
        return self._masks[categories]

    def _expand_to_slices(self, mask: Mask, index: npt.NDArray[np.int32]) -> Mask:
        return mask[index] if len(self.trace) else np.zeros(0, dtype=bool)

    def mask_names(self, pattern: re.Pattern[str], method: str = "search") -> Mask:
        """Return a mask of the slices whose name matches; ``method`` is "search" or "match"."""
        if (pattern, method) not in self._masks:
            find = pattern.search if method == "search" else pattern.match
            is_match = np.array([find(name) is not None for name in self.trace.names], dtype=bool)
            self._masks[pattern, method] = self._expand_to_slices(is_match, self.trace.name_index)
        return self._masks[pattern, method]

    @cached_property
    def work_args(self) -> dict[str, npt.NDArray[np.float64]]:
        """Columns of the arguments of GPU work; -1 for other slices and where absent."""
        index = np.flatnonzero(self.is_gpu_work)
        decoded = decode_arguments(self.trace.arguments, index, WorkArgs)
        num_bytes, occupancy, blocks = (np.full(len(self.trace), -1.0) for _ in range(3))
        num_bytes[index] = [args.bytes for args in decoded]
        occupancy[index] = [args.occupancy for args in decoded]
        blocks[index] = [args.blocks_per_sm for args in decoded]
        return {"bytes": num_bytes, "occupancy": occupancy, "blocks_per_sm": blocks}

    @cached_property
    def launches(self) -> Int64s:
        """Index of the runtime call that launched each GPU slice; -1 if it was not recorded."""
        trace, launches = self.trace, np.full(len(self.trace), -1, np.int64)
        correlation = trace.correlation
        is_runtime = self.mask_categories(RUNTIME_CATEGORIES) & ~self.on_gpu & (correlation >= 0)
        # Correlation ids are unique within one process, so ranks are matched one after the other.
        for index in self.slices_of_ranks:
            calls = np.flatnonzero(is_runtime[index]) + index.start
            work = np.flatnonzero(self.is_gpu_work[index] & (correlation[index] >= 0)) + index.start
            if not len(calls) or not len(work):
                continue
            calls = calls[np.argsort(correlation[calls], kind="stable")]
            # The last of several calls of one id is the innermost: cuda_driver inside of cuda_runtime.
            latest = np.searchsorted(correlation[calls], correlation[work], side="right") - 1
            matches = (latest >= 0) & (correlation[calls[latest]] == correlation[work])
            launches[work] = np.where(matches, calls[latest], -1)
        assert len(launches) == len(trace)
        return launches

    @cached_property
    def slices_of_ranks(self) -> list[Slices]:
        """Slices of each rank, in the order of ``trace.ranks``. Tracks are in that order too."""
        ranks = self.rank_of_track[self.trace.track_index] if len(self.trace) else np.zeros(0, np.int64)
        first = np.searchsorted(ranks, self.trace.ranks, side="left").tolist()
        last = np.searchsorted(ranks, self.trace.ranks, side="right").tolist()
        return [slice(a, b) for a, b in zip(first, last, strict=True)]

    @cached_property
    def is_communication(self) -> Mask:
        """Mask of communication: kernels on ranks with GPU streams, host collectives on ranks without.

        A kernel communicates if its arguments name a collective, if ``record_param_comms`` launched it, or by
        its name. Python frames and CPU operators never do.
        """
        trace = self.trace
        is_communication = self.is_kernel & self.mask_names(COMMUNICATION_KERNELS)
        unknown = np.flatnonzero(self.is_kernel & ~is_communication)
        for position, text in trace.arguments.iterate(unknown):
            is_communication[unknown[position]] |= b'"Collective name"' in text
        if "record_param_comms" in trace.names:
            # Old recordings have the collective on the CPU only: look at the operators around the launch.
            is_call = trace.name_index == trace.names.index("record_param_comms")
            unknown = np.flatnonzero(self.is_kernel & ~is_communication & (self.launches >= 0))
            is_communication[unknown[self.find_around(self.launches[unknown], is_call) >= 0]] = True
        return is_communication | self.is_host_collective & ~self.rank_has_gpu[self.rank_position]

    @cached_property
    def is_host_collective(self) -> Mask:
        """Mask of the annotations of collectives that run on the CPU."""
        return ~self.on_gpu & self.is_wrapper & self.mask_names(HOST_COLLECTIVES, "match")

    def find_around(self, index: Int64s, is_around: Mask) -> Int64s:
        """Return the innermost slice of the mask around each slice of ``index``; -1 if there is none."""
        enclosing = np.full(len(index), -1, np.int64)
        slices, positions = index.copy(), np.arange(len(index))
        # Each round goes one level outwards, for all slices at once.
        while len(positions):
            slices = self.trace.parents[slices]
            matches = (slices >= 0) & is_around[slices]
            enclosing[positions[matches]] = slices[matches]
            continues = (slices >= 0) & ~matches
            slices, positions = slices[continues], positions[continues]
        return enclosing

    @cached_property
    def rank_position(self) -> npt.NDArray[np.int64]:
        """Position of each slice's rank in ``trace.ranks``."""
        position = np.zeros(len(self.trace), np.int64)
        for number, index in enumerate(self.slices_of_ranks):
            position[index] = number
        return position

    @cached_property
    def rank_has_gpu(self) -> Mask:
        """Mask of the ranks with work on GPU streams, in the order of ``trace.ranks``."""
        return np.array([bool(self.is_gpu_work[index].any()) for index in self.slices_of_ranks], dtype=bool)

    @cached_property
    def is_compute(self) -> Mask:
        """Mask of compute: kernels that do not communicate; on ranks without a GPU, operators."""
        on_gpu_rank = self.rank_has_gpu[self.rank_position] if len(self.trace) else np.zeros(0, bool)
        return np.where(on_gpu_rank, self.is_kernel & ~self.is_communication, self._is_cpu_compute)

    @cached_property
    def _is_cpu_compute(self) -> Mask:
        if self.rank_has_gpu.all():
            return np.zeros(len(self.trace), dtype=bool)
        is_operator: Mask = self._is_operator & ~self._is_dispatched_in_python
        # Operators on gloo's own thread inside a collective are part of the collective.
        candidates = np.flatnonzero(is_operator & self._is_on_collective_track)
        is_operator[candidates[self.find_around(candidates, self.is_host_collective) >= 0]] = False
        return is_operator

    @cached_property
    def _is_call(self) -> Mask:
        """Mask of operators and functions on the CPU."""
        return ~self.on_gpu & ~self.is_wrapper & ~self.mask_categories(RUNTIME_CATEGORIES)

    @cached_property
    def _is_operator(self) -> Mask:
        """Mask of operators on the CPU, without those that only call others."""
        trace = self.trace
        if not len(trace):
            return self._is_call
        # Names without a namespace are Python functions (autograd.Function, record_function): they may wait
        # for communication inside, so they count only if nothing was recorded inside of them.
        is_leaf = np.ones(len(trace), dtype=bool)
        is_leaf[trace.parents[trace.parents >= 0]] = False
        is_named = np.array(["::" in name for name in trace.names], dtype=bool)
        is_container = self.mask_names(_CONTAINERS, "match")
        is_operator = self._is_call & ~is_container & (is_named[trace.name_index] | is_leaf)
        return np.asarray(is_operator | ~self.on_gpu & self.mask_names(_COMPILED_GRAPHS, "match"))

    @cached_property
    def _is_dispatched_in_python(self) -> Mask:
        """Mask of operators around functions, such as those of DTensor, which communicate inside of them.

        The time of such an operator is that of the operators inside; the rest is Python and waiting.
        """
        parents_of = self.trace.parents
        is_dispatched = np.zeros(len(self.trace), dtype=bool)
        parents = np.unique(parents_of[self._is_call & ~self._is_operator])
        while len(parents := parents[parents >= 0]):
            is_dispatched[parents[self._is_operator[parents]]] = True
            parents = np.unique(parents_of[parents])
        return is_dispatched

    @cached_property
    def is_wrapper_of_compute(self) -> Mask:
        """Mask of wrappers, and of autograd's nodes and Python's dispatch with operators that compute inside.

        Of ``evaluate_function: MmBackward0`` the time belongs to the matmul inside.
        """
        is_node = self.mask_names(_AUTOGRAD_NODES, "match") | self._is_dispatched_in_python
        is_node |= self.mask_names(_COMPILED_CALLS, "match")
        functions = np.flatnonzero(
            self._is_call & ~self._is_operator & ~self.mask_names(_COLLECTIVE_CALLS, "match")
        )
        is_node[functions[self.find_around(functions, self._is_dispatched_in_python) >= 0]] = True
        around = self.is_wrapper & ~self.is_compute
        parents = np.unique(self.trace.parents[self.is_compute])
        while len(parents := parents[parents >= 0]):
            around[parents[is_node[parents]]] = True
            parents = np.unique(self.trace.parents[parents])
        return around

    @cached_property
    def _is_on_collective_track(self) -> Mask:
        """Return the mask of the slices on threads of gloo itself.

        A send or receive begins on the thread that calls it, which may compute until it waits for it.
        """
        trace, is_call = self.trace, self.mask_names(_COLLECTIVE_CALLS, "match")
        is_message = self.mask_names(_MESSAGES)
        is_own = np.zeros(len(trace.tracks), dtype=bool)
        is_own[trace.track_index[self.is_host_collective & ~is_message]] = True
        is_own[trace.track_index[is_call & ~self.on_gpu]] = False
        return self._expand_to_slices(is_own, trace.track_index)

    @cached_property
    def ranks(self) -> list[RankActivity]:
        """Activity of each rank, in the order of ``trace.ranks``."""
        return [self._describe_rank(number) for number in range(len(self.trace.ranks))]

    def _describe_rank(self, number: int) -> RankActivity:
        trace, index = self.trace, self.slices_of_ranks[number]
        start, end = trace.start_ns[index], self.end_ns[index]
        on_gpu = bool(self.rank_has_gpu[number])
        first = int(start.min()) if len(start) else 0

        def merge(mask: Mask) -> Intervals:
            return merge_intervals(start[mask[index]], end[mask[index]])

        return RankActivity(
            rank=trace.ranks[number],
            index=index,
            on_gpu=on_gpu,
            start_ns=first,
            end_ns=int(end.max()) if len(end) else 0,
            steps=self._find_steps(index, on_gpu),
            compute=merge(self.is_compute),
            communication=merge(self.is_communication),
            copies=merge(self.is_copy),
        )

    @cached_property
    def _step_numbers(self) -> Int64s:
        """Step number of each name; -1 for other names."""
        matches = [STEP.match(name) for name in self.trace.names]
        return np.array([int(match[1][:9]) if match else -1 for match in matches], np.int64)

    def _find_steps(self, index: Slices, on_gpu: bool) -> tuple[Step, ...]:
        """Return the steps of one rank. A step lasts until the next begins, so that steps add up.

        The last one lasts until the GPU has finished the work launched in it, less the time for which the GPU
        still had work of earlier steps when the first one began: a GPU that is as far behind its host at the
        end as at the beginning does the work of as many steps as are marked.
        """
        trace = self.trace
        numbers = self._step_numbers[trace.name_index[index]] if len(trace) else np.zeros(0, np.int64)
        marks = np.flatnonzero(numbers >= 0) + index.start
        if np.any(~self.on_gpu[marks]):
            marks = marks[~self.on_gpu[marks]]  # the GPU's copies of the marks are of the same steps
        marks = marks[np.argsort(trace.start_ns[marks], kind="stable")]
        _, first = np.unique(self._step_numbers[trace.name_index[marks]], return_index=True)
        marks = marks[np.sort(first)]
        if not len(marks):
            return ()
        starts = trace.start_ns[marks]
        end = host_end = int(self.end_ns[marks[-1]])
        if on_gpu:
            work = np.flatnonzero(self.is_gpu_work[index]) + index.start
            launches = self.launches[work]
            launched_at = np.where(launches >= 0, trace.start_ns[launches], trace.start_ns[work])
            of_step = work[(launched_at >= starts[-1]) & (launched_at < end)]
            behind = self._measure_work_before(work, int(starts[0]))
            end = max(end, int(self.end_ns[of_step].max(initial=0)) - behind)
        ends = [*starts[1:].tolist(), end]
        names = self._step_numbers[trace.name_index[marks]].tolist()
        return tuple(
            Step(number=number, start_ns=start, end_ns=stop, host_end_ns=host_stop)
            for number, start, stop, host_stop in zip(
                names, starts.tolist(), ends, [*ends[:-1], host_end], strict=True
            )
        )

    def _measure_work_before(self, work: Int64s, start_ns: int) -> int:
        """Return for how long after ``start_ns`` the GPU still works on what was launched before."""
        trace, end = self.trace, start_ns
        tracks, launches = trace.track_index[work], self.launches[work]
        for track in np.unique(tracks).tolist():
            stream, launched = work[tracks == track], launches[tracks == track]
            is_after = (launched >= 0) & (trace.start_ns[launched] >= start_ns)
            if is_after.any():
                # A stream is a queue: all of its work before the first that was launched in a step is older.
                first = int(trace.start_ns[stream[is_after]].min())
                older = stream[trace.start_ns[stream] < first]
                end = max(end, int(self.end_ns[older].max(initial=0)))
        return end - start_ns

    @property
    def is_python(self) -> Mask:
        """Mask of Python frames."""
        return self.mask_categories(frozenset({PYTHON_CATEGORY}))

    @cached_property
    def steps_by_rank(self) -> dict[int, int]:
        """Number of recorded steps of each rank; 1 without marks of steps, so that figures per step exist.

        A rank without marks is taken to have recorded as many steps as those that have them.
        """
        unmarked = max(max((len(rank.steps) for rank in self.ranks), default=1), 1)
        return {rank.rank: len(rank.steps) or unmarked for rank in self.ranks}

    @cached_property
    def has_steps(self) -> bool:
        """Return whether steps are marked; if not, figures "per step" are those of the whole recording."""
        return any(rank.steps for rank in self.ranks)

    @cached_property
    def is_in_steps(self) -> Mask:
        """Mask of the slices that begin in a step of their rank; all slices of a rank without marks of steps.

        A recording may begin and end in the middle of a step, which has no mark then: figures of a step leave
        that work out.
        """
        mask = np.ones(len(self.trace), dtype=bool)
        for rank in self.ranks:
            if rank.steps:
                start = self.trace.start_ns[rank.index]
                mask[rank.index] = (start >= rank.steps[0].start_ns) & (start < rank.steps[-1].end_ns)
        return mask

    @property
    def num_steps(self) -> int:
        """Number of steps of the rank that recorded most; at least 1."""
        return max(self.steps_by_rank.values(), default=1)
