"""Tests of the verdict on a plan: four states, never "fits" if memory is short or unknown."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from random_plans import plans
from tests.requirements import examples

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.planner.memory_needs import list_memory_needs
from shardscope.planner.verdict import assess_plan


def make_plan(
    layout: ss.Layout | None = None,
    cluster: str = "8xh100-sxm-80gb",
    model: str = "llama-3.1-8b",
    **recipe: object,
) -> ss.Plan:
    return ss.Plan(
        ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout or ss.Layout.fsdp2()
    )  # type: ignore[arg-type]


def test_a_plan_that_fits_reports_how_much_it_needs() -> None:
    plan = make_plan()
    verdict = assess_plan(plan)
    assert verdict.state == "fits" == plan.memory().verdict
    assert format_gib(plan.memory().peak_bytes) in verdict.reason and not verdict.shortages
    assert verdict.runs


def test_a_plan_over_80_percent_of_its_gpu_is_tight() -> None:
    plan = make_plan(seq_len=6144)
    report = plan.memory()
    assert report.fits and report.is_tight
    verdict = assess_plan(plan)
    assert verdict.state == "tight" == report.verdict
    assert "80 %" in verdict.reason and format_gib(report.peak_bytes) in verdict.reason
    assert verdict.runs


def test_a_band_whose_top_is_over_the_limit_is_tight() -> None:
    plan = make_plan()
    report = plan.memory()
    above = replace(report, find_band=lambda: (report.low_bytes, report.usable_bytes + 2**30))
    verdict = assess_plan(plan, above)
    assert verdict.state == "tight" == above.verdict
    assert format_gib(report.usable_bytes + 2**30) in verdict.reason


def test_the_gpu_that_is_meant_is_named() -> None:
    """Stages of a pipeline need unequal memory: "each GPU" was said of all, and of a single one."""
    pipeline = make_plan(ss.Layout.megatron(pp=4), model="llama-3.1-70b")
    stage = pipeline.memory().worst_stage.stage
    assert not pipeline.memory().fits
    assert f"on the fullest GPU, stage {stage}, which has" in assess_plan(pipeline).reason
    single = make_plan(cluster="1xh100-sxm-80gb")
    assert "on the GPU, which has" in assess_plan(single).reason


def test_every_kind_of_memory_that_is_short_is_named() -> None:
    over = assess_plan(make_plan(model="llama-3.1-405b"))
    assert over.state == "does not fit" and not over.runs
    assert [place.name for place in over.shortages] == ["GPU memory"]
    assert format_gib(over.shortages[0].needed_bytes) in over.reason and "each GPU" in over.reason
    offloaded = make_plan(ss.Layout.zero(3, offload_optimizer="cpu"))
    small = replace(offloaded, cluster=replace(offloaded.cluster, host_memory_bytes=2**36))
    host = assess_plan(small)
    assert host.state == "does not fit" and small.memory().fits
    assert "host memory" in host.reason and "64.0" in host.reason


def test_a_need_of_unknown_memory_is_no_fit() -> None:
    plan = make_plan(ss.Layout.zero(3, offload_optimizer="cpu"), "8xl40s-48gb", recompute="full")
    assert plan.memory().fits and plan.cluster.host_memory_bytes is None
    verdict = assess_plan(plan)
    assert verdict.state == "unknown" and "not known" in verdict.reason
    assert [place.name for place in verdict.unknown] == ["host memory"]
    known = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=2**40))
    assert assess_plan(known).state == "fits"
    # Ranks of DDP load the model through host memory.
    assert assess_plan(make_plan(ss.Layout.ddp(), "8xl40s-48gb", "llama-3.2-1b")).state == "unknown"


def test_cpu_ranks_are_not_called_gpus() -> None:
    assert (
        "CPU rank"
        in assess_plan(make_plan(ss.Layout.ddp(), "2xcpu", "llama-3.1-70b", precision="fp32")).reason
    )


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_a_plan_fits_only_if_all_its_memory_is_of_known_size(plan: ss.Plan) -> None:
    report = plan.memory()
    verdict = assess_plan(plan)
    needed = list_memory_needs(plan, report)
    short = any(place.room_bytes is not None and place.needed_bytes > place.room_bytes for place in needed)
    unknown = any(place.room_bytes is None and place.needed_bytes for place in needed)
    assert (verdict.state == "does not fit") == short
    assert (verdict.state == "unknown") == (unknown and not short)
    if verdict.state == "fits":
        assert not report.is_tight and report.high_bytes <= report.usable_bytes
    assert verdict.reason.endswith(".")
