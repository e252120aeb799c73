"""Comparison of the predicted and the measured step: bars by part, a table, and the measured rates."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.number_format import Scale
from shardscope.timing.calibration.store import find_traced_rates, remove_traced_rates
from shardscope.timing.calibration.traced import TracedRates
from shardscope.timing.report import PARTS, format_part, format_seconds
from shardscope.trace import Trace
from shardscope.trace.analysis.plan_comparison import IDLE, STEP, UNKNOWN_COMMUNICATION, PlanComparison
from shardscope_widgets.kit.display_names import describe_devices
from shardscope_widgets.kit.part_table import add_sign
from shardscope_widgets.kit.theme import PART_COLOURS, PART_PATTERNS
from shardscope_widgets.time.rows import PlanStep
from shardscope_widgets.time.view import CALIBRATE_LABEL
from shardscope_widgets.trace.analysis_page import NONE, AnalysisPage, Heading, Row, TableWriter
from shardscope_widgets.trace.stacked_bars import FAINT, BarPart, draw_stacked_bars, get_pattern_class

COLOURS: Mapping[str, str] = {**PART_COLOURS, IDLE: FAINT, UNKNOWN_COMMUNICATION: "#8b6b4a"}
PATTERNS: Mapping[str, str] = {**PART_PATTERNS, UNKNOWN_COMMUNICATION: "x", IDLE: "."}
DRAWN = (*PARTS, UNKNOWN_COMMUNICATION, IDLE)
BEFORE, PREDICTED, MEASURED = "before", "predicted", "measured"
ROW_PIXELS = 30

NO_PLAN = "This trace belongs to no run of Shardscope, so there is no plan to compare it with."
OWN_TASK = "The run's task is a function of your own, which need not train the plan's model."


class PlanAgainstTrace:
    """The plan of one trace's run, and the use of the rates that the trace measured."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._before: dict[str, float] | None = None
        """Predicted seconds by part before the measured rates were used, the step included."""

    @property
    def is_using_rates(self) -> bool:
        """Return whether predictions use rates that a trace measured."""
        plan = self._trace.plan
        return plan is not None and find_traced_rates(plan.cluster) is not None

    def use_measured_rates(self) -> None:
        """Give the measured rates to the calibration. Raises ``ValueError``, ``OSError``."""
        before = _read_predicted(self._trace.compare())
        self._trace.measured_rates().store()
        self._before = before

    def remove_measured_rates(self) -> None:
        """Predict from the calibration alone again. Raises ``ValueError``, ``OSError``."""
        if self._trace.plan is not None:
            remove_traced_rates(self._trace.plan.cluster.gpu.name)
        self._before = None

    def describe(self) -> AnalysisPage:
        """Return bars and table of predicted and measured parts, or why there are none."""
        plan = self._trace.plan
        if plan is None:
            return AnalysisPage(sentences=[NO_PLAN])
        if not self._trace.trains_the_plan:
            return AnalysisPage(sentences=[OWN_TASK])
        try:
            comparison = self._trace.compare()
        except FieldError:
            step = PlanStep.from_plan(plan)
            fix = [_describe_calibration(plan)] if step.is_uncalibrated else []
            return AnalysisPage(sentences=[f"No prediction: {step.refusal}", *fix], may_change=True)
        sentences = [comparison.text]
        traced = find_traced_rates(plan.cluster)
        before = self._before if traced is not None else None
        if before is not None:
            seconds = {row["part"]: row["predicted_seconds"] or 0.0 for row in comparison}[STEP]
            sentences = [
                f"The measured rates move the prediction from {format_seconds(before[STEP])} to "
                f"{format_seconds(seconds)}. {comparison.text}"
            ]
        if traced is not None:
            sentences.append(_describe_rates(traced))
        rows = {row["part"]: (row["predicted_seconds"], row["measured_seconds"]) for row in comparison}
        scale = Scale.for_seconds(max(max(one or 0.0, two or 0.0) for one, two in rows.values()))
        return AnalysisPage(
            sentences=sentences,
            tables=[_write_table(rows, before, scale)],
            figures=[_draw_bars(rows, before, scale)],
            may_change=True,
            has_rates=True,
            uses_rates=traced is not None,
        )


Parts = Mapping[str, tuple[float | None, float | None]]
"""Predicted and measured seconds by part."""


def _describe_calibration(plan: ss.Plan) -> str:
    """Return how the run's machine is measured: the Time tab offers it for plans of this machine only."""
    cluster, machine = plan.cluster, ss.Cluster.detect()
    devices = describe_devices(cluster)
    if cluster.num_nodes == 1 and cluster.gpu.name == machine.gpu.name:
        return (
            f"This run's plan is for {devices} of this machine: choose them under GPUs, press "
            f'"{CALIBRATE_LABEL}" in the Time tab, and come back.'
        )
    return f"This run's plan is for {devices}: only ss.calibrate() on such a machine makes a prediction."


def _read_predicted(comparison: PlanComparison) -> dict[str, float]:
    return {row["part"]: row["predicted_seconds"] or 0.0 for row in comparison}


def _describe_rates(traced: TracedRates) -> str:
    return f"Predictions use what a trace measured. {traced}"


def _write_table(rows: Parts, before: Mapping[str, float] | None, scale: Scale) -> str:
    written = []
    for part, (predicted, measured) in rows.items():
        difference = NONE
        if predicted is not None and measured is not None:
            difference = add_sign(measured - predicted, scale.format(abs(measured - predicted)))
        cells = [
            format_part(part),
            *([NONE if predicted is None else scale.format(before[part])] if before is not None else []),
            NONE if predicted is None else scale.format(predicted),
            NONE if measured is None else scale.format(measured),
            difference,
        ]
        swatch = None
        if part != STEP:
            swatch = COLOURS[part], get_pattern_class(COLOURS[part], PATTERNS.get(part, ""))
        written.append(Row(cells, swatch=swatch, is_total=part == STEP))
    headings = [
        Heading(f"part, {scale.unit}"),
        *([Heading("before", "predicted without the measured rates")] if before is not None else []),
        Heading("predicted"),
        Heading("measured", "slowest rank, mean of its steps"),
        Heading("difference", "measured minus predicted"),
    ]
    return TableWriter().write(headings, written, most=len(written))


def _draw_bars(rows: Parts, before: Mapping[str, float] | None, scale: Scale) -> go.Figure:
    bars: dict[str, dict[str, float]] = {BEFORE: dict(before)} if before is not None else {}
    bars[PREDICTED] = {part: predicted or 0.0 for part, (predicted, _) in rows.items()}
    bars[MEASURED] = {part: measured or 0.0 for part, (_, measured) in rows.items()}
    labels = list(bars)
    # All parts, so that another comparison fills the same traces.
    parts = [
        BarPart(
            format_part(part),
            COLOURS[part],
            PATTERNS.get(part, ""),
            [bars[label].get(part, 0.0) for label in labels],
            [
                f"<b>{label}</b><br>{format_part(part)}: {format_seconds(bars[label].get(part, 0.0))}"
                for label in labels
            ],
            [0.5 if label == BEFORE else 1.0 for label in labels],
        )
        for part in DRAWN
    ]
    return draw_stacked_bars(labels, parts, scale, ROW_PIXELS)
