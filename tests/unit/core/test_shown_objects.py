"""Tests of the HTML tables that public objects display in notebooks, with their text escaped."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from tests.requirements import sample

import shardscope as ss
from shardscope.core.html_table import format_value, render_html_fields, render_html_table
from shardscope.planner.checks import Findings
from shardscope.planner.claims import claims

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


def test_no_repairs_say_whether_the_plan_fits() -> None:
    fits = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
    )
    needs_several = replace(fits, architecture=ss.models["llama-3.1-70b"])
    for a_plan, expected in ((fits, "The plan fits"), (needs_several, "plan.make_it_fit()")):
        assert not a_plan.repairs()
        assert expected in str(a_plan.repairs()) and expected in render_html(a_plan.repairs())


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


PRINTED = {
    **{name: OBJECTS[name] for name in ("Plan", "repairs", "findings", "Advice", "Claim", "Claims")},
    "Fit": lambda: plan().make_it_fit(),
    "stages": lambda: plan().memory().by_stage,
    "phase": lambda: plan().memory().worst_stage.peak,
}


@pytest.mark.parametrize("name", PRINTED)
def test_objects_with_plans_print_as_sentences(name: str) -> None:
    """In a terminal, in IPython and in viewers that show text only: no fields of plans, no addresses."""
    value = PRINTED[name]()
    plain, _ = DisplayFormatter().format(value)
    for text in (repr(value), str(value), plain["text/plain"]):
        assert text and not any(raw in text for raw in ("Architecture(", "Gpu(", "<function", " at 0x"))
        assert max(map(len, text.split("\n"))) < 800


def test_print_of_a_plan_has_the_rows_of_its_table() -> None:
    lines = str(plan()).split("\n")
    assert lines[0] == "model      llama-3.1-8b, 8,030,261,248 parameters"
    assert "degrees    data parallel 8, shard 8" in lines
    assert repr(plan()).startswith("<Plan: llama-3.1-8b on 8xh100-sxm-80gb with FSDP2, full, bf16-mixed, ")
    small = ss.Plan(
        ss.models["gpt2"],
        ss.Cluster.parse("1xh100-sxm-80gb"),
        ss.Recipe(seq_len=512, global_batch_size=1),
        ss.Layout.ddp(),
    )
    assert "degrees    one rank" in str(small)
    assert "1 sequence of 512 tokens per step, 1 micro-batch of 1" in str(small)


def test_memory_reports_say_that_a_plan_is_tight_and_what_it_needs_outside_the_gpu() -> None:
    recipe = ss.Recipe(seq_len=6144, global_batch_size=64)
    tight = ss.Plan(plan().architecture, plan().cluster, recipe, ss.Layout.fsdp2()).memory()
    assert tight.verdict == "tight" and repr(tight).endswith("in backward, tight>")
    assert "in backward, tight</caption>" in tight.to_html()
    layout = ss.Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu")
    recipe = ss.Recipe(seq_len=2048, global_batch_size=16, recompute="full")
    offloaded = ss.Plan(plan().architecture, ss.Cluster.parse("1xrtx-4090-24gb"), recipe, layout).memory()
    for text in (repr(offloaded), offloaded.to_html()):
        assert "fits; 150 GiB of host memory per rank" in text


def test_ranking_table_marks_tight_plans_and_has_the_warning_of_its_text() -> None:
    ranking = ss.search(ss.models["llama-3.1-70b"], ss.Cluster.parse("1xrtx-4090-24gb"), ss.Recipe())
    assert ranking.unknown_memory and f"<p>{ranking.unknown_memory}</p>" in render_html(ranking)
    html = render_html(
        ss.search(plan().architecture, plan().cluster, ss.Recipe(seq_len=4096, global_batch_size=64))
    )
    assert ">tight</td>" in html and "data_parallel" not in html


def test_tables_have_units_and_no_python_literals() -> None:
    html = render_html(plan().cluster.gpu)
    assert "bf16 989.5, fp16 989.5, fp8 1,979, tf32 494.5, fp32 67 TFLOP/s" in html
    html = render_html(ss.models["mixtral-8x7b"])
    assert "num experts 8" in html and "mlp only layers" not in html


def test_advice_marks_what_the_plan_has_without_styles() -> None:
    advice = ss.recommend(plan().architecture, plan().cluster, plan().recipe)
    html = render_html(advice)
    assert html.count("<td style='text-align:left'><b>") == 3 * sum(turn.taken for turn in advice.path)
    assert "<p>Alternatives:</p><ul>" in html


def test_wide_tables_shrink_in_narrow_boxes_and_break_long_names() -> None:
    """On paper a table does not scroll: columns beyond the page's width were cut."""
    name = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    html = render_html_table([f"column {number}" for number in range(9)], [[name, *range(8)]])
    ElementTree.fromstring(html)
    assert "container-type:inline-size" in html and "font-size:clamp(" in html
    assert "reducer::<wbr/>copy_<wbr/>bucket" in html and html.replace("<wbr/>", "").count(name) == 1
    assert "font-size" not in render_html_table(["a", "b"], [["aten::add_relu", 1]])
    assert "white-space:nowrap" not in html[html.index("<th") : html.index("</thead>")]


def test_fields_with_arrays_are_shown() -> None:
    @dataclass
    class Nested:
        bounds: Any
        empty: tuple[int, ...] = ()

    assert format_value(Nested(np.array([1, 2]))) == "bounds [1 2]"
    assert format_value(Nested(np.array([]))) == "bounds []"
    assert format_value(Nested(None)) == ""


def test_sizes_of_models_are_numbers_of_one_unit_and_names_stay_on_one_line() -> None:
    html = render_html(ss.models)
    assert "parameters, M" in html and "e+03" not in html
    for size in ("8,030", "1,008,039"):
        assert re.search(rf"<td style='text-align:right[^']*'>{size}</td>", html), size
    row = render_html_table(("name", "task"), [("70b-on-two-nodes", "a-b-c")])
    assert "white-space:nowrap'>70b-on-two-nodes" in row
    assert "nowrap'>a-b-c" not in row, "only names of rows"
