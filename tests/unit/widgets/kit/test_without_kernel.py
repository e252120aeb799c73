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
