"""Tests of charts: the state that they send, the clicks that they report, and their SVG."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import shardscope as ss
from shardscope_widgets import MemoryView, StepView
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.run.figure import RunFigure

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())


@pytest.fixture
def sent_states(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The states that charts send."""
    states: list[dict[str, Any]] = []
    monkeypatch.setattr(Chart, "_send", lambda self, message, buffers=None: states.append(message["state"]))
    return states


def test_each_change_sends_the_whole_figure_once(sent_states: list[dict[str, Any]]) -> None:
    chart = Chart([{"type": "bar", "x": [1.0], "y": [2.0]}], layout={"height": 100})
    sent_states.clear()
    with chart.batch_update():
        chart.data[0].x, chart.layout.height = [3.0], 200
    (state,) = sent_states
    assert list(state) == ["_figure"], "no state of plotly's own protocol"
    assert state["_figure"]["data"][0]["y"] == [2.0] and state["_figure"]["data"][0]["x"] == [3.0]
    assert state["_figure"]["layout"]["height"] == 200
    chart.redraw([{"x": [4.0]}], {"height": 200})
    assert sent_states[-1]["_figure"]["data"][0]["x"] == [4.0]
    count = len(sent_states)
    chart.add_traces([{"type": "scatter", "x": [0.0], "y": [1.0]}])
    chart.layout.height = 300
    assert len(sent_states) == count + 2 and len(sent_states[-1]["_figure"]["data"]) == 2


def test_reloaded_page_receives_the_current_figure() -> None:
    view = MemoryView(PLAN)
    view.show(PLAN.with_layout(ss.Layout.ddp()) if hasattr(PLAN, "with_layout") else PLAN)
    figure = view.figure.get_state()["_figure"]
    total = sum(trace["x"][0] for trace in figure["data"] if trace["type"] == "bar")
    assert total == pytest.approx(view.report.peak_bytes / 2**30) if view.report else pytest.fail("no report")
    assert not [name for name in view.figure.get_state() if name.startswith(("_py2js", "_js2py", "_widget_"))]


def test_data_of_hidden_traces_is_not_sent() -> None:
    view = MemoryView(PLAN)
    traces = view.figure.get_state()["_figure"]["data"]
    assert all("x" not in trace for trace in traces if trace.get("visible") is False)
    view.mode.value = "step"
    areas = [trace for trace in view.figure.get_state()["_figure"]["data"] if trace.get("stackgroup")]
    assert areas and all(trace["x"] for trace in areas), "the data of a trace that becomes visible is sent"


def test_clicks_are_reported_and_malformed_messages_ignored() -> None:
    chart, clicks = Chart([{"type": "bar", "x": [1.0], "y": [2.0]}]), []
    assert not chart.clickable
    chart.on_click(lambda trace, point, customdata: clicks.append((trace, point, customdata)))
    assert chart.clickable
    chart._handle_custom_msg({"click": {"trace": 0, "point": 3, "customdata": "words"}}, [])
    chart._handle_custom_msg({"click": {"trace": 9, "point": 0, "customdata": None}}, [])
    chart._handle_custom_msg({"click": "all"}, [])
    chart._handle_custom_msg("x", [])
    assert clicks == [(0, 3, "words")]


# -------------------------------------------------------------------------------------------- as SVG


def find_rects(svg: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.tag == "rect"]


def test_svg_bar_lengths_are_proportional_to_bytes() -> None:
    view = MemoryView(PLAN)
    assert view.report is not None
    lengths = {
        each.find("title").text: float(each.get("width", 0)) for each in find_rects(view.figure.to_svg())
    }  # type: ignore[union-attr]
    scale = lengths["activations"] / view.report.components["activations"]
    for name in ("parameters", "optimizer"):
        assert lengths[name] == pytest.approx(scale * view.report.components[name], abs=0.2)
    assert "<tspan" in view.figure.to_svg() and "GiB" in view.figure.to_svg()


@pytest.mark.parametrize("make", [lambda: MemoryView(PLAN), lambda: StepView(PLAN)], ids=["memory", "time"])
def test_svg_has_no_scripts_styles_or_external_references(make: Any) -> None:
    svg = make().figure.to_svg()
    ElementTree.fromstring(svg)
    assert len(find_rects(svg)) >= 5 and not re.search(
        r"<script|<style|\bon\w+=|https?://|var\(|nan|inf", svg
    )


def test_svg_draws_lines_areas_and_gaps() -> None:
    view = MemoryView(PLAN)
    view.mode.value = "step"
    assert view.figure.to_svg().count("<polygon") == 9
    figure = RunFigure()
    figure.start_run(2, None, 40, ["loss"])
    figure.add_records([{"step": step, "rank": 0, "loss": 3.0 - step / 10} for step in range(30)])
    svg = figure.widget.to_svg()
    ElementTree.fromstring(svg)
    assert "<path" in svg and "loss" in svg
    chart = Chart(
        [{"type": "scatter", "mode": "lines", "x": np.arange(5.0), "y": [1, float("nan"), 2, 3, None]}]
    )
    assert chart.to_svg().count("M") == 2, "a gap starts a new path"


def test_svg_escapes_untrusted_text() -> None:
    chart = Chart([{"type": "bar", "name": "<script>", "x": ["<b>&"], "y": [1.0]}])
    chart.layout.annotations = [
        {"text": "<script>alert(1)</script> <b>bold</b>", "x": 0, "y": 0, "xref": "paper"}
    ]
    svg = chart.to_svg()
    ElementTree.fromstring(svg)
    assert "<script" not in svg and ">bold</tspan>" in svg


def test_svg_of_many_markers_stays_small() -> None:
    many = np.random.default_rng(0).random(20_000)
    chart = Chart([{"type": "scatter", "mode": "markers", "x": many, "y": many}])
    assert len(chart.to_svg()) < 40_000
