"""Tests of the order of a search's plans: differences below the prediction error do not decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.requirements import sample, thorough

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.core.plan import Plan
from shardscope.planner.search.ranking import AS_FAST, Ranking

MODEL = ss.models["llama-3.1-8b"]
NODES = {
    "room to spare": ("qwen3-0.6b", "8xh100-sxm-80gb"),
    "tight": ("llama-3.1-8b", "8xh100-sxm-80gb"),
    "two nodes": ("llama-3.1-8b", "2x8xh100-sxm-80gb"),
    "experts": ("mixtral-8x7b", "2x8xh100-sxm-80gb"),
}


@pytest.fixture(scope="module", params=NODES)
def ranking(request: pytest.FixtureRequest) -> Ranking:
    model, gpus = NODES[request.param]
    return ss.search(ss.models[model], ss.Cluster.parse(gpus), ss.Recipe())


@pytest.fixture(scope="module")
def ranking_of_unknown_hosts() -> Ranking:
    """Some plans fit by themselves and some with a host whose memory nobody said."""
    return ss.search(MODEL, ss.Cluster.parse("8xa10-24gb"), ss.Recipe(seq_len=1024))


def count_options(plan: Plan) -> tuple[int, int, int]:
    """Return the number of options that are set, the chunks per stage, and the peak bytes."""
    layout: Any = plan.layout
    values = [getattr(layout, name, 1) for name in ("tp", "pp", "vpp", "cp", "ep", "replicate")]
    places = [getattr(layout, name, None) for name in ("offload", "offload_optimizer", "offload_params")]
    turned_on = sum(value > 1 for value in values) + sum(place is not None for place in places)
    turned_on += plan.recipe.recompute != "none"
    return turned_on, getattr(layout, "vpp", 1), plan.memory().peak_bytes


@sample(1)
def test_the_simplest_of_the_fastest_plans_is_first(ranking: Ranking) -> None:
    fastest = ranking.step_seconds[ranking.is_feasible].min()
    alike = np.flatnonzero(ranking.is_feasible & (ranking.step_seconds <= AS_FAST * fastest))
    assert len(alike) > 1
    assert set(ranking.order[: len(alike)]) == set(alike)
    told = [count_options(ranking.plan(int(row))) for row in ranking.order[: min(len(alike), 40)]]
    assert told == sorted(told)
    least = min(count_options(ranking.plan(int(row))) for row in alike[:: max(1, len(alike) // 100)])
    assert count_options(ranking.best) <= least


def test_the_rest_is_ordered_by_speed(ranking: Ranking) -> None:
    seconds = ranking.step_seconds[ranking.order]
    num_alike = int((seconds <= AS_FAST * seconds.min()).sum())
    assert (np.diff(seconds[num_alike:]) >= -1e-8 * seconds.min()).all()
    assert sorted(ranking.order) == np.flatnonzero(ranking.is_feasible).tolist()
    assert (np.diff(ranking.step_seconds[ranking.pareto()]) >= -1e-8 * seconds.min()).all()


def test_pipeline_chunks_that_gain_less_than_the_error_are_not_first() -> None:
    """Of two stages 17 chunks gain less than a percent over 8, and leave less of each GPU's memory."""
    found = ss.search(MODEL, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ["megatron"])
    fastest: dict[int, int] = {}
    for vpp in (8, 17):
        rows = np.flatnonzero(found.is_feasible & (found.column("pp") == 2) & (found.column("vpp") == vpp))
        fastest[vpp] = rows[found.step_seconds[rows].argmin()]
    seconds = {vpp: found.step_seconds[row] for vpp, row in fastest.items()}
    assert seconds[17] < seconds[8] < AS_FAST * seconds[17]
    assert found.column("vpp")[found.order[0]] <= 8
    assert found.headroom_bytes[found.order[0]] > found.headroom_bytes[fastest[17]]


def test_plans_that_need_memory_of_unknown_size_come_last(ranking_of_unknown_hosts: Ranking) -> None:
    known = ranking_of_unknown_hosts.is_room_known[ranking_of_unknown_hosts.order]
    assert 0 < known.sum() < len(known)
    assert known[: known.sum()].all()
    assert ranking_of_unknown_hosts.host_bytes[ranking_of_unknown_hosts.order[0]] == 0
    assert (ranking_of_unknown_hosts.host_bytes[ranking_of_unknown_hosts.order[known.sum() :]] > 0).all()
    seconds = ranking_of_unknown_hosts.step_seconds[ranking_of_unknown_hosts.order]
    assert seconds[known.sum() :].min() > 0
    assert (np.diff(seconds[known.sum() :]) >= -1e-8 * seconds.min()).all()


def test_the_number_of_such_plans_and_the_reason_are_reported(ranking_of_unknown_hosts: Ranking) -> None:
    hosted = ranking_of_unknown_hosts.is_feasible & (ranking_of_unknown_hosts.host_bytes > 0)
    assert (
        f"{hosted.sum():,} of the {ranking_of_unknown_hosts.num_feasible:,} plans"
        in ranking_of_unknown_hosts.unknown_memory
    )
    assert (
        f"{format_gib(int(ranking_of_unknown_hosts.host_bytes[hosted].min()))} GiB"
        in ranking_of_unknown_hosts.unknown_memory
    )
    assert "after the others" in ranking_of_unknown_hosts.unknown_memory
    assert ranking_of_unknown_hosts.unknown_memory in repr(ranking_of_unknown_hosts)


@thorough()
def test_the_best_plan_may_need_memory_of_unknown_size_if_all_do() -> None:
    found = ss.search(ss.models["llama-3.1-405b"], ss.Cluster.parse("1xa10-24gb"), ss.Recipe())
    assert found.num_feasible
    assert not found.is_room_known[found.order].any()
    assert found.host_bytes[found.order[0]] > 2**40
    assert f"{found.num_feasible} of the {found.num_feasible} plans" in found.unknown_memory
    assert "after the others" not in found.unknown_memory


def test_nothing_is_reported_if_the_host_memory_is_known() -> None:
    cluster = replace(ss.Cluster.parse("8xa10-24gb"), host_memory_bytes=2**40)
    found = ss.search(MODEL, cluster, ss.Recipe(seq_len=1024))
    assert found.num_feasible
    assert found.unknown_memory == ""
    assert found.is_room_known.all()
