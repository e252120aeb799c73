"""Tests of static output: the plain HTML that a saved notebook shows without a kernel or widgets."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until
from IPython.core.events import EventManager

import shardscope as ss
from shardscope_widgets import MemoryView, RunView, StepView, Studio
from shardscope_widgets.kit.saved.chart_svg import draw_svg
from shardscope_widgets.kit.saved.static_picture import rewrite_html
from shardscope_widgets.run.run_html import render_legend

WIDGET = "application/vnd.jupyter.widget-view+json"
PLAN = ss.Plan(
    ss.models["gpt2"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=512), ss.Layout.fsdp2()
)


def read_static_text(view: Any) -> str:
    """Return the text of the static HTML of ``view``, without markup."""
    bundle = view._repr_mimebundle_()
    assert bundle[WIDGET]["model_id"] == view.model_id, "with a kernel the widget is shown"
    html = bundle["text/html"]
    assert len(html) < 50_000
    assert not re.search(r"<script|<style|\bon\w+=|https?://", html)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.mark.parametrize("make", [MemoryView, StepView])
def test_fault_47_static_output_has_the_table_of_the_view(make: Any) -> None:
    view = make()
    view.show(PLAN)
    text = read_static_text(view)
    name = "optimizer" if make is MemoryView else "matrices"
    assert name in text and re.search(r"\d", text)


def test_fault_47_static_output_has_the_verdict_and_table_of_the_studio() -> None:
    studio = Studio()
    text = read_static_text(studio)
    assert "Llama 3.1 8B on" in text and "Fits" in text and "activations" in text
    studio.architecture.name.value = "llama-3.1-70b"
    text = read_static_text(studio)
    assert "Llama 3.1 70B on" in text and "Does not fit" in text
    assert "Searching for" not in text and "Or a single change" not in text, "actions that need a kernel"
    assert "saved by the layers" not in text, "collapsed rows are omitted"


def test_fault_47_static_output_has_the_chart() -> None:
    html = MemoryView(PLAN)._repr_mimebundle_()["text/html"]
    alternative = "Memory of a GPU by component. The table below has the numbers."
    assert html.count("<rect") >= 5
    assert f"<img alt='{alternative}' src='data:image/svg+xml;base64," in html
    assert "<button" not in html and "<input" not in html, "no controls, which would not work"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Any]:
    """The outputs that are published to a notebook, and the events of its cells."""
    published: list[Any] = []
    shell = SimpleNamespace(events=EventManager(SimpleNamespace(), ["post_run_cell"]))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(
        "IPython.display.publish_display_data", lambda data, **options: published.append((data, options))
    )
    return published, shell.events


def test_fault_47_static_output_is_updated_after_each_cell(notebook: tuple[list[Any], Any]) -> None:
    published, events = notebook
    studio = Studio()
    studio._ipython_display_()
    (live, _), (static, options) = published
    assert WIDGET in live and "text/html" not in live, "the widget is an output of its own"
    assert "Llama 3.1 8B" in static["text/html"] and WIDGET not in static
    published.clear()
    events.trigger("post_run_cell", None)
    assert not published, "nothing has changed"
    studio.architecture.name.value = "llama-3.1-70b"
    events.trigger("post_run_cell", None)
    ((static, update),) = published
    assert update == {**options, "update": True} and "Llama 3.1 70B" in static["text/html"]
    studio.tabs.value = "Time"
    events.trigger("post_run_cell", None)
    assert "matrices" in published[-1][0]["text/html"], "the visible tab, which was created only now"
    count = len(published)
    studio.close()
    events.trigger("post_run_cell", None)
    assert len(published) == count


def test_fault_47_view_is_shown_although_its_svg_fails(notebook: tuple[list[Any], Any]) -> None:
    view = MemoryView(PLAN)
    view.figure.to_svg = lambda: 1 / 0
    view._ipython_display_()
    assert WIDGET in notebook[0][0][0] and "optimizer" in notebook[0][1][0]["text/html"]


def test_fault_47_static_output_has_the_final_state_of_a_run() -> None:
    run = FakeRun([record(loss=2.5)])
    run.write("<b>printed</b>")
    run.status = "finished"
    view = RunView(run)
    assert wait_until(lambda: view.status == "finished" and "2.500" in view.facts.value)
    text = read_static_text(view)
    assert "finished" in text and "2.500" in text and "&lt;b&gt;printed" in text


def test_static_table_is_the_legend_of_its_chart() -> None:
    """Each bar's colour stands beside its name; columns without numbers are omitted."""
    html = MemoryView(PLAN)._repr_mimebundle_()["text/html"]
    for colour in set(re.findall(r"<rect[^>]* fill='(#\w{6})'", html)):
        assert f"background-color:{colour}" in html
    assert re.findall(r"<th[^>]*>(\w+)</th>", html)[:1] == ["predicted"] and ">measured</th>" not in html


def test_static_chart_keeps_its_shape_where_the_page_is_narrow() -> None:
    """On paper, a fixed height would show the top of the image that is the fallback of the SVG."""
    html = MemoryView(PLAN)._repr_mimebundle_()["text/html"]
    width, height = re.search(r"<svg viewBox='0 0 (\d+) (\d+)'", html).groups()
    box, svg = re.search(r"<div style='(max-width[^']*)'><svg[^>]*style='([^']*)'", html).groups()
    assert f"aspect-ratio:{width}/{height}" in box and not re.search(r"(?<!-)\bheight:\d", box)
    assert "height:auto" in svg


def test_words_of_a_static_chart_are_apart_where_svg_and_styles_are_removed() -> None:
    html = MemoryView(PLAN)._repr_mimebundle_()["text/html"]
    text = re.sub(r"<[^>]+>", "", html)
    assert "predicted rehearsed" in text and "parameters gradients" in text


def test_static_legend_of_ranks_has_the_size_of_its_lines() -> None:
    """An ``<svg>`` without a size is a box of 300 x 150 pixels."""
    html = rewrite_html(render_legend(2))
    lines = re.findall(r"<svg viewbox=[^>]*>", html)
    assert len(lines) == 2 and all("width:20px;height:4px" in line for line in lines)
    assert html.count("<path d=") == 2


def test_static_chart_has_the_titles_of_vertical_axes_and_the_patterns_of_bars() -> None:
    html = draw_svg(
        [{"type": "bar", "x": ["a"], "y": [2.0], "marker": {"pattern": {"shape": "/"}}}],
        {"yaxis": {"title": "TFLOP/s"}},
    )
    assert "TFLOP/s" in html and "rotate(-90)" in html and "<path d='M" in html
