"""Tests of ``ScheduleView``: its steps, its schedules, and what it shows without a kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope_widgets import ScheduleView
from shardscope_widgets.teach.schedule_figure import KINDS

LLAMA = ss.models["llama-3.1-8b"]
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")


def build_plan(layout: ss.Layout, batch: int = 16) -> ss.Plan:
    return ss.Plan(LLAMA, EIGHT, ss.Recipe(global_batch_size=batch, recompute="selective"), layout)


PIPELINE = build_plan(ss.Layout.megatron(pp=4))


def read_memory(view: ScheduleView, stage: int) -> float:
    """Return the length of a stage's memory bar at the shown step."""
    frame: Any = view.figure._frames[view.step]
    return sum(changes["x"][stage] for changes in frame["traces"].values())


def test_every_step_says_what_the_stages_do_and_draws_their_memory() -> None:
    view = ScheduleView(PIPELINE)
    assert view.step == 0 and "stage 0 runs the forward of micro-batch 0" in view.figure.words
    assert "; stages 1, 2 and 3 wait." in view.figure.words
    before = read_memory(view, 0)
    view.step = 2
    assert "forward of micro-batch 2" in view.figure.words
    assert read_memory(view, 0) > before, "two more micro-batches are in flight"
    view.step = 10**6
    assert view.step == view.figure.num_steps - 1 and "ended" in view.figure.words
    view.step = -3
    assert view.step == 0


def test_bars_are_the_blocks_of_the_schedule() -> None:
    view = ScheduleView(PIPELINE)
    assert view.shown is not None
    # The axis is in seconds, because the schedule is longer than one.
    assert max(block.start + block.seconds for block in view.shown.blocks) > 1
    for kind, trace in zip(KINDS, view.figure.data, strict=False):
        blocks = [block for block in view.shown.blocks if block.kind == kind]
        assert len(trace.y or ()) == len(blocks)
        assert sum(trace.x or ()) == pytest.approx(sum(block.seconds for block in blocks), rel=1e-4)


def test_fewer_micro_batches_than_stages_are_the_reason_of_a_longer_interleaved_bubble() -> None:
    one = ScheduleView(build_plan(ss.Layout.megatron(pp=4), 2), schedule="interleaved").heading.value
    assert "4 stages in 2 chunks each, 1 micro-batch:" in one
    assert "With equal stages and at least 4 micro-batches" in one
    assert "because there are fewer micro-batches than stages" in one
    eight = ScheduleView(PIPELINE, schedule="interleaved").heading.value
    assert "With equal stages, the bubble" in eight and "because stages are not equal" in eight


def test_other_schedules_can_be_chosen_and_are_refused_where_they_cannot_run() -> None:
    view = ScheduleView(PIPELINE)
    assert [value for _, value in view.choice.options] == ["gpipe", "1f1b", "interleaved"]
    assert view.choice.value == "1f1b" and "For comparison" not in view.heading.value
    view.choice.value = "gpipe"
    assert view.shown is not None and set(view.shown.most_in_flight) == {PIPELINE.num_micro_batches}
    assert "For comparison" in view.heading.value
    with pytest.raises(ValueError, match="zb-h1"):
        ScheduleView(PIPELINE, schedule="zb-h1")
    assert ScheduleView(PIPELINE, schedule="interleaved").choice.value == "interleaved"


def test_plan_without_a_pipeline_says_what_it_lacks() -> None:
    view = ScheduleView(build_plan(ss.Layout.fsdp2()))
    assert "No pipeline" in view.heading.value and "without bubbles" in view.heading.value
    assert view.choice.layout.display == "none" and view.figure.num_steps > 3
    assert "micro-batch 0" in view.figure.words
    view.show(PIPELINE)
    assert view.choice.layout.display == "" and "stage 0" in view.figure.words


def test_plan_of_an_unknown_gpu_figure_says_so() -> None:
    unknown = next(name for name, gpu in ss.gpus.items() if name != "cpu" and not gpu.peak_flops.get("bf16"))
    plan = ss.Plan(LLAMA, ss.Cluster.parse(f"8x{unknown}"), ss.Recipe(), ss.Layout.fsdp2())
    with pytest.raises(ValueError):
        plan.step()
    view = ScheduleView(plan)
    assert "cannot be drawn" in view.heading.value and view.figure.num_steps == 0


def test_long_step_leaves_out_its_middle() -> None:
    view = ScheduleView(build_plan(ss.Layout.megatron(pp=4), 256))
    assert view.shown is not None and view.shown.num_micro_batches == 128
    forward = view.figure.data[KINDS.index("forward")]
    numbers = {int(text) for text in forward.text}
    assert 0 in numbers and 127 in numbers and 64 not in numbers
    frame: Any = view.figure._frames[0]
    assert any("micro-batches 8 to 119" in note["text"] for note in frame["layout"]["annotations"])
    assert sum(len(trace.x or ()) for trace in view.figure.data) < 700


def test_page_and_saved_notebook_need_no_kernel_and_no_network(tmp_path: Path) -> None:
    view = ScheduleView(PIPELINE)
    view.step = 3
    html = view.to_html(tmp_path / "schedule.html").read_text()
    assert not re.search(r"(?:src|href)=['\"]?https?:", html)
    assert '"step": 3' in html and view.figure.words in html
    static = view._repr_mimebundle_()["text/html"]
    assert static.count("<rect") > 60 and view.figure.words in static
    assert not re.search(r"<script|https?://", static) and len(static) < 120_000
