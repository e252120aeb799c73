"""Tests of advised plans: no equally simple plan is better; at most two alternatives."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from tests.requirements import few, sample, thorough

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import why_not_trained
from shardscope.planner.advice.advice import Advice, recommend
from shardscope.planner.advice.plan_evaluator import PAYS, SAFE, has_offload
from shardscope.planner.advice.simplicity import compute_simplicity
from shardscope.planner.differences import does_the_same
from shardscope.planner.repairs.savings import find_savings
from shardscope.timing.report import format_seconds
from shardscope_widgets.memory.repairs import describe_cost

H100 = "h100-sxm-80gb"
LLAMA, EIGHT = ss.models["llama-3.1-8b"], ss.Cluster.parse(f"8x{H100}")


def is_better(plan: ss.Plan, other: ss.Plan, wanted: ss.Recipe) -> bool:
    try:
        is_faster = plan.step().seconds < other.step().seconds
    except ValueError:
        return False
    is_leaner = plan.memory().peak_bytes < other.memory().peak_bytes
    as_simple = compute_simplicity(plan, wanted).is_as_simple_as(compute_simplicity(other, wanted))
    return is_faster and is_leaner and as_simple


def is_comparable(plan: ss.Plan, other: ss.Plan) -> bool:
    fields = ("method", "precision", "optimizer", "global_batch_size", "seq_len")
    return plan.cluster == other.cluster and all(
        getattr(plan.recipe, name) == getattr(other.recipe, name) for name in fields
    )


def check_numbers(found: Advice) -> None:
    """Every number of the words is the plan's own."""
    assert found.plan is not None
    assert format_gib(found.plan.memory().peak_bytes) in found.why
    advised = found.plan
    for plan, words in found.alternatives:
        assert format_gib(plan.memory().peak_bytes) in words, words
        try:
            seconds, others = plan.step().seconds, advised.step().seconds
        except ValueError:
            continue
        assert f"{format_seconds(seconds)} per step" in words
        told = re.search(r"(\d+) % (faster|slower)", words)
        if told and is_comparable(plan, advised):
            ratio = others / seconds if told[2] == "faster" else seconds / others
            assert round(100 * (ratio - 1)) == int(told[1]), words
        more = re.search(r"([\d.,]+) GiB (more|less) on each", words)
        if more:
            difference = plan.memory().peak_bytes - advised.memory().peak_bytes
            assert format_gib(abs(difference)) == more[1] and (difference > 0) == (more[2] == "more")
        counts = "larger than our usual prediction error" in words
        if is_comparable(plan, advised):
            assert counts == (PAYS * seconds < others)


MODELS = ["gpt2", "llama-3.2-1b", "qwen3-8b", "llama-3.1-8b", "qwen3-32b", "mixtral-8x7b"]
CLUSTERS = ["l4-24gb", "8xl40s-48gb", f"8x{H100}", f"2x8x{H100}"]
RECIPES: list[dict[str, Any]] = [
    {"seq_len": 1024},
    {"seq_len": 1024, "recompute": "full", "micro_batch_size": 2},
]
SCREENS = [ss.Layout.fsdp2(), ss.Layout.zero(), ss.Layout.megatron(), ss.Layout.ddp()]
EVERY = list(product(MODELS, CLUSTERS, RECIPES))


@pytest.mark.parametrize(("model", "cluster", "recipe"), few(EVERY[::2] + EVERY[1::4], EVERY[::24]), ids=str)
def test_no_equally_simple_plan_is_faster_and_leaner_than_the_advised_one(
    model: str, cluster: str, recipe: dict[str, Any]
) -> None:
    nouns = ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe)
    layout = SCREENS[EVERY.index((model, cluster, recipe)) * 5 // 3 % len(SCREENS)]
    try:
        current = ss.Plan(*nouns, layout)
    except ValueError:
        current = None
    advice = recommend(*nouns, current=current)
    assert len(advice.alternatives) <= 2
    if advice.plan is None:
        return
    if current is not None and not current.memory().fits:
        assert advice.plan != current
    rivals = [turn.plan for turn in advice.path] + [plan for plan, _ in advice.alternatives] + [current]
    for rival in rivals:
        if rival is not None and rival.memory().fits and is_comparable(rival, advice.plan):
            assert not is_better(rival, advice.plan, nouns[2]), (rival, advice.plan)
    check_numbers(advice)


def test_the_plan_on_screen_is_kept_if_it_is_as_good() -> None:
    """It was advised to take 54.6 GiB and 4.24 s in place of 54.0 GiB and 4.13 s."""
    current = ss.Plan(LLAMA, EIGHT, ss.Recipe(), ss.Layout.fsdp2())
    advice = recommend(LLAMA, EIGHT, ss.Recipe(), current=current)
    assert advice.plan == current
    assert "Keep the current plan" in advice.why
    turn = next(turn for turn in advice.path if "on screen" in turn.question)
    assert turn.taken
    assert recommend(LLAMA, EIGHT, ss.Recipe()).plan == current


@sample(1)
@pytest.mark.parametrize(
    "current",
    [
        ss.Plan(LLAMA, EIGHT, ss.Recipe(recompute="full"), ss.Layout.fsdp2()),
        ss.Plan(LLAMA, EIGHT, ss.Recipe(), ss.Layout.ddp()),
        pytest.param(
            ss.Plan(LLAMA, ss.Cluster.parse(f"2x8x{H100}"), ss.Recipe(), ss.Layout.fsdp2()), marks=thorough()
        ),
        pytest.param(ss.Plan(LLAMA, EIGHT, ss.Recipe(method="lora"), ss.Layout.fsdp2()), marks=thorough()),
    ],
    ids=["slower", "does not fit", "another cluster", "another task"],
)
def test_a_plan_on_screen_that_is_not_as_good_is_not_kept(current: ss.Plan) -> None:
    advice = recommend(LLAMA, EIGHT, ss.Recipe(), current=current)
    assert advice.plan is not None and advice.plan != current
    assert advice.why.startswith("Start with")


def test_a_much_faster_plan_is_an_alternative_with_its_cost() -> None:
    advice = recommend(LLAMA, EIGHT, ss.Recipe())
    assert advice.plan is not None
    plan, words = advice.alternatives[0]
    assert PAYS * plan.step().seconds < advice.plan.step().seconds
    assert "faster" in words and "GiB more" in words
    assert plan.layout.title in words


def test_a_much_faster_plan_on_these_gpus_comes_before_more_nodes() -> None:
    """It is tight, so it has to be a third faster than the plan with offload."""
    advice = recommend(ss.models["llama-3.1-70b"], ss.Cluster.parse(f"2x8x{H100}"), ss.Recipe())
    assert advice.plan is not None and has_offload(advice.plan.layout)
    (plan, words), (other, _) = advice.alternatives
    assert plan.cluster == advice.plan.cluster and other.cluster.num_nodes > 2
    assert SAFE * plan.step().seconds < advice.plan.step().seconds
    assert plan.memory().is_tight and "tight" in words


@thorough()
def test_plans_that_cannot_be_launched_are_marked() -> None:
    advice = recommend(LLAMA, ss.Cluster.parse("2xrtx-4090-24gb"), ss.Recipe(method="lora", seq_len=2048))
    for plan, words in advice.alternatives:
        assert ("Cannot be launched here" in words) == (why_not_trained(plan) is not None)


@sample(1)
@pytest.mark.parametrize("familiar", [("fsdp2",), ("deepspeed",)], ids=str)
def test_an_alternative_is_never_the_plan_on_screen(familiar: tuple[str, ...]) -> None:
    """A team that knows FSDP2 was offered, as an alternative, the Megatron-core plan that it had."""
    recipe = ss.Recipe(micro_batch_size=2)
    current = ss.Plan(LLAMA, EIGHT, recipe, ss.Layout.megatron(tp=2))
    advice = recommend(LLAMA, EIGHT, recipe, familiar, current=current)
    assert advice.alternatives
    assert not any(does_the_same(plan, current) for plan, _ in advice.alternatives)


SETTINGS = list(product(["llama-3.1-8b", "llama-3.2-1b"], SCREENS[:2], [{}, {"attention": "eager"}]))


@sample(1)
@pytest.mark.parametrize(
    ("model", "layout", "recipe"),
    few(SETTINGS, SETTINGS[::4]),
    ids=lambda one: getattr(one, "framework", str(one)),
)
def test_the_memory_view_offers_nothing_faster_than_the_advice_does(
    model: str, layout: ss.Layout, recipe: dict[str, Any]
) -> None:
    """Chips offered Liger kernels, "12.2 GiB less, 7 % faster", where the advice knew of nothing faster."""
    current = ss.Plan(ss.models[model], EIGHT, ss.Recipe(**recipe), layout)
    advice = recommend(current.architecture, EIGHT, current.recipe, current=current)
    seconds = current.step().seconds
    savings = find_savings(current, current.memory())
    gains = [(one, describe_cost(one.seconds_lost, seconds)) for one in savings]
    faster = [(one, gain) for one, gain in gains if "faster" in gain]
    if advice.plan != current:
        assert advice.why.startswith("Start with")  # Chips of a plan that is to be left are no second answer.
        return
    words = dict(advice.alternatives)
    for one, gain in faster:
        assert gain in words[one.plan] and format_gib(one.bytes_won) in words[one.plan]


def test_a_current_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(ValueError, match="current"):
        recommend(LLAMA, EIGHT, ss.Recipe(), current="fsdp2")  # type: ignore[arg-type]
