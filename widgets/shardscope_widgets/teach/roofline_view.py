"""``RooflineView``: the operators of one layer on the roofline of a plan's GPU, for growing micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import shardscope as ss
from shardscope.core.number_format import Scale, join_list
from shardscope.prediction.roofline import LayerRoofline, change_batch, compute_roofline
from shardscope.timing.operators import OperatorCost
from shardscope.timing.report import format_seconds
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.display_names import format_name
from shardscope_widgets.kit.numbers import Unit, format_three_digits
from shardscope_widgets.teach.roofline_labels import place_labels
from shardscope_widgets.teach.stepped_chart import Frame, SteppedChart
from shardscope_widgets.teach.stepped_view import SteppedView
from shardscope_widgets.teach.teaching_view import write_heading
from shardscope_widgets.trace.roofline_figure import (
    Roof,
    RooflinePoint,
    build_axes,
    build_points,
    build_roof,
    build_style,
    find_extent,
)

HEIGHT = 320
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SEQUENCES = (128, 512, 2048, 8192, 32_768, 131_072)
KINDS = ("matmul", "expert matmul", "attention")
NUM_ROOFS = 2
"""Traces of roofs: 8-bit matmuls, and attention in half precision."""


class RooflineView(SteppedView):
    """The matmuls and the attention of one layer on the roofline of the plan's GPU.

    The line is what the GPU attains at an intensity, in FLOP per byte; points are what ``plan.step()``
    predicts for one micro-batch on one rank. Steps are micro-batch sizes, the buttons above the chart
    sequence lengths. The arrow keys, Home, End and the space bar walk through the steps.

    Williams et al. 2009 ("Roofline: an insightful visual performance model").
    """

    title = "Roofline"

    def __init__(self, plan: ss.Plan | None = None) -> None:
        self.shown: LayerRoofline | None = None
        self._by_step: list[LayerRoofline] = []
        self.table = controls.create_html()
        choice = controls.create_segments([("", None)], "Sequence length")
        super().__init__(choice, _create_figure(), self.table)
        self.figure.observe(self._note_step, "step")
        if plan is not None:
            self.show(plan)

    def show(self, plan: ss.Plan) -> None:
        """Draw another plan, at its own micro-batch and sequence length."""
        self._check_shown(plan, ss.Plan)
        self.plan = plan
        lengths = [
            length for length in sorted({*SEQUENCES, plan.recipe.seq_len}) if _has_length(plan, length)
        ]
        own = plan.recipe.seq_len
        self._offer(
            [(f"{length:,} tokens", length) for length in lengths],
            own,
            [
                f"Sequences of {length:,} tokens: {'of the plan' if length == own else 'for comparison'}"
                for length in lengths
            ],
        )
        self._draw(plan.recipe.micro_batch_size)

    def _draw_choice(self) -> None:
        """Draw the plan at the chosen length, at the step of the same micro-batch size."""
        if self._by_step:
            self._draw(self._by_step[self.step].plan.recipe.micro_batch_size)

    def _draw(self, micro_batch_size: int) -> None:
        """Draw the plan at the chosen length, at the step of this micro-batch size."""
        assert self.plan is not None
        plan = self.plan
        try:
            by_step = _list_rooflines(plan, self.choice.value or plan.recipe.seq_len)
        except ValueError as error:  # A figure of the GPU that nobody published.
            self.shown, self._by_step = None, []
            self._refuse(plan, f"The roofline cannot be drawn: {error}")
            return
        self._by_step = by_step
        sizes = [one.plan.recipe.micro_batch_size for one in by_step]
        step = sizes.index(micro_batch_size) if micro_batch_size in sizes else 0
        _draw_steps(self.figure, by_step, step)
        self.heading.value = write_heading(plan, _write_sentences(by_step[0]))
        self._note_step(None)

    def _note_step(self, _: object) -> None:
        if self._by_step:
            self.shown = self._by_step[self.step]
            self.table.value = _render_table(self.shown)


def _has_length(plan: ss.Plan, length: int) -> bool:
    try:
        change_batch(plan, plan.recipe.micro_batch_size, length)
    except ValueError:
        return False
    return True


def _list_rooflines(plan: ss.Plan, length: int) -> list[LayerRoofline]:
    """Return the plan with each micro-batch size that it can have; its own raises what is unknown."""
    own = plan.recipe.micro_batch_size
    rooflines = []
    for size in sorted({*MICRO_BATCHES, own}):
        try:
            changed = change_batch(plan, size, length)
        except ValueError:
            continue
        rooflines.append(compute_roofline(changed))
    return rooflines or [compute_roofline(plan)]


def _create_figure() -> SteppedChart:
    axis = {"fixedrange": True, "zeroline": False}
    figure = SteppedChart(
        [{"type": "scatter", "mode": "lines"} for _ in range(NUM_ROOFS)]
        + [{"type": "scatter", "mode": "markers", "name": kind} for kind in KINDS],
        layout={**build_style(HEIGHT), "xaxis": axis, "yaxis": axis},
    )
    figure.label = "Roofline of a layer's operators. The table below has the numbers."
    figure._config = {"displayModeBar": False, "responsive": True}
    return figure


def _list_points(shown: LayerRoofline) -> list[RooflinePoint]:
    total = sum(one.seconds for one in shown.operators) + shown.rest_seconds
    return [
        RooflinePoint(
            one.name,
            one.kind,
            one.flops / one.num_bytes,
            one.flops / one.seconds / 1e12,
            one.seconds / total,
            shown.peaks[one.precision] / 1e12,
            "the layer's forward",
        )
        for one in shown.operators
    ]


def _draw_steps(figure: SteppedChart, by_step: Sequence[LayerRoofline], step: int) -> None:
    first = by_step[0]
    gpu = format_name(first.plan.cluster.gpu.name)
    roofs = [
        Roof(f"{gpu}, {precision}", peak / 1e12, first.bytes_per_second)
        for precision, peak in first.peaks.items()
    ]
    by_frame = [_list_points(shown) for shown in by_step]
    extent = find_extent([point for points in by_frame for point in points], roofs)
    traces: list[dict[str, object]] = [
        build_roof(roof, extent, "solid" if number == 0 else "dash") for number, roof in enumerate(roofs)
    ]
    traces += [{"x": [], "y": [], "showlegend": False}] * (NUM_ROOFS - len(roofs))
    frames = []
    for shown, points in zip(by_step, by_frame, strict=True):
        largest = max(point.share for point in points)
        drawn = {
            NUM_ROOFS + number: build_points([one for one in points if one.kind == kind], number, largest)
            for number, kind in enumerate(KINDS)
        }
        # A name stays in the legend only where there are points.
        filled = {index: trace for index, trace in drawn.items() if trace["x"]}
        labels = place_labels(points, roofs[0], extent)
        frames.append(Frame(_write_words(shown), filled, labels._asdict()))
    kinds = {point.kind for point in by_frame[0]}
    traces += [{"x": [], "y": [], "showlegend": kind in kinds} for kind in KINDS]
    figure.draw_steps(traces, {**build_axes(extent), "height": HEIGHT, "showlegend": True}, frames, step)


def _write_sentences(shown: LayerRoofline) -> list[str]:
    (precision, peak), *others = shown.peaks.items()
    experts = " with routed experts" if shown.has_experts else ""
    ridge = shown.find_ridge(precision)
    first = (
        f"{format_name(shown.plan.cluster.gpu.name)}: {format_three_digits(peak / 1e12)} TFLOP/s in "
        f"{precision} and {format_three_digits(shown.bytes_per_second / 1e12)} TB/s. Below {ridge:,.0f} FLOP "
        "per byte, where the line bends, memory bounds an operator; above it, arithmetic does."
    )
    for other, _ in others:
        kinds = {one.kind for one in shown.operators if one.precision == other}
        what = {
            (True, False): "Attention runs",
            (False, True): "Experts run",
            (True, True): "Attention and experts run",
        }["attention" in kinds, "expert matmul" in kinds]
        first += f" {what} in {other} (dashed)."
    return [
        first,
        f"Points are the forward of one layer{experts} on one rank; the larger, the more of its time. "
        "Backward has two products of the same size for each.",
    ]


def _write_words(shown: LayerRoofline) -> str:
    recipe = shown.plan.recipe
    bound = [
        one.name for one in shown.operators if one.flops / one.num_bytes < shown.find_ridge(one.precision)
    ]
    seconds = sum(one.seconds for one in shown.operators) + shown.rest_seconds
    flops = sum(one.flops for one in shown.operators)
    if not bound:
        said = "all of them are bound by arithmetic"
    elif len(bound) == len(shown.operators):
        said = "all of them are bound by memory"
    else:
        said = f"memory bounds {join_list(bound)}"
    tokens = recipe.micro_batch_size * recipe.seq_len
    return (
        f"Micro-batches of {recipe.micro_batch_size} × {recipe.seq_len:,} = {tokens:,} tokens: {said}. The "
        f"layer's forward takes {format_seconds(seconds)}, {format_three_digits(flops / seconds / 1e12)} "
        f"TFLOP/s; {format_seconds(shown.rest_seconds)} of it are norms, activations and launches, which "
        "have few FLOPs."
    )


def _render_table(shown: LayerRoofline) -> str:
    scale = Scale.for_column(one.seconds for one in shown.operators)
    unit = Unit.for_column(one.num_bytes for one in shown.operators)
    rows = "".join(_render_row(shown, one, scale, unit) for one in shown.operators)
    recipe = shown.plan.recipe
    return (
        "<div class='ss-scroll' tabindex='0' role='group' aria-label='Operators of a layer'>"
        f"<table class='ss-table'><caption>Micro-batches of {recipe.micro_batch_size} × {recipe.seq_len:,} "
        "tokens</caption><thead><tr><th scope='col'>operator</th><th scope='col'>GFLOP</th>"
        f"<th scope='col'>{unit.name} moved</th><th scope='col'>FLOP per byte</th>"
        "<th scope='col'>attainable TFLOP/s</th><th scope='col'>predicted</th>"
        f"<th scope='col'>time, {scale.unit}</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _render_row(shown: LayerRoofline, one: OperatorCost, scale: Scale, unit: Unit) -> str:
    numbers = (
        format_three_digits(one.flops / 1e9),
        format_three_digits(one.num_bytes / unit.num_bytes),
        format_three_digits(one.flops / one.num_bytes),
        format_three_digits(shown.compute_attainable(one) / 1e12),
        format_three_digits(one.flops / one.seconds / 1e12),
        scale.format(one.seconds),
    )
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f"<tr><th scope='row'>{escape(one.name)}</th>{cells}</tr>"
