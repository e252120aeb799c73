"""How busy, hot and hungry a run's cards are, asked of NVML once a second and kept in the run folder.

The supervisor asks, never the kernel. A driver may take seconds to answer: a thread of its own waits for it.
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
"""In the file, whatever a run takes: of more, the older ones are thinned evenly."""
DENSE_SAMPLES = 200
"""The last ones, which stay as they are."""


def _utilisation(pynvml: Any, handle: Any) -> int | None:
    rates = ask_quietly(pynvml, "nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None else int(rates.gpu)


def _temperature(pynvml: Any, handle: Any) -> int | None:
    # The older of two names, which drivers of all ages have; 0 is the sensor of the GPU itself (nvml.h).
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
"""What is asked of each card; ``used_bytes`` counts everybody's processes."""


class CardWatch:
    """One run's; without cards it does nothing, and asks no driver."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        described = read_json(folder.run_json) or {}
        found = described.get("gpus")
        self.cards = [card for card in found if isinstance(card, int)] if isinstance(found, list) else []
        self._asked = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None
        self._samples: list[dict[str, Any]] = []

    def look(self) -> None:
        """Ask for a sample, and return at once."""
        if not self.cards:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="shardscope-cards")
            self._thread.start()
        self._asked.set()

    def finish(self) -> None:
        """No more samples."""
        self._ended = True
        self._asked.set()

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError):
            return
        except Exception as error:  # NVMLError, of a library that may be any stand-in
            print(f"GPUs are not watched: {error}", file=sys.stderr, flush=True)
            return
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(card) for card in self.cards]
            while self._asked.wait() and not self._ended:
                self._asked.clear()
                with contextlib.suppress(OSError):  # A full disk costs a sample.
                    self._keep(sample(pynvml, handles))
        except pynvml.NVMLError as error:  # a card that is not there any more
            print(f"GPUs are not watched: {error}", file=sys.stderr, flush=True)
        finally:
            pynvml.nvmlShutdown()

    def _keep(self, found: dict[str, Any]) -> None:
        if len(found) == 1:  # Only a time: this driver tells nothing.
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
    """At most ``most`` of ``samples``, the first among them, about equally far apart in time."""
    between = (samples[-1]["time"] - samples[0]["time"]) / most
    kept = samples[:1]
    for each in samples[1:]:
        # A clock that was set back counts as well.
        if abs(each["time"] - kept[-1]["time"]) >= between:
            kept.append(each)
    return kept if len(kept) <= most + 1 else samples[:: -(-len(samples) // most)]


def sample(pynvml: Any, handles: list[Any]) -> dict[str, Any]:
    """``time``, and by name a list with a number for each card; names that no card answers are left out."""
    found: dict[str, Any] = {"time": time.time()}
    for name, ask in ASKED.items():
        answers = [ask(pynvml, handle) for handle in handles]
        if any(answer is not None for answer in answers):
            found[name] = answers
    return found


def card_samples(folder: RunFolder, cards: list[int]) -> list[dict[str, Any]]:
    """The samples of a run as records, one for each card: time, rank, gpu, and what that card answered."""
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
