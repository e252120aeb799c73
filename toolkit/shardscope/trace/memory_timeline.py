"""Memory over time by component, from the allocation history of a ``torch.cuda.memory`` snapshot.

A snapshot has no component names: each allocation is attributed by the Python (and C++) frames that made it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, get_type_hints

import numpy as np
import numpy.typing as npt

from shardscope.core.number_format import format_gib
from shardscope.trace.memory_snapshot import BEFORE, Allocation, load_history
from shardscope.trace.table import Table

Int64s = npt.NDArray[np.int64]

BEFORE_HISTORY = "before_history"
"""Tensors from before the history: parameters, and whatever earlier steps left."""
OTHER = "other"
MAX_POINTS = 2_000
"""Most points of the table: of more, the highest of each equal part of the events."""

_PATTERNS = {
    "optimizer": r"torch/optim/|/optimizers?/|megatron/core/optimizer|distrib_optimizer\.py|fused_adam",
    "gather_buffers": (
        r"fsdp/_fully_shard/|_fsdp_|zero/partition|partitioned_param_coordinator|zero/stage|stage_1_and_2|"
        r"param_and_grad_buffer|nn/parallel/distributed\.py"
    ),
    "communication": r"distributed/distributed_c10d\.py|ProcessGroupNCCL|ncclComm",
    "logits": r"loss/|/loss_utils\.py|model/loss\.py|cross_entropy|CrossEntropy",
    "gradients": r"_engine_run_backward|autograd/graph\.py|autograd/__init__\.py|torch/csrc/autograd/engine",
    "activations": r"nn/modules/|modeling_\w+\.py|/transformer/|\bforward\b",
}
"""Pattern of "file name:function" of a frame, by component; the first component that matches any frame of an
allocation is its own. Paths of torch 2.13, DeepSpeed 0.18, Megatron-Core 0.17 and transformers 5."""
_COMPONENTS = tuple(_PATTERNS)
_OF_FRAME = [re.compile(pattern) for pattern in _PATTERNS.values()]
_GRADIENTS, _ACTIVATIONS = _COMPONENTS.index("gradients"), _COMPONENTS.index("activations")


class MemoryTimelineRow(TypedDict):
    """Live bytes of one component after one event of the history."""

    event: int
    """Number of the event; 0 is the beginning of the history."""
    seconds: float | None
    """Time since the first event; None in snapshots of torch before 2.1, which have no times."""
    component: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Live bytes over the history of one rank's snapshot, by component."""

    num_bytes: Mapping[str, Int64s]
    """Live bytes after each event, by component, those with the most at the peak first; the first entry of
    each is from before the first event."""
    seconds: npt.NDArray[np.float64] | None
    """Time of each entry since the first event; None if the snapshot has none."""

    @property
    def total_bytes(self) -> Int64s:
        """Live bytes of all components after each event."""
        total: Int64s = np.sum(list(self.num_bytes.values()), axis=0, dtype=np.int64)
        return total

    @property
    def peak_event(self) -> int:
        """Number of the event after which most bytes were live, the earliest one on ties."""
        return int(np.argmax(self.total_bytes))

    @property
    def peak_bytes(self) -> int:
        """Most live bytes."""
        return int(self.total_bytes[self.peak_event])

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Live bytes by component at the peak, largest first."""
        sizes = {name: int(values[self.peak_event]) for name, values in self.num_bytes.items()}
        return MappingProxyType({name: size for name, size in sizes.items() if size})

    def list_points(self) -> Int64s:
        """Return the events that a chart needs: of many, the highest of each equal part, and the peak."""
        total = self.total_bytes
        if len(total) <= MAX_POINTS:
            return np.arange(len(total))
        bounds = np.linspace(0, len(total), MAX_POINTS + 1).astype(np.int64)
        highest = [low + int(np.argmax(total[low:high])) for low, high in pairwise(bounds)]
        return np.unique([*highest, self.peak_event, len(total) - 1])

    def table(self) -> Table[MemoryTimelineRow]:
        """Return one row per point (at most about 2,000) and component that is not empty."""
        rows: list[MemoryTimelineRow] = [
            {
                "event": int(event),
                "seconds": None if self.seconds is None else float(self.seconds[event]),
                "component": name,
                "num_bytes": int(values[event]),
            }
            for event in self.list_points()
            for name, values in self.num_bytes.items()
        ]
        return Table(rows, tuple(get_type_hints(MemoryTimelineRow)))

    def __str__(self) -> str:
        parts = ", ".join(f"{format_gib(size)} {name}" for name, size in self.at_peak.items())
        when = "" if self.seconds is None else f" after {self.seconds[self.peak_event]:.3f} s"
        return f"{format_gib(self.peak_bytes)} GiB alive at the peak{when}: {parts or 'nothing'}"


def build_memory_timeline(
    allocations: Sequence[Allocation], times_us: Sequence[int] | None
) -> MemoryTimeline:
    """Return the timeline of ``allocations``, whose events happened at ``times_us`` (None: unknown)."""
    num_entries = 1 + max((allocation.ends for allocation in allocations), default=0)
    begins = np.array([allocation.begins + 1 for allocation in allocations], np.int64)
    ends = np.array([allocation.ends + 1 for allocation in allocations], np.int64)
    sizes = np.array([allocation.num_bytes for allocation in allocations], np.int64)
    components = _find_components(allocations, begins, ends)
    num_bytes: dict[str, Int64s] = {}
    for name in (*_COMPONENTS, BEFORE_HISTORY, OTHER):
        is_component = components == name
        if is_component.any():
            changes = np.zeros(num_entries + 1, np.int64)
            np.add.at(changes, begins[is_component], sizes[is_component])
            np.subtract.at(changes, ends[is_component], sizes[is_component])
            num_bytes[name] = np.cumsum(changes)[:num_entries]
    if not num_bytes:
        num_bytes[OTHER] = np.zeros(num_entries, np.int64)
    seconds = None
    if times_us:
        times = np.array([times_us[0], *times_us], np.float64)[:num_entries]
        seconds = (times - times[0]) / 1e6
    peak = MemoryTimeline(num_bytes=num_bytes, seconds=None).peak_event
    largest = sorted(num_bytes, key=lambda name: -int(num_bytes[name][peak]))
    return MemoryTimeline(num_bytes={name: num_bytes[name] for name in largest}, seconds=seconds)


def _find_components(allocations: Sequence[Allocation], begins: Int64s, ends: Int64s) -> npt.NDArray[np.str_]:
    """Return the component of each allocation."""
    hints: dict[int, int] = {}
    components = np.array([_find_component(allocation.frames, hints) for allocation in allocations], np.int64)
    # Backward makes gradients, which stay for the optimizer, and temporaries, which it frees itself: those
    # that are freed before its last allocation count as activations, as in the census of a step.
    in_backward = np.flatnonzero(components == _GRADIENTS)
    order = in_backward[np.argsort(begins[in_backward], kind="stable")]
    if len(order):
        others = np.sort(begins[(components >= 0) & (components != _GRADIENTS)])
        # A backward is a stretch of such allocations without one of a forward or an optimizer in between.
        stretch = np.searchsorted(others, begins[order])
        last = np.append(np.flatnonzero(np.diff(stretch)), len(order) - 1)
        end_of_backward = begins[order[last]][np.searchsorted(last, np.arange(len(order)))]
        components[order[ends[order] <= end_of_backward]] = _ACTIVATIONS
    names = np.array([*_COMPONENTS, BEFORE_HISTORY, OTHER])
    return names[components]


def _find_component(frames: object, hints: dict[int, int]) -> int:
    """Return the index of an allocation's component; ``hints`` keeps that of each frame by its ``id``."""
    if isinstance(frames, str) and frames == BEFORE:
        return -2
    best = len(_COMPONENTS)
    for frame in frames if isinstance(frames, Iterable) else ():
        hint = hints.get(id(frame))
        if hint is None:
            hint = hints[id(frame)] = _read_hint(frame)
        best = min(best, hint)
    return best if best < len(_COMPONENTS) else -1


def _read_hint(frame: object) -> int:
    if not isinstance(frame, Mapping):
        return len(_COMPONENTS)
    text = f"{frame.get('filename')}:{frame.get('name')}"
    return next((index for index, known in enumerate(_OF_FRAME) if known.search(text)), len(_COMPONENTS))


def load_memory_timeline(path: str | Path) -> MemoryTimeline:
    """Read a snapshot file; see :func:`shardscope.trace.memory_snapshot.load_memory_snapshot`."""
    allocations, times_us = load_history(path)
    return build_memory_timeline(allocations, times_us)
