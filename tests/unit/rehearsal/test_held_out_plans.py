"""Tests of predictions against rehearsals of held-out plans, and of the errors that these plans found."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy.rehearsal_samples import in_words
from tests.accuracy.rehearsals import COMPONENTS, STORED, read_rehearsals
from tests.requirements import few, skip_from_torch

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.prediction.batch.memory import compute_peaks

HELD_OUT = sorted(STORED.glob("*-unseen.jsonl"))
"""Samples of :mod:`wide_sampling` and :mod:`recipe_sampling` with seed 78811. ``mixed`` has seed 78812 and
was sampled after the errors of the others were fixed: at first 68 of its 69 plans were within 1 %, the worst
1.3 % off."""


def test_every_framework_has_held_out_plans() -> None:
    assert {file.name.partition("-")[0] for file in HELD_OUT} >= {"ddp", "fsdp2", "megatron"}


@pytest.mark.parametrize("file", HELD_OUT, ids=lambda file: file.stem)
def test_predictions_agree_with_held_out_rehearsals(file: Path) -> None:
    rows, rejected = read_rehearsals([file])
    assert not rejected and rows
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.03, in_words(worst)
    assert sum(abs(row.error) <= 0.01 for row in rows) >= 0.95 * len(rows)


def shrink_model(name: str, **changes: Any) -> ss.Architecture:
    """Return a published model with two layers and a small vocabulary, so that layers dominate."""
    arch = ss.models[name]
    values = {"name": f"little {name}", "num_hidden_layers": 2, "vocab_size": 997, **changes}
    if arch.sliding_window_layers:
        values.setdefault("sliding_window_layers", 1)
    return replace(arch, **values)


def build_plan(arch: ss.Architecture, cluster: str, layout: ss.Layout, **recipe: Any) -> Plan:
    return Plan(arch, ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


DDP = ss.Layout.ddp()
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
FIXED_ERRORS = {
    "the final norm of a wide model with few words": build_plan(
        shrink_model(
            "qwen2.5-7b", **{**SMALL, "hidden_size": 1536}, num_key_value_heads=2, num_hidden_layers=4
        ),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=3000,
        micro_batch_size=3,
        global_batch_size=12,
        precision="bf16",
        recompute="selective",
        recompute_interval=2,
    ),
    "gradients of the head's input add up between two chunks": build_plan(
        shrink_model("glm-4-9b", **{**SMALL, "hidden_size": 1536}, num_key_value_heads=2),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=1000,
        micro_batch_size=3,
        global_batch_size=6,
        loss="chunked",
    ),
    "attention in fp32 lays its output by tokens": build_plan(
        shrink_model(
            "phi-3-mini", **SMALL, num_key_value_heads=8, sliding_window=None, sliding_window_layers=0
        ),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=1500,
        global_batch_size=2,
        precision="fp32",
    ),
    "a lone key head and one sequence": build_plan(
        shrink_model(
            "falcon-7b", hidden_size=512, num_attention_heads=8, head_dim=64, intermediate_size=2048
        ),
        "2xcpu",
        DDP,
        seq_len=1500,
        global_batch_size=2,
    ),
    "offload on CPU ranks copies autocast's copies": build_plan(
        shrink_model("llama-3.1-8b", **SMALL, num_key_value_heads=2),
        "2xcpu",
        DDP,
        seq_len=333,
        global_batch_size=2,
        recompute="offload",
    ),
    "every other layer of Gemma 2 has no mask of the others' kind": build_plan(
        shrink_model("gemma-2-2b", **SMALL, num_key_value_heads=2, sliding_window=256),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=1000,
        micro_batch_size=2,
        global_batch_size=4,
        precision="bf16",
        recompute="full",
        recompute_interval=2,
    ),
    "learned positions have 8-bit moments": build_plan(
        shrink_model("gpt2", **SMALL, num_key_value_heads=8),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=200,
        global_batch_size=2,
        optimizer="adamw_8bit",
    ),
    "OLMo 2's norm after the feed-forward has freed its tensors": build_plan(
        shrink_model("olmo-2-7b", **SMALL, num_key_value_heads=8),
        "2xh100-sxm-80gb",
        ss.Layout.fsdp2(),
        seq_len=2048,
        micro_batch_size=2,
        global_batch_size=4,
        precision="fp32",
        recompute="full",
    ),
    "a stage's embedding is reduced beside itself": build_plan(
        shrink_model("llama-3.1-8b", **SMALL, num_key_value_heads=2, vocab_size=32_000),
        "8xh100-sxm-80gb",
        ss.Layout.fsdp2(pp=2, replicate=2),
        seq_len=128,
        global_batch_size=16,
    ),
}


@pytest.mark.parametrize("case", few(FIXED_ERRORS, []))
def test_errors_found_by_held_out_plans_stay_fixed(case: str) -> None:
    """The framework's own code runs on fake tensors; before the fixes each prediction was over 1 % off."""
    a_plan = FIXED_ERRORS[case]
    if a_plan.layout.framework == "fsdp2" and a_plan.degrees.pp > 1:
        skip_from_torch("2.15", "allocates pipelines' receive buffers one at a time")
    if a_plan.architecture.num_key_value_heads == 1:
        skip_from_torch("2.15", "needs less for attention with one key head")
    rehearse = import_module(f"shardscope.frameworks.{a_plan.layout.framework}.rehearsal.rehearse").rehearse
    stages = rehearse(a_plan, lambda words, fraction: None)
    rehearsed = max(peak.num_bytes for stage in stages for peak in stage.peaks)
    predicted = max(
        sum(moment.components[name] for name in COMPONENTS)  # type: ignore[index]
        for stage in a_plan.memory().by_stage
        for moment in stage.phases
    )
    assert predicted == pytest.approx(rehearsed, rel=0.007)


def test_peaks_of_pipeline_stage_arrays_equal_single_plans() -> None:
    """Regression test: arrays skipped the first layer of a stage whose forward runs later."""
    one = build_plan(
        replace(ss.Architecture.of_size("1b"), num_hidden_layers=17),
        "2xh100-sxm-80gb",
        ss.Layout.fsdp2(pp=2),
        method="qlora",
        precision="bf16",
        seq_len=256,
        global_batch_size=384,
    )
    other = replace(one, recipe=replace(one.recipe, micro_batch_size=3))
    assert compute_peaks([one, other]).tolist() == [each.memory().peak_bytes for each in (one, other)]


def test_peaks_of_arrays_equal_single_plans_with_one_key_value_head() -> None:
    falcon = shrink_model("falcon-7b")
    several = [
        build_plan(falcon, "2xh100-sxm-80gb", DDP, seq_len=512, micro_batch_size=micro, global_batch_size=12)
        for micro in (1, 2, 3)
    ]
    assert compute_peaks(several).tolist() == [each.memory().peak_bytes for each in several]


@pytest.mark.parametrize("distributed", [True, False])
def test_megatron_main_weights_exist_before_the_first_step(distributed: bool) -> None:
    a_plan = build_plan(
        shrink_model("llama-3.1-8b"),
        "h100-sxm-80gb",
        ss.Layout.megatron(distributed_optimizer=distributed),
        seq_len=256,
        global_batch_size=1,
    )
    stage = a_plan.memory().by_stage[0]
    start = a_plan.memory().at("initialisation")
    weights = next(m for m in stage.phases if m.phase == "rest").components["parameters"] // 2
    assert start["optimizer"] == pytest.approx(4 * weights, rel=1e-3)
    assert start["gradients"] == pytest.approx(4 * weights, rel=1e-3)
