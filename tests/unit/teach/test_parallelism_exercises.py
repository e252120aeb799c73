"""Tests of the exercises about ZeRO, FSDP2, tensor parallelism and pipelines: their answers are those of
the papers, of recorded runs and of the library, and each known mistake has a hint of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import shardscope as ss
from shardscope import teach
from shardscope.prediction.schedule import compute_schedule
from shardscope.teach.answers import Number
from shardscope.teach.exercises import EXERCISES, data_parallel, pipeline, tensor_parallel
from shardscope.timing.pipeline import compute_bubble_seconds

TRACES = Path(__file__).parents[2] / "fixtures" / "traces_of_runs"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHARDSCOPE_ANSWERS", raising=False)


@pytest.mark.parametrize(
    "name", [name for name, exercise in EXERCISES.items() if isinstance(exercise.expected, Number)]
)
def test_known_mistakes_get_hints_of_their_own_and_none_is_right(name: str) -> None:
    expected = EXERCISES[name].expected
    assert isinstance(expected, Number)
    assert teach.check(name, expected.value()).correct
    for mistake in expected.mistakes:
        feedback = teach.check(name, mistake.value())
        assert feedback.correct is False and mistake.hint in feedback.text


def test_zero_bytes_are_those_of_the_paper() -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 GPUs.
    stages = [round(data_parallel.compute_zero_bytes(stage, 7.5e9, 64) / 1e9, 1) for stage in range(4)]
    assert stages == [120.0, 31.4, 16.6, 1.9]


def test_all_gathers_are_those_of_a_recorded_run() -> None:
    trace = ss.Trace.load(TRACES / "fsdp2")
    assert trace.plan is not None
    calls = [row for row in trace.collectives() if row["rank"] == 0 and row["kind"] == "all_gather"]
    num_micro_batches = trace.activity.num_steps * trace.plan.num_micro_batches
    layers = trace.plan.architecture.num_hidden_layers
    assert len(calls) == num_micro_batches * data_parallel.count_all_gathers(layers)


def test_all_reduced_bytes_are_those_of_the_predicted_step() -> None:
    plan = tensor_parallel.build_wide_plan()
    plan = replace(plan, layout=ss.Layout.megatron(tp=8, sequence_parallel=False))
    (call,) = [call for call in plan.step().sent if call.part == "tensor_parallel"]
    layers = plan.num_micro_batches * plan.architecture.num_hidden_layers
    # The embedding and the head all-reduce too: about one layer more of 80.
    assert call.num_bytes / layers == pytest.approx(tensor_parallel.compute_all_reduced_bytes(), rel=0.02)


def test_pipeline_answers_are_those_of_the_schedule() -> None:
    stages, chunks, number = pipeline.STAGES, pipeline.CHUNKS, pipeline.MICRO_BATCHES
    bubble = compute_bubble_seconds(stages * number, number, chunks, number) / number
    assert pipeline.compute_bubble_percent(stages, number, chunks) == pytest.approx(100 * bubble)
    plan = pipeline.build_pipeline_plan()
    assert plan.num_micro_batches == number
    assert compute_schedule(plan).most_in_flight == tuple(
        pipeline.count_in_flight(stage, stages, number) for stage in range(stages)
    )
    step = plan.step()
    assert round(100 * step.parts["bubble"] / step.seconds) == 16, "as notebook 06 says"


@pytest.mark.parametrize(
    ("layout", "right"),
    [
        (ss.Layout.fsdp2(), False),
        (ss.Layout.fsdp2(reshard_after_forward=False), False),
        (ss.Layout.ddp(), False),
        (ss.Layout.zero(stage=1), False),
        (ss.Layout.zero(stage=2), False),
        (ss.Layout.zero(stage=2, overlap_comm=True), True),
        (ss.Layout.zero(stage=3), False),
    ],
    ids=["FSDP2", "FSDP2 without resharding", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-2 overlapped", "ZeRO-3"],
)
def test_slow_links_need_stage_2_with_overlap(layout: ss.Layout, right: bool) -> None:
    plan = data_parallel.build_slow_link_plan()
    assert round(plan.step().tokens_per_second_per_gpu) == 918, "as notebook 04 says"
    assert teach.check("04-slow-links", layout).correct is right
    other = replace(plan, layout=layout, recipe=replace(plan.recipe, micro_batch_size=2))
    assert "recipe must stay" in teach.check("04-slow-links", other).text


def test_tensor_parallelism_stays_inside_a_node() -> None:
    plan = tensor_parallel.build_wide_plan()
    assert round(plan.step().tokens_per_second_per_gpu) == 534, "as notebook 05 says"
    for tp in (1, 2, 4, 8, 16):
        for sequence_parallel in (False, True)[: 1 if tp == 1 else 2]:
            layout = ss.Layout.megatron(tp=tp, sequence_parallel=sequence_parallel)
            right = (tp, sequence_parallel) == (8, True)
            assert teach.check("05-inside-a-node", layout).correct is right, layout
            assert teach.check("05-inside-a-node", replace(plan, layout=layout)).correct is right
    # The same unit as in the chart of the plan.
    too_large = teach.check("05-inside-a-node", ss.Layout.megatron(tp=4)).text
    assert "(the peak is 137 of 79.1 GiB)" in too_large, too_large
    # As sequence parallelism comes with tp, learners need not name it.
    assert teach.check("05-inside-a-node", ss.Layout.megatron(tp=8)).correct
    for layout in (ss.Layout.megatron(tp=8, pp=2), ss.Layout.fsdp2(tp=8)):
        assert "must stay as it is here" in teach.check("05-inside-a-node", layout).text


def test_the_bubble_shrinks_with_chunks_and_smaller_micro_batches() -> None:
    plan = pipeline.build_pipeline_plan()
    for vpp, size, right in ((1, 1, False), (2, 1, False), (5, 1, True), (10, 1, True), (5, 2, False)):
        layout, recipe = replace(plan.layout, vpp=vpp), replace(plan.recipe, micro_batch_size=size)
        answer = replace(plan, layout=layout, recipe=recipe)
        assert teach.check("06-shrink-the-bubble", answer).correct is right, (vpp, size)
    larger = replace(plan, recipe=replace(plan.recipe, global_batch_size=1024))
    assert "recipe.global_batch_size must stay" in teach.check("06-shrink-the-bubble", larger).text
