"""Tests of ``GuidedView``: each step changes one thing, and its sentence has the numbers of the view."""

from __future__ import annotations

import re

import pytest

import shardscope as ss
from shardscope_widgets import GuidedView
from shardscope_widgets.kit.numbers import format_size

PLAN = ss.Plan(
    ss.models["llama-3.1-8b"],
    ss.Cluster.parse("8xh100-sxm-80gb"),
    ss.Recipe(global_batch_size=16),
    ss.Layout.fsdp2(),
)


def find_step(view: GuidedView, text: str) -> int:
    return next(index for index, step in enumerate(view.steps) if text in step.words)


def test_memory_steps_change_one_thing_and_say_what_to_watch() -> None:
    view = GuidedView(PLAN)
    assert view.view.plan == PLAN and not view.view.pins
    assert "This is the plan" in view.words.value
    view.step = find_step(view, "twice as large")
    changed = view.view.plan
    assert changed is not None and changed.recipe.micro_batch_size == 2 and view.view.pins == (PLAN,)
    activations = [format_size(plan.memory().components["activations"]) for plan in (PLAN, changed)]
    assert " → ".join(activations) in view.words.value and "optimizer state stay" in view.words.value
    view.step = find_step(view, "DDP")
    assert view.view.plan is not None and view.view.plan.layout.framework == "ddp"
    assert "optimizer" in view.words.value and "state stay" not in view.words.value
    view.step = 0
    assert view.view.plan == PLAN and not view.view.pins


def test_time_steps_name_the_parts_that_move() -> None:
    view = GuidedView(PLAN, "time")
    view.step = find_step(view, "PCIe")
    assert view.view.shown is not None
    assert view.view.shown.plan.cluster.intra_node_link.name == "pcie-4-x16"
    assert "fewer tokens/s" in view.words.value and re.search("all-gathers|gradient", view.words.value)
    view.step = find_step(view, "Recompute every layer")
    assert "recomputation" in view.words.value


def test_steps_that_the_plan_cannot_have_are_left_out_and_a_new_plan_starts_anew() -> None:
    view = GuidedView(PLAN)
    view.step = 3
    small = ss.Plan(
        ss.models["gpt2"], PLAN.cluster, ss.Recipe(seq_len=1024, recompute="full"), ss.Layout.ddp()
    )
    view.show(small)
    assert view.step == 0 and view.view.plan == small
    words = " ".join(step.words for step in view.steps)
    assert "twice as long" not in words and "FSDP2" in words and "Keep all activations" in words
    with pytest.raises(ValueError, match="topic"):
        GuidedView(PLAN, "speed")  # type: ignore[arg-type]


def test_saved_notebook_has_the_sentence_once_and_the_view() -> None:
    view = GuidedView(PLAN)
    view.step = 1
    static = view._repr_mimebundle_()["text/html"]
    assert static.count("Take micro-batches twice as large") == 1 and "<rect" in static
    assert not re.search(r"<script|https?://", static)
