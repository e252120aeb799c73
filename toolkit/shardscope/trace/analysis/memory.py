"""Memory over time, from the allocator's ``[memory]`` records of a trace with ``profile_memory=True``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict, get_type_hints

import msgspec
import numpy as np

from shardscope.trace.analysis.intervals import Int64s
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.trace.store import MemorySamples, Trace

Floats: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"

MAX_POINTS = 2_000
"""Maximum points of one device; of more records, the highest of each equal part of the time is kept."""
_DEVICES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuseone"}
"""Names of device types (torch/headeronly/core/DeviceType.h). Builds for ROCm have GPUs as "cuda", too."""


class MemoryRow(TypedDict):
    """Memory of one device of a rank at one time."""

    rank: int
    device: str
    """"cpu", "cuda:0", ..."""
    seconds: float
    """Time in the trace."""
    allocated_bytes: int
    """Bytes of tensors. Without totals in the records, those that the recording saw allocated or freed."""
    reserved_bytes: int | None
    """Bytes that the caching allocator holds; None on the CPU, and if not recorded."""


class _Record(msgspec.Struct, gc=False):
    device_type: int = msgspec.field(default=-1, name="Device Type")
    device: int = msgspec.field(default=0, name="Device Id")
    change: int = msgspec.field(default=0, name="Bytes")
    allocated: int = msgspec.field(default=0, name="Total Allocated")
    reserved: int = msgspec.field(default=0, name="Total Reserved")


def find_memory(trace: Trace) -> Table[MemoryRow]:
    """Return the rows of all devices; see :meth:`Trace.memory`."""
    rows: list[MemoryRow] = []
    for samples in trace.memory_samples:
        rows += _list_rows(samples)
    reason = "the trace has no memory records, which torch.profiler writes with profile_memory=True"
    return Table(rows, tuple(get_type_hints(MemoryRow)), reason)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """All records of one device of a rank, by time."""

    name: str
    """"cpu", "cuda:0", ..."""
    time_ns: Int64s
    allocated_bytes: Floats
    """Bytes of tensors. Without totals in the records, those that the recording saw allocated or freed."""
    reserved_bytes: Floats | None
    """Bytes that the caching allocator holds; None on the CPU, and if not recorded."""


def read_devices(samples: MemorySamples) -> list[DeviceMemory]:
    """Return the memory of each device in the records of a rank."""
    decoder = msgspec.json.Decoder(_Record, strict=False)
    of_device: dict[tuple[int, int], list[tuple[int, _Record]]] = {}
    for time_ns, raw in zip(samples.time_ns.tolist(), samples.args, strict=True):
        try:
            record = decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        of_device.setdefault((record.device_type, record.device), []).append((time_ns, record))
    devices: list[DeviceMemory] = []
    for (device_type, device), records in sorted(of_device.items()):
        name = _DEVICES.get(device_type, f"device type {device_type}")
        # CPU records have no totals: add up what was allocated and freed.
        totals = [float(record.allocated) for _, record in records]
        if not any(totals):
            changes = np.cumsum([float(record.change) for _, record in records])
            # Memory from before the recording is freed in it: add at least that much, so that no total is
            # negative.
            totals = (changes - min(float(changes.min()), 0.0)).tolist()
        reserved = np.array([float(record.reserved) for _, record in records])
        devices.append(
            DeviceMemory(
                name=name if name == "cpu" else f"{name}:{device}",
                time_ns=np.array([time for time, _ in records], np.int64),
                allocated_bytes=np.array(totals),
                # Before 1.11 torch wrote no totals: then 0 is not what the allocator holds.
                reserved_bytes=None if name == "cpu" or not reserved.any() else reserved,
            )
        )
    return devices


def _list_rows(samples: MemorySamples) -> list[MemoryRow]:
    return [
        {
            "rank": samples.rank,
            "device": device.name,
            "seconds": int(device.time_ns[index]) / 1e9,
            "allocated_bytes": int(device.allocated_bytes[index]),
            "reserved_bytes": None if device.reserved_bytes is None else int(device.reserved_bytes[index]),
        }
        for device in read_devices(samples)
        for index in choose_points(device.time_ns, device.allocated_bytes).tolist()
    ]


def choose_points(times: Int64s, values: Floats) -> Int64s:
    """Return the indices of at most :data:`MAX_POINTS` points, the highest of each part of the time."""
    if len(times) <= MAX_POINTS:
        return np.arange(len(times))
    part = np.minimum((times - times[0]) * MAX_POINTS // max(int(times[-1] - times[0]), 1), MAX_POINTS - 1)
    order = np.lexsort((-values, part))
    first = np.unique(part[order], return_index=True)[1]
    return np.sort(order[first])
