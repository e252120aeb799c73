"""Tests of the HTML tables that public objects display in notebooks, with their text escaped."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from IPython.core.formatters import DisplayFormatter
from tests.requirements import sample

import shardscope as ss
from shardscope.core.html_table import render_html_fields, render_html_table
from shardscope.planner.checks import Findings
from shardscope.planner.claims import claims
from shardscope.planner.repairs.repairs import Repairs

TRACE = Path(__file__).parents[2] / "fixtures" / "trace_2_ranks"


@cache
def plan() -> ss.Plan:
    """Return a plan that does not fit, so that it has repairs and findings."""
    recipe = ss.Recipe(seq_len=8192, micro_batch_size=4)
    return ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())


OBJECTS = {
    "Architecture": lambda: plan().architecture,
    "Cluster": lambda: plan().cluster,
    "Gpu": lambda: plan().cluster.gpu,
    "Recipe": lambda: plan().recipe,
    "Layout": lambda: plan().layout,
    "Plan": plan,
    "MemoryReport": lambda: plan().memory(),
    "StepReport": lambda: plan().step(),
    "repairs": lambda: plan().repairs(),
    "findings": lambda: plan().findings(),
    "Ranking": lambda: ss.search(plan().architecture, plan().cluster, plan().recipe),
    "Advice": lambda: ss.recommend(plan().architecture, plan().cluster, plan().recipe),
    "models": lambda: ss.models,
    "gpus": lambda: ss.gpus,
    "Claims": claims,
    "Claim": lambda: claims()[0],
    "numbers of a claim": lambda: claims()[0].numbers,
    "Trace": lambda: ss.Trace.load(TRACE),
    "ranks of a trace": lambda: ss.Trace.load(TRACE).summary().ranks,
    "summary of a trace": lambda: ss.Trace.load(TRACE).summary(),
}


def render_html(value: object) -> str:
    """Return the HTML that a notebook displays for ``value`` at the end of a cell."""
    data, _ = DisplayFormatter().format(value)
    return str(data.get("text/html", ""))


@sample(6)
@pytest.mark.parametrize("name", OBJECTS)
def test_public_objects_display_as_html_tables(name: str) -> None:
    html = render_html(OBJECTS[name]())
    assert "<table" in html and "</td>" in html
    for raw in ("<script", ">None<", "object at 0x", "dtype="):
        assert raw not in html
    assert len(html) < 100_000


def test_runs_display_their_status_and_escaped_reason(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"world_size": 2, "created": 1.0, "name": "mine"}))
    (folder / "status.jsonl").write_text(
        json.dumps({"status": "failed", "reason": "<b>rank 1</b> raised", "time": 1.0}) + "\n"
    )
    html = render_html(ss.Run.attach(folder))
    assert "<table" in html and "failed" in html
    assert "&lt;b&gt;rank 1&lt;/b&gt; raised" in html and "<b>rank" not in html


def test_findings_and_repairs_are_lists_with_html() -> None:
    findings, repairs = plan().findings(), plan().repairs()
    assert isinstance(findings, list) and findings == list(findings)
    assert isinstance(repairs, list) and repairs == list(repairs)
    assert plan().repairs()[0].change in render_html(repairs)
    assert render_html(Findings()) == "<p>No findings.</p>"
    assert "fits" in render_html(Repairs())


def test_plans_display_model_cluster_layout_and_recipe() -> None:
    html = render_html(plan())
    for text in ("llama-3.1-8b", "8xh100-sxm-80gb", "FSDP2", "8,192"):
        assert text in html


@pytest.mark.parametrize("value", ["<script>x</script>", "<img src=x onerror=y>", "a & b"])
def test_table_cells_and_titles_are_escaped(value: Any) -> None:
    for html in (render_html_table([value], [[value]], value), render_html_fields({value: value}, value)):
        ElementTree.fromstring(html)
        assert value not in html


def test_numbers_have_thousands_separators_and_missing_ones_a_dash() -> None:
    html = render_html_table(["a", "b"], [[1234567, None], [0.12345, float("nan")]])
    assert "1,234,567" in html and "0.1235" in html and html.count("–") == 2
