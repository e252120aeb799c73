"""Tests of the leaderboard on made-up answers; ``make leaderboard`` asks the real estimators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.leaderboard.estimators import ADAPTERS, ESTIMATORS, Answers
from tests.leaderboard.page import make_anchor, write_page
from tests.leaderboard.plan_requests import count_largest_module, describe_plan
from tests.leaderboard.tables import Table, TableRow, plan_simumax_run

import shardscope as ss

TABLE = Table(
    "Peaks",
    "Made up.",
    "tensors",
    tuple(TableRow(f"plan {number}", "a source", 100.0, 110.0) for number in range(4)),
)
ADAPTER = """
from protocol import refuse, serve

def estimate(plan):
    print("noise of an estimator")
    refuse({"has no experts": plan.architecture.experts})
    return {"tensors": 1 / plan.size, "seconds": "ships no system"}

serve(estimate, "1.0")
"""


def answer(**estimates: float | str) -> Answers:
    """Answer ``plan_0=...`` with an estimate, or with a reason."""
    found = {name.replace("_", " "): value for name, value in estimates.items()}
    values = {name: {"tensors": value} for name, value in found.items() if not isinstance(value, str)}
    return Answers("1.0", values, {name: value for name, value in found.items() if isinstance(value, str)})


def test_the_page_first_says_where_another_is_better() -> None:
    better = answer(plan_0=101.0, plan_1=95.0, plan_2="has no experts", plan_3="has no experts")
    worse = answer(plan_0=200.0, plan_1=50.0)
    page = write_page([TABLE], ESTIMATORS, {"SimuMax": better, "calculon": worse})
    first = page.split("\n\n")[1]
    assert "SimuMax in “Peaks” (2 rows: median 3.0 % against 10.0 %, p90 5.0 % against 10.0 %)" in first
    assert "calculon" not in first


def test_the_page_first_says_that_none_is_better() -> None:
    page = write_page([TABLE], ESTIMATORS, {"calculon": answer(plan_0=110.0, plan_1=90.0)})
    assert page.split("\n\n")[1].startswith("No other estimator is better")


def test_rows_without_an_estimate_are_counted() -> None:
    """A row without an answer is counted too: no row is left out of a table."""
    page = write_page([TABLE], ESTIMATORS, {"calculon": answer(plan_0=120.0, plan_1="no A", plan_2="no A")})
    assert re.search(r"\| calculon \| 1 \| 3 \| 20\.0 % \| 10\.0 % \|", page)
    refusals = page.partition("## Rows without an estimate by calculon")[2]
    assert "| Peaks | 2 | no A |" in refusals
    assert "| Peaks | 1 | its process ended before this row |" in refusals


def test_common_rows_are_those_that_all_answered() -> None:
    both = {"SimuMax": answer(plan_0=100.0, plan_1=100.0), "calculon": answer(plan_1=130.0, plan_2=130.0)}
    page = write_page([TABLE], ESTIMATORS, both)
    assert "On the 1 rows in common, by median: SimuMax 0.0 %" in page


def test_the_contents_have_every_adapter_and_every_link_a_heading() -> None:
    adapters = {path.stem for path in ADAPTERS.glob("*.py")} - {"protocol"}
    assert {estimator.adapter for estimator in ESTIMATORS} == adapters
    page = write_page([TABLE], ESTIMATORS, {estimator.name: answer(plan_0=1.0) for estimator in ESTIMATORS})
    links = dict(re.findall(r"^- \[(.+)\]\(#(.+)\)$", page, re.MULTILINE))
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert links == {heading: make_anchor(heading) for heading in headings}
    for estimator in ESTIMATORS:
        assert f"Rows without an estimate by {estimator.name}" in links
        assert f"| {estimator.name} | 1.0 | {estimator.text} |" in page


def test_adapters_answer_every_plan_whatever_their_estimator_does(tmp_path: Path) -> None:
    """Refusals, errors of the estimator's own code, zero-bubble schedules, and prints on stdout."""
    script = tmp_path / "adapter.py"
    script.write_text(ADAPTER, encoding="utf-8")
    plan = {"id": "a", "schedule": None, "size": 2, "architecture": {"experts": None}}
    plans = [
        plan,
        {**plan, "id": "b", "architecture": {"experts": 8}},
        {**plan, "id": "c", "size": 0},
        {**plan, "id": "d", "schedule": "zb-h1"},
    ]
    process = subprocess.run(
        [sys.executable, script],
        input=json.dumps(plans),
        env={**os.environ, "PYTHONPATH": str(ADAPTERS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in process.stdout.splitlines()] == [
        {"version": "1.0"},
        {"id": "a", "values": {"tensors": 0.5, "seconds": "ships no system"}},
        {"id": "b", "refused": "has no experts"},
        {"id": "c", "refused": "its code raises ZeroDivisionError: division by zero"},
        {"id": "d", "refused": "has no zero-bubble schedule"},
    ]


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (ss.Layout.ddp(), 0),
        (ss.Layout.fsdp2(), 3),
        (ss.Layout.fsdp2(reshard_after_forward=False), 2),
        (ss.Layout.zero(stage=1), 1),
        (ss.Layout.megatron(tp=2), 1),
    ],
)
def test_plans_are_described_in_zero_stages(layout: ss.Layout, stage: int) -> None:
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), layout)
    described = describe_plan("a", plan)
    json.dumps(described)
    assert described["zero_stage"] == stage
    # Embedding and head are its largest modules, of 128,256 x 4,096 each.
    assert count_largest_module(plan.architecture) == 128_256 * 4096


def test_simumax_runs_are_planned_by_their_names() -> None:
    run = {"case": "llama3_405b_l4_tp2_cp4_pp1_dp1_seq32768_mbc4_cef", "model": "llama3-405b", "layer_num": 4}
    plan = plan_simumax_run(run)
    assert (plan.degrees.tp, plan.degrees.cp, plan.degrees.pp, plan.num_micro_batches) == (2, 4, 1, 4)
    assert (plan.recipe.seq_len, plan.architecture.num_hidden_layers) == (32768, 4)
