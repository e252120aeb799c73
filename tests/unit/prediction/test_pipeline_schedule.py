"""Tests of pipeline schedules: blocks that respect their dependencies, and the numbers of step and memory."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.requirements import examples, needs

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.memory.activations.stage_activations import count_in_flight
from shardscope.prediction.pipeline import compute_bubbles
from shardscope.prediction.schedule import PipelineSchedule, compute_schedule
from shardscope.timing.pipeline import Pass, Schedule, compute_bubble_seconds, iterate_passes, time_passes

LLAMA = ss.models["llama-3.1-8b"]
PROPERTY = settings(max_examples=examples(80), deadline=None)


def build_plan(
    layout: ss.Layout, cluster: str = "8xh100-sxm-80gb", batch: int = 32, **recipe: Any
) -> ss.Plan:
    recipe = {"recompute": "selective"} | recipe
    return ss.Plan(LLAMA, ss.Cluster.parse(cluster), ss.Recipe(global_batch_size=batch, **recipe), layout)


PIPELINES = {
    "fsdp2 1f1b": build_plan(ss.Layout.fsdp2(pp=4)),
    "fsdp2 interleaved": build_plan(ss.Layout.fsdp2(pp=4, vpp=2)),
    "zero-1": build_plan(ss.Layout.zero(stage=1, pp=2)),
    "megatron 1f1b": build_plan(ss.Layout.megatron(pp=4, tp=2)),
    "megatron interleaved": build_plan(ss.Layout.megatron(pp=4, tp=2, vpp=4)),
    "two nodes": build_plan(ss.Layout.megatron(tp=4, pp=4), "2x8xh100-sxm-80gb", 64),
    "recomputed": build_plan(ss.Layout.megatron(tp=2, pp=2, cp=2), recompute="full"),
    "8-bit": build_plan(ss.Layout.fsdp2(pp=2), optimizer="adamw_8bit"),
}
ONE_STAGE = build_plan(ss.Layout.fsdp2())


def check_blocks(schedule: PipelineSchedule) -> None:
    """Check that no two blocks of a stage overlap, and that each pass runs once, after what it waits for."""
    pp, vpp = schedule.num_stages, schedule.num_chunks
    begin: dict[tuple[str, int, int], float] = {}
    done: dict[tuple[str, int, int], float] = {}
    tolerance = 1e-9 * schedule.seconds
    for stage in range(pp):
        now = 0.0
        for block in schedule.get_stage(stage):
            assert block.start == pytest.approx(now, abs=tolerance), "neither a gap nor an overlap"
            assert block.end >= block.start
            now = block.end
            if block.kind in ("forward", "backward"):
                key = (block.kind, block.chunk * pp + stage, block.micro_batch)
                assert key not in done
                begin[key], done[key] = block.start, block.end
    counts = Counter(kind for kind, *_ in done)
    assert counts == dict.fromkeys(("forward", "backward"), pp * vpp * schedule.num_micro_batches)
    for (kind, position, number), start in begin.items():
        neighbour = position - 1 if kind == "forward" else position + 1
        if 0 <= neighbour < pp * vpp:
            assert start >= done[kind, neighbour, number] - tolerance
        if kind == "backward":
            assert start >= done["forward", position, number] - tolerance


@pytest.mark.parametrize("name", PIPELINES)
def test_schedule_has_the_seconds_of_the_step(name: str) -> None:
    plan = PIPELINES[name]
    schedule, report = compute_schedule(plan), plan.step()
    check_blocks(schedule)
    busy = sum(one.seconds for one in schedule.get_stage(schedule.slowest_stage) if one.kind != "bubble")
    assert busy == pytest.approx(report.seconds - report.parts["bubble"], rel=1e-9)
    assert schedule.bubble_seconds == pytest.approx(report.parts["bubble"], rel=1e-9)
    assert schedule.seconds == pytest.approx(report.seconds, rel=1e-9)
    sent = sum(one.seconds for one in schedule.get_stage(schedule.slowest_stage) if one.kind == "send")
    assert sent == pytest.approx(report.parts["pipeline_transfers"], rel=1e-9)


def test_chunks_in_flight_of_a_long_step_are_counted_at_once() -> None:
    plan = build_plan(ss.Layout.megatron(pp=4, vpp=8), batch=1024)
    schedule = compute_schedule(plan)
    started = time.process_time()
    assert schedule.most_in_flight == tuple(count_in_flight(plan, stage)[1] for stage in range(4))
    assert time.process_time() - started < 3, "each count read all blocks of the stage"


@pytest.mark.parametrize("name", PIPELINES)
def test_micro_batches_in_flight_are_those_of_the_predicted_memory(name: str) -> None:
    plan = PIPELINES[name]
    schedule, stages = compute_schedule(plan), plan.memory().by_stage
    for number, stage in enumerate(stages):
        assert schedule.most_in_flight[number] == count_in_flight(plan, number)[1]
        held = [schedule.compute_memory(number, now) for now in schedule.event_times]
        totals = [sum(parts.values()) for parts in held]
        # The backward with the most in flight is the phase of plan.memory() itself, and nothing is above it.
        assert stage.at("backward").total in totals
        assert max(totals) <= stage.peak_bytes
        starts = schedule.compute_memory(number, 0.0)
        assert starts["parameters"] == stage.at("rest").components["parameters"]


def test_memory_at_a_moment_grows_by_the_activations_of_one_micro_batch() -> None:
    plan = build_plan(ss.Layout.megatron(pp=4), recompute="none")
    schedule = compute_schedule(plan)
    starts = [one.start for one in schedule.get_stage(0) if one.kind == "forward"][:4]
    held = [schedule.compute_memory(0, start)["activations"] for start in starts]
    steps = {later - earlier for earlier, later in pairwise(held)}
    assert max(steps) - min(steps) <= 1, "each forward adds as much"
    assert held[-1] == plan.memory().by_stage[0].at("forward").components["activations"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_other_schedules_have_the_bubble_of_their_formula(schedule: Schedule) -> None:
    for name in ("fsdp2 1f1b", "megatron interleaved", "two nodes"):
        plan = PIPELINES[name]
        simulated = compute_schedule(plan, schedule)
        check_blocks(simulated)
        assert simulated.bubble_seconds == pytest.approx(compute_bubbles(plan)[schedule], rel=1e-9)
        if schedule == "gpipe":
            assert set(simulated.most_in_flight) == {plan.num_micro_batches}


def test_a_stage_of_one_layer_is_not_interleaved() -> None:
    arch = replace(LLAMA, num_hidden_layers=9)
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    plan = ss.Plan(arch, cluster, ss.Recipe(global_batch_size=32), ss.Layout.megatron(pp=4))
    assert min(plan.stage_layers) == 1 and "interleaved" not in compute_bubbles(plan)
    with pytest.raises(FieldError, match="at least 2 layers"):
        compute_schedule(plan, "interleaved")


@PROPERTY
@given(
    pp=st.integers(2, 8),
    vpp=st.integers(1, 4),
    rounds=st.integers(1, 5),
    forward=st.floats(0.1, 10),
    backward=st.floats(0.1, 10),
    is_gpipe=st.booleans(),
)
def test_bubble_of_equal_stages_is_the_closed_formula(
    pp: int, vpp: int, rounds: int, forward: float, backward: float, is_gpipe: bool
) -> None:
    """Narayanan et al. 2021, section 2.2: (pp - 1) / (vpp x micro-batches) of a stage's own time."""
    number = pp * rounds
    if is_gpipe:
        vpp = 1
    schedule: Schedule = "gpipe" if is_gpipe else "1f1b" if vpp == 1 else "interleaved"
    passes = [[Pass(*one) for one in iterate_passes(schedule, pp, vpp, s, number)] for s in range(pp)]
    times = time_passes(passes, [(forward, backward)] * pp)
    own = number * vpp * (forward + backward)
    total = max(end for spans in times for _, end in spans)
    # Interleaved, backwards that are shorter than forwards wait for forwards of other chunks.
    if vpp == 1 or backward >= forward:
        assert (total - own) / own == pytest.approx((pp - 1) / (vpp * number), rel=1e-9)
    assert total >= own * (1 + (pp - 1) / (vpp * number)) * (1 - 1e-9)


@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize("pp", [2, 4])
def test_interleaved_passes_run_in_the_order_of_torch(pp: int, vpp: int) -> None:
    schedules = needs("torch.distributed.pipelining.schedules")
    stage = MagicMock(num_stages=pp * vpp, group_size=pp, group_rank=0, stage_index=0, has_backward=False)
    # With 10 micro-batches on 4 stages, rounds are of 5.
    for number in (1, 3, 8, 10):
        expected = schedules.ScheduleInterleaved1F1B([stage] * vpp, number, loss_fn=None).pipeline_order
        for rank, actions in expected.items():
            order = [
                (one.computation_type.name == "FORWARD", one.stage_index // pp, one.microbatch_index)
                for one in actions
                if one is not None
            ]
            assert list(iterate_passes("interleaved", pp, vpp, rank, number)) == order


def simulate_bubble(vpp: int, micro_batches: int, seconds: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds that the slowest stage waits in the simulator, and those of the closed formula.

    ``seconds`` are those of one chunk's forward and backward, by stage.
    """
    schedule: Schedule = "1f1b" if vpp == 1 else "interleaved"
    pp = len(seconds)
    passes = [[Pass(*one) for one in iterate_passes(schedule, pp, vpp, s, micro_batches)] for s in range(pp)]
    own = [micro_batches * vpp * sum(both) for both in seconds]
    end = max(end for spans in time_passes(passes, seconds) for _, end in spans)
    return end - max(own), compute_bubble_seconds(sum(own), max(own), vpp, micro_batches)


@PROPERTY
@given(
    pp=st.integers(2, 8),
    vpp=st.integers(1, 8),
    micro_batches=st.integers(1, 16),
    forward=st.floats(0.1, 10),
    backward=st.floats(0.1, 10),
)
def test_bubble_of_few_micro_batches_is_the_simulated_one(
    pp: int, vpp: int, micro_batches: int, forward: float, backward: float
) -> None:
    assume(micro_batches < pp or micro_batches % pp == 0)
    simulated, formula = simulate_bubble(vpp, micro_batches, [(forward, backward)] * pp)
    own = micro_batches * vpp * (forward + backward)
    assert formula == pytest.approx(simulated, rel=1e-9, abs=1e-9 * own)
    if micro_batches == 1:
        assert formula == pytest.approx((pp - 1) * own), "nothing runs at the same time"


@PROPERTY
@given(
    vpp=st.integers(2, 8),
    micro_batches=st.integers(1, 7),
    forwards=st.lists(st.floats(0.8, 1.25), min_size=2, max_size=8),
    slowest_is_last=st.booleans(),
)
def test_bubble_of_few_micro_batches_on_unequal_stages(
    vpp: int, micro_batches: int, forwards: list[float], slowest_is_last: bool
) -> None:
    """An approximation in general, and exact where the last stage is slower than the other, equal ones."""
    micro_batches = min(micro_batches, len(forwards) - 1)
    if slowest_is_last:
        forwards = [1.0] * (len(forwards) - 1) + [max(forwards) + 0.2]
    simulated, formula = simulate_bubble(vpp, micro_batches, [(one, 2 * one) for one in forwards])
    step = micro_batches * vpp * 3 * max(forwards) + simulated
    assert abs(formula - simulated) <= (1e-9 if slowest_is_last else 0.12) * step


def test_a_single_interleaved_micro_batch_takes_as_long_as_its_stages_together() -> None:
    plan = build_plan(ss.Layout.fsdp2(pp=4, vpp=4), batch=2)
    assert plan.num_micro_batches == 1
    report, simulated = plan.step(), compute_schedule(plan)
    assert report.seconds == pytest.approx(simulated.seconds, rel=1e-9)
    # Three further stages; the last one, which is the slowest, also has the head and the update.
    assert report.parts["bubble"] > 2 * (report.seconds - report.parts["bubble"])


@PROPERTY
@given(
    pp=st.sampled_from((2, 4, 8)),
    vpp=st.sampled_from((1, 2)),
    tp=st.sampled_from((1, 2)),
    framework=st.sampled_from(("fsdp2", "megatron", "zero")),
    batch=st.sampled_from((8, 12, 16, 48, 64)),
    model=st.sampled_from(("llama-3.1-8b", "mixtral-8x7b", "gpt2", "gemma-2-9b")),
    recompute=st.sampled_from(("none", "full")),
)
def test_any_plan_has_a_schedule_of_its_own_numbers(
    pp: int, vpp: int, tp: int, framework: str, batch: int, model: str, recompute: str
) -> None:
    try:
        layout = {
            "fsdp2": lambda: ss.Layout.fsdp2(pp=pp, vpp=vpp, tp=tp),
            "megatron": lambda: ss.Layout.megatron(pp=pp, vpp=vpp, tp=tp),
            "zero": lambda: ss.Layout.zero(stage=1, pp=pp, tp=tp),
        }[framework]()
        recipe = ss.Recipe(seq_len=1024, global_batch_size=batch, recompute=recompute)  # type: ignore[arg-type]
        plan = ss.Plan(ss.models[model], ss.Cluster.parse("2x8xh100-sxm-80gb"), recipe, layout)
    except FieldError:
        assume(False)
    schedule, report = compute_schedule(plan), plan.step()
    check_blocks(schedule)
    busy = sum(one.seconds for one in schedule.get_stage(schedule.slowest_stage) if one.kind != "bubble")
    assert busy == pytest.approx(report.seconds - report.parts["bubble"], rel=1e-9)
    is_whole = vpp == 1 or plan.num_micro_batches < pp or plan.num_micro_batches % pp == 0
    if schedule.slowest_stage == pp - 1 and is_whole:
        assert schedule.seconds == pytest.approx(report.seconds, rel=1e-6)
    for stage in range(pp):
        assert schedule.most_in_flight[stage] == count_in_flight(plan, stage)[1]


@pytest.mark.parametrize("micro_batches", [2, 3, 5, 6, 7, 10, 11])
def test_longer_rounds_of_torch_hold_more_chunks(micro_batches: int) -> None:
    """Where pp does not divide the micro-batches, a round of ``ScheduleInterleaved1F1B`` is longer."""
    recipe = ss.Recipe(seq_len=512, global_batch_size=micro_batches)
    cluster = ss.Cluster.parse("1x4xh100-sxm-80gb")
    try:
        plan = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.fsdp2(pp=4, vpp=2))
    except FieldError:
        assert micro_batches == 11, "only 11 = 2 rounds of 5 and one more is not taken"
        return
    in_flight = [count_in_flight(plan, stage)[1] for stage in range(4)]
    assert in_flight == list(compute_schedule(plan).most_in_flight)


def test_plan_without_a_pipeline_has_one_row_with_the_step() -> None:
    schedule, report = compute_schedule(ONE_STAGE), ONE_STAGE.step()
    assert schedule.schedule is None and schedule.num_stages == 1
    assert schedule.seconds == pytest.approx(report.seconds, rel=1e-9)
    kinds = Counter(one.kind for one in schedule.blocks)
    assert kinds["forward"] == kinds["backward"] == ONE_STAGE.num_micro_batches and not kinds["bubble"]
    exposed = sum(one.seconds for one in schedule.blocks if one.kind == "communication")
    assert exposed == pytest.approx(report.parts["gathers"] + report.parts["gradients"])


def test_schedules_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match="one stage"):
        compute_schedule(ONE_STAGE, "gpipe")
    with pytest.raises(ValueError, match="gpipe"):
        compute_schedule(PIPELINES["fsdp2 1f1b"], "zb-h1")
    odd = build_plan(ss.Layout.fsdp2(pp=4), "4xh100-sxm-80gb", 9)
    with pytest.raises(ValueError, match="rounds of about pp=4"):
        compute_schedule(odd, "interleaved")
