"""Comparison of runs: their plans, results and prediction errors, as tables and curves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, check_choice, refuse
from shardscope.core.html_table import LONG_NAME, TABLE, WIDE_BOX, render_text
from shardscope.core.number_format import format_error
from shardscope.records.clock_offsets import sum_seconds
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.folder_checks import shorten_message
from shardscope.records.json_files import RESERVED
from shardscope.records.json_values import is_number
from shardscope.records.metrics_table import compute_curve, compute_curves
from shardscope.runs.task_fields import compare_tasks, has_task_fields
from shardscope.runs.totals import compute_totals, iterate_records

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.runs.run import Run
    from shardscope.runs.summaries import RunSummary

TOKENS = "tokens_per_second_all_ranks"
SHOWN = {
    "seconds": "{:,.0f}",
    "loss": "{:.4g}",
    "step_seconds": "{:.3g}",
    "predicted_step_seconds": "{:.3g}",
    "tensors_gib": "{:.3g}",
    "predicted_tensors_gib": "{:.3g}",
}
ERRORS = ("step_error", "memory_error")


MAX_SHOWN = 200
"""Maximum number of rows of the HTML table; ``to_frame`` has all."""


class Runs(list["Run"]):
    """A list of runs. A notebook shows it as a table; ``compare`` puts two runs side by side."""

    def __init__(self, runs: Iterable[Run] = (), damaged: Sequence[RunSummary] = ()) -> None:
        super().__init__(runs)
        self.damaged = tuple(damaged)
        """Summaries of unreadable run folders, with ``name`` and ``damage``; also rows of the table."""
        self.missing = ""
        """Why the folder of these runs cannot hold any, as the end of a sentence; empty if it can."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per run.

        Columns: ``run``, ``status``, ``target`` (the scheduler's queue and job; empty for this machine),
        ``started`` (UTC, timezone-aware), ``seconds`` of duration, ``plan``, ``nodes``, ``ranks``, ``steps``,
        last ``loss`` (mean over ranks), median and predicted ``step_seconds``, measured and predicted tensors
        at the peak (GiB). Errors are (predicted - measured) / measured. Unknown values are empty. Damaged
        folders are the last rows, with status "damaged" and the damage as ``plan``. The numbers of an ended
        run are computed once and kept in its folder.
        """
        import pandas as pd

        return pd.DataFrame(_make_rows(self, self.damaged), columns=list(COLUMNS))

    def curves(self, metric: str = "loss") -> pd.DataFrame:
        """Return ``metric`` by step, averaged over ranks, with one column per run that logged it.

        Raises ``ValueError`` naming the logged metrics if no run logged it as a number.
        """
        import pandas as pd

        values = {run.name: compute_curve(iterate_records(run), metric) for run in self}
        # Collect the logged names for the error only: it reads every line of every run again.
        if not any(values.values()):
            logged = sorted(
                {name for run in self for line in iterate_records(run) for name in line} - {*RESERVED}
            )
            refuse(
                "curves metric", metric, f"what was logged: {', '.join(logged) or 'nothing'}", Value("loss")
            )
        frame = pd.DataFrame({name: pd.Series(steps, dtype=float) for name, steps in values.items() if steps})
        frame.index.name = "step"
        return frame.sort_index()

    def compare(self, first: str | Run, second: str | Run) -> Comparison:
        """Compare two of these runs, given by name or as ``Run``. Raises ``ValueError`` for unknown ones."""
        return Comparison(runs=Runs([self._find(first), self._find(second)]))

    def _find(self, name: str | Run) -> Run:
        names = [run.name for run in self]
        if isinstance(name, str):
            for summary in self.damaged:
                if summary.name == name:
                    raise ValueError(f"compare run is {name!r}, whose folder is damaged: {summary.damage}")
            return self[names.index(check_choice("compare run", name, names))]
        # Compare folders, not objects: there may be several handles on the same run.
        wanted = getattr(name, "folder", None)
        match = next((run for run in self if wanted and _is_same(run.folder, wanted)), None)
        if match is None:
            refuse("compare run", name, f"one of these: {', '.join(names)}", "its name")
        return match

    def _repr_html_(self) -> str:
        if not self and not self.damaged:
            return f"<p>No runs here{escape(self.missing)}.</p>"
        shown, damaged = self[-MAX_SHOWN:], self.damaged[-MAX_SHOWN:]
        # Unnamed runs are named after their start time: without the start column there is room for errors.
        has_start_names = all(_NAMED_BY_START.match(run.name) for run in shown)
        hidden = {"started"} if has_start_names else set()
        if not any(run.target for run in shown):
            hidden |= {"target", "nodes"}
        columns = [name for name in COLUMNS if name not in hidden]
        left = len(self) + len(self.damaged) - len(shown) - len(damaged)
        more = f"<p>{left:,} older ones are not shown: ss.runs().to_frame() has all.</p>" if left else ""
        return _render_table(_make_rows(shown, damaged), columns) + more


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one run."""

    run: str
    points: Mapping[int, float]
    """Values by step; may be empty, and may contain NaN and infinities."""
    predicted: float | None = None
    first_step: int = 0
    """What users call step 0 of ``points``: 1 for Shardscope's own loop. Other code has its own numbers."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side: differences of their plans and tasks, their results and their curves."""

    runs: Runs

    @property
    def plan_differences(self) -> list[str]:
        """Differences from the first plan to the second, such as ``recompute none → full``.

        Raises ``ValueError`` if a plan cannot be read.
        """
        from shardscope.planner.differences import find_differences

        return [str(difference) for difference in find_differences(self.runs[0].plan, self.runs[1].plan)]

    @property
    def task_differences(self) -> list[str]:
        """Differences of the recorded task fields, such as ``num steps 60 → 30``."""
        return [str(difference) for difference in compare_tasks(*self.runs)]

    @property
    def differences(self) -> list[str]:
        """Plan differences, then task differences. Raises ``ValueError`` if a plan cannot be read."""
        return self.plan_differences + self.task_differences

    def to_frame(self) -> pd.DataFrame:
        """Return one column per run: status, times, losses and the errors of both predictions."""
        frame = self.runs.to_frame()
        frame.index = [run.name for run in self.runs]
        return frame.drop(columns="run").T

    def curves(self, metric: str = "loss") -> pd.DataFrame:
        """Return ``metric`` of both runs by step. Raises ``ValueError`` if neither logged it."""
        return self.runs.curves(metric)

    def loss_curves(self) -> list[Curve]:
        """Return the loss of each run by step, averaged over its ranks."""
        return [
            Curve(
                run=run.name,
                points=compute_curve(iterate_records(run), "loss"),
                first_step=int(run.trains_the_plan),
            )
            for run in self.runs
        ]

    def pace_curves(self) -> tuple[str, list[Curve]]:
        """Return the label of the speed metric and each run's curve of it.

        The metric is tokens per second, which is comparable for any batch size, or the step seconds if no run
        logged tokens.
        """
        records = [compute_curves(iterate_records(run), TOKENS, "step_seconds") for run in self.runs]
        if any(run_curves[TOKENS] for run_curves in records):
            name, label, predict = TOKENS, "tokens/s of all ranks", _predict_tokens_per_second
        else:
            name, label, predict = "step_seconds", "step seconds", _predict_seconds
        return label, [
            Curve(
                run=run.name,
                points=run_curves[name],
                predicted=predict(run),
                first_step=int(run.trains_the_plan),
            )
            for run, run_curves in zip(self.runs, records, strict=True)
        ]

    def __str__(self) -> str:
        cells = _list_known_cells(_make_rows(self.runs, self.runs.damaged))
        lines = [(_format_heading(name) if name != "run" else "", *texts) for name, texts in cells.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            [
                *("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines),
                self._describe_plan_differences(),
                self._describe_task_differences(),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = _render_columns(_make_rows(self.runs, self.runs.damaged))
        plans = f"<p>{escape(self._describe_plan_differences())}</p>"
        tasks = f"<p>{escape(self._describe_task_differences())}</p>"
        style = "max-width:560px;overflow-x:auto;overflow-wrap:break-word"
        return f"<div style='{style}' tabindex='0'>{table}{plans}{tasks}</div>"

    def _describe_plan_differences(self) -> str:
        # The plan of an older or damaged run may not load; its results are still worth showing.
        try:
            differences = "; ".join(self.plan_differences) or "none"
        except ValueError as error:
            differences = f"not known: {error}"
        return f"Plan settings that differ: {differences}."

    def _describe_task_differences(self) -> str:
        # A user's own function has no fields to compare (``record_task_fields``).
        unknown = " and ".join(run.name for run in self.runs if not has_task_fields(run))
        limit = f" (of {unknown} only the task's name and steps are known)" if unknown else ""
        differences = "; ".join(self.task_differences) or "none"
        return f"Task settings that differ: {differences}{limit}."


def _predict_seconds(run: Run) -> float | None:
    metrics = run.predicted_metrics()
    return metrics.step_seconds if metrics else None


def _predict_tokens_per_second(run: Run) -> float | None:
    seconds = _predict_seconds(run)
    return run.plan.recipe.global_batch_size * run.plan.recipe.seq_len / seconds if seconds else None


def _is_same(folder: Path, other: Path) -> bool:
    try:
        return folder.resolve() == other.resolve()
    except (OSError, RuntimeError):  # For example a loop of symbolic links.
        return folder == other


_NAMED_BY_START = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
COLUMNS = (
    *("run", "status", "target", "started", "seconds", "plan", "nodes", "ranks", "steps", "loss"),
    *("step_seconds", "predicted_step_seconds", "step_error"),
    *("tensors_gib", "predicted_tensors_gib", "memory_error"),
)


def _make_rows(runs: Iterable[Run], damaged: Iterable[RunSummary]) -> list[dict[str, object]]:
    from shardscope.runs.summaries import summarize

    rows = [_make_row(summarize(run.folder, run)) for run in runs]
    return rows + [_make_damaged_row(summary.name, summary.damage) for summary in damaged]


def _make_row(summary: RunSummary) -> dict[str, object]:
    run = summary.run
    if run is None:
        return _make_damaged_row(summary.name, summary.damage)
    # A file of the run may be damaged although its status can be read.
    try:
        totals = compute_totals(run)
    except (ValueError, OSError) as error:
        return _make_damaged_row(run.name, shorten_message(RunFolder(run.folder), error))
    # The time of a lost run's last status is unknown if there was no heartbeat.
    times = [record["time"] for record in run.history if is_number(record["time"])]
    known = times if times and summary.status in FINAL else [*times, time.time()]
    row: dict[str, object] = {
        "run": run.name,
        "status": summary.status,
        "started": _to_datetime(times[0]) if times else None,
        "seconds": sum_seconds(known) if times else None,
        "plan": totals.plan,
        "target": run.target,
        "nodes": len(run.nodes) or 1,
        "ranks": run.world_size,
        "steps": totals.num_steps,
        "loss": totals.loss,
        "step_seconds": totals.step_seconds,
        "predicted_step_seconds": run.predicted_step_seconds,
        "memory_error": totals.memory_error,
        "tensors_gib": _to_gib(totals.tensor_bytes),
        "predicted_tensors_gib": _to_gib(totals.predicted_tensor_bytes),
    }
    # The convention of all errors in this project: positive if the prediction was too high.
    if totals.step_seconds and run.predicted_step_seconds:
        row["step_error"] = run.predicted_step_seconds / totals.step_seconds - 1
    return row


def _make_damaged_row(name: str, damage: str) -> dict[str, object]:
    return {"run": name, "status": "damaged", "plan": damage}


def _to_datetime(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):  # A year outside the range of datetime.
        return None


def _to_gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def _render_table(lines: Sequence[dict[str, object]], columns: Sequence[str]) -> str:
    """Render rows as an HTML table. pandas would need jinja2 to format columns with missing values."""
    cells = {name: [_format_value(name, line.get(name)) for line in lines] for name in columns}
    # On paper nothing scrolls: columns without a value are left out, and the text is as small as needed.
    cells = {name: texts for name, texts in cells.items() if name == "run" or any(map(_is_known, texts))}
    head = "".join(f"<th style='{_get_style(name)}'>{escape(_format_heading(name))}</th>" for name in cells)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td style='{_get_style(name, text)}'>{render_text(text)}</td>"
            for name, text in zip(cells, texts, strict=True)
        )
        + "</tr>"
        for texts in zip(*cells.values(), strict=True)
    )
    size = 100 / (COLUMN_EM * len(cells))
    table = TABLE.replace("collapse'", f"collapse;font-size:clamp(8px,{size:.2f}cqw,13px)'")
    return f"{WIDE_BOX}{table}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


COLUMN_EM = 6.0
"""Mean width of a column in units of the font size, with which the table fits its box, also on paper."""
_STYLES = {
    "run": "text-align:left;min-width:11em",
    "started": "min-width:6em",
    "plan": "text-align:left;min-width:8em",
}
"""Styles of columns in addition to the padding; dates stay on two lines."""


def _get_style(name: str, text: str = "") -> str:
    """Return the style of a cell. A name stays on one line unless it is long."""
    one_line = "white-space:nowrap" if name == "run" and len(text) <= LONG_NAME else ""
    return ";".join(filter(None, ("padding:2px .3em", _STYLES.get(name), one_line)))


def _render_columns(lines: Sequence[dict[str, object]]) -> str:
    """Render rows as a table with one column per run, which leaves room for the curves."""
    rows = {
        name: "".join(f"<td>{escape(value)}</td>" for value in values)
        for name, values in _list_known_cells(lines).items()
    }
    head = rows.pop("run").replace("td>", "th>")
    body = "".join(
        f"<tr><th scope='row' style='text-align:left'>{escape(_format_heading(name))}</th>{cells}</tr>"
        for name, cells in rows.items()
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"


def _list_known_cells(lines: Sequence[dict[str, object]]) -> dict[str, list[str]]:
    """Return each column's texts, without the columns that no run has, such as the target on this machine."""
    cells = {name: [_format_value(name, line.get(name)) for line in lines] for name in COLUMNS}
    return {name: values for name, values in cells.items() if any(map(_is_known, values))}


def _is_known(text: str) -> bool:
    return text not in ("", "–")


def _format_heading(name: str) -> str:
    return name.replace("_gib", "_GiB").replace("_", " ")


def _format_value(name: str, value: object) -> str:
    if value is None or value != value:  # NaN, pandas' missing number, differs from itself.
        return "–"
    if isinstance(value, datetime):
        # Local time, as in the default run names, with its offset: the page may be read in another zone.
        local = datetime.fromtimestamp(value.timestamp()).astimezone()
        return local.isoformat(sep=" ", timespec="minutes")
    if name in ERRORS and isinstance(value, float):
        return format_error(value)
    return SHOWN[name].format(value) if name in SHOWN else str(value)
