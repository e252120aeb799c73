"""What a notebook keeps of a view: plain HTML for those who open it where no kernel and no widgets are."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import FakeRun, record, until
from IPython.core.events import EventManager

import shardscope as ss
from shardscope_widgets import MemoryView, RunView, StepView, Studio

WIDGET = "application/vnd.jupyter.widget-view+json"
PLAN = ss.Plan(
    ss.models["gpt2"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=512), ss.Layout.fsdp2()
)


def picture(view: Any) -> str:
    """The words that are kept of ``view``, without markup."""
    bundle = view._repr_mimebundle_()
    assert bundle[WIDGET]["model_id"] == view.model_id, "where there is a kernel it is the widget"
    html = bundle["text/html"]
    assert len(html) < 50_000
    assert not re.search(r"<script|<style|\bon\w+=|https?://", html)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.mark.parametrize("make", [MemoryView, StepView])
def test_fault_47_static_output_has_the_table_of_the_view(make: Any) -> None:
    view = make()
    view.show(PLAN)
    words = picture(view)
    name = "optimizer" if make is MemoryView else "matrices"
    assert name in words and re.search(r"\d", words)


def test_fault_47_static_output_has_the_verdict_and_table_of_the_studio() -> None:
    studio = Studio()
    words = picture(studio)
    assert "Llama 3.1 8B on" in words and "Fits" in words and "activations" in words
    studio.architecture.name.value = "llama-3.1-70b"
    words = picture(studio)
    assert "Llama 3.1 70B on" in words and "Does not fit" in words
    assert "Searching for" not in words and "Or a single change" not in words, (
        "what only a living view can do"
    )
    assert "saved by the layers" not in words, "rows that are closed"


def test_fault_47_static_output_has_the_chart() -> None:
    html = MemoryView(PLAN)._repr_mimebundle_()["text/html"]
    assert html.count("<rect") >= 5 and "<img alt='chart' src='data:image/svg+xml;base64," in html
    assert "<button" not in html and "<input" not in html, "nothing that cannot be pressed"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Any]:
    """What is published to a notebook, and what happens at the end of each of its cells."""
    published: list[Any] = []
    shell = SimpleNamespace(events=EventManager(SimpleNamespace(), ["post_run_cell"]))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(
        "IPython.display.publish_display_data", lambda data, **how: published.append((data, how))
    )
    return published, shell.events


def test_fault_47_static_output_is_updated_after_each_cell(notebook: tuple[list[Any], Any]) -> None:
    published, events = notebook
    studio = Studio()
    studio._ipython_display_()
    (live, _), (picture, how) = published
    assert WIDGET in live and "text/html" not in live, "the living view is an output of its own"
    assert "Llama 3.1 8B" in picture["text/html"] and WIDGET not in picture
    published.clear()
    events.trigger("post_run_cell", None)
    assert not published, "nothing has changed"
    studio.architecture.name.value = "llama-3.1-70b"
    events.trigger("post_run_cell", None)
    ((picture, update),) = published
    assert update == {**how, "update": True} and "Llama 3.1 70B" in picture["text/html"]
    studio.tabs.value = "Time"
    events.trigger("post_run_cell", None)
    assert "matrices" in published[-1][0]["text/html"], "the page in sight, made only now"
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
    assert until(lambda: view.status == "finished" and "2.500" in view.facts.value)
    words = picture(view)
    assert "finished" in words and "2.500" in words and "&lt;b&gt;printed" in words
