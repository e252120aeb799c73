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
from typing import Any

from shardscope.machine.detection import ask_quietly
from shardscope.records.files import append_line, encode, read_json, read_lines
from shardscope.records.folder import RunFolder
from shardscope.records.json_values import is_number
from shardscope.records.regular_files import open_new

MAX_SAMPLES = 600
"""Maximum number of samples in the file, for a run of any length: older ones are thinned out evenly."""
DENSE_SAMPLES = 200
"""Number of latest samples that are never thinned out."""


def _utilisation(pynvml: Any, handle: Any) -> int | None:
    rates = ask_quietly(pynvml, "nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None else int(rates.gpu)


def _temperature(pynvml: Any, handle: Any) -> int | None:
    # The older of two functions, which every driver version has; 0 is NVML_TEMPERATURE_GPU (nvml.h).
    degrees = ask_quietly(pynvml, "nvmlDeviceGetTemperature", handle, 0)
    return None if degrees is None else int(degrees)


def _power(pynvml: Any, handle: Any) -> float | None:
    milliwatts = ask_quietly(pynvml, "nvmlDeviceGetPowerUsage", handle)
    return None if milliwatts is None else milliwatts / 1000


def _used(pynvml: Any, handle: Any) -> int | None:
    memory = ask_quietly(pynvml, "nvmlDeviceGetMemoryInfo", handle)
    return None if memory is None else int(memory.used)


ASKED: dict[str, Callable[[Any, Any], Any]] = {
    "utilisation_percent": _utilisation,
    "temperature_celsius": _temperature,
    "power_watts": _power,
    "used_bytes": _used,
}
"""The NVML readings of a sample, by name; ``used_bytes`` includes all processes on the GPU."""


class GpuSampler:
    """GPU sampler of one run. Without GPUs it does nothing and calls no driver."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        described = read_json(folder.run_json) or {}
        found = described.get("gpus")
        self.cards = [card for card in found if isinstance(card, int)] if isinstance(found, list) else []
        self._asked = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        self._samples: list[dict[str, Any]] = []

    def request_sample(self) -> None:
        """Request a sample from the thread and return immediately."""
        if not self.cards:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="shardscope-cards")
            self._thread.start()
        self._asked.set()

    def finish(self) -> None:
        """Stop sampling."""
        self._ended = True
        self._asked.set()

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError):
            return
        except Exception as error:  # NVMLError, or any error of a replacement for the pynvml package.
            print(f"GPUs are not watched: {error}", file=sys.stderr, flush=True)
            return
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(card) for card in self.cards]
            while self._asked.wait() and not self._ended:
                self._asked.clear()
                with contextlib.suppress(OSError):  # A full disk costs a sample.
                    self._keep(sample(pynvml, handles))
        except pynvml.NVMLError as error:  # For example a GPU that has fallen off the bus.
            print(f"GPUs are not watched: {error}", file=sys.stderr, flush=True)
        finally:
            pynvml.nvmlShutdown()

    def _keep(self, found: dict[str, Any]) -> None:
        if len(found) == 1:  # Only the time: this driver supports none of the readings.
            return
        self._samples.append(found)
        if len(self._samples) <= MAX_SAMPLES:
            append_line(self.folder.cards, found)
            return
        older, dense = self._samples[:-DENSE_SAMPLES], self._samples[-DENSE_SAMPLES:]
        self._samples = _thinned(older, len(older) // 2) + dense
        partial = self.folder.cards.with_name(f".{self.folder.cards.name}.{os.getpid()}")
        with open_new(partial) as file:
            file.writelines(map(encode, self._samples))
        partial.replace(self.folder.cards)


def _thinned(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return about ``most`` of ``samples``, the first included, evenly spaced in time."""
    between = (samples[-1]["time"] - samples[0]["time"]) / most
    kept = samples[:1]
    for each in samples[1:]:
        # abs(): the system clock may have been set back.
        if abs(each["time"] - kept[-1]["time"]) >= between:
            kept.append(each)
    return kept if len(kept) <= most + 1 else samples[:: -(-len(samples) // most)]


def sample(pynvml: Any, handles: list[Any]) -> dict[str, Any]:
    """Return a sample: ``time``, and for each supported reading a list with one number per GPU."""
    found: dict[str, Any] = {"time": time.time()}
    for name, ask in ASKED.items():
        answers = [ask(pynvml, handle) for handle in handles]
        if any(answer is not None for answer in answers):
            found[name] = answers
    return found


def read_gpu_samples(folder: RunFolder, cards: list[int]) -> list[dict[str, Any]]:
    """Return the samples of a run, one record per sample and GPU: time, rank, gpu and the readings."""
    records = []
    for line in read_lines(folder.cards):
        when = line.get("time")
        if not is_number(when):
            continue
        for rank, card in enumerate(cards):
            record = {"time": when, "rank": rank, "gpu": card}
            for name in ASKED:
                answers = line.get(name)
                value = answers[rank] if isinstance(answers, list) and rank < len(answers) else None
                if is_number(value):
                    record[name] = value
            if len(record) > 3:
                records.append(record)
    return records
