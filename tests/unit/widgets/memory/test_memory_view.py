"""Tests of the memory view without a browser: rows, modes, pins, tiers and suggested changes."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from html import unescape
from itertools import pairwise
from math import nan
from typing import Any

import pytest
from fake_runs import wait_until
from shown_text import strip_tags
from tests.requirements import few

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.planner.differences import find_differences
from shardscope.planner.memory_needs import fits
from shardscope.planner.repairs.make_it_fit import Fit, make_it_fit
from shardscope.rehearsal.extent import estimate_seconds
from shardscope.runs.explain.measured import build_measured_memory
from shardscope_widgets import MemoryView, Studio
from shardscope_widgets.kit.background_work import DurationEstimate, describe_duration
from shardscope_widgets.kit.pins import name_pins
from shardscope_widgets.memory import fit_search, table
from shardscope_widgets.memory import view as memory_view
from shardscope_widgets.memory.figure import _build_total_label
from shardscope_widgets.memory.repairs import describe_cost, name_changes
from shardscope_widgets.memory.rows import Bar

GIB = 2**30


def build_plan(
    model: str = "llama-3.1-8b",
    cluster: str = "8xh100-sxm-80gb",
    layout: ss.Layout | None = None,
    **recipe: Any,
) -> ss.Plan:
    layout = layout or ss.Layout.fsdp2()
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


def read_bars(view: MemoryView) -> dict[str, dict[str, float]]:
    """Return row -> component -> GiB of the bars."""
    bars: dict[str, dict[str, float]] = {}
    for trace in view.figure.data:
        if trace.type == "bar":
            for label, value in zip(trace.y, trace.x, strict=True):
                bars.setdefault(label, {})[trace.name] = value
    return bars


def build_report_of_tier(plan: ss.Plan, tier: str) -> Any:
    return replace(plan.memory(), tier=tier)  # type: ignore[arg-type]


def test_chart_reserves_a_row_for_every_tier() -> None:
    view = MemoryView(build_plan())
    assert list(view.figure.layout.yaxis.categoryarray) == ["predicted", "rehearsed", "measured"]
    assert list(read_bars(view)) == ["predicted"]
    assert {a.text for a in view.figure.layout.annotations} >= {
        "not rehearsed yet",
        "plan not run yet",
    }


@pytest.mark.parametrize(("share", "is_beyond"), [(0.6, True), (0.9, False)])
def test_notes_of_empty_rows_do_not_cross_the_capacity(share: float, is_beyond: bool) -> None:
    row = Bar("measured", "measured", {}, int(share * 100 * GIB), note="plan not run yet")
    note = _build_total_label(row, 100.0)
    assert note["x"] == (pytest.approx(share * 100) if is_beyond else 0)


def test_rehearsal_is_shown_only_with_its_own_plan() -> None:
    plan, other = build_plan(), build_plan(seq_len=2048)
    view = MemoryView(plan)
    height, num_rows = view.figure.layout.height, len(read_rows(view))
    view.add(plan, build_report_of_tier(plan, "rehearsed"))
    assert list(read_bars(view)) == ["predicted", "rehearsed"]
    assert view.figure.layout.height == height, "the chart keeps its height"
    assert len(read_rows(view)) == num_rows and read_column(view, "rehearsed")["activations"]
    view.show(other)
    assert list(read_bars(view)) == ["predicted"]
    view.show(plan)
    assert list(read_bars(view)) == ["predicted", "rehearsed"]


def test_measured_memory_shows_unmeasured_components_as_dashes() -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.fsdp2()
    )
    phases = {"rest": {"parameters": 4 * 2**20}, "forward": {"parameters": 4 * 2**20, "activations": 2**20}}
    view = MemoryView(plan)
    view.add(plan, build_measured_memory(plan, {0: {"memory": {"phases": phases}}}, []))
    assert read_bars(view)["measured"]["activations"] == 2**20 / GIB
    assert "Measured 5 MiB of tensors" in strip_tags(view.table.value)
    assert read_column(view, "measured")["optimizer"] == "–", (
        "a component that is not measured separately is not 0"
    )


def test_step_mode_shows_the_timeline_at_the_same_height() -> None:
    plan = build_plan()
    view = MemoryView(plan)
    height = view.figure.layout.height
    view.mode.value = "step"
    shown = [trace for trace in view.figure.data if trace.visible]
    assert all(trace.type == "scatter" for trace in shown)
    assert view.figure.layout.height == height
    report = plan.memory()
    fullest = max(sum(parts.values()) for _, _, parts in report.timeline)
    areas = [trace.y for trace in shown]
    assert max(map(sum, zip(*areas, strict=True))) == pytest.approx(fullest / GIB)
    view.mode.value = "peak"
    assert all(trace.type == "bar" for trace in view.figure.data if trace.visible)


def test_stages_mode_shows_a_bar_per_stage_and_the_range_of_the_worst() -> None:
    plan = build_plan("llama-3.1-70b", "4x8xh100-sxm-80gb", ss.Layout.megatron(tp=8, pp=4))
    view = MemoryView(plan)
    report = plan.memory()
    assert list(read_bars(view)) == ["predicted"], "only the stage with the highest peak"
    view.mode.value = "stages"
    assert [sum(parts.values()) for parts in read_bars(view).values()] == pytest.approx(
        [stage.peak_bytes / GIB for stage in report.by_stage]
    )
    row = report.worst_stage.stage
    ends = [(s.x0, s.x1) for s in view.figure.layout.shapes if s.y0 == s.y1 == row]
    assert ends == [(report.low_bytes / GIB, report.high_bytes / GIB)]
    view.show(build_plan())
    assert view.mode.value == "peak" and list(read_bars(view)) == ["predicted"], (
        "a plan with one stage has no stages mode"
    )


def test_offloaded_bytes_are_shown_as_host_memory() -> None:
    plan = build_plan(layout=ss.Layout.fsdp2(offload="cpu"))
    view = MemoryView(plan)
    assert read_bars(view)["host"]["host"] == plan.memory().host_bytes / GIB
    assert read_bars(view)["predicted"]["host"] == 0
    pattern = r"host memory: ([\d.]+) of 2,048 GiB on each node, ([\d.]+) GiB per rank"
    match = re.search(pattern, strip_tags(view.caption.value))
    assert match and float(match[1]) == pytest.approx(8 * float(match[2]), rel=0.01)
    assert read_column(view, "predicted")["host"] == match[2]
    assert "host" not in read_bars(MemoryView(build_plan())) and "host" not in read_column(
        MemoryView(build_plan()), "predicted"
    )


def read_rows(view: Any) -> dict[str, list[str]]:
    """Return row -> text of its cells."""
    rows = re.findall(r"data-opens='([^']+)'>(.*?)</tr>", view.table.value, re.DOTALL)
    return {key: [strip_tags(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for key, row in rows}


def read_column(view: Any, title: str, after: int = 0) -> dict[str, str]:
    """Return row -> text in the first column titled ``title``, or in a column ``after`` it."""
    titles = [strip_tags(head) for head in re.findall(r"<th scope='col'[^>]*>(.*?)</th>", view.table.value)]
    index = next(index for index, head in enumerate(titles[1:]) if head.startswith(title)) + after
    return {key: cells[index] for key, cells in read_rows(view).items()}


def test_components_are_sorted_by_bytes() -> None:
    for plan in (build_plan(), build_plan(recompute="full"), build_plan(micro_batch_size=8)):
        numbers = read_column(MemoryView(plan), "predicted")
        total = float(numbers.pop("total"))
        sizes = [float(number.replace(",", "")) for number in numbers.values()]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) == 9
        assert sum(sizes) == pytest.approx(total, rel=0.01)


def test_pinned_plans_are_bars_and_table_columns_with_differences() -> None:
    before, after, third = (
        build_plan(),
        build_plan(recompute="full", micro_batch_size=2),
        build_plan(seq_len=2048),
    )
    assert [str(change) for change in find_differences(before, after)] == [
        "micro batch size 1 → 2",
        "recompute none → full",
    ]
    view = MemoryView(after, pins=(before, third))
    bars = read_bars(view)
    assert list(bars) == ["predicted", "pin 0", "pin 1"]
    assert sum(bars["pin 0"].values()) == pytest.approx(before.memory().peak_bytes / GIB)
    assert "micro-batch 1" in view.figure.layout.yaxis.ticktext[-2].replace("<br>", " ")
    assert "FSDP2: micro-batch 1, recompute none'" in view.table.value, "the tooltip has the full description"
    predicted, pinned = read_column(view, "predicted"), read_column(view, "micro-batch 1, recompute none")
    for name, number in read_column(view, "micro-batch 1", after=1).items():
        difference = float(number.replace("−", "-"))
        assert difference == pytest.approx(float(predicted[name]) - float(pinned[name]), abs=0.11), name
    view.show(before)
    assert "this plan" in view.figure.layout.yaxis.ticktext[-2], "pin labels follow the current plan"
    assert set(read_column(view, "this plan", after=1).values()) == {"0"}


def test_a_pin_with_many_differences_is_named_by_model_and_framework() -> None:
    pin = ss.Plan(
        ss.models["llama-3.2-1b"],
        ss.Cluster.parse("2xh100-sxm-80gb"),
        ss.Recipe(seq_len=2048, micro_batch_size=2, recompute="full"),
        ss.Layout.zero(stage=2),
    )
    (name,) = name_pins([pin], build_plan())
    assert name.short == "Llama 3.2 1B, DeepSpeed ZeRO-2" and "+" not in name.full
    assert "2 × H100 SXM 80 GB" in name.full and "sequence 2,048" in name.full
    # Of the same model under the same framework, what differs is the name.
    (name,) = name_pins([build_plan(recompute="full", seq_len=2048, micro_batch_size=2)], build_plan())
    assert "micro-batch 2" in name.short and "FSDP2" not in name.short


def test_pins_of_one_model_and_framework_are_told_apart() -> None:
    """Seen from another model, both were "Llama 3.1 8B, FSDP2": the second one with "(2)", which was cut."""
    pins = [build_plan(), build_plan(micro_batch_size=2), build_plan(micro_batch_size=2, recompute="full")]
    other = replace(build_plan(layout=ss.Layout.zero()), architecture=ss.models["qwen3-8b"])
    names = [name.short for name in name_pins(pins, other)]
    assert len(set(names)) == 3 and "micro-batch 2" in names[1] and "recompute full" in names[2]
    view = MemoryView(other)
    view.pins = pins
    view.mode.value = "step"
    notes = [note for note in view.figure.layout.annotations if note.xref == "paper"]
    labels = [note.text for note in notes if "usable" not in note.text]
    assert len(set(labels)) == len(pins)
    # The margin has room for 16 characters, of which the dashes before the label take five.
    assert all(len(line) <= 14 for label in labels for line in label.split("<br>")), labels


def test_pins_are_told_apart_by_what_their_labels_show() -> None:
    """Labels have two short lines: "Llama 3.1 8B, DeepSpeed…" was that of ZeRO-2 and of ZeRO-3."""
    other = replace(build_plan(layout=ss.Layout.ddp()), architecture=ss.models["qwen3-8b"])
    chat = replace(ss.models["llama-3.1-8b"], name="meta-llama-3.1-8b-instruct-chat-v1")
    cases = [
        [build_plan(layout=ss.Layout.zero(stage=2)), build_plan(layout=ss.Layout.zero(stage=3))],
        [replace(build_plan(), architecture=replace(chat, name=f"{chat.name}{end}")) for end in "abc"],
        [replace(build_plan(layout=one), architecture=chat) for one in (ss.Layout.fsdp2(), ss.Layout.zero())],
    ]
    view = MemoryView(other)
    for pins in cases:
        view.pins = pins
        view.mode.value = "peak"
        bars = view.figure.layout.yaxis.ticktext
        assert len(set(bars)) == len(bars) > len(pins), bars
        view.mode.value = "step"
        notes = [note for note in view.figure.layout.annotations if note.xref == "paper"]
        lines = [note.text for note in notes if "usable" not in note.text]
        # Each begins with dashes of its own.
        names = {line.split(" ", 1)[1] for line in lines}
        assert len(names) == len(pins), lines


def test_pins_on_other_gpus_are_told_apart_and_a_folder_keeps_its_name() -> None:
    other = replace(build_plan(layout=ss.Layout.zero()), architecture=ss.models["qwen3-8b"])
    mine = replace(ss.models["llama-3.1-8b"], name="my-llama_v2")
    half = ss.Cluster.parse("4xh100-sxm-80gb")
    pins = [replace(one, architecture=mine) for one in (build_plan(), build_plan(micro_batch_size=2))]
    names = [name.short for name in name_pins([*pins, replace(pins[0], cluster=half)], other)]
    assert len(set(names)) == 3 and all("my-llama_v2" in name for name in names)
    assert "4 × H100" in names[2] and "micro-batch 2" in names[1]


def test_the_check_without_gpus_is_named_so_for_gpus_only() -> None:
    view = MemoryView(build_plan())
    button = view.rehearse.button
    assert "GPUs" in button.description
    view.show(
        ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(), ss.Layout.fsdp2())
    )
    assert "GPU" not in button.description + button.tooltip


def find_pin_button(view: MemoryView) -> Any:
    waiting: list[Any] = [view]
    for widget in waiting:
        if getattr(widget, "description", "") == "Pin for comparison":
            return widget
        waiting += getattr(widget, "children", ())
    raise AssertionError("no button")


def test_names_of_offloaded_pins_have_each_part_once() -> None:
    offloaded = ss.Layout.zero(stage=3, offload_params="cpu", offload_optimizer="cpu")
    layouts = {
        "parameters on CPU, optimizer on CPU": offloaded,
        "offload optimizer buffer count 8": ss.Layout.zero(stage=3, offload_optimizer_buffer_count=8),
    }
    current = build_plan(layout=ss.Layout.zero(stage=3))
    for name, layout in layouts.items():
        (pin,) = name_pins([build_plan(layout=layout)], current)
        assert pin.short == name and pin.full.count("on CPU") in (0, 2)
    (pin,) = name_pins([current], build_plan(layout=offloaded))
    assert pin.short == "nothing on CPU"


def test_buttons_pin_and_unpin_plans() -> None:
    one, two = build_plan(), build_plan(seq_len=2048)
    view = MemoryView(one)
    button = find_pin_button(view)
    assert button.description == "Pin for comparison"
    button.click()
    assert view.pins == (one,) and button.description == "Unpin"
    view.show(two)
    assert button.description == "Pin for comparison"
    button.click()
    assert view.pins == (one, two)
    view.table.press_button("unpin 0")
    assert view.pins == (two,) and list(read_bars(view)) == ["predicted", "pin 0"]
    view.table.press_button("unpin 7")
    assert view.table.error and view.pins == (two,)
    button.click()
    assert view.pins == () and list(read_bars(view)) == ["predicted"]


def test_pin_buttons_call_on_pin_and_pins_are_deduplicated() -> None:
    pinned: list[ss.Plan] = []
    one, two = build_plan(), build_plan(seq_len=2048)
    view = MemoryView(one, on_pin=pinned.append)
    find_pin_button(view).click()
    assert pinned == [one] and view.pins == ()
    view.pins = (two, one, two)
    assert view.pins == (two, one), "pins are unique"
    view.table.press_button("unpin 0")
    assert pinned == [one, two]


def test_a_click_on_a_component_opens_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    view = MemoryView(build_plan())
    sent: list[Any] = []
    monkeypatch.setattr(view.table, "send", sent.append)
    for mode, kind in (("peak", "bar"), ("step", "scatter")):
        view.mode.value = mode
        traces = [(index, trace) for index, trace in enumerate(view.figure.data) if trace.type == kind]
        index = next(index for index, trace in traces if trace.name == "gather buffers")
        view.figure._handle_custom_msg({"click": {"trace": index, "point": 0, "customdata": ""}}, [])
    assert sent == [{"open": "gather_buffers"}] * 2
    assert "gather_buffers" in read_rows(view)


def test_tooltips_are_not_higher_than_the_chart() -> None:
    """plotly shows no label that is higher than its chart; a line has 17 pixels."""
    view = MemoryView(build_plan(layout=ss.Layout.fsdp2(pp=2)))
    bars = [trace for trace in view.figure.data if trace.type == "bar"]
    texts = [text for trace in bars for text in trace.customdata]
    assert max(9 + 17 * len(text.split("<br>")) for text in texts) <= view.figure.layout.height
    assert any(text.endswith(" …") for text in texts), "of a longer text the first words remain"


def test_only_the_visible_subplot_takes_clicks() -> None:
    """Where two subplots overlap, plotly sends every hover and click to the upper one."""
    view = MemoryView(build_plan())
    for mode, shown, hidden in (("peak", "xaxis", "xaxis2"), ("step", "xaxis2", "xaxis")):
        view.mode.value = mode
        assert view.figure.layout[shown].domain == (0, 1)
        assert view.figure.layout[hidden].domain[1] < 0.01


def test_axes_have_no_grid_lines_and_capacity_label_is_in_the_margin() -> None:
    view = MemoryView(build_plan())
    for axis in (view.figure.layout[name] for name in ("xaxis", "yaxis", "xaxis2", "yaxis2")):
        assert axis.showgrid is False
    view.mode.value = "step"
    capacity = next(note for note in view.figure.layout.annotations if "usable" in note.text)
    assert (capacity.xref, capacity.xanchor) == ("paper", "left"), "the label is in the margin"


def test_step_mode_labels_do_not_overlap() -> None:
    view = MemoryView(build_plan(), pins=(build_plan(recompute="full"), build_plan(recompute="selective")))
    view.mode.value = "step"
    layout = view.figure.layout
    pixels = layout.height - layout.margin.t - layout.margin.b
    heights = [
        note.y / layout.yaxis2.range[1] * pixels for note in layout.annotations if note.xref == "paper"
    ]
    assert len(heights) == 3
    assert all(upper - lower > 13 for upper, lower in pairwise(heights))


def test_chart_labels_contain_no_line_breaks() -> None:
    tiny = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.fsdp2()
    )
    view = MemoryView(tiny)
    for note in view.figure.layout.annotations:
        assert "<br>" not in note.text


def test_framework_change_is_reported_as_one_difference() -> None:
    differences = find_differences(build_plan(), build_plan("llama-3.1-70b", layout=ss.Layout.zero(stage=2)))
    assert [str(difference) for difference in differences] == [
        "model llama-3.1-8b → llama-3.1-70b",
        "framework FSDP2 → DeepSpeed ZeRO-2",
    ]


def test_derived_options_are_not_reported_as_differences() -> None:
    before = build_plan(layout=ss.Layout.zero(3))
    after = build_plan(layout=ss.Layout.zero(3, offload_params="nvme"))
    assert after.layout.offload_params_buffer_count is not None  # type: ignore[attr-defined]
    for one, other in ((before, after), (after, before)):
        assert [difference.field for difference in find_differences(one, other)] == ["offload_params"]
    chosen = build_plan(layout=ss.Layout.zero(3, offload_params="nvme", offload_params_buffer_count=99))
    assert {difference.field for difference in find_differences(before, chosen)} == {
        "offload_params",
        "offload_params_buffer_count",
    }


def test_timeline_of_a_pinned_plan_is_labelled_and_within_the_axis() -> None:
    small, large = build_plan(), build_plan(micro_batch_size=4)
    view = MemoryView(small, pins=(large,))
    view.mode.value = "step"
    line = next(trace for trace in view.figure.data if trace.visible and trace.mode == "lines+markers")
    assert max(line.y) > small.memory().usable_bytes / 2**30, (
        "precondition: the pinned plan exceeds the capacity line"
    )
    assert view.figure.layout.yaxis2.range[1] > max(line.y)
    assert any("micro-<br>batch" in note.text for note in view.figure.layout.annotations)


# --------------------------------------------------------------------------------- suggested changes


@pytest.fixture
def studio() -> Studio:
    return Studio()


def read_offers(view: Any) -> list[str]:
    return [button.description for button in view.repairs.buttons.children]


def apply_each_offer(view: MemoryView) -> list[ss.Plan]:
    """Return the plan that a click on each suggested change gives."""
    before, changed = view.plan, []
    assert before is not None
    for index in range(len(read_offers(view))):
        view.repairs.buttons.children[index].click()
        assert view.plan is not None and view.plan != before
        changed.append(view.plan)
        view.show(before)
        view.repairs.show_repairs(before, before.memory())
    return changed


def test_fitting_plan_is_offered_cheap_memory_savings() -> None:
    plan = build_plan()
    view = MemoryView(plan)
    assert 1 <= len(read_offers(view)) <= 3 and view.repairs.make_it_fit.layout.display == "none"
    for chip, changed in zip(read_offers(view), apply_each_offer(view), strict=True):
        assert f"−{format_gib(plan.memory().peak_bytes - changed.memory().peak_bytes)} GiB" in chip
        assert re.search(r"\d %|same speed", chip)
        assert changed.layout == plan.layout
        for field in ("method", "precision", "optimizer", "seq_len", "global_batch_size"):
            assert getattr(changed.recipe, field) == getattr(plan.recipe, field)
        assert changed.step().seconds < 1.2 * plan.step().seconds


def test_make_it_fit_button_lists_and_applies_its_changes() -> None:
    plan = build_plan("llama-3.1-405b", "8x8xh100-sxm-80gb", ss.Layout.megatron(tp=1, pp=1))
    applied: list[ss.Plan] = []
    view = MemoryView(plan, on_apply=applied.append)
    panel = view.repairs
    assert wait_until(lambda: panel.make_it_fit.layout.display == "", 60)
    assert panel.make_it_fit.description == "Make it fit"
    text = strip_tags(panel.fit_words.value)
    fit = make_it_fit(plan)
    assert fit is not None and all(change.lower() in unescape(text).lower() for change in fit.changes)
    assert re.search(r"fits, [\d.]+ of 79.1 GiB", text)
    panel.make_it_fit.click()
    assert applied == [fit.plan] and fits(applied[0], applied[0].memory())
    view.show(fit.plan)
    assert panel.make_it_fit.layout.display == "none"


def test_fit_search_skips_superseded_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[ss.Plan] = []
    may_continue = threading.Event()

    def search(plan: ss.Plan) -> None:
        searched.append(plan)
        assert may_continue.wait(10)

    monkeypatch.setattr(fit_search, "make_it_fit", search)
    plans = [build_plan(micro_batch_size=size) for size in (2, 4, 8)]
    view = MemoryView(plans[0])
    for plan in plans[1:]:
        view.show(plan)
    may_continue.set()
    assert wait_until(lambda: not view.repairs.fit_search.is_busy)
    assert len(searched) <= 2 and searched[-1] == plans[-1]


def test_standalone_view_shows_the_fitting_plan_says_what_changed_and_undoes_it() -> None:
    plan = build_plan(micro_batch_size=2)
    view = MemoryView(plan)
    assert view.undo is not None and view.undo.layout.display == "none"
    assert wait_until(lambda: view.repairs.make_it_fit.layout.display == "", 60)
    change = view.repairs.fit_words.value.partition(":")[0]
    view.repairs.make_it_fit.click()
    assert view.plan is not None and fits(view.plan, view.plan.memory())
    assert view.caption.value.startswith(f"<b>with {change[0].lower()}{change[1:]}</b> · ")
    # A further change counts from the same plan.
    wait_until(lambda: not view.repairs.make_it_fit.disabled)
    assert read_offers(view)
    view.repairs.buttons.children[0].click()
    assert view.plan != plan and view.caption.value.startswith(f"<b>with {change[0].lower()}{change[1:]}, ")
    view.undo.click()
    assert view.plan == plan and not view.caption.value.startswith("<b>with")
    assert view.undo.layout.display == "none"
    assert MemoryView(plan, on_apply=lambda plan: None).undo is None, "a Studio has its inputs"


def test_oversized_plan_is_offered_only_changes_that_make_it_fit() -> None:
    plan = build_plan(micro_batch_size=2)
    view = MemoryView(plan)
    assert read_offers(view)
    for changed in apply_each_offer(view):
        assert fits(changed, changed.memory())
        assert changed.step().seconds < 3 * plan.step().seconds


def test_suggested_changes_of_the_previous_plan_are_disabled() -> None:
    """Until the user pauses, the previous plan's suggestions are shown and disabled."""
    applied: list[ss.Plan] = []
    view = MemoryView(build_plan(), on_apply=applied.append)

    async def press_before_the_pause() -> None:
        view.show(build_plan(seq_len=2048))
        for chip in view.repairs.buttons.children:
            assert chip.disabled
            chip.click()
        view.repairs.make_it_fit.click()

    asyncio.run(press_before_the_pause())
    assert applied == []


@pytest.mark.parametrize(
    ("slowdown", "text"),
    [
        (0.03, "3 % slower"),
        (0.4, "1.4x slower"),
        (-0.07, "8 % faster"),
        (-0.6, "2.5x faster"),
        (-0.95, "20x faster"),
        (0.001, "same speed"),
        (nan, "time unknown"),
    ],
)
def test_cost_of_a_change_is_described_as_relative_step_time(slowdown: float, text: str) -> None:
    assert text in describe_cost(slowdown * 4.0, 4.0)


SITUATIONS: list[dict[str, Any]] = [
    {"micro": "2"},
    {"micro": "4", "seq_len": "2048"},
    {"micro": "4", "seq_len": "8192", "framework": "deepspeed"},
    {},
]


@pytest.mark.parametrize("situation", few(SITUATIONS, SITUATIONS[1:2]), ids=str)
def test_applying_a_suggested_change_gives_exactly_its_plan(
    studio: Studio, situation: dict[str, Any]
) -> None:
    studio.layout_picker.framework.value = situation.get("framework", "fsdp2")
    studio.recipe.micro.value = situation.get("micro", "1")
    studio.recipe.seq_len.value = situation.get("seq_len", "4096")
    before, panel = studio.plan, studio.memory.repairs
    changed = apply_each_offer(MemoryView(before))
    assert changed
    for index, plan in enumerate(changed):
        studio.apply(before)
        assert studio.plan == before
        panel.buttons.children[index].click()
        assert studio.plan.degrees == plan.degrees
        assert fill_default_rank(studio.plan.recipe) == fill_default_rank(plan.recipe)
        assert studio.plan.memory().peak_bytes == plan.memory().peak_bytes


def fill_default_rank(recipe: ss.Recipe) -> ss.Recipe:
    """Return the recipe with an explicit LoRA rank, as the input shows it."""
    return replace(recipe, lora_rank=recipe.adapter_rank) if recipe.has_adapters else recipe


def test_optimizer_without_an_input_is_preserved(studio: Studio) -> None:
    plan = replace(studio.plan, recipe=replace(studio.plan.recipe, optimizer="sgd"))
    studio.apply(plan)
    studio.recipe.seq_len.value = "2048"
    assert studio.plan.recipe.optimizer == "sgd"


# ----------------------------------------------------------------------------------------- rehearsal


def test_rehearsal_shows_progress_and_then_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    may_continue = threading.Event()

    def rehearse(self: ss.Plan, progress: Any = None, timeout: float = 0) -> Any:
        progress("forward", 0.5)
        assert may_continue.wait(10)
        progress("backward", 0.9)
        return build_report_of_tier(self, "rehearsed")

    monkeypatch.setattr(ss.Plan, "rehearse", rehearse, raising=False)
    view = MemoryView(build_plan())
    panel = view.rehearse
    assert panel.layout.display == ""
    expected = estimate_seconds(view.plan)
    assert describe_duration(expected) == "about 40 s" and describe_duration(expected) in panel.button.tooltip
    panel.button.click()
    assert wait_until(lambda: "forward" in panel.words.value)
    assert panel.progress.value == 0.5 and panel.button.disabled and panel.cancel.layout.display == ""
    assert view.caption.layout.display == "none", "progress replaces the caption"
    may_continue.set()
    assert wait_until(lambda: not panel.is_busy) and not panel.button.disabled
    assert "rehearsed" in read_bars(view) and view.caption.layout.display == ""
    view.show(build_plan(seq_len=2048))
    assert "about 5 s" in panel.button.tooltip, "the estimate uses the duration of the last rehearsal"


def test_rehearsal_that_ends_after_a_plan_change_keeps_the_new_chart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a rehearsal's thread draws the old plan the user selects a new one, which stays on screen."""
    old, new = build_plan(), build_plan(seq_len=2048)
    view = MemoryView(old)
    is_drawing, may_continue, original = threading.Event(), threading.Event(), memory_view.draw_memory

    def draw_slowly(figure: Any, shown: Any, mode: Any) -> None:
        if threading.current_thread().name == "rehearsal":
            is_drawing.set()
            may_continue.wait(1)
        original(figure, shown, mode)

    monkeypatch.setattr(memory_view, "draw_memory", draw_slowly)
    rehearsal_thread = threading.Thread(
        target=view.add, args=(old, build_report_of_tier(old, "rehearsed")), name="rehearsal"
    )
    rehearsal_thread.start()
    assert is_drawing.wait(10)
    show_thread = threading.Thread(target=view.show, args=(new,))
    show_thread.start()
    show_thread.join(0.3)  # Long enough to finish if it did not wait for the lock.
    may_continue.set()
    for thread in (rehearsal_thread, show_thread):
        thread.join(10)
    assert sum(read_bars(view)["predicted"].values()) == pytest.approx(new.memory().peak_bytes / GIB)
    assert list(read_bars(view)) == ["predicted"], "the rehearsal belongs to the old plan"


def test_duration_estimate_is_refined_from_progress() -> None:
    estimate = DurationEstimate(40)
    assert estimate.format(4, 0.1) == "4 s of about 40 s", "too early to refine the estimate"
    assert estimate.format(30, 0.3) == "30 s of about 2 minutes"
    assert estimate.format(60, 0.3) == "60 s of about 2 minutes", "no refinement without progress"
    assert estimate.format(70, 0.9) == "70 s of about 80 s"
    assert estimate.format(90, 0.9) == "90 s", "no estimate after it is exceeded"
    assert DurationEstimate(None).format(12, 0.9) == "12 s"


def test_rehearsal_estimate_grows_with_layers_and_micro_batches() -> None:
    def estimate_plan_seconds(**recipe: Any) -> float:
        return estimate_seconds(build_plan(**recipe))

    assert (
        estimate_plan_seconds(global_batch_size=8)
        < estimate_plan_seconds(global_batch_size=16)
        < estimate_plan_seconds(global_batch_size=24)
    )
    assert estimate_plan_seconds(global_batch_size=24) == estimate_plan_seconds(global_batch_size=64), (
        "no more micro-batches than these are rehearsed"
    )
    assert estimate_seconds(build_plan("llama-3.1-70b")) > estimate_plan_seconds()


def test_rehearsal_can_be_cancelled_and_shows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def rehearse_endlessly(self: ss.Plan, progress: Any = None, timeout: float = 0) -> Any:
        while True:
            progress("forward", 0.1)
            started.set()
            time.sleep(0.02)

    monkeypatch.setattr(ss.Plan, "rehearse", rehearse_endlessly, raising=False)
    view = MemoryView(build_plan())
    view.rehearse.button.click()
    assert started.wait(10)
    view.rehearse.cancel.click()
    assert wait_until(lambda: "Cancelled" in view.rehearse.words.value)
    assert wait_until(lambda: not view.rehearse.is_busy) and not view.rehearse.button.disabled

    def raise_value_error(self: ss.Plan, progress: Any = None, timeout: float = 0) -> Any:
        raise ValueError("Layout.pp is 2; allowed: <1>. Nearest fix: pp=1.")

    monkeypatch.setattr(ss.Plan, "rehearse", raise_value_error, raising=False)
    view.rehearse.button.click()
    assert wait_until(lambda: "allowed: &lt;1&gt;" in view.rehearse.words.value)
    assert list(read_bars(view)) == ["predicted"]


def test_amount_that_rounds_to_zero_is_shown_as_below_the_smallest() -> None:
    assert [table._format_amount(number) for number in (0, 2048, 2**20, 2**30)] == [
        "0", "<0.0001", "0.00098", "1.00",
    ]  # fmt: skip


def test_a_fit_names_its_changes_as_the_inputs_do() -> None:
    plan = ss.Plan(
        ss.models["llama-3.1-70b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
    )
    layout = ss.Layout.fsdp2(offload="cpu")
    recipe = ss.Recipe(recompute="full", micro_batch_size=4)
    fitting = ss.Plan(plan.architecture, plan.cluster, recipe, layout)
    changes = tuple(str(one) for one in find_differences(plan, fitting))
    fit = Fit(plan=fitting, changes=changes, bytes_won=1, seconds_lost=1.0)
    assert name_changes(plan, fit) == "micro-batch 1 → 4, recompute none → full, offload none → CPU"
