"""Tests of the step view without a browser: bars, rates, token budget, errors and measured steps."""

from __future__ import annotations

import re
import threading
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import wait_until
from shown_text import strip_tags

import shardscope as ss
from shardscope.timing.report import PARTS, format_part
from shardscope_widgets import StepView
from shardscope_widgets.kit import numbers
from shardscope_widgets.kit.theme import PART_COLOURS, PART_PATTERNS, PATTERN_CLASSES
from shardscope_widgets.studio.head import render_rates
from shardscope_widgets.time import rows as step_rows
from shardscope_widgets.time.rows import RunSteps, build_shown_step
from shardscope_widgets.time.table import render_part_rows, render_rate_table


def build_plan(
    model: str = "llama-3.1-8b",
    cluster: str = "8xh100-sxm-80gb",
    layout: ss.Layout | None = None,
    **recipe: Any,
) -> ss.Plan:
    layout = layout or ss.Layout.fsdp2()
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


PIPELINE = {
    "model": "llama-3.1-70b",
    "cluster": "4x8xh100-sxm-80gb",
    "layout": ss.Layout.megatron(tp=8, pp=4),
}


def remove_price(plan: ss.Plan) -> ss.Plan:
    """Return the plan on a GPU whose price and power limit are unknown."""
    fields = plan.to_dict()
    for name in ("price_per_hour_usd", "price_date", "tdp_watts"):
        fields["cluster"]["gpu"][name] = None
    return ss.Plan.from_dict(fields)


def read_bars(view: StepView) -> dict[str, dict[str, float]]:
    """Return row -> part -> bar length in the chart's unit."""
    bars: dict[str, dict[str, float]] = {}
    for trace in view.figure.data:
        for label, value in zip(trace.y, trace.x, strict=True):
            bars.setdefault(label, {})[trace.name.replace(" ", "_")] = value
    return bars


def read_annotations(view: StepView) -> dict[str, str]:
    return {note.y: strip_tags(note.text) for note in view.figure.layout.annotations}


@pytest.mark.parametrize("plan", [build_plan(), build_plan(**PIPELINE)], ids=["fsdp2", "megatron"])
def test_step_bars_equal_the_step_report(plan: ss.Plan) -> None:
    report, view = plan.step(), StepView(plan)
    shown = read_bars(view)
    factor = view.shown.scale.factor if view.shown else 0
    for name in PARTS:
        assert shown["predicted"][name] == pytest.approx(report.parts[name] * factor)
        assert shown["overlapped"][name] == pytest.approx(report.hidden[name] * factor)
    assert sum(shown["predicted"].values()) == pytest.approx(report.seconds * factor)
    assert "measured" not in shown and read_annotations(view)["measured"] == "not measured yet"
    assert sum(report.hidden.values()) <= view.figure.layout.xaxis.range[1] / factor


def test_figure_object_and_height_are_kept_on_update() -> None:
    view = StepView(build_plan())
    figure, height = view.figure, view.figure.layout.height
    view.show(build_plan(**PIPELINE))
    assert view.figure is figure and figure.layout.height == height
    assert read_bars(view)["predicted"]["bubble"] > 0


def test_hover_and_table_explain_every_part() -> None:
    plan = build_plan(**PIPELINE)
    report, view = plan.step(), StepView(plan)
    for trace, name in zip(view.figure.data, PARTS, strict=False):
        # A tooltip has as much of the text as fits into the chart.
        hover_words = unescape(trace.customdata[0].replace("<br>", " ")).removesuffix(" …").split()
        assert hover_words == report.explain(name).split()[: len(hover_words)]
        assert " ".join(hover_words).startswith(f"{format_part(name)}, ")
    text = strip_tags(view.table.value)
    for name in PARTS:
        if report.parts[name] or report.hidden[name]:
            assert report.explain(name).partition(" = ")[2] in text
        else:
            assert format_part(name) in text.partition("No time in this plan")[2]


def test_tooltips_are_not_higher_than_the_chart() -> None:
    """plotly shows no label that is higher than its chart; a line has 17 pixels."""
    for plan in (build_plan(), build_plan(**PIPELINE)):
        view = StepView(plan)
        texts = [text for trace in view.figure.data for text in trace.customdata]
        assert max(9 + 17 * len(text.split("<br>")) for text in texts) <= view.figure.layout.height
        assert any(text.endswith(" …") for text in texts), "of a longer text the first words remain"


def test_all_times_of_the_view_have_one_unit() -> None:
    view = StepView(build_plan())
    assert view.report is not None and view.report.seconds > 1
    texts = [strip_tags(view.table.value), strip_tags(view.figures.value)]
    texts += [text for trace in view.figure.data for text in trace.customdata]
    units = {unit for text in texts for unit in re.findall(r"\d (µs|ms|s)\b", text)}
    assert units == {"s"}, "from one second on, as in Plans"


def test_parts_have_unique_combinations_of_colour_and_pattern() -> None:
    styles = [(PART_COLOURS[name], PART_PATTERNS.get(name, "")) for name in PARTS]
    assert len(set(styles)) == len(PARTS)
    assert set(PART_PATTERNS.values()) <= set(PATTERN_CLASSES)
    view = StepView(build_plan())
    for trace, (colour, pattern) in zip(view.figure.data, styles, strict=False):
        assert (trace.marker.color, trace.marker.pattern.shape) == (colour, pattern)


def test_rates_state_their_flop_counting_convention() -> None:
    plan = build_plan()
    report, text = plan.step(), strip_tags(render_rate_table(build_shown_step(plan)))
    assert report.mfu is not None
    assert f"MFU, % {100 * report.mfu:.1f}" in text
    assert "causal attention" in text and "no recomputation" in text
    assert f"TFLOP/s, full attention: {report.tflops_per_gpu_full_attention:.0f}" in text
    assert "attention counts every key" in text and "recomputed ones included" in text


def test_same_collective_in_forward_and_backward_is_one_row() -> None:
    plan = build_plan()
    report = plan.step()
    kinds = {(call.part, call.collective, call.ranks, call.link) for call in report.communication}
    assert 0 < len(kinds) < len(report.communication)
    assert {(call.part, call.collective, call.ranks, call.link) for call in report.sent} == kinds
    rows = render_part_rows(build_shown_step(plan)).partition("Communication")[2].partition("<tbody>")[2]
    assert rows.count("<tr>") == len(kinds) + len(report.staged)


@pytest.mark.parametrize(
    "layout",
    [ss.Layout.fsdp2(), ss.Layout.ddp(), ss.Layout.zero(stage=3)],
    ids=lambda layout: layout.framework,
)
def test_exposed_communication_agrees_in_table_and_report(layout: ss.Layout) -> None:
    """Exposed communication and copies add up to the part's row; its explanation has the same numbers."""
    plan = build_plan(layout=layout)
    shown = build_shown_step(plan)
    report, scale = plan.step(), shown.scale
    parts, _, sent = render_part_rows(shown).partition("Communication")
    exposed_by_part = {}
    names = {format_part(name): name for name in PARTS}
    for row in re.findall(r"<tr>(<td>.*?)</tr>", sent):
        label, _, _, _, moved, _, waited = re.findall(r"<td[^>]*>(.*?)</td>", row)
        part = names[label]
        exposed_by_part.setdefault(part, []).append(float(waited))
        assert moved == "–" or f"of {moved} GiB" in report.explain(part)
    assert report.parts["gradients"] and report.parts["gathers"]
    assert exposed_by_part.keys() >= {"gradients", "gathers"}
    for part, exposed in exposed_by_part.items():
        row = re.search(rf"{format_part(part)}</button></th><td>([\d.]+)</td>", parts)
        assert row and float(row[1]) == pytest.approx(sum(exposed), rel=0.02)
        assert report.parts[part] == pytest.approx(
            report.staged.get(part, 0)
            + sum(call.exposed_seconds for call in report.communication if call.part == part)
        )
    assert report.staged and scale.unit in sent


def test_unknown_rates_are_dashes_with_the_reason_as_tooltip() -> None:
    html = render_rate_table(build_shown_step(remove_price(build_plan())))
    for rate, why in (("$ per M tokens", "The price of"), ("kWh per M tokens", "The power limit of")):
        cell = re.search(rf"{re.escape(rate)}</button></th><td title='([^']+)'>–", html)
        assert cell and cell[1].startswith(why) and "H100 SXM 80 GB" in cell[1]


# ----------------------------------------------------------------------- plans that do not fit, pins


def read_rate_cells(html: str) -> dict[str, list[str]]:
    """Return rate -> visible text of its cells."""
    visible_html = re.sub(r"<span class='ss-off-screen'>.*?</span>", "", html)
    rows = re.findall(r"data-opens='([^']+)'>(.*?)</tr>", visible_html)
    return {key: [strip_tags(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for key, row in rows}


def test_a_plan_that_does_not_fit_has_no_rates_and_no_price() -> None:
    """A plan that runs out of memory has neither a speed nor a price."""
    plan = build_plan(micro_batch_size=2)
    view = StepView(plan)
    cells = read_rate_cells(view.figures.value)
    seconds = next(iter(cells))
    assert seconds.startswith("one step") and cells.pop(seconds)[0] != "–"
    assert len(cells) == 6 and {row[0] for row in cells.values()} == {"–"}
    assert re.search(r"title='Does not fit: [^']*85\.5 GiB[^']*79\.1", view.figures.value)
    assert "$" not in strip_tags(view.budget_words.value) and "Does not fit" in view.budget_words.value
    head = render_rates(build_shown_step(plan))
    assert re.findall(r"<b>(.*?)</b>", head) == ["–"] * 3 and "Does not fit" in head
    view.show(build_plan())
    assert "–" not in strip_tags(view.budget_words.value)
    assert not any("–" in row[0] for row in read_rate_cells(view.figures.value).values())


def test_measured_rates_are_shown_for_a_plan_predicted_not_to_fit() -> None:
    """The measurement shows that the plan ran, against the prediction."""
    plan = build_plan(micro_batch_size=2)
    view = StepView(plan)
    view.add(plan, RunSteps(20, 2 * plan.step().seconds))
    predicted, measured = read_rate_cells(view.figures.value)["tokens/s"][:2]
    assert predicted == "–" and measured == numbers.format_short(plan.step().tokens_per_second / 2)


def test_headline_rates_are_three_numbers_with_units() -> None:
    report, html = build_plan().step(), render_rates(build_shown_step(build_plan()))
    assert report.mfu is not None and report.cost_per_token is not None
    assert re.findall(r"<b>(.*?)</b> <span>(.*?)</span>", html) == [
        (numbers.format_short(report.tokens_per_second_per_gpu), "tokens/s per GPU"),
        (f"{100 * report.mfu:.0f} %", "MFU"),
        (numbers.format_dollars(1e6 * report.cost_per_token), "per M tokens"),
    ]


def test_pinned_plans_are_compared_by_step_time_throughput_and_price() -> None:
    plan, pin = build_plan(), build_plan(recompute="full")
    view = StepView(plan, pins=(pin,))
    factor = view.shown.scale.factor if view.shown else 0
    assert sum(read_bars(view)["pin 0"].values()) == pytest.approx(pin.step().seconds * factor)
    cells = read_rate_cells(view.figures.value)
    seconds = next(cells[key] for key in cells if key.startswith("one step"))
    assert seconds[3].startswith("−"), "the current plan is faster"
    assert cells["tokens/s"][2] == numbers.format_short(pin.step().tokens_per_second)
    assert cells["tokens/s"][3].startswith("+") and cells["$ per M tokens"][3].startswith("−$")
    assert "recompute full" in strip_tags(view.figures.value) and "recompute full" in strip_tags(
        view.table.value
    )
    view.figures.press_button("unpin 0")
    assert view.pins == () and "pin 0" not in read_bars(view)


def test_a_click_on_a_part_opens_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    view = StepView(build_plan())
    sent: list[Any] = []
    monkeypatch.setattr(view.table, "send", sent.append)
    click = {"trace": list(PARTS).index("attention"), "point": 0, "customdata": ""}
    view.figure._handle_custom_msg({"click": click}, [])
    assert sent == [{"open": "attention"}] and "data-opens='attention'" in view.table.value


def test_every_bar_is_inside_the_plot() -> None:
    for pins in ((), (build_plan(recompute="full", seq_len=16_384),)):
        view = StepView(build_plan(), pins=pins)
        longest = max(sum(parts.values()) for parts in read_bars(view).values())
        assert longest <= view.figure.layout.xaxis.range[1]
        assert view.figure.layout.xaxis.visible is False, "there is no axis under the labels"


@pytest.mark.parametrize("text", ["15T", "300B", "1e9"])
def test_token_budget_shows_duration_and_price(text: str) -> None:
    plan = build_plan()
    view = StepView(plan)
    view.budget.value = text
    report = plan.step()
    tokens = {"15T": 15e12, "300B": 300e9, "1e9": 1e9}[text]
    hours = report.days(tokens) * 24
    unit, size = {"15T": ("years", 24 * 365), "300B": ("days", 24), "1e9": ("hours", 1)}[text]
    match = re.match(
        r"([\d.,]+) (\w+) without failures · \$([\d.,]+[kMBT]?)", strip_tags(view.budget_words.value)
    )
    assert match and match[2] == unit
    assert float(match[1].replace(",", "")) == pytest.approx(hours / size, rel=0.006)


def test_invalid_token_budget_shows_an_error_at_its_input() -> None:
    view = StepView(build_plan())
    view.budget.value = "many"
    assert "num_tokens is 'many'" in strip_tags(view.budget_row.message)
    assert not view.budget_words.value
    view.budget.value = "1B"
    assert not view.budget_row.message and view.budget_words.value


def test_prediction_error_is_shown_and_old_numbers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_value_error(self: ss.Plan) -> Any:
        raise ValueError("Gpu.peak_flops['bf16'] is None; allowed: its <peak>. Nearest fix: ss.calibrate().")

    view = StepView(build_plan())
    monkeypatch.setattr(ss.Plan, "step", raise_value_error)
    view.show(build_plan(seq_len=2048))
    assert "ss.calibrate()" in strip_tags(view.caption.value) and "&lt;peak&gt;" in view.caption.value
    assert read_bars(view) == {} and read_annotations(view)["predicted"].startswith("no prediction")
    assert not view.figures.value and not view.table.value and not view.budget_row.is_shown
    monkeypatch.undo()
    view.show(build_plan())
    assert read_bars(view)["predicted"] and view.budget_row.is_shown


# ------------------------------------------------------------------------------------------ measured


def test_measured_steps_are_shown_only_with_their_own_plan() -> None:
    plan, other = build_plan(), build_plan(seq_len=2048)
    view = StepView(plan)
    seconds = plan.step().seconds * 1.25
    view.add(plan, RunSteps(20, seconds))
    factor = view.shown.scale.factor if view.shown else 0
    assert read_bars(view)["measured"] == {"measured": pytest.approx(seconds * factor)}
    assert read_annotations(view)["measured"].endswith("+25 %")
    view.show(other)
    assert "measured" not in read_bars(view)
    view.show(plan)
    assert "measured" in read_bars(view)


def test_measured_step_is_shown_without_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan()

    def raise_value_error(self: ss.Plan) -> Any:
        raise ValueError("unknown")

    monkeypatch.setattr(ss.Plan, "step", raise_value_error)
    view = StepView()
    view.add(plan, RunSteps(20, 0.5))
    view.show(plan)
    assert read_bars(view) == {"measured": {"measured": 500.0}}
    assert read_annotations(view)["measured"] == "500 ms"
    cells = read_rate_cells(view.figures.value)
    assert cells["one step, ms"] == ["–", "500"] and cells["tokens/s"] == ["–", "–"]


def test_a_missing_rate_is_reported_with_the_button_that_measures_it() -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.fsdp2()
    )
    elsewhere = StepView(plan, machine=ss.Cluster.parse("8xh100-sxm-80gb"))
    unknown = "The bf16 FLOP/s of this device are unknown."
    text = strip_tags(elsewhere.caption.value)
    assert text.startswith(unknown) and "ss.calibrate() on such a machine" in text
    here = StepView(plan, machine=HERE)
    assert strip_tags(here.caption.value) == f'{unknown} Press "Measure this machine".'


def test_ratio_of_finished_runs_is_shown_under_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    residual = SimpleNamespace(words="3 runs took 1.12 times the predicted step")
    monkeypatch.setattr(step_rows, "find_residual", lambda plan: residual)
    assert residual.words in strip_tags(StepView(build_plan()).caption.value)

    def raise_value_error(plan: ss.Plan) -> None:
        raise ValueError("calibration.json, line 3: <no number>")

    monkeypatch.setattr(step_rows, "find_residual", raise_value_error)
    assert "line 3: <no number>" in strip_tags(StepView(build_plan()).caption.value)


# ----------------------------------------------------------------------- calibration of this machine

HERE = ss.Cluster.parse("2xcpu")


def test_calibration_is_offered_only_for_plans_on_this_machine() -> None:
    view = StepView(build_plan(), machine=HERE)
    assert view.calibrate.layout.display == "none"
    view.show(build_plan(cluster="2xcpu"))
    assert view.calibrate.layout.display == ""
    gpu_view = StepView(build_plan(), machine=ss.Cluster.parse("8xh100-sxm-80gb"))
    assert gpu_view.calibrate.layout.display == ""
    gpu_view.show(build_plan(cluster="2x8xh100-sxm-80gb"))
    assert gpu_view.calibrate.layout.display == "none"


def test_calibration_shows_progress_and_updates_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    may_continue, is_calibrated = threading.Event(), threading.Event()

    def calibrate(cluster: ss.Cluster, progress: Any) -> None:
        progress("matrix products", 0.25)
        assert cluster == HERE and may_continue.wait(10)

    monkeypatch.setattr(ss, "calibrate", calibrate)
    view = StepView(build_plan(cluster="2xcpu"), machine=HERE, on_calibrate=is_calibrated.set)
    shown: list[ss.Plan] = []
    monkeypatch.setattr(view, "show", shown.append)
    view.calibrate.button.click()
    assert wait_until(lambda: "matrix products" in view.calibrate.words.value)
    assert view.calibrate.progress.value == 0.25 and view.calibrate.button.disabled
    may_continue.set()
    assert is_calibrated.wait(10) and [plan.cluster for plan in shown] == [HERE]
