"""What was predicted of a run's charts, where the run trains the plan's model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardscope.runs.explain.measured import tensors_of

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The predictions of what ranks log, each under the name of the metric; None where there is none."""

    peak_memory_bytes: int
    """Of one rank."""
    memory_of: str
    """What these bytes are: a GPU's rank reports all tensors, a CPU rank those that outlive a step."""
    step_seconds: float | None = None
    """As ``plan.step()`` said at launch."""
    tokens_per_second: float | None = None
    """Of one rank: its share of a global batch by the step."""
    step_from: str = ""
    """Which constants the step is predicted from: a calibration of this machine, or the catalogue."""

    def of(self, metric: str) -> float | None:
        """The prediction of what ranks log as ``metric``."""
        known: Mapping[str, float | None] = {
            "peak_memory_bytes": self.peak_memory_bytes,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        return known.get(metric)


def expected(plan: Plan, description: Mapping[str, Any], engine: object) -> Expected | None:
    """The predictions of ``plan`` for a run; None where nothing says that the run trains its model.

    ``description`` is what ``run.json`` has, ``engine`` what rank 0's engine recorded. A task of one's own
    has the plan's model if it has as many parameters.
    """
    if description.get("trains_the_plan") is not True and not _has_as_many_parameters(plan, engine):
        return None
    try:
        report = plan.memory()
    except ValueError:
        return None
    if plan.cluster.gpu.name == "cpu":
        parts = report.at("optimizer")
        held = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        what = "parameters, gradients and optimizer"
    else:
        held = tensors_of(report.components)
        what = "tensors at the peak"
    seconds, source = _predicted_step(description)
    tokens = plan.num_micro_batches * plan.recipe.micro_batch_size * plan.recipe.seq_len
    return Expected(
        peak_memory_bytes=int(held),
        memory_of=what,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        step_from=source,
    )


def _predicted_step(description: Mapping[str, Any]) -> tuple[float | None, str]:
    predicted = description.get("predicted")
    if not isinstance(predicted, Mapping):
        return None, ""
    seconds = predicted.get("step_seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return None, ""
    return (float(seconds), str(predicted.get("from") or "")) if seconds > 0 else (None, "")


def _has_as_many_parameters(plan: Plan, engine: object) -> bool:
    if not isinstance(engine, Mapping):
        return False
    counted = engine.get("num_parameters", engine.get("num_trained_parameters"))
    return bool(counted == plan.architecture.num_parameters)
