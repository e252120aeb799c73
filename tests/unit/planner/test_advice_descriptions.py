"""Tests of the texts with which advice compares plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.planner.advice import descriptions
from shardscope.planner.advice.layout_ladder import (
    build_fully_sharded,
    build_sharded_optimizer,
    choose_outcome,
    try_megatron,
)
from shardscope.planner.advice.plan_evaluator import (
    PAYS,
    SAFE,
    EvaluatedPlan,
    PlanEvaluator,
    find_fastest,
    has_offload,
    is_faster,
)

PLAN = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())


def run(
    seconds: float | None, *, fits: bool = True, tight: bool = False, recompute: Any = "none"
) -> EvaluatedPlan:
    """A plan of which only its time and its fit matter."""
    recipe = SimpleNamespace(recompute=recompute)
    made: Any = SimpleNamespace(
        seconds=seconds,
        fits=fits,
        report=SimpleNamespace(is_tight=tight),
        moves_activations=recompute == "offload",
        plan=SimpleNamespace(recipe=recipe),
    )
    found: EvaluatedPlan = made
    return found


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_comparisons_are_the_same_from_both_sides(seconds: float, others: float) -> None:
    one, other = descriptions.compare_seconds(seconds, others), descriptions.compare_seconds(others, seconds)
    assert one.replace("faster", "slower") == other.replace("faster", "slower")
    if one != "no faster":
        assert ("faster" in one) == (seconds < others)
        assert ("faster" in one) != ("faster" in other)


@pytest.mark.parametrize(
    ("seconds", "others", "told"),
    [
        (1.0, 1.18, "18 % faster"),
        (1.18, 1.0, "18 % slower"),
        (1.0, 2.5, "2.5x faster"),
        (60.0, 1.0, "60x slower"),
        (1.0, 1.001, "no faster"),
    ],
)
def test_comparisons_of_two_times(seconds: float, others: float, told: str) -> None:
    assert descriptions.compare_seconds(seconds, others) == told


@pytest.mark.parametrize(
    ("days", "told"),
    [
        (0.002, "2.9 minutes"),
        (0.2, "4.8 hours"),
        (0.5, "12 hours"),
        (1.0, "1 day"),
        (34.0, "34 days"),
        (500.0, "1.4 years"),
        (1e6, "2,738 years"),
    ],
)
def test_durations(days: float, told: str) -> None:
    assert descriptions.format_duration(days) == told


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (124_439_808, "124M"),
        (8_030_261_248, "8.03B"),
        (70_553_706_496, "70.6B"),
        (405_853_388_800, "406B"),
        (8.1e12, "8.1T"),
    ],
)
def test_numbers_of_parameters(number: float, told: str) -> None:
    assert descriptions.abbreviate_count(number) == told


def test_slow_steps_have_no_speed_of_zero() -> None:
    slow = ss.Plan(
        ss.models["deepseek-v3"],
        ss.Cluster.parse("256x8xrtx-3090-24gb"),
        ss.Recipe(method="lora", seq_len=512, global_batch_size=256, recompute="full"),
        ss.Layout.fsdp2(tp=8),
    )
    report = slow.step()
    speed, share = report.tokens_per_second_per_gpu, 100 * (report.mfu or 0)
    assert speed < 0.5 and share < 0.5
    assert f" {speed:.2g} tokens/s per GPU" in descriptions.describe_speed(
        EvaluatedPlan(plan=slow, report=slow.memory(), short=())
    )
    assert f" {speed:.2g} tokens/s per GPU" in repr(report) and f"MFU {share:.2g} %" in repr(report)


def test_plan_names_have_the_changes_to_the_recipe() -> None:
    wanted = ss.Recipe(micro_batch_size=4)
    changed = ss.Recipe(micro_batch_size=2, recompute="full", loss="chunked")
    layout = ss.Layout.fsdp2(tp=2, reshard_after_forward=False)
    plan = ss.Plan(PLAN.architecture, PLAN.cluster, ss.Recipe(micro_batch_size=2, recompute="full"), layout)
    assert descriptions.name_plan(PLAN, PLAN.recipe) == "FSDP2"
    told = descriptions.name_plan(plan, wanted)
    assert all(fact in told for fact in ("FSDP2", "tp 2", "weights kept", "micro-batch 2", "full recomp"))
    tried = PlanEvaluator(PLAN.architecture, PLAN.cluster, wanted).evaluate_plan(ss.Layout.fsdp2(), changed)
    assert isinstance(tried, EvaluatedPlan)
    eased = descriptions.describe_recipe_changes(tried, wanted)
    assert all(fact in eased for fact in ("micro-batch 2 instead of 4", "full recomputation", "chunks"))
    split = ss.Plan(PLAN.architecture, PLAN.cluster, ss.Recipe(), ss.Layout.megatron(tp=2, pp=2, vpp=4))
    assert descriptions.name_plan(split, split.recipe) == "Megatron-core (tp 2, pp 2, vpp 4)"


# ------------------------------------------------------------------------------------- what is chosen


@given(st.lists(st.tuples(st.floats(1, 100), st.booleans(), st.booleans()), max_size=8))
def test_the_fastest_plan_fits_and_is_tight_only_if_much_faster(runs: list[tuple[float, bool, bool]]) -> None:
    tried = [run(seconds, fits=fits, tight=tight) for seconds, fits, tight in runs]
    best = find_fastest(tried)
    fitting = [one for one in tried if one.fits]
    assert (best is None) == (not fitting)
    if best is None or best.seconds is None:
        return
    assert best.fits
    for one in fitting:
        assert one.seconds is not None
        if not one.report.is_tight:
            assert not is_faster(one, best, 1.0) or best.report.is_tight
            assert not best.report.is_tight or best.seconds * SAFE < one.seconds


def test_a_plan_without_predicted_time_is_never_faster() -> None:
    assert not is_faster(run(None), run(5.0))
    assert not is_faster(run(5.0), run(None))
    first = run(None)
    assert find_fastest([first, run(None)]) is first


@given(st.floats(1, 100))
def test_a_plan_is_faster_from_ten_percent_on(seconds: float) -> None:
    assert is_faster(run(seconds), run(seconds * PAYS * 1.001))
    assert not is_faster(run(seconds), run(seconds * PAYS * 0.999))


def test_easier_recipes_start_from_the_requested_micro_batch() -> None:
    recipe = ss.Recipe(seq_len=8192, micro_batch_size=4)
    evaluator = PlanEvaluator(ss.models["llama-3.2-1b"], ss.Cluster.parse("8xa100-sxm-80gb"), recipe)
    outcome = evaluator.evaluate_layout(ss.Layout.fsdp2())
    assert outcome.best is not None
    assert outcome.best.fits
    assert outcome.is_eased
    assert 4 % outcome.best.plan.recipe.micro_batch_size == 0
    assert evaluator.evaluate_layout(ss.Layout.fsdp2()) is outcome, "each layout is tried once"


def test_remaining_memory_is_used_by_a_faster_plan_that_is_not_tight() -> None:
    evaluator = PlanEvaluator(
        ss.models["gpt2"], ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(seq_len=1024, recompute="full")
    )
    tried = evaluator.evaluate_plan(ss.Layout.ddp(), evaluator.recipe)
    assert isinstance(tried, EvaluatedPlan)
    larger = evaluator.with_room(tried)
    assert larger.plan.recipe.recompute != "full", "there is room for activations"
    assert not larger.report.is_tight
    assert is_faster(larger, tried, 1.0)
    assert evaluator.with_room(larger) is larger


def test_another_framework_is_tried_only_where_it_could_decide() -> None:
    evaluator = PlanEvaluator(PLAN.architecture, PLAN.cluster, PLAN.recipe)
    assert choose_outcome(evaluator, build_sharded_optimizer(PLAN.cluster), ()).best is not None
    assert {o.wanted.plan.layout.framework for o in evaluator.list_outcomes() if o.wanted} == {"fsdp2"}
    choose_outcome(evaluator, build_fully_sharded(PLAN.cluster), ("deepspeed",))
    assert {o.wanted.plan.layout.framework for o in evaluator.list_outcomes() if o.wanted} == {
        "fsdp2",
        "deepspeed",
    }


def test_megatron_splits_inside_nodes_with_the_fewest_stages() -> None:
    cluster = ss.Cluster.parse("8x8xh100-sxm-80gb")
    evaluator = PlanEvaluator(ss.models["llama-3.1-70b"], cluster, ss.Recipe(global_batch_size=256))
    best = try_megatron(evaluator).best
    assert best is not None
    assert best.fits
    degrees = best.plan.degrees
    assert degrees.tp <= cluster.gpus_per_node
    assert degrees.tp * degrees.pp > 1


def test_layouts_with_offload() -> None:
    assert has_offload(ss.Layout.fsdp2(offload="cpu"))
    assert has_offload(ss.Layout.zero(offload_optimizer="nvme"))
    assert not has_offload(ss.Layout.ddp())
    assert not has_offload(ss.Layout.megatron())
