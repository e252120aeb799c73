"""What a notebook keeps of a view: plain HTML for those who open it where no kernel and no widgets are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_run_view import FakeRun, record, until

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
def test_fault_47_the_table_of_a_view_is_kept(make: Any) -> None:
    view = make()
    view.show(PLAN)
    words = picture(view)
    name = "optimizer" if make is MemoryView else "matrices"
    assert name in words and re.search(r"\d", words)


def test_fault_47_the_studio_keeps_its_sentence_and_its_table() -> None:
    studio = Studio()
    words = picture(studio)
    assert "Llama 3.1 8B on" in words and "Fits" in words and "activations" in words
    studio.architecture.name.value = "llama-3.1-70b"
    assert "Llama 3.1 70B on" in picture(studio) and "Does not fit" in picture(studio)


def test_fault_47_a_run_keeps_its_end() -> None:
    run = FakeRun([record(loss=2.5)])
    run.write("<b>printed</b>")
    run.status = "finished"
    view = RunView(run)
    assert until(lambda: view.status == "finished" and "2.500" in view.facts.value)
    words = picture(view)
    assert "finished" in words and "2.500" in words and "&lt;b&gt;printed" in words
