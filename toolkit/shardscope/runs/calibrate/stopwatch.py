"""Timing of one call on all ranks at once; the slowest rank counts."""

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
"""Minimum length of a sample, which times several calls: clocks have overhead, and GPU calls are queued."""


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float
    own: float
    """CPU time on a CPU rank, else the same as ``wall``."""


class Stopwatch:
    """Timer of calls on all ranks of the process group, which must make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.once = 0.0
        """Wall-clock seconds of one call of the last case, on the slowest rank."""

    def work(self, call: Callable[[], Any], budget_seconds: float) -> float:
        """Return the seconds of ``call`` on the slowest rank, measured for about ``budget_seconds``.

        The result is the first quartile of the samples, because other load can only make a call longer. On a
        CPU rank CPU time is measured, which other load does not change.
        """
        samples = self._samples(call, budget_seconds)
        return quantiles(self._slowest([one.own for one in samples]), n=4, method="inclusive")[0]

    def waiting(self, call: Callable[[], Any], budget_seconds: float) -> float:
        """Return the wall-clock seconds of a call in which ranks wait for each other: the fastest sample.

        Each sample counts with its slowest rank, because a late rank finds the others already waiting.
        """
        return min(self._slowest([one.wall for one in self._samples(call, budget_seconds)]))

    def slowest(self, seconds: float) -> float:
        """Return the maximum over ranks, so that all ranks decide by the same number."""
        return self._slowest([seconds])[0]

    def total(self, number: float) -> float:
        """Return the sum over ranks."""
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
        self.slowest(0.0)  # A barrier: all ranks start together.
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
        # Process time adds up all threads, also those that spin while they wait.
        return Sample(wall / calls, own / calls / torch.get_num_threads())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, samples: list[float]) -> list[float]:
        """Return the maximum over ranks of each sample."""
        if not dist.is_initialized():
            return samples
        told = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return [float(one) for one in told]
