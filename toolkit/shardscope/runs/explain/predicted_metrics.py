"""Predicted values for the charts of a run that trains the plan's model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.runs.explain.measured import sum_tensor_bytes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PredictedMetrics:
    """Predicted values of the logged metrics, by metric name; None where there is no prediction."""

    peak_memory_bytes: int | None
    """Predicted peak of one rank; None on CPU ranks of the user's own code, which log resident memory."""
    memory_content: str
    """Content of these bytes: on a GPU all tensors at the peak, on a CPU those that outlive a step."""
    memory_title: str = "memory"
    """Its name in a chart's title."""
    step_seconds: float | None = None
    """Prediction of ``plan.step()`` at launch."""
    tokens_per_second: float | None = None
    """Tokens per second of one rank: its share of the global batch divided by the step time."""
    step_source: str = ""
    """Source of the constants of the step prediction: this machine's calibration, or the catalogue."""

    def get(self, metric: str) -> float | None:
        """Return the prediction for ``metric``, or None."""
        known: Mapping[str, float | None] = {
            "peak_memory_bytes": self.peak_memory_bytes,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        return known.get(metric)


def predict_metrics(plan: Plan, description: Mapping[str, object], engine: object) -> PredictedMetrics | None:
    """Return the predictions of ``plan`` for a run; None if the run may train another model.

    ``description`` is the content of ``run.json``, ``engine`` the record of rank 0's engine. The user's own
    function counts as training the plan's model if the number of parameters is the same.
    """
    if description.get("trains_the_plan") is not True and not _has_as_many_parameters(plan, engine):
        return None
    try:
        report = plan.memory()
    except ValueError:
        return None
    tensor_bytes: int | None
    if plan.cluster.gpu.name == "cpu" and description.get("trains_the_plan") is not True:
        # A script or function logs the resident memory of its process (``ctx.memory_metrics``): libraries are
        # most of it, and no plan predicts them.
        tensor_bytes, content, title = None, "", "memory"
    elif plan.cluster.gpu.name == "cpu":
        # An engine's CPU rank logs what outlives a step.
        parts = report.at("optimizer")
        tensor_bytes = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        content, title = "parameters, gradients and optimizer", "training state"
    else:
        tensor_bytes = sum_tensor_bytes(report.components)
        content, title = "tensors at the peak", "peak memory"
    seconds, source = _read_predicted_step(description)
    tokens = plan.num_micro_batches * plan.recipe.micro_batch_size * plan.recipe.seq_len
    return PredictedMetrics(
        peak_memory_bytes=None if tensor_bytes is None else int(tensor_bytes),
        memory_content=content,
        memory_title=title,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        step_source=source,
    )


def _read_predicted_step(description: Mapping[str, object]) -> tuple[float | None, str]:
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
