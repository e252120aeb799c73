"""Tests of changes that fix a plan: all valid, ordered by the step time they cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from random_plans import plans
from tests.requirements import examples

import shardscope as ss
from shardscope.planner.differences import find_differences
from shardscope.planner.memory_needs import fits
from shardscope.planner.repairs.repairs import describe_repairs, find_steps
from shardscope.planner.repairs.single_changes import list_ladders

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")


def make_plan(
    model: str = "llama-3.1-8b",
    cluster: str = "8xh100-sxm-80gb",
    layout: ss.Layout | None = None,
    **recipe: object,
) -> ss.Plan:
    return ss.Plan(
        ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout or ss.Layout.fsdp2()
    )  # type: ignore[arg-type]


def list_changed_fields(one: ss.Plan, other: ss.Plan) -> set[str]:
    """List the fields of recipe and layout in which two plans differ; another framework counts as one."""
    return {difference.field for difference in find_differences(one, other)}


def test_a_plan_that_fits_needs_no_repair() -> None:
    assert make_plan().memory().fits
    assert make_plan().repairs() == []


def test_a_faster_repair_is_as_much_faster_as_advice_would_say() -> None:
    """Compiled modules, whose step takes 73 % of the seconds, were "27 % faster"."""
    plan = make_plan("llama-3.2-1b", "h100-sxm-80gb", ss.Layout.ddp(), micro_batch_size=4)
    repairs = plan.repairs()
    index = next(i for i, one in enumerate(repairs) if one.plan.recipe.kernels == "compiled")
    ratio = plan.step().seconds / repairs[index].plan.step().seconds
    assert ratio > 1.3
    assert f"about {100 * (ratio - 1):.0f} % faster" in describe_repairs(plan, repairs)[index]


def test_repairs_print_as_sentences() -> None:
    """Without the changed plans, which fill a screen each."""
    repairs = make_plan(micro_batch_size=4, seq_len=8192).repairs()
    lines = str(repairs).splitlines()
    assert len(lines) == len(repairs) > 0
    for line, repair in zip(lines, repairs, strict=True):
        assert line.startswith(repair.change) and "GiB less" in line and "Plan(" not in line
    unknown = str(repairs[0]._replace(seconds_lost=float("nan")))
    assert "not known" in unknown and "nan" not in unknown


def test_a_repair_unpacks_into_its_four_fields() -> None:
    plan = make_plan(micro_batch_size=4, seq_len=8192)
    repairs = plan.repairs()
    assert repairs
    for change, repaired, bytes_won, seconds_lost in repairs:
        assert change and repaired.memory().fits
        assert bytes_won == plan.memory().peak_bytes - repaired.memory().peak_bytes > 0
        assert math.isfinite(seconds_lost)
    lost = [repair.seconds_lost for repair in repairs]
    assert lost == sorted(lost)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (make_plan(micro_batch_size=2), "recompute"),
        (make_plan(micro_batch_size=4, seq_len=2048), "micro_batch_size"),
        (
            make_plan("llama-3.1-70b", "8x8xh100-sxm-80gb", ss.Layout.fsdp2(replicate=8), recompute="full"),
            "replicate",
        ),
        (make_plan("llama-3.1-8b", layout=ss.Layout.zero(stage=0), recompute="full"), "stage"),
        (make_plan("llama-3.1-8b", layout=ss.Layout.ddp(), recompute="full"), "framework"),
        (make_plan("llama-3.1-8b", "h100-sxm-80gb", recompute="full", micro_batch_size=4), "offload"),
        (make_plan("llama-3.1-8b", "h100-sxm-80gb", recompute="full"), "method"),
        (make_plan("llama-3.1-70b", "4x8xh100-sxm-80gb", ss.Layout.megatron(tp=4, pp=2)), "pp"),
        (make_plan("llama-3.1-70b", "4x8xh100-sxm-80gb", ss.Layout.megatron(tp=4, pp=2)), "tp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_of_change_is_offered_if_it_is_sufficient(plan: ss.Plan, field: str) -> None:
    assert not plan.memory().fits
    repairs = [repair for repair in plan.repairs() if list_changed_fields(plan, repair.plan) == {field}]
    assert repairs, [(repair.change, list_changed_fields(plan, repair.plan)) for repair in plan.repairs()]
    assert all(repair.plan.memory().fits for repair in repairs)


def test_the_smallest_sufficient_step_is_offered() -> None:
    plan = make_plan(micro_batch_size=8, seq_len=2048)
    assert not plan.memory().fits
    (repair,) = [r for r in plan.repairs() if list_changed_fields(plan, r.plan) == {"micro_batch_size"}]
    recipe = repair.plan.recipe
    doubled = replace(repair.plan, recipe=replace(recipe, micro_batch_size=2 * recipe.micro_batch_size))
    assert not doubled.memory().fits


def test_no_change_is_offered_if_none_is_sufficient() -> None:
    """The ones on the way to a combination are for the combination."""
    plan = make_plan("llama-3.1-405b", micro_batch_size=8)
    assert plan.repairs() == [] and "plan.make_it_fit()" in str(plan.repairs())
    found = find_steps(plan)
    assert 0 < len(found) <= 6
    assert not any(repair.plan.memory().fits for repair in found)
    won = [repair.bytes_won for repair in found]
    assert won == sorted(won, reverse=True)


def test_offload_to_a_host_that_is_too_small_is_not_offered() -> None:
    plan = make_plan("llama-3.1-8b", "h100-sxm-80gb", recompute="full")
    offloads = {r.change for r in plan.repairs() if "host" in r.change}
    assert offloads
    small = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=2**34))
    assert not offloads & {r.change for r in small.repairs()}


def test_one_gpu_may_offload_to_its_host() -> None:
    """Nobody to shard with; a 4090 cannot hold 7B and its state, the host beside it can."""
    plan = make_plan("llama-2-7b", "rtx-4090-24gb", ss.Layout.ddp(), global_batch_size=1, recompute="full")
    repairs = {repair.change: repair.plan for repair in plan.repairs()}
    state = repairs["Offload training state to the host with FSDP2"]
    assert state.layout == ss.Layout.fsdp2(offload="cpu") and state.memory().fits
    optimizer = repairs["Offload the optimizer to the host with DeepSpeed ZeRO-3"]
    assert optimizer.layout == ss.Layout.zero(3, offload_optimizer="cpu") and optimizer.memory().fits
    assert not any(change.startswith("Shard") for change in repairs), "there is nobody to shard with"
    # Where the optimizer alone is not enough, parameters follow it.
    larger = make_plan("llama-2-13b", "rtx-4090-24gb", ss.Layout.ddp(), global_batch_size=1, recompute="full")
    both = {repair.change: repair.plan.layout for repair in larger.repairs()}
    assert both["Offload the optimizer and parameters to the host with DeepSpeed ZeRO-3"] == ss.Layout.zero(
        3, offload_optimizer="cpu", offload_params="cpu"
    )


def test_another_framework_has_the_least_sufficient_offload() -> None:
    plan = make_plan("llama-2-7b", "2xh100-sxm-80gb", ss.Layout.ddp(), global_batch_size=2)
    assert "Shard training state with FSDP2" in {repair.change for repair in plan.repairs()}
    plan = make_plan("llama-2-13b", "2xa100-sxm-40gb", ss.Layout.ddp(), global_batch_size=2, recompute="full")
    changes = {repair.change for repair in plan.repairs()}
    assert "Offload training state to the host with FSDP2" in changes
    assert "Shard training state with FSDP2" not in changes


def test_a_change_without_formulas_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(micro_batch_size=2)
    memory = ss.Plan.memory

    def record_call(self: ss.Plan) -> object:
        if self.recipe.recompute == "selective":
            raise ValueError("no formulas")
        return memory(self)

    monkeypatch.setattr(ss.Plan, "memory", record_call)
    repairs = plan.repairs()
    assert repairs and all(repair.plan.recipe.recompute != "selective" for repair in repairs)


def test_paged_state_with_offloaded_activations_of_every_other_layer() -> None:
    """To tell pages from activations on the host, the plan is asked again without the latter."""
    plan = make_plan(
        "llama-2-7b", "2xa100-sxm-40gb", ss.Layout.ddp(), optimizer="paged_adamw", recompute="offload",
        recompute_interval=2, global_batch_size=2,
    )  # fmt: skip
    assert plan.repairs()


def test_the_text_of_a_button() -> None:
    plan = make_plan(micro_batch_size=2)
    words = describe_repairs(plan, plan.repairs())
    selective = next(text for text in words if text.startswith("Recompute selectively: saves "))
    assert selective.endswith(("slower", "as fast")) and " GiB, about " in selective


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_every_change_is_a_plan_one_step_away(plan: ss.Plan) -> None:
    for ladder in list_ladders(plan):
        for change in ladder:
            assert change.text
            fields = list_changed_fields(plan, change.plan) - {"shard"}
            assert len(fields) == 1, (change.text, fields)
            assert change.plan.world_size == plan.world_size
            assert change.plan.architecture == plan.architecture


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_repairs_of_any_plan_are_all_enough_and_none_is_much_slower(plan: ss.Plan) -> None:
    repairs = plan.repairs()
    if fits(plan, plan.memory()):
        assert repairs == [] == find_steps(plan)
    assert all(fits(repair.plan, repair.plan.memory()) for repair in repairs)
    assert all(repair.bytes_won > 0 for repair in repairs)
    for repair in repairs:
        if not math.isnan(repair.seconds_lost):
            assert repair.plan.step().seconds <= 3 * plan.step().seconds * (1 + 1e-9)
    assert all(": saves " in words for words in describe_repairs(plan, repairs))
    enough = {fits(step.plan, step.plan.memory()) for step in find_steps(plan)}
    assert len(enough) <= 1


def test_older_gpus_get_fp16_and_never_bf16() -> None:
    recipe = {"seq_len": 512, "precision": "fp32", "optimizer": "sgd"}
    old, new = (
        {
            change.plan.recipe.precision
            for ladder in list_ladders(make_plan("llama-3.2-1b", gpu, ss.Layout.ddp(), **recipe))
            for change in ladder
        }
        for gpu in ("1xt4-16gb", "1xa100-sxm-40gb")
    )
    assert "fp16-mixed" in old and not any(precision.startswith("bf16") for precision in old)
    assert "bf16-mixed" in new and "fp16-mixed" not in new


def test_a_sufficient_change_that_is_sixty_times_as_slow_is_not_offered() -> None:
    plan = make_plan(
        "llama-3.1-405b", "8x8xh100-sxm-80gb", ss.Layout.fsdp2(offload="cpu"), global_batch_size=64
    )
    slow = [step for step in find_steps(plan) if step.plan.step().seconds > 3 * plan.step().seconds]
    assert slow and all(fits(step.plan, step.plan.memory()) for step in slow)
    assert not {step.change for step in slow} & {repair.change for repair in plan.repairs()}
    (words,) = describe_repairs(plan, slow[-1:])
    ratio = slow[-1].plan.step().seconds / plan.step().seconds
    assert f"about {ratio:.{0 if ratio > 10 else 1}f}x slower" in words


# ------------------------------------------------------------------------------ what a change costs


def test_an_unknown_time_is_nan() -> None:
    plan = make_plan("llama-3.1-8b", "2xcpu")
    steps = find_steps(plan)
    assert steps and all(math.isnan(step.seconds_lost) for step in steps)
    assert "time unknown" in describe_repairs(plan, steps)[0]
