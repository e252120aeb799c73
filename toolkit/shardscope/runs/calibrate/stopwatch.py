"""How ranks time one call: all of them make it at the same moment, and the slowest counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

MIN_SAMPLES = 3
MAX_SAMPLES = 100
SAMPLE_SECONDS = 1e-3
"""So many calls are timed together that a sample is at least this long: clocks cost, a GPU's calls queue."""


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float
    own: float
    """Of a CPU rank, the processor's time; else the same."""


class Stopwatch:
    """Times calls on all ranks of the process group, which must make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.once = 0.0
        """Seconds by the clock of one call of the last case, on the slowest rank."""

    def work(self, call: Callable[[], Any], budget_seconds: float) -> float:
        """Seconds of ``call`` on the slowest rank; about ``budget_seconds`` are spent on it.

        Of its samples the first quartile. What else runs on the machine can only make a call longer, and of a
        CPU rank the processor's time is taken, which it does not.
        """
        samples = self._samples(call, budget_seconds)
        return quantiles(self._slowest([one.own for one in samples]), n=4, method="inclusive")[0]

    def waiting(self, call: Callable[[], Any], budget_seconds: float) -> float:
        """The same of a call in which ranks wait for each other: time by the clock, of the fastest sample.

        Each sample is its slowest rank's, for one that comes late finds the others waiting for it.
        """
        return min(self._slowest([one.wall for one in self._samples(call, budget_seconds)]))

    def slowest(self, seconds: float) -> float:
        """The most that any rank says: what they all wait for, and what they all decide by."""
        return self._slowest([seconds])[0]

    def total(self, number: float) -> float:
        """The sum over ranks."""
        if not dist.is_initialized():
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(told)
        return float(told.item())

    def _samples(self, call: Callable[[], Any], budget_seconds: float) -> list[Sample]:
        call()
        self.once = self.slowest(self._sample(call, 1).wall)
        calls = max(1, min(1000, round(SAMPLE_SECONDS / self.once)))
        number = max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_seconds / (self.once * calls))))
        self.slowest(0.0)  # Nobody begins before all are here.
        return [self._sample(call, calls) for _ in range(number)]

    def _sample(self, call: Callable[[], Any], calls: int) -> Sample:
        self._finish()
        wall, own = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        self._finish()
        wall, own = time.perf_counter() - wall, time.process_time() - own
        if self.device.type != "cpu":
            return Sample(wall / calls, wall / calls)
        # Threads of one operator share its work, and those that wait for others spin.
        return Sample(wall / calls, own / calls / torch.get_num_threads())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, samples: list[float]) -> list[float]:
        """Of each sample the slowest rank's."""
        if not dist.is_initialized():
            return samples
        told = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return [float(one) for one in told]
