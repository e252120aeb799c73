"""GPU utilization, temperature, power and memory of a run, sampled from NVML once a second.

The supervisor samples, not the kernel. A driver call may take seconds, so it runs in its own thread. On a
cluster the supervisor of each node samples the GPUs of its ranks, less often, into its own folder.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

from shardscope.machine.detection import list_visible_indices, query_nvml
from shardscope.records.clock_offsets import read_clock_offsets
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, encode, partial_file, read_json, read_lines
from shardscope.records.json_values import is_int, is_number
from shardscope.records.regular_files import open_new

MAX_SAMPLES = 600
"""Maximum number of samples in the file, for a run of any length: older ones are thinned out evenly."""
DENSE_SAMPLES = 200
"""Number of latest samples that are never thinned out."""
NODE_SECONDS = 5.0
"""Minimum time between two samples of a cluster's node: readers read the files of all nodes."""
MAX_NODE_SAMPLES, DENSE_NODE_SAMPLES = 200, 60
"""The same for the file of one node, which is sent as a whole if the run folder is not shared."""


def _read_utilization(pynvml: ModuleType, handle: object) -> int | None:
    rates = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    return None if rates is None else int(rates.gpu)


def _read_temperature(pynvml: ModuleType, handle: object) -> int | None:
    # The older of two functions, which every driver version has; 0 is NVML_TEMPERATURE_GPU (nvml.h).
    degrees = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetTemperature(handle, 0))
    return None if degrees is None else int(degrees)


def _read_power(pynvml: ModuleType, handle: object) -> float | None:
    milliwatts = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    return None if milliwatts is None else milliwatts / 1000  # nvml.h: milliwatts.


def _read_used_bytes(pynvml: ModuleType, handle: object) -> int | None:
    memory = query_nvml(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return None if memory is None else int(memory.used)


READINGS: dict[str, Callable[[ModuleType, object], int | float | None]] = {
    "utilisation_percent": _read_utilization,
    "temperature_celsius": _read_temperature,
    "power_watts": _read_power,
    "used_bytes": _read_used_bytes,
}
"""The NVML readings of a sample, by name; ``used_bytes`` includes all processes on the GPU."""


class GpuSample(NamedTuple):
    """The readings of all GPUs of a run at one time."""

    time: float
    """Epoch seconds."""
    readings: dict[str, list[int | float | None]]
    """One number per GPU by name of the reading, for readings that the driver supports."""

    gpus: tuple[int, ...] = ()
    """Driver indices of the GPUs, on the nodes of a cluster; ``run.json`` has those of this machine."""

    def to_record(self) -> dict[str, object]:
        """Return the sample as a line of ``cards.jsonl``."""
        gpus = {"gpus": list(self.gpus)} if self.gpus else {}
        return {"time": self.time, **gpus, **self.readings}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> GpuSample | None:
        """Return the sample that :meth:`to_record` wrote; None for another line."""
        when, gpus = record.get("time"), record.get("gpus")
        if not is_number(when):
            return None
        readings = {
            name: [number if is_number(number) else None for number in numbers]
            for name in READINGS
            if isinstance(numbers := record.get(name), list)
        }
        return cls(when, readings, tuple(filter(is_int, gpus)) if isinstance(gpus, list) else ())


class GpuSampler:
    """GPU sampler of one run. Without GPUs it does nothing and calls no driver."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        description = read_json(folder.run_json) or {}
        indices, world_size = description.get("gpus"), description.get("world_size")
        self.gpus = list(filter(is_int, indices)) if isinstance(indices, list) else []
        """Driver indices of the run's GPUs; on a node they are known once the driver was asked."""
        self._num_node_gpus = 0
        if isinstance(folder, NodeFolder) and description.get("device") == "cuda" and is_int(world_size):
            self._num_node_gpus = len(folder.select_ranks(world_size))
        self._max_samples, self._num_dense = MAX_SAMPLES, DENSE_SAMPLES
        if self._num_node_gpus:
            self._max_samples, self._num_dense = MAX_NODE_SAMPLES, DENSE_NODE_SAMPLES
        self._next_request = 0.0
        self._requested = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        # Of the attempts before: thinning out writes the whole file again.
        lines = read_lines(folder.gpu_samples) if folder.attempt > 1 else ()
        self._samples = list(filter(None, map(GpuSample.from_record, lines)))

    def request_sample(self) -> None:
        """Request a sample from the thread and return immediately."""
        if not self.gpus and not self._num_node_gpus:
            return
        if self._num_node_gpus:
            if time.monotonic() < self._next_request:
                return
            self._next_request = time.monotonic() + NODE_SECONDS
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._sample_on_request, daemon=True, name="shardscope-gpu-monitor"
            )
            self._thread.start()
        self._requested.set()

    def finish(self) -> None:
        """Stop sampling."""
        self._ended = True
        self._requested.set()

    def _sample_on_request(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError):
            return
        except Exception as error:  # NVMLError, or any error of a replacement for the pynvml package.
            print(f"GPU monitoring stopped: {error}", file=sys.stderr, flush=True)
            return
        try:
            if self._num_node_gpus:  # The scheduler has chosen them, by CUDA_VISIBLE_DEVICES.
                self.gpus = list_visible_indices()[: self._num_node_gpus]
            # A slow driver call delays only later samples: requests that come meanwhile are one.
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in self.gpus]
            while self._requested.wait() and not self._ended:
                self._requested.clear()
                with contextlib.suppress(OSError):  # A full disk costs a sample.
                    gpus = tuple(self.gpus) if self._num_node_gpus else ()
                    self._store(read_sample(pynvml, handles)._replace(gpus=gpus))
        except pynvml.NVMLError as error:  # For example a GPU that has fallen off the bus.
            print(f"GPU monitoring stopped: {error}", file=sys.stderr, flush=True)
        finally:
            pynvml.nvmlShutdown()

    def _store(self, sample: GpuSample) -> None:
        if not sample.readings:  # This driver supports none of them.
            return
        self._samples.append(sample)
        if len(self._samples) <= self._max_samples:
            append_line(self.folder.gpu_samples, sample.to_record())
            return
        # Halve the older part and write the file again, under another name: readers see either version.
        older, dense = self._samples[: -self._num_dense], self._samples[-self._num_dense :]
        self._samples = _thin_out(older, len(older) // 2) + dense
        partial = partial_file(self.folder.gpu_samples)
        with open_new(partial) as file:
            file.writelines(encode(one.to_record()) for one in self._samples)
        partial.replace(self.folder.gpu_samples)


def _thin_out(samples: list[GpuSample], max_samples: int) -> list[GpuSample]:
    """Return about ``max_samples`` of ``samples``, the first included, evenly spaced in time."""
    interval = (samples[-1].time - samples[0].time) / max_samples
    thinned = samples[:1]
    for sample in samples[1:]:
        # abs(): the system clock may have been set back.
        if abs(sample.time - thinned[-1].time) >= interval:
            thinned.append(sample)
    # A clock that jumps back and forth makes every interval long: then thin out by number.
    if len(thinned) <= max_samples + 1:
        return thinned
    every = -(-len(samples) // max_samples)
    return samples[::every]


def read_sample(pynvml: ModuleType, handles: list[object]) -> GpuSample:
    """Return a sample of the GPUs with these NVML handles."""
    readings: dict[str, list[int | float | None]] = {}
    for name, read in READINGS.items():
        numbers = [read(pynvml, handle) for handle in handles]
        if any(number is not None for number in numbers):
            readings[name] = numbers
    return GpuSample(time.time(), readings)


def read_gpu_samples(folder: RunFolder, gpus: list[int]) -> list[dict[str, float]]:
    """Return the samples of a run, one record per sample and GPU: time, rank, gpu and the readings.

    Those of a cluster have the node, too: they are of the latest attempt, by the clock of node 0.
    """
    if not folder.has_nodes:
        lines = read_lines(folder.gpu_samples)
        return [record for line in lines for record in _read_line(line, dict(enumerate(gpus)), {})]
    description = read_json(folder.run_json) or {}
    world_size, num_nodes = description.get("world_size"), description.get("num_nodes")
    if not is_int(world_size) or not is_int(num_nodes) or not 0 < num_nodes <= world_size:
        return []
    offsets = read_clock_offsets(folder)
    records: list[dict[str, float]] = []
    for part in folder.list_nodes():
        if part.node >= num_nodes:
            continue
        first = part.node * (world_size // num_nodes)
        for line in read_lines(part.gpu_samples):
            indices = line.get("gpus")
            named = list(filter(is_int, indices)) if isinstance(indices, list) else []
            of_rank = {first + local: gpu for local, gpu in enumerate(named[: world_size // num_nodes])}
            found = _read_line(line, of_rank, {"node": part.node})
            records += [{**one, "time": one["time"] - offsets.of_node(part.node)} for one in found]
    return sorted(records, key=lambda record: record["time"])


def _read_line(
    line: Mapping[str, object], gpus: Mapping[int, int], more: Mapping[str, float]
) -> list[dict[str, float]]:
    """Return a record for each rank of ``gpus`` (driver indices by rank) that a line has readings of."""
    when = line.get("time")
    if not is_number(when):
        return []
    records: list[dict[str, float]] = []
    for position, (rank, gpu) in enumerate(gpus.items()):
        readings: dict[str, float] = {}
        for name in READINGS:
            numbers = line.get(name)
            value = numbers[position] if isinstance(numbers, list) and position < len(numbers) else None
            if is_number(value):
                readings[name] = value
        if readings:
            records.append({"time": when, "rank": rank, **more, "gpu": gpu, **readings})
    return records
