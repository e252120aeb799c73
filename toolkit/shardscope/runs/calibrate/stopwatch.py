"""Timing of one call on all ranks at once; the slowest rank counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import NamedTuple

import torch
import torch.distributed as dist

MIN_SAMPLES = 3
MAX_SAMPLES = 100
SAMPLE_SECONDS = 1e-3
"""Minimum length of a sample, which times several calls: clocks have overhead, and GPU calls are queued."""


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float
    """CPU time on a CPU rank, else the same as ``wall``."""


class Stopwatch:
    """Timer of calls on all ranks of the process group, which must make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds_per_call = 0.0
        """Wall-clock seconds of one call of the last case, on the slowest rank."""

    def measure_work(self, call: Callable[[], object], budget_seconds: float) -> float:
        """Return the seconds of ``call`` on the slowest rank, measured for about ``budget_seconds``.

        The result is the first quartile of the samples, because other load can only make a call longer. On a
        CPU rank CPU time is measured, which other load does not change.
        """
        samples = self._take_samples(call, budget_seconds)
        return quantiles(self._max_of_each([sample.cpu for sample in samples]), n=4, method="inclusive")[0]

    def measure_waiting(self, call: Callable[[], object], budget_seconds: float) -> float:
        """Return the wall-clock seconds of a call in which ranks wait for each other: the fastest sample.

        Each sample counts with its slowest rank, because a late rank finds the others already waiting.
        """
        return min(self._max_of_each([sample.wall for sample in self._take_samples(call, budget_seconds)]))

    def max_over_ranks(self, seconds: float) -> float:
        """Return the maximum over ranks, so that all ranks decide by the same number."""
        return self._max_of_each([seconds])[0]

    def sum_over_ranks(self, number: float) -> float:
        """Return the sum over ranks."""
        if not dist.is_initialized():
            return number
        tensor = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(tensor)
        return float(tensor.item())

    def _take_samples(self, call: Callable[[], object], budget_seconds: float) -> list[Sample]:
        call()  # Warmup: the first call allocates memory, selects kernels and connects ranks.
        # All ranks make the same number of calls, which they derive from the slowest rank's time.
        self.seconds_per_call = self.max_over_ranks(self._take_sample(call, 1).wall)
        calls = max(1, min(1000, round(SAMPLE_SECONDS / self.seconds_per_call)))
        sample_seconds = self.seconds_per_call * calls
        number = max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_seconds / sample_seconds)))
        self.max_over_ranks(0.0)  # A barrier: all ranks start together.
        return [self._take_sample(call, calls) for _ in range(number)]

    def _take_sample(self, call: Callable[[], object], calls: int) -> Sample:
        # GPU calls return before they are done: wait for earlier ones, then for these.
        self._synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        self._synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if self.device.type != "cpu":
            return Sample(wall / calls, wall / calls)
        # Process time adds up all threads, also those that spin while they wait.
        return Sample(wall / calls, cpu / calls / torch.get_num_threads())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _max_of_each(self, samples: list[float]) -> list[float]:
        """Return the maximum over ranks of each sample."""
        if not dist.is_initialized():
            return samples
        tensor = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]
