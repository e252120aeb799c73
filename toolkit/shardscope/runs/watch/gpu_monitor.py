"""GPU utilization, temperature, power and memory of a run, sampled from NVML once a second.

The supervisor samples, not the kernel. A driver call may take seconds, so it runs in its own thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from shardscope.machine.detection import query_nvml
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, encode, read_json, read_lines
from shardscope.records.json_values import is_int, is_number
from shardscope.records.regular_files import open_new

MAX_SAMPLES = 600
"""Maximum number of samples in the file, for a run of any length: older ones are thinned out evenly."""
DENSE_SAMPLES = 200
"""Number of latest samples that are never thinned out."""


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

    def to_record(self) -> dict[str, object]:
        """Return the sample as a line of ``cards.jsonl``."""
        return {"time": self.time, **self.readings}


class GpuSampler:
    """GPU sampler of one run. Without GPUs it does nothing and calls no driver."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        indices = (read_json(folder.run_json) or {}).get("gpus")
        self.gpus = list(filter(is_int, indices)) if isinstance(indices, list) else []
        """Driver indices of the run's GPUs."""
        self._requested = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        self._samples: list[GpuSample] = []

    def request_sample(self) -> None:
        """Request a sample from the thread and return immediately."""
        if not self.gpus:
            return
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
            # A slow driver call delays only later samples: requests that come meanwhile are one.
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in self.gpus]
            while self._requested.wait() and not self._ended:
                self._requested.clear()
                with contextlib.suppress(OSError):  # A full disk costs a sample.
                    self._store(read_sample(pynvml, handles))
        except pynvml.NVMLError as error:  # For example a GPU that has fallen off the bus.
            print(f"GPU monitoring stopped: {error}", file=sys.stderr, flush=True)
        finally:
            pynvml.nvmlShutdown()

    def _store(self, sample: GpuSample) -> None:
        if not sample.readings:  # This driver supports none of them.
            return
        self._samples.append(sample)
        if len(self._samples) <= MAX_SAMPLES:
            append_line(self.folder.gpu_samples, sample.to_record())
            return
        # Halve the older part and write the file again, under another name: readers see either version.
        older, dense = self._samples[:-DENSE_SAMPLES], self._samples[-DENSE_SAMPLES:]
        self._samples = _thin_out(older, len(older) // 2) + dense
        partial = self.folder.gpu_samples.with_name(f".{self.folder.gpu_samples.name}.{os.getpid()}")
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
    """Return the samples of a run, one record per sample and GPU: time, rank, gpu and the readings."""
    records: list[dict[str, float]] = []
    for line in read_lines(folder.gpu_samples):
        when = line.get("time")
        if not is_number(when):
            continue
        for rank, gpu in enumerate(gpus):
            record: dict[str, float] = {"time": when, "rank": rank, "gpu": gpu}
            for name in READINGS:
                numbers = line.get(name)
                value = numbers[rank] if isinstance(numbers, list) and rank < len(numbers) else None
                if is_number(value):
                    record[name] = value
            if len(record) > 3:
                records.append(record)
    return records
