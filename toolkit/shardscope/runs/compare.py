"""Runs beside each other: what each planned, how it went, and how far off its prediction was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from shardscope.runs.folder import FINAL
from shardscope.runs.metrics_table import FIRST, curve
from shardscope.validation import one_of, refuse

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.runs.run import Run

SHOWN = {
    "started": "{:%Y-%m-%d %H:%M}",
    "seconds": "{:,.0f}",
    "loss": "{:.4g}",
    "step_seconds": "{:.3g}",
    "predicted_step_seconds": "{:.3g}",
    "step_error": "{:+.0%}",
    "tensors_gib": "{:.3g}",
    "predicted_tensors_gib": "{:.3g}",
    "memory_error": "{:+.0%}",
}


class Runs(list["Run"]):
    """A list of runs; at the end of a cell it is a table, and ``compare`` puts two of them side by side."""

    def to_frame(self) -> pd.DataFrame:
        """One line per run.

        ``run``, ``status``, ``started`` (UTC), ``seconds`` it took, ``plan``, ``ranks``, ``steps``, last
        ``loss`` (mean over ranks), median and predicted ``step_seconds``, measured and predicted tensors at
        the peak (GiB). An error is (predicted - measured) / measured. Empty where something is not known.
        """
        import pandas as pd

        return pd.DataFrame([_row(run) for run in self], columns=list(_COLUMNS))

    def curves(self, metric: str = "loss") -> pd.DataFrame:
        """``metric`` by step, the mean over ranks, a column for each run that logged it.

        Raises ``ValueError`` naming what was logged if no run logged it as a number.
        """
        import pandas as pd

        found = {run.name: curve(run.metrics(), metric) for run in self}
        if not any(found.values()):
            logged = sorted({name for run in self for line in run.metrics() for name in line} - {*FIRST})
            refuse("curves metric", metric, f"what was logged: {', '.join(logged) or 'nothing'}", "'loss'")
        frame = pd.DataFrame({name: pd.Series(steps, dtype=float) for name, steps in found.items() if steps})
        frame.index.name = "step"
        return frame.sort_index()

    def compare(self, first: str | Run, second: str | Run) -> Comparison:
        """Two of these runs, by name or itself. Raises ``ValueError`` for a name that none has."""
        return Comparison(runs=Runs([self._named(first), self._named(second)]))

    def _named(self, name: str | Run) -> Run:
        names = [run.name for run in self]
        if isinstance(name, str):
            return self[names.index(one_of("compare run", name, names))]
        # By the folder, which is the run: there may be any number of handles on it.
        wanted = getattr(name, "folder", None)
        found = next((run for run in self if wanted and run.folder.resolve() == wanted.resolve()), None)
        if found is None:
            refuse("compare run", name, f"one of these: {', '.join(names)}", "its name")
        return found

    def _repr_html_(self) -> str:
        if not self:
            return "<p>No runs here.</p>"
        return _html(self.to_frame())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs: what their plans differ in, both lines of the table, and their curves."""

    runs: Runs

    @property
    def differences(self) -> list[str]:
        """``recompute none → full`` and the like, from the first plan to the second.

        Raises ``ValueError`` if a plan cannot be read.
        """
        from shardscope.planner.differences import differences

        return [str(difference) for difference in differences(self.runs[0].plan, self.runs[1].plan)]

    def to_frame(self) -> pd.DataFrame:
        """A column for each run: status, times, losses and the errors of both predictions."""
        frame = self.runs.to_frame()
        frame.index = [run.name for run in self.runs]
        return frame.drop(columns="run").T

    def curves(self, metric: str = "loss") -> pd.DataFrame:
        """``metric`` of both by step. Raises ``ValueError`` if neither logged it."""
        return self.runs.curves(metric)

    def _repr_html_(self) -> str:
        try:
            words = "; ".join(self.differences) or "none"
        except ValueError as error:
            words = f"not known: {error}"
        return f"{self.runs._repr_html_()}<p>Differences of their plans: {escape(words)}.</p>"


_COLUMNS = (
    *("run", "status", "started", "seconds", "plan", "ranks", "steps", "loss"),
    *("step_seconds", "predicted_step_seconds", "step_error"),
    *("tensors_gib", "predicted_tensors_gib", "memory_error"),
)


def _row(run: Run) -> dict[str, Any]:
    import pandas as pd

    from shardscope.timing.calibration_runs import median_step

    metrics, history = run.metrics(), run.history
    losses, step = curve(metrics, "loss"), median_step(metrics)
    times = [record["time"] for record in history if isinstance(record["time"], int | float)]
    until = times[-1] if times and history[-1]["status"] in FINAL else time.time()
    row: dict[str, Any] = {
        "run": run.name,
        "status": run.status,
        "started": pd.Timestamp(times[0], unit="s") if times else None,
        "seconds": until - times[0] if times else None,
        "plan": _plan_words(run),
        "ranks": run.world_size,
        "steps": len({line["step"] for line in metrics if isinstance(line.get("step"), int)}),
        "loss": losses[max(losses)] if losses else None,
        "step_seconds": step[1] if step else None,
        "predicted_step_seconds": run.predicted_step_seconds,
    }
    if step and run.predicted_step_seconds:
        row["step_error"] = run.predicted_step_seconds / step[1] - 1
    return row | _memory(run)


def _memory(run: Run) -> dict[str, float]:
    from shardscope.runs.measured import predicted_tensors

    found = run.memory()
    row = {}
    if found.predicted is not None:
        row["predicted_tensors_gib"] = predicted_tensors(found.predicted) / 2**30
    if found.tensor_bytes and (error := found.error) is not None:
        row |= {"tensors_gib": found.tensor_bytes / 2**30, "memory_error": error}
    return row


def _plan_words(run: Run) -> str:
    try:
        plan = run.plan
    except ValueError:
        return "cannot be read"
    return f"{plan.architecture.name}, {plan.cluster}, {plan.layout.description}"


def _html(frame: pd.DataFrame) -> str:
    """Written by hand: pandas' own needs jinja2 for formats of columns that have gaps."""

    def shown(name: str, value: Any) -> str:
        if value is None or value != value:
            return "–"
        return escape(SHOWN[name].format(value) if name in SHOWN else str(value))

    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in frame.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{shown(name, value)}</td>' for name, value in line.items())}</tr>"
        for line in _lines(frame)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _lines(frame: pd.DataFrame) -> Sequence[dict[str, Any]]:
    return [{str(name): value for name, value in line.items()} for line in frame.to_dict("records")]
