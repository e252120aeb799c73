"""The step view without a browser: bars, rates, the budget, refusals and measured steps."""

from __future__ import annotations

import re
import threading
import time
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from shardscope.timing.report import PARTS
from shardscope_widgets import StepView
from shardscope_widgets.kit import numbers
from shardscope_widgets.kit.display_names import format_part
from shardscope_widgets.kit.theme import PART_COLOURS, PART_PATTERNS, PATTERN_CLASSES
from shardscope_widgets.time import rows as step_rows
from shardscope_widgets.time.rates import render_rates
from shardscope_widgets.time.rows import RunSteps, build_shown_step
from shardscope_widgets.time.table import render_part_rows, render_rate_table


def plan_of(
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


def without_a_price(plan: ss.Plan) -> ss.Plan:
    """The same plan on a GPU of which only what a step needs is known."""
    fields = plan.to_dict()
    for name in ("price_per_hour_usd", "price_date", "tdp_watts"):
        fields["cluster"]["gpu"][name] = None
    return ss.Plan.from_dict(fields)


def words(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))).strip()


def drawn(view: StepView) -> dict[str, dict[str, float]]:
    """Row -> part -> what the bar is long, in the chart's unit."""
    found: dict[str, dict[str, float]] = {}
    for trace in view.figure.data:
        for label, value in zip(trace.y, trace.x, strict=True):
            found.setdefault(label, {})[trace.name.replace(" ", "_")] = value
    return found


def notes(view: StepView) -> dict[str, str]:
    return {note.y: words(note.text) for note in view.figure.layout.annotations}


@pytest.mark.parametrize("plan", [plan_of(), plan_of(**PIPELINE)], ids=["fsdp2", "megatron"])
def test_bars_are_the_report(plan: ss.Plan) -> None:
    report, view = plan.step(), StepView(plan)
    shown = drawn(view)
    factor = view.shown.scale.factor if view.shown else 0
    for name in PARTS:
        assert shown["predicted"][name] == pytest.approx(report.parts[name] * factor)
        assert shown["overlapped"][name] == pytest.approx(report.hidden[name] * factor)
    assert sum(shown["predicted"].values()) == pytest.approx(report.seconds * factor)
    assert "measured" not in shown and notes(view)["measured"] == "no run of this plan yet"
    assert sum(report.hidden.values()) <= view.figure.layout.xaxis.range[1] / factor


def test_the_figure_is_redrawn_in_place() -> None:
    view = StepView(plan_of())
    figure, height = view.figure, view.figure.layout.height
    view.show(plan_of(**PIPELINE))
    assert view.figure is figure and figure.layout.height == height
    assert drawn(view)["predicted"]["bubble"] > 0


def test_hover_and_table_explain_every_part() -> None:
    plan = plan_of(**PIPELINE)
    report, view = plan.step(), StepView(plan)
    for trace, name in zip(view.figure.data, PARTS, strict=False):
        spoken = unescape(trace.customdata[0].replace("<br>", " ")).split()
        assert spoken == (format_part(name) + report.explain(name).removeprefix(name)).split()
    told = words(view.table.value)
    for name in PARTS:
        if report.parts[name] or report.hidden[name]:
            assert report.explain(name).partition(" = ")[2] in told
        else:
            assert format_part(name) in told.partition("No time in this plan")[2]


def test_parts_are_told_apart_by_colour_and_pattern_together() -> None:
    looks = [(PART_COLOURS[name], PART_PATTERNS.get(name, "")) for name in PARTS]
    assert len(set(looks)) == len(PARTS)
    assert set(PART_PATTERNS.values()) <= set(PATTERN_CLASSES)
    view = StepView(plan_of())
    for trace, (colour, pattern) in zip(view.figure.data, looks, strict=False):
        assert (trace.marker.color, trace.marker.pattern.shape) == (colour, pattern)


def test_rates_name_their_convention() -> None:
    plan = plan_of()
    report, told = plan.step(), words(render_rate_table(build_shown_step(plan)))
    assert report.mfu is not None
    assert f"MFU, % {100 * report.mfu:.1f}" in told
    assert "causal attention" in told and "no recomputation" in told
    assert f"TFLOP/s, full attention: {report.tflops_per_gpu_full_attention:.0f}" in told
    assert "attention counts every key" in told and "recomputed ones included" in told


def test_a_collective_of_forward_and_backward_is_one_row() -> None:
    plan = plan_of()
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
def test_what_a_part_waits_for_is_one_number_wherever_it_is_told(layout: ss.Layout) -> None:
    """What is sent, copies included, adds up to the part's row; its words name the same numbers."""
    plan = plan_of(layout=layout)
    shown = build_shown_step(plan)
    report, scale = plan.step(), shown.scale
    parts, _, sent = render_part_rows(shown).partition("Communication")
    told = {}
    names = {format_part(name): name for name in PARTS}
    for row in re.findall(r"<tr>(<td>.*?)</tr>", sent):
        label, _, _, _, moved, _, waited = re.findall(r"<td[^>]*>(.*?)</td>", row)
        part = names[label]
        told.setdefault(part, []).append(float(waited))
        assert moved == "–" or f"of {moved} GiB" in report.explain(part)
    assert told.keys() >= {"gradients"}
    for part, exposed in told.items():
        row = re.search(rf"{format_part(part)}</button></th><td>([\d.]+)</td>", parts)
        assert row and float(row[1]) == pytest.approx(sum(exposed), rel=0.02)
        assert report.parts[part] == pytest.approx(
            report.staged.get(part, 0)
            + sum(call.exposed_seconds for call in report.communication if call.part == part)
        )
    assert report.staged and scale.unit in sent


def test_what_is_not_known_is_a_dash_that_says_why() -> None:
    html = render_rate_table(build_shown_step(without_a_price(plan_of())))
    for rate, why in (("$ per M tokens", "The price of"), ("kWh per M tokens", "The power limit of")):
        cell = re.search(rf"{re.escape(rate)}</button></th><td title='([^']+)'>–", html)
        assert cell and cell[1].startswith(why) and "H100 SXM 80 GB" in cell[1]


# ------------------------------------------------------------------------- plans that do not fit, pins


def rate_cells(html: str) -> dict[str, list[str]]:
    """Rate -> the text that is seen in its cells."""
    seen = re.sub(r"<span class='ss-off-screen'>.*?</span>", "", html)
    found = re.findall(r"data-opens='([^']+)'>(.*?)</tr>", seen)
    return {key: [words(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for key, row in found}


def test_a_plan_that_does_not_fit_has_no_rates_and_no_price() -> None:
    """Nobody can train at a speed, or for a price, at which the plan runs out of memory."""
    short = plan_of(micro_batch_size=2)
    view = StepView(short)
    cells = rate_cells(view.figures.value)
    seconds = next(iter(cells))
    assert seconds.startswith("one step") and cells.pop(seconds)[0] != "–"
    assert len(cells) == 6 and {row[0] for row in cells.values()} == {"–"}
    assert re.search(r"title='Does not fit: [^']*85\.5 GiB[^']*79\.1", view.figures.value)
    assert "$" not in words(view.budget_words.value) and "Does not fit" in view.budget_words.value
    head = render_rates(build_shown_step(short))
    assert re.findall(r"<b>(.*?)</b>", head) == ["–"] * 3 and "Does not fit" in head
    view.show(plan_of())
    assert "–" not in words(view.budget_words.value)
    assert not any("–" in row[0] for row in rate_cells(view.figures.value).values())


def test_what_was_measured_of_such_a_plan_is_told_all_the_same() -> None:
    """It ran, whatever was predicted of it."""
    short = plan_of(micro_batch_size=2)
    view = StepView(short)
    view.add(short, RunSteps(20, 2 * short.step().seconds))
    predicted, measured = rate_cells(view.figures.value)["tokens/s"][:2]
    assert predicted == "–" and measured == numbers.format_short(short.step().tokens_per_second / 2)


def test_the_head_has_three_numbers_above_their_units() -> None:
    report, html = plan_of().step(), render_rates(build_shown_step(plan_of()))
    assert report.mfu is not None and report.cost_per_token is not None
    assert re.findall(r"<b>(.*?)</b> <span>(.*?)</span>", html) == [
        (numbers.format_short(report.tokens_per_second_per_gpu), "tokens/s per GPU"),
        (f"{100 * report.mfu:.0f} %", "MFU"),
        (numbers.format_dollars(1e6 * report.cost_per_token), "per M tokens"),
    ]


def test_pinned_plans_compare_seconds_speed_and_price() -> None:
    here, pin = plan_of(), plan_of(recompute="full")
    view = StepView(here, pins=(pin,))
    factor = view.shown.scale.factor if view.shown else 0
    assert sum(drawn(view)["pin 0"].values()) == pytest.approx(pin.step().seconds * factor)
    cells = rate_cells(view.figures.value)
    seconds = next(cells[key] for key in cells if key.startswith("one step"))
    assert seconds[3].startswith("−"), "the plan on screen is quicker"
    assert cells["tokens/s"][2] == numbers.format_short(pin.step().tokens_per_second)
    assert cells["tokens/s"][3].startswith("+") and cells["$ per M tokens"][3].startswith("−$")
    assert "recompute full" in words(view.figures.value) and "recompute full" in words(view.table.value)
    view.figures.press_button("unpin 0")
    assert view.pins == () and "pin 0" not in drawn(view)


def test_a_click_on_a_part_opens_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    view = StepView(plan_of())
    sent: list[Any] = []
    monkeypatch.setattr(view.table, "send", sent.append)
    click = {"trace": list(PARTS).index("attention"), "point": 0, "customdata": ""}
    view.figure._handle_custom_msg({"click": click}, [])
    assert sent == [{"open": "attention"}] and "data-opens='attention'" in view.table.value


def test_every_bar_is_inside_the_plot() -> None:
    for pins in ((), (plan_of(recompute="full", seq_len=16_384),)):
        view = StepView(plan_of(), pins=pins)
        longest = max(sum(parts.values()) for parts in drawn(view).values())
        assert longest <= view.figure.layout.xaxis.range[1]
        assert view.figure.layout.xaxis.visible is False, "no axis under the words"


@pytest.mark.parametrize("text", ["15T", "300B", "1e9"])
def test_the_budget_is_the_reports_own_days(text: str) -> None:
    plan = plan_of()
    view = StepView(plan)
    view.budget.value = text
    report = plan.step()
    tokens = {"15T": 15e12, "300B": 300e9, "1e9": 1e9}[text]
    hours = report.days(tokens) * 24
    unit, size = {"15T": ("years", 24 * 365), "300B": ("days", 24), "1e9": ("hours", 1)}[text]
    match = re.match(r"([\d.,]+) (\w+) without failures · \$([\d.,]+[kMBT]?)", words(view.budget_words.value))
    assert match and match[2] == unit
    assert float(match[1].replace(",", "")) == pytest.approx(hours / size, rel=0.006)


def test_a_budget_that_is_no_number_is_said_at_the_input() -> None:
    view = StepView(plan_of())
    view.budget.value = "many"
    assert "num_tokens is 'many'" in words(view.budget_row.message)
    assert not view.budget_words.value
    view.budget.value = "1B"
    assert not view.budget_row.message and view.budget_words.value


def test_a_refusal_is_told_and_no_old_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: ss.Plan) -> Any:
        raise ValueError("Gpu.peak_flops['bf16'] is None; allowed: its <peak>. Nearest fix: ss.calibrate().")

    view = StepView(plan_of())
    monkeypatch.setattr(ss.Plan, "step", refused)
    view.show(plan_of(seq_len=2048))
    assert "ss.calibrate()" in words(view.caption.value) and "&lt;peak&gt;" in view.caption.value
    assert drawn(view) == {} and notes(view)["predicted"].startswith("no prediction")
    assert not view.figures.value and not view.table.value and not view.budget_row.is_shown
    monkeypatch.undo()
    view.show(plan_of())
    assert drawn(view)["predicted"] and view.budget_row.is_shown


# ----------------------------------------------------------------------------------------- measured


def test_measured_steps_stand_beside_their_own_plan_and_no_other() -> None:
    plan, other = plan_of(), plan_of(seq_len=2048)
    view = StepView(plan)
    seconds = plan.step().seconds * 1.25
    view.add(plan, RunSteps(20, seconds))
    factor = view.shown.scale.factor if view.shown else 0
    assert drawn(view)["measured"] == {"measured": pytest.approx(seconds * factor)}
    assert notes(view)["measured"].endswith("+25 %")
    view.show(other)
    assert "measured" not in drawn(view)
    view.show(plan)
    assert "measured" in drawn(view)


def test_a_measurement_is_shown_where_nothing_can_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()

    def refused(self: ss.Plan) -> Any:
        raise ValueError("unknown")

    monkeypatch.setattr(ss.Plan, "step", refused)
    view = StepView()
    view.add(plan, RunSteps(20, 0.5))
    view.show(plan)
    assert drawn(view) == {"measured": {"measured": 500.0}}
    assert notes(view)["measured"] == "500 ms"
    cells = rate_cells(view.figures.value)
    assert cells["one step, ms"] == ["–", "500"] and cells["tokens/s"] == ["–", "–"]


def test_a_missing_rate_is_reported_without_names_of_the_python_api() -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.fsdp2()
    )
    caption = words(StepView(plan).caption.value)
    assert caption == "The bf16 FLOP/s of this device are unknown. Fix: ss.calibrate()."


def test_what_finished_runs_took_stands_under_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(words="3 runs took 1.12 times the predicted step")
    monkeypatch.setattr(step_rows, "find_residual", lambda plan: found)
    assert found.words in words(StepView(plan_of()).caption.value)

    def damaged(plan: ss.Plan) -> None:
        raise ValueError("calibration.json, line 3: <no number>")

    monkeypatch.setattr(step_rows, "find_residual", damaged)
    assert "line 3: <no number>" in words(StepView(plan_of()).caption.value)


# ------------------------------------------------------------------------------- measuring this machine

HERE = ss.Cluster.parse("2xcpu")


def test_only_a_plan_for_this_machine_offers_to_measure_it() -> None:
    view = StepView(plan_of(), machine=HERE)
    assert view.calibrate.layout.display == "none"
    view.show(plan_of(cluster="2xcpu"))
    assert view.calibrate.layout.display == ""
    ours = StepView(plan_of(), machine=ss.Cluster.parse("8xh100-sxm-80gb"))
    assert ours.calibrate.layout.display == ""
    ours.show(plan_of(cluster="2x8xh100-sxm-80gb"))
    assert ours.calibrate.layout.display == "none"


def test_measuring_says_how_far_it_is_and_the_prediction_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, told = threading.Event(), threading.Event()

    def calibrate(cluster: ss.Cluster, progress: Any) -> None:
        progress("matrix products", 0.25)
        assert cluster == HERE and goes_on.wait(10)

    monkeypatch.setattr(ss, "calibrate", calibrate)
    view = StepView(plan_of(cluster="2xcpu"), machine=HERE, on_calibrate=told.set)
    shown: list[ss.Plan] = []
    monkeypatch.setattr(view, "show", shown.append)
    view.calibrate.button.click()
    deadline = time.monotonic() + 10
    while view.calibrate.progress.value != 0.25 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert view.calibrate.button.disabled and "matrix products" in view.calibrate.words.value
    goes_on.set()
    assert told.wait(10) and [plan.cluster for plan in shown] == [HERE]
