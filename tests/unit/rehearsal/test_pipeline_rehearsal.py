"""Tests of rehearsals of FSDP2 in pipeline stages, under torch's own 1F1B and GPipe schedules."""

from __future__ import annotations

from typing import Any

import pytest
from tests.accuracy.measurement_kinds import tensor_bytes
from tests.accuracy.rehearsal_samples import in_words
from tests.accuracy.rehearsals import STORED, read_rehearsals
from tests.requirements import few, skip_from_torch, thorough

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.plan import Plan
from shardscope.frameworks.fsdp2.rehearsal.rehearse import rehearse
from shardscope.memory.report import PHASES
from shardscope.rehearsal.result import RehearsedStage

pytestmark = thorough()

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")


def build_plan(num_micro_batches: int, **recipe: Any) -> Plan:
    arch = Architecture.of_size("60m")
    return Plan(
        arch,
        EIGHT,
        ss.Recipe(**{"seq_len": 512, "global_batch_size": 4 * num_micro_batches, **recipe}),
        ss.Layout.fsdp2(pp=2),
    )


BUFFERS_FREED = "allocates pipelines' receive buffers one at a time"


def rehearse_plan(plan: Plan) -> list[RehearsedStage]:
    return rehearse(plan, lambda words, fraction: None)


def find_peak_bytes(stage: RehearsedStage, component: str, phase: str) -> int:
    return max(m.components.get(component, 0) for m in stage.peaks if m.phase == phase)


@pytest.fixture(scope="module")
def stages() -> list[RehearsedStage]:
    return rehearse_plan(build_plan(8))


def test_each_stage_has_its_layers_and_shards(stages: list[RehearsedStage]) -> None:
    plan = build_plan(8)
    assert [stage.num_layers for stage in stages] == list(plan.stage_layers)
    for stage, predicted in zip(stages, plan.memory().by_stage, strict=True):
        assert {peak.phase for peak in stage.peaks} == set(PHASES)
        for name in ("parameters", "optimizer"):
            rest = next(m for m in predicted.phases if m.phase == "rest").components[name]  # type: ignore[index]
            assert find_peak_bytes(stage, name, "rest") == pytest.approx(rest, abs=2**20)


def test_1f1b_holds_one_micro_batch_less_on_the_next_stage(stages: list[RehearsedStage]) -> None:
    first, last = (find_peak_bytes(stage, "activations", "forward") for stage in stages)
    assert first == pytest.approx(2 * last, rel=0.15)


def test_gradients_stay_unsharded_until_the_end_of_the_schedule(stages: list[RehearsedStage]) -> None:
    """torch's pipeline stage reduces once a step: until then a rank has unsharded fp32 gradients, and
    parameters stay all-gathered after a backward."""
    for stage in stages:
        sharded = find_peak_bytes(stage, "parameters", "rest")
        assert find_peak_bytes(stage, "gradients", "forward") == 0
        # Four ranks shard the fp32 weights: unsharded, these are four shards, and in bf16 half of that.
        assert find_peak_bytes(stage, "gather_buffers", "backward") > (4 + 2) * sharded


def test_receive_buffers_are_allocated_for_every_micro_batch(stages: list[RehearsedStage]) -> None:
    skip_from_torch("2.15", BUFFERS_FREED)
    more = rehearse_plan(build_plan(16))
    arch = Architecture.of_size("60m")
    for less, many in zip(stages, more, strict=True):
        added = find_peak_bytes(many, "gather_buffers", "rest") - find_peak_bytes(
            less, "gather_buffers", "rest"
        )
        assert added == 8 * 512 * arch.hidden_size * 2
        assert "micro-batches run" in many.note


def test_only_the_last_interleaved_chunk_has_logits() -> None:
    """The last stage has the loss of one micro-batch, whatever the number of chunks in flight."""
    recipe = ss.Recipe(seq_len=4096, global_batch_size=32)
    plans = [Plan(ss.models["llama-3.1-8b"], EIGHT, recipe, ss.Layout.fsdp2(pp=4, vpp=vpp)) for vpp in (2, 4)]
    few, many = (plan.memory().by_stage[-1].peak.components for plan in plans)
    assert many["logits"] == few["logits"]
    # Thirteen chunks of two layers in flight instead of five of four.
    assert many["activations"] < 1.4 * few["activations"]


@pytest.mark.parametrize("recompute", few(("full", "none"), ["full"]))
def test_gpipe_holds_all_micro_batches_of_a_step(recompute: str) -> None:
    """The last stage also saves the norm, head and loss of each micro-batch."""
    arch = Architecture.of_size("60m")
    recipe = ss.Recipe(seq_len=512, global_batch_size=16, recompute=recompute)
    plans = [
        Plan(arch, EIGHT, recipe, ss.Layout.fsdp2(pp=2, pipeline_schedule=schedule))
        for schedule in ("1F1B", "GPipe")
    ]
    of_1f1b, of_gpipe = (plan.memory().by_stage for plan in plans)
    for one, other, rehearsed in zip(of_1f1b, of_gpipe, rehearse_plan(plans[1]), strict=True):
        assert "ScheduleGPipe" in rehearsed.note and "micro-batches run" not in rehearsed.note
        peaks = [max(map(tensor_bytes, stage.phases)) for stage in (one, other)]
        assert peaks[1] > peaks[0]
        assert peaks[1] == pytest.approx(rehearsed.peak.num_bytes, rel=0.02)
    assert plans[1].step().seconds == plans[0].step().seconds


@pytest.mark.parametrize(
    ("model", "layout", "recipe", "named"),
    [
        ("60m", {"pp": 2, "vpp": 2}, {}, r"Layout\.vpp is 2"),
        ("60m", {"pp": 2, "tp": 2}, {}, r"Layout\.tp is 2"),
        ("60m", {"pp": 2}, {"method": "lora"}, r"Recipe\.method is 'lora'"),
        ("gpt2", {"pp": 2}, {}, r"Architecture\.model_type is 'gpt2'"),
    ],
)
def test_plans_that_cannot_be_split_into_stages_are_rejected(
    model: str, layout: dict[str, Any], recipe: dict[str, Any], named: str
) -> None:
    arch = ss.models["gpt2"] if model == "gpt2" else Architecture.of_size(model)
    values = {"seq_len": 512, "global_batch_size": 16, **recipe}
    plan = Plan(arch, EIGHT, ss.Recipe(**values), ss.Layout.fsdp2(**layout))
    with pytest.raises(ValueError, match=named):
        rehearse_plan(plan)


def test_predictions_agree_with_stored_rehearsals() -> None:
    rows, rejected = read_rehearsals([STORED / "fsdp2-pp.jsonl"])
    assert not rejected and len(rows) >= 25
    close = [row for row in rows if abs(row.error) <= 0.01]
    worst = max(rows, key=lambda row: abs(row.error))
    assert len(close) >= 0.9 * len(rows), [in_words(row) for row in rows if row not in close]
    assert abs(worst.error) <= 0.03, in_words(worst)


def test_repeating_the_stored_sample_gives_the_same_bytes() -> None:
    skip_from_torch("2.15", BUFFERS_FREED)
    rows, _ = read_rehearsals([STORED / "fsdp2-pp.jsonl"])
    row = next(row for row in rows if row.name == "fsdp2-pp:3")
    assert max(stage.peak.num_bytes for stage in rehearse_plan(row.plan)) == sum(row.stored.values())
