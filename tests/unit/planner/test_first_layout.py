"""The first layout of a framework: it fits where one does, and nothing is changed without need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.planner.repairs.first_layout import NEAR, choose_first_layout
from shardscope.planner.verdict import assess_plan

H100 = "h100-sxm-80gb"


def make_first_plan(framework: str, model: str, cluster: str, **recipe: Any) -> ss.Plan:
    nouns = ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe)
    return ss.Plan(*nouns, choose_first_layout(framework, *nouns))


def test_405b_with_megatron_has_tensor_parallelism_in_nodes_and_stages_across() -> None:
    """No layout of Megatron-core fits there; its default is short by 2,946 GiB on each GPU."""
    plan = make_first_plan("megatron", "llama-3.1-405b", f"8x8x{H100}")
    default = replace(plan, layout=ss.Layout.megatron())
    assert (plan.degrees.tp, plan.degrees.pp) == (8, 8)
    assert plan.memory().peak_bytes * 10 < default.memory().peak_bytes


@pytest.mark.parametrize(
    ("framework", "model", "cluster"),
    [
        ("megatron", "llama-3.1-70b", f"8x8x{H100}"),
        ("fsdp2", "llama-3.1-70b", f"8x8x{H100}"),
        ("megatron", "llama-3.1-8b", f"8x{H100}"),
        ("megatron", "qwen3-32b", f"4x8x{H100}"),
        ("fsdp2", "qwen3-32b", f"4x8x{H100}"),
    ],
)
def test_the_first_layout_fits_with_the_unchanged_recipe(framework: str, model: str, cluster: str) -> None:
    plan = make_first_plan(framework, model, cluster)
    assert assess_plan(plan).state == "fits"
    assert plan.degrees.tp <= plan.cluster.gpus_per_node
    assert plan.recipe == ss.Recipe()


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_defaults_that_fit_and_are_about_as_fast_stay(model: str) -> None:
    assert make_first_plan("fsdp2", model, f"8x{H100}").layout == ss.Layout.fsdp2()
    assert make_first_plan("deepspeed", model, f"8x{H100}").layout == ss.Layout.zero()
    assert make_first_plan("ddp", model, f"8x{H100}").layout == ss.Layout.ddp()


def test_a_layout_is_simple_for_its_speed() -> None:
    plan = make_first_plan("megatron", "llama-3.1-8b", f"8x{H100}")
    ranking = ss.search(plan.architecture, plan.cluster, plan.recipe, ["megatron"])
    same = ranking.is_feasible & (ranking.recompute == "none") & (ranking.column("micro_batch_size") == 1)
    fastest = float(ranking.step_seconds[same].min())
    assert plan.step().seconds <= NEAR * fastest
    assert sum(getattr(plan.degrees, name) > 1 for name in ("tp", "pp", "cp", "vpp")) == 1


@pytest.mark.parametrize("framework", list(frameworks))
@pytest.mark.parametrize("cluster", ["2xcpu", "rtx-4090-24gb", f"6x{H100}", "7x8xl4-24gb"])
def test_there_is_always_a_layout_of_that_framework(framework: str, cluster: str) -> None:
    nouns = ss.models["llama-3.1-8b"], ss.Cluster.parse(cluster), ss.Recipe()
    assert choose_first_layout(framework, *nouns).framework == framework
    with pytest.raises(ValueError, match="megatron"):
        choose_first_layout("megatorn", *nouns)


def test_few_gpus_start_with_offload_if_nothing_else_fits() -> None:
    plan = make_first_plan("fsdp2", "llama-3.1-8b", "rtx-4090-24gb", recompute="full", global_batch_size=4)
    assert plan.layout == ss.Layout.fsdp2(offload="cpu") and plan.memory().fits
