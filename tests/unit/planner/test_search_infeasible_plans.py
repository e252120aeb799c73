"""Tests of the reasons why plans of a search cannot run: short memory, or no engine for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import is_trained, why_not_trained
from shardscope.planner.search.ranking import Ranking
from shardscope.planner.verdict import assess_plan


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    cluster = replace(ss.Cluster.parse("2x8xh100-sxm-80gb"), host_memory_bytes=400 * 2**30)
    return ss.search(ss.models["llama-3.1-70b"], cluster, ss.Recipe())


def sample_rows(rows: np.ndarray) -> list[int]:
    return rows[:: max(1, len(rows) // 40)].tolist()


def test_infeasible_plans_name_the_memory_that_is_short(ranking: Ranking) -> None:
    for row in sample_rows(np.flatnonzero(ranking.is_feasible)):
        assert assess_plan(ranking.plan(row)).state != "does not fit"
        assert ranking.why_not(row).startswith("cannot be launched here: ") or ranking.why_not(row) == ""
    for row in sample_rows(np.flatnonzero(~ranking.is_feasible)):
        verdict = assess_plan(ranking.plan(row))
        assert verdict.state == "does not fit"
        for place in verdict.shortages:
            if place.name == "GPU memory":
                assert f"{format_gib(place.short_bytes)} GiB over the GPU's memory" in ranking.why_not(row)


def test_a_shortage_of_host_memory_has_both_numbers(ranking: Ranking) -> None:
    on_the_gpu = ranking.peak_bytes <= ranking.cluster.usable_bytes_per_gpu
    rows = sample_rows(np.flatnonzero(on_the_gpu & ~ranking.is_feasible & (ranking.host_bytes > 410 * 2**30)))
    assert rows, "else this tests nothing"
    for row in rows:
        needed = format_gib(int(ranking.host_bytes[row]))
        assert f"{needed} GiB of host memory" in ranking.why_not(row) and "400" in ranking.why_not(row)
        assert "over the GPU's memory" not in ranking.why_not(row)


def test_plans_that_no_engine_runs_are_reported_as_such(ranking: Ranking) -> None:
    rows = sample_rows(np.flatnonzero(ranking.is_feasible))
    refused = [row for row in rows if ranking.why_not_launched(row)]
    for row in rows:
        plan = ranking.plan(row)
        assert ranking.why_not_launched(row) == (why_not_trained(plan) or "")
        assert is_trained(plan) == (not ranking.why_not_launched(row))
    assert refused and len(refused) < len(rows)
    assert all(ranking.why_not(row).startswith("cannot be launched here: ") for row in refused)


def test_an_invalid_row_is_refused(ranking: Ranking) -> None:
    for row in (-1, ranking.num_evaluated):
        with pytest.raises(IndexError):
            ranking.why_not(row)
        with pytest.raises(IndexError):
            ranking.why_not_launched(row)
