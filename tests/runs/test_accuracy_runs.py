"""Our own runs on CPU ranks: what was measured is measured again, and near its prediction."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.accuracy.own_rows import read_plan
from tests.accuracy.own_runs import draw_plan, run
from tests.accuracy.rows import OWN, Row, read
from tests.requirements import few, thorough

from shardscope.frameworks.registry import check_trained
from shardscope.runs.explain.measured import sum_predicted_tensors

pytestmark = [pytest.mark.usefixtures("bounded_time", "nothing_left"), thorough()]

GIB = 2**30


def read_stored_rows(framework: str, method: str) -> list[Row]:
    found = [row for row in read([OWN]) if str(row["id"]).startswith("own-cpu-")]
    return [
        row for row in found if row["framework"] == framework and bool(row.get("lora")) == (method == "lora")
    ]


@pytest.mark.parametrize(
    ("framework", "method"), few([("ddp", "lora"), ("fsdp2", "full")], [("fsdp2", "full")])
)
def test_stored_measurements_equal_a_run_of_today(framework: str, method: str, tmp_path: Path) -> None:
    row = read_stored_rows(framework, method)[0]
    plan = read_plan(row)
    assert plan is not None
    again = run(plan, tmp_path)
    assert again["peak_memory_gib"] == pytest.approx(row["peak_memory_gib"], rel=0.002)
    assert sum_predicted_tensors(plan.memory()) / GIB == pytest.approx(again["peak_memory_gib"], rel=0.01)


def test_randomly_drawn_plans_are_supported_by_their_engines() -> None:
    plans = [draw_plan(random.Random(seed)) for seed in range(60)]
    made = [plan for plan in plans if plan is not None]
    assert made == [
        plan for plan in (draw_plan(random.Random(seed)) for seed in range(60)) if plan is not None
    ]
    assert len(made) > 30
    assert {plan.layout.framework for plan in made} == {"ddp", "fsdp2"}
    assert len({plan.architecture.model_type for plan in made}) > 8
    for plan in made:
        check_trained(plan)
