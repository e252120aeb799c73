"""Predictions beside rehearsals for plans drawn by seeds that no formula had met, and what these showed."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy.rehearsal_samples import in_words
from tests.accuracy.rehearsals import COMPONENTS, STORED, read_rehearsals
from tests.requirements import few

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.prediction.batch.memory import compute_peaks

UNSEEN = sorted(STORED.glob("*-unseen.jsonl"))
"""Of :mod:`wide_sampling` and :mod:`recipe_sampling`, seed 78811; ``mixed`` is 78812, drawn once formulas had
been mended by the other, of which 68 of 69 plans were within 1 % when first seen, and the worst 1.3 % off."""


def test_there_are_unseen_plans_of_each_framework() -> None:
    assert {file.name.partition("-")[0] for file in UNSEEN} >= {"ddp", "fsdp2", "megatron"}


@pytest.mark.parametrize("file", UNSEEN, ids=lambda file: file.stem)
def test_predictions_agree_with_plans_drawn_unseen(file: Path) -> None:
    rows, refused = read_rehearsals([file])
    assert not refused and rows
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.03, in_words(worst)
    assert sum(abs(row.error) <= 0.01 for row in rows) >= 0.95 * len(rows)


def cut(name: str, **changes: Any) -> ss.Architecture:
    """A published model of two layers and a small vocabulary, so that layers are what counts."""
    arch = ss.models[name]
    values = {"name": f"little {name}", "num_hidden_layers": 2, "vocab_size": 997, **changes}
    if arch.sliding_window_layers:
        values.setdefault("sliding_window_layers", 1)
    return replace(arch, **values)


def plan(arch: ss.Architecture, cluster: str, layout: ss.Layout, **recipe: Any) -> Plan:
    return Plan(arch, ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


DDP = ss.Layout.ddp()
LITTLE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
SHOWN = {
    "the final norm of a wide model with few words": plan(
        cut("qwen2.5-7b", **{**LITTLE, "hidden_size": 1536}, num_key_value_heads=2, num_hidden_layers=4),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=3000,
        micro_batch_size=3,
        global_batch_size=12,
        precision="bf16",
        recompute="selective",
        recompute_interval=2,
    ),
    "gradients of the head's input add up between two chunks": plan(
        cut("glm-4-9b", **{**LITTLE, "hidden_size": 1536}, num_key_value_heads=2),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=1000,
        micro_batch_size=3,
        global_batch_size=6,
        loss="chunked",
    ),
    "attention in fp32 lays its output by tokens": plan(
        cut("phi-3-mini", **LITTLE, num_key_value_heads=8, sliding_window=None, sliding_window_layers=0),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=1500,
        global_batch_size=2,
        precision="fp32",
    ),
    "a lone key head and one sequence": plan(
        cut("falcon-7b", hidden_size=512, num_attention_heads=8, head_dim=64, intermediate_size=2048),
        "2xcpu",
        DDP,
        seq_len=1500,
        global_batch_size=2,
    ),
    "offload on CPU ranks copies autocast's copies": plan(
        cut("llama-3.1-8b", **LITTLE, num_key_value_heads=2),
        "2xcpu",
        DDP,
        seq_len=333,
        global_batch_size=2,
        recompute="offload",
    ),
    "every other layer of Gemma 2 has no mask of the others' kind": plan(
        cut("gemma-2-2b", **LITTLE, num_key_value_heads=2, sliding_window=256),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=1000,
        micro_batch_size=2,
        global_batch_size=4,
        precision="bf16",
        recompute="full",
        recompute_interval=2,
    ),
    "learned positions have 8-bit moments": plan(
        cut("gpt2", **LITTLE, num_key_value_heads=8),
        "2xh100-sxm-80gb",
        DDP,
        seq_len=200,
        global_batch_size=2,
        optimizer="adamw_8bit",
    ),
    "a stage's embedding is reduced beside itself": plan(
        cut("llama-3.1-8b", **LITTLE, num_key_value_heads=2, vocab_size=32_000),
        "8xh100-sxm-80gb",
        ss.Layout.fsdp2(pp=2, replicate=2),
        seq_len=128,
        global_batch_size=16,
    ),
}


@pytest.mark.parametrize("shown", few(SHOWN, list(SHOWN)[-1:]))
def test_errors_that_unseen_plans_showed_are_fixed(shown: str) -> None:
    """The framework's own code plays each plan now; before the mending each was more than 1 % off."""
    one = SHOWN[shown]
    play = import_module(f"shardscope.frameworks.{one.layout.framework}.rehearsal.rehearse").rehearse
    stages = play(one, lambda words, fraction: None)
    rehearsed = max(moment.num_bytes for stage in stages for moment in stage.moments)
    predicted = max(
        sum(moment.components[name] for name in COMPONENTS)  # type: ignore[index]
        for stage in one.memory().by_stage
        for moment in stage.phases
    )
    assert predicted == pytest.approx(rehearsed, rel=0.007)


def test_arrays_look_at_the_first_layer_of_a_later_forward() -> None:
    """An array of stages has kinds of its own for each place, so that a kind's other end was passed over."""
    one = plan(
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


def test_arrays_tell_one_sequence_from_several_where_a_key_head_is_alone() -> None:
    falcon = cut("falcon-7b")
    several = [
        plan(falcon, "2xh100-sxm-80gb", DDP, seq_len=512, micro_batch_size=micro, global_batch_size=12)
        for micro in (1, 2, 3)
    ]
    assert compute_peaks(several).tolist() == [each.memory().peak_bytes for each in several]


@pytest.mark.parametrize("distributed", [True, False])
def test_megatron_s_main_copies_are_there_before_the_first_step(distributed: bool) -> None:
    one = plan(
        cut("llama-3.1-8b"),
        "h100-sxm-80gb",
        ss.Layout.megatron(distributed_optimizer=distributed),
        seq_len=256,
        global_batch_size=1,
    )
    found = one.memory().by_stage[0]
    start = one.memory().at("initialisation")
    weights = next(m for m in found.phases if m.phase == "rest").components["parameters"] // 2
    assert start["optimizer"] == pytest.approx(4 * weights, rel=1e-3)
    assert start["gradients"] == pytest.approx(4 * weights, rel=1e-3)
