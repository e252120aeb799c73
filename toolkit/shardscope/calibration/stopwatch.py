"""How ranks time one call: all of them make it at the same moment, and the slowest counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

MIN_CALLS = 3
MAX_CALLS = 100
"""Samples of one call."""
SAMPLE_SECONDS = 1e-3
"""Calls to a GPU are queued; so many are timed together that a sample is at least this long."""


class Stopwatch:
    """Times calls on all ranks of the process group, which must make the same calls in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], Any], budget_seconds: float) -> float:
        """Seconds of ``call`` on the slowest rank; about ``budget_seconds`` are spent on it.

        Of its samples the first quartile: what else runs on the machine can only make a call longer.
        """
        call()
        once = self.slowest(self._sample(call, 1))
        per_sample = 1 if self.device.type == "cpu" else max(1, min(1000, round(SAMPLE_SECONDS / once)))
        wanted = budget_seconds / (once * per_sample)
        samples = max(MIN_CALLS, min(MAX_CALLS, int(wanted)))
        if dist.is_initialized():
            dist.barrier()
        taken = [self._sample(call, per_sample) for _ in range(samples)]
        return self.slowest(quantiles(taken, n=4, method="inclusive")[0])

    def slowest(self, seconds: float) -> float:
        """The most that any rank says: what they all wait for, and what they all decide by."""
        if not dist.is_initialized():
            return seconds
        told = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told.item())

    def total(self, number: float) -> float:
        """The sum over ranks."""
        if not dist.is_initialized():
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(told)
        return float(told.item())

    def _sample(self, call: Callable[[], Any], calls: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - began) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
