"""What a run's own memory numbers are to be compared with."""

from __future__ import annotations

from typing import NamedTuple

import shardscope as ss

MIB, GIB = 2**20, 2**30


class PredictedPeak(NamedTuple):
    """The predicted counterpart of ``peak_memory_bytes``, and what both count."""

    num_bytes: int
    of: str


class Unit(NamedTuple):
    """GiB, or MiB for the tiny models of rehearsals."""

    name: str
    num_bytes: int

    @classmethod
    def of(cls, num_bytes: int) -> Unit:
        """The unit in which ``num_bytes`` reads well."""
        return cls("MiB", MIB) if 0 < num_bytes < GIB // 4 else cls("GiB", GIB)

    def show(self, num_bytes: float) -> str:
        """``num_bytes`` in this unit, two decimals."""
        return f"{num_bytes / self.num_bytes:,.2f}"


def predicted_peak(run: ss.Run) -> PredictedPeak | None:
    """The plan's prediction of what ranks report; None if the run's plan cannot be read.

    GPUs report all tensors at their peak (``torch.cuda.max_memory_allocated``). CPU ranks report the tensors
    that outlive a step: parameters, gradients and optimizer.
    """
    try:
        plan = run.plan
        report = plan.memory()
    except (ValueError, OSError):
        return None
    if plan.cluster.gpu.name == "cpu":
        parts = report.at("optimizer")
        held = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        return PredictedPeak(held, "of parameters, gradients and optimizer")
    libraries = ("communication", "runtime", "fragmentation")
    return PredictedPeak(
        sum(value for name, value in report.components.items() if name not in libraries),
        "of tensors at the peak",
    )
