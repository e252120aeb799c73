"""Tests of memory needs of GPUs, host and NVMe: verdict, repairs and launch use the same answer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from shown_text import strip_tags
from tests.launch_offers import offer_for, read_verdict

import shardscope as ss
from shardscope.planner.memory_needs import find_shortages, fits, list_host_and_nvme_needs, list_memory_needs
from shardscope.planner.repairs.repairs import describe_repairs, find_steps
from shardscope.timing.paging import count_evicted_bytes, count_page_transfer_bytes, count_paged_bytes
from shardscope_widgets import Studio

GIB = 2**30
BOTH_OFFLOADS = ss.Layout.zero(3, offload_optimizer="cpu", offload_params="cpu")


def make_plan(model: str, cluster: str, layout: ss.Layout, **recipe: Any) -> ss.Plan:
    settings = {"global_batch_size": 8, "recompute": "full", **recipe}
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**settings), layout)


def with_host(plan: ss.Plan, num_bytes: int | None) -> ss.Plan:
    return replace(plan, cluster=replace(plan.cluster, host_memory_bytes=num_bytes))


@pytest.fixture
def too_much_for_the_host() -> ss.Plan:
    return make_plan("llama-3.1-405b", "8xh100-sxm-80gb", BOTH_OFFLOADS)


def test_a_plan_that_needs_too_much_host_memory_does_not_fit(too_much_for_the_host: ss.Plan) -> None:
    plan = too_much_for_the_host
    report = plan.memory()
    assert report.fits, "the card has room: MemoryReport.fits is about nothing else"
    assert not fits(plan, report)
    (lacking,) = find_shortages(plan, report)
    assert lacking.name == "host memory"
    assert lacking.short_bytes == 8 * report.host_bytes - plan.cluster.host_memory_bytes  # type: ignore[operator]
    said = re.fullmatch(
        r"Does not fit: needs ([\d,]+) GiB of host memory on each node, which has 2,048",
        read_verdict(plan, report),
    )
    assert said and int(said[1].replace(",", "")) == pytest.approx(8 * report.host_bytes / GIB, abs=1)


def test_two_shortages_are_both_named(too_much_for_the_host: ss.Plan) -> None:
    plan = replace(
        too_much_for_the_host, recipe=ss.Recipe(seq_len=65_536, global_batch_size=8, recompute="none")
    )
    said = read_verdict(plan, plan.memory())
    pattern = r"Does not fit: needs [\d,]+ GiB on each GPU, which has 79\.1 and [\d,]+ GiB of host memory on"
    assert re.match(pattern, said)


def test_a_need_of_unknown_host_memory_is_named() -> None:
    plan = make_plan("llama-2-13b", "rtx-4090-24gb", BOTH_OFFLOADS)
    report = plan.memory()
    assert plan.cluster.host_memory_bytes is None and fits(plan, report)
    needed = round(report.host_bytes / GIB)
    said = read_verdict(plan, report)
    assert said.startswith("Fits if ") and f"{needed} GiB of host memory" in said
    # Known, it is no part of the sentence any more.
    assert "host" not in read_verdict(with_host(plan, 2**40), report)
    lacks = read_verdict(with_host(plan, 2**36), report)
    assert lacks.startswith("Does not fit") and "of host memory" in lacks


def test_nvme_is_a_kind_of_memory() -> None:
    layout = ss.Layout.zero(3, offload_optimizer="nvme")
    plan = make_plan("llama-2-13b", "8xh100-sxm-80gb", layout)
    report = plan.memory()
    drives = next(place for place in list_host_and_nvme_needs(plan, report) if place.name == "NVMe")
    assert drives.needed_bytes == 8 * report.nvme_bytes and drives.room_bytes is None
    assert re.fullmatch(r"Fits if the node has [\d,]+ GiB of NVMe", read_verdict(plan, report))
    small = replace(plan, cluster=replace(plan.cluster, nvme_bytes=2**30))
    assert re.search(r"needs [\d,]+ GiB on NVMe on each node, which has 1", read_verdict(small, report))


def test_pipeline_stages_of_one_node_are_added_up() -> None:
    """Stages differ, and a node of eight has all four of them, two ranks each."""
    plan = make_plan("llama-2-13b", "8xh100-sxm-80gb", ss.Layout.fsdp2(pp=4, offload="cpu"))
    report = plan.memory()
    by_stage = [stage.host_bytes for stage in report.by_stage]
    assert len(set(by_stage)) > 1, "else this tests nothing"
    (host,) = list_host_and_nvme_needs(plan, report)
    assert host.needed_bytes == 2 * sum(by_stage) < 8 * max(by_stage)
    many = replace(
        plan, cluster=ss.Cluster.parse("4x8xh100-sxm-80gb"), recipe=ss.Recipe(global_batch_size=32)
    )
    each = [stage.host_bytes for stage in many.memory().by_stage]
    (host,) = list_host_and_nvme_needs(many, many.memory())
    assert host.needed_bytes == 8 * max(each)


def test_cpu_ranks_use_host_memory() -> None:
    layout = ss.Layout.zero(3, offload_optimizer="nvme")
    plan = make_plan("llama-3.2-1b", "2xcpu", layout, global_batch_size=2, seq_len=512)
    report = plan.memory()
    (host,) = (place for place in list_memory_needs(plan, report) if place.name == "host memory")
    assert host.needed_bytes == 2 * (report.host_bytes + report.peak_bytes)


# ------------------------------------------------------------------------- one answer for all that ask


def test_repairs_save_the_memory_that_is_short(too_much_for_the_host: ss.Plan) -> None:
    plan = too_much_for_the_host
    repairs = plan.repairs()
    assert repairs
    report = plan.memory()
    for repair in repairs:
        (host,) = (p for p in list_memory_needs(repair.plan, repair.plan.memory()) if p.name == "host memory")
        assert repair.bytes_won == 8 * report.host_bytes - host.needed_bytes > 0
        assert " GiB a node of host memory, " in describe_repairs(plan, [repair])[0]
    # With a third of the model, state that need not be on the host may come back.
    smaller = with_host(make_plan("llama-3.1-8b", "8xh100-sxm-80gb", BOTH_OFFLOADS), 100 * GIB)
    changes = {repair.change for repair in smaller.repairs()}
    assert "Keep the optimizer on the GPU" in changes
    assert all(fits(repair.plan, repair.plan.memory()) for repair in smaller.repairs())


def test_all_views_report_a_shortage_of_host_memory(too_much_for_the_host: ss.Plan) -> None:
    studio = Studio()
    studio.architecture.name.value = "llama-3.1-405b"
    studio.apply(replace(too_much_for_the_host, recipe=too_much_for_the_host.recipe))
    assert studio.plan.memory().fits
    head = strip_tags(studio.headline.value)
    assert "ss-lacks" in studio.headline.value and "host memory" in head and "2,048" in head
    assert studio.fit_search.is_busy or studio.memory.repairs.make_it_fit.layout.display == ""
    assert "of 2,048 GiB on each node" in strip_tags(studio.memory.caption.value)


def test_the_launch_button_checks_host_memory(too_much_for_the_host: ss.Plan) -> None:
    layout = ss.Layout.fsdp2(offload="cpu")
    plan = with_host(make_plan("llama-3.1-70b", "8xh100-sxm-80gb", layout), 1000 * GIB)
    offer = offer_for(plan, plan.cluster, plan.memory())
    assert offer.is_trial
    assert all(fact in offer.note for fact in ("1,051 GiB of host memory", "which has 1,000"))
    enough = with_host(plan, 2**41)
    assert offer_for(enough, enough.cluster, enough.memory()).label == "Launch on 8 GPUs"


# ------------------------------------------------------------------------------------ paged optimizers


def make_paged_plan(
    cluster: str = "a100-sxm-80gb", model: str = "llama-2-7b", optimizer: str = "paged_adamw"
) -> ss.Plan:
    return make_plan(model, cluster, ss.Layout.ddp(), optimizer=optimizer, global_batch_size=1)


def test_paged_state_that_fits_on_the_gpu_costs_no_time() -> None:
    plan = make_paged_plan("h200-sxm-141gb")
    report = plan.memory()
    assert count_paged_bytes(plan, report) > 50 * GIB
    assert count_evicted_bytes(plan, report) == count_page_transfer_bytes(plan, report) == 0
    assert list_host_and_nvme_needs(plan, report) == ()
    assert "host" not in read_verdict(plan, report)
    plain = make_paged_plan("h200-sxm-141gb", optimizer="adamw")
    assert plan.step().seconds == pytest.approx(plain.step().seconds, rel=0.01)


def test_evicted_pages_are_transferred_in_each_step() -> None:
    plan = make_paged_plan()
    report = plan.memory()
    moments = count_paged_bytes(plan, report)
    away = count_evicted_bytes(plan, report)
    assert 0 < away == report.peak_bytes + moments - report.usable_bytes < moments
    (host,) = list_host_and_nvme_needs(plan, report)
    assert host.needed_bytes == away, "what stays on the GPU needs no host memory"
    # Weights, gradients and moments of 7B are 108 GB: not even the update has room for all.
    assert count_page_transfer_bytes(plan, report) == moments
    link = plan.cluster.host_link.bandwidth_bytes_per_second * 0.8
    assert plan.step().parts["offload"] == pytest.approx(2 * moments / link)


def test_pages_evicted_only_at_the_peak_are_transferred_once() -> None:
    plan = make_paged_plan("h100-sxm-80gb", "llama-3.2-1b")
    recipe = replace(plan.recipe, recompute="none", micro_batch_size=1, seq_len=4096)
    for seq_len in range(4096, 65_536, 1024):
        longer = replace(plan, recipe=replace(recipe, seq_len=seq_len))
        report = longer.memory()
        if count_evicted_bytes(longer, report):
            break
    assert (
        0
        < count_page_transfer_bytes(longer, report)
        == count_evicted_bytes(longer, report)
        < count_paged_bytes(longer, report)
    )


def test_offloaded_activations_are_not_pages() -> None:
    plan = make_paged_plan()
    both = replace(plan, recipe=replace(plan.recipe, recompute="offload"))
    report = both.memory()
    assert count_paged_bytes(both, report) == count_paged_bytes(plan, plan.memory()) < report.host_bytes


def test_paging_is_never_reported_as_faster() -> None:
    plan = make_paged_plan(optimizer="adamw")
    assert not plan.memory().fits
    steps = {step.plan.recipe.optimizer: step for step in find_steps(plan)}
    repair = steps["paged_adamw"]
    assert repair.seconds_lost > 0
    [said] = describe_repairs(plan, [repair])
    assert said.endswith(", while it pages") and "faster" not in said
