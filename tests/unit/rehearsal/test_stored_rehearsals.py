"""Tests of predictions against stored rehearsals, most of DDP and FSDP2; some of these are repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.accuracy.rehearsal_samples import HELD_OUT_SEEDS, SEED, in_words, is_same, stored_file
from tests.accuracy.rehearsals import COMPONENTS, STORED, Rehearsed, read_rehearsals
from tests.accuracy.sampling import sample_plans
from tests.requirements import few, sample

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.frameworks.ddp.rehearsal import rehearse as ddp
from shardscope.frameworks.fsdp2.rehearsal import rehearse as fsdp2
from shardscope.memory.report import PHASES

MODULES: dict[str, Any] = {"ddp": ddp, "fsdp2": fsdp2}
WITHIN_ONE_PERCENT = {"ddp": 1.0, "fsdp2": 1.0}
"""Shares of plans within 1 % today; the goal is 0.95."""
WORST = {"ddp": 0.01, "fsdp2": 0.01}
"""Largest error of today; the goal is 0.03."""
REPLAYED = {"ddp": (1, 3, 5, 6), "fsdp2": (5, 6, 20, 42)}
"""Indices of rehearsals that take seconds."""


def read_rows(framework: str) -> list[Rehearsed]:
    rows, rejected = read_rehearsals([STORED / f"{framework}.jsonl"])
    assert not rejected
    return rows


@pytest.mark.parametrize("framework", MODULES)
def test_predictions_agree_with_stored_rehearsals(framework: str) -> None:
    rows = read_rows(framework)
    assert len(rows) >= 60
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= WITHIN_ONE_PERCENT[framework], close
    assert abs(worst.error) <= WORST[framework], in_words(worst)


@pytest.mark.parametrize("sample", HELD_OUT_SEEDS)
@pytest.mark.parametrize("framework", MODULES)
def test_predictions_agree_with_wide_samples(framework: str, sample: int) -> None:
    """The samples have every family, published widths, every k-th layer, fewer shards, and any adapters."""
    rows, rejected = read_rehearsals([stored_file(framework, wide=sample)])
    assert not rejected and len(rows) >= 25
    assert len({row.plan.architecture.model_type for row in rows}) >= 12
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= WORST[framework], in_words(worst)


ADAPTERS_WITHIN_ONE_PERCENT = {"ddp": 1.0, "fsdp2": 1.0, "deepspeed": 1.0}
"""Shares of plans within 1 % today; all are within 3 %. At first, DDP's were up to 20 % too low."""


@pytest.mark.parametrize("framework", ADAPTERS_WITHIN_ONE_PERCENT)
def test_predictions_agree_with_rehearsals_of_lora_on_all_projections(framework: str) -> None:
    rows, rejected = read_rehearsals([STORED / f"{framework}-adapters.jsonl"])
    assert not rejected and len(rows) >= 16
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= ADAPTERS_WITHIN_ONE_PERCENT[framework], close
    assert abs(worst.error) <= 0.03, in_words(worst)


ZERO_HELD_OUT = {1: 0.9, 2: 0.95}
"""Shares of ZeRO's samples within 1 % today. Of the second, 36 of 43 plans were within 1 % when first
rehearsed, and 39 within 3 %."""


@pytest.mark.parametrize("sample", ZERO_HELD_OUT)
def test_predictions_agree_with_wide_samples_of_zero(sample: int) -> None:
    rows, rejected = read_rehearsals([stored_file("deepspeed", wide=sample)])
    assert not rejected and len(rows) >= 25
    assert len({row.plan.architecture.model_type for row in rows}) >= 12
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.03, in_words(worst)
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    assert close >= ZERO_HELD_OUT[sample], close


@pytest.mark.parametrize("framework", ["fsdp2-pp", "fsdp2-tp"])
def test_predictions_agree_with_wide_samples_of_pp_and_tp(framework: str) -> None:
    rows, rejected = read_rehearsals([STORED / f"{framework}.jsonl", stored_file(framework, wide=2)])
    assert not rejected and len(rows) >= 40
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= 0.95, close
    assert abs(worst.error) <= 0.03, in_words(worst)


@pytest.mark.parametrize("framework", [*MODULES, "fsdp2-pp", "fsdp2-tp"])
def test_predictions_agree_with_the_final_held_out_sample(framework: str) -> None:
    """Sampled after the last change of FSDP2's formulas: all 48 plans were within 1 %, 12 of DDP's 16."""
    rows, rejected = read_rehearsals([stored_file(framework, wide=3)])
    assert not rejected and len(rows) >= 16
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= {"ddp": 0.015}.get(framework, 0.01), in_words(worst)


@pytest.mark.parametrize("framework", ["ddp", "deepspeed"])
def test_predictions_agree_with_what_sweeps_over_families_found(framework: str) -> None:
    """Nemotron under autocast was 14 % too low, dropped inputs and routed experts 3 % too high."""
    rows, rejected = read_rehearsals([STORED / f"{framework}-sweeps.jsonl"])
    assert not rejected and len(rows) == 3
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.006, in_words(worst)


def test_predictions_agree_with_rehearsals_of_norms_and_experts() -> None:
    """Norms after the feed-forward, matrices larger than the bucket, offloaded experts: up to 24 % low."""
    rows, rejected = read_rehearsals([STORED / "mixed-norms-and-experts.jsonl"])
    assert not rejected and len(rows) == 7
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.012, in_words(worst)
    assert sum(abs(row.error) <= 0.003 for row in rows) >= 6


def test_predictions_agree_with_rehearsals_of_shared_experts_and_autocast() -> None:
    """DeepSeek V2 Lite was 12 % low (ZeRO-3) to 19 % high (ZeRO-2), Falcon under DDP 6 to 9 % high.

    The last four have adapters of the feed-forward or of attention's output alone: 3 to 16 % high.
    """
    rows, rejected = read_rehearsals([STORED / "mixed-shared-experts-and-casts.jsonl"])
    assert not rejected and len(rows) == 16
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.006, in_words(worst)
    assert sum(abs(row.error) <= 0.0025 for row in rows) >= 13


def test_predictions_agree_with_rehearsals_of_usual_fine_tunes() -> None:
    """Models of 1 to 685 billion parameters, cut in depth: of 98 plans 96 were within 3 % at first."""
    rows, rejected = read_rehearsals([STORED / "mixed-fine-tunes.jsonl"])
    assert not rejected and len(rows) == 98
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= 0.97, close
    assert abs(worst.error) <= 0.03, in_words(worst)


def test_predictions_agree_with_rehearsals_of_smollm3_and_olmo3() -> None:
    """Two to eight layers of SmolLM3 3B, OLMo 3 7B and 32B: all were within 1 % at first.

    51 random plans under DDP, FSDP2 and ZeRO, with and without LoRA; 8 with tensor or pipeline parallelism.
    """
    rows, rejected = read_rehearsals([STORED / "mixed-smollm3-and-olmo3.jsonl"])
    assert not rejected and len(rows) == 59
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.01, in_words(worst)


def test_predictions_agree_with_rehearsals_of_glm4_moe() -> None:
    """One to four layers of GLM-4.5 Air under DDP, FSDP2 and ZeRO, of 40 random plans those in 16 bits.

    Nine of the eleven in fp32 were within 1 %, two 4 and 7 % too high: LoRA, unfused attention, ZeRO. They
    are not stored; ``mixed-fp32`` has others.
    """
    rows, rejected = read_rehearsals([STORED / "mixed-glm4-moe.jsonl"])
    assert not rejected and len(rows) == 29
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.02, in_words(worst)
    assert sum(abs(row.error) <= 0.01 for row in rows) >= 28


def test_predictions_agree_with_rehearsals_of_ministral3_and_glm4_moe_lite() -> None:
    """One to four layers of Ministral 3 (25 plans) and GLM-4.7 Flash (20) under DDP, FSDP2 and ZeRO.

    Three of them have tensor or pipeline parallelism. One, of GLM in fp32, was 1.4 % too high at first.
    """
    rows, rejected = read_rehearsals([STORED / "mixed-ministral3-and-glm4-lite.jsonl"])
    assert not rejected and len(rows) == 45
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.015, in_words(worst)
    assert sum(abs(row.error) <= 0.005 for row in rows) >= 44


def test_predictions_agree_with_rehearsals_in_fp32() -> None:
    """66 random plans of nine models, many with unfused attention or dropout: 53 were within 1 % at first."""
    rows, rejected = read_rehearsals([STORED / "mixed-fp32.jsonl"])
    assert not rejected and len(rows) == 66
    far = {row.name for row in rows if abs(row.error) > 0.02}
    assert not far, far
    assert sum(abs(row.error) <= 0.01 for row in rows) >= 62


def test_activation_after_a_matrix_larger_than_the_bucket() -> None:
    """ZeRO-3 has released the down projection by then: 1.2 % too high with its all-gathered weight."""
    rows, _ = read_rehearsals([STORED / "deepspeed-recipes-held-out-3.jsonl"])
    (row,) = [row for row in rows if row.name.endswith(":41")]
    assert row.plan.architecture.model_type == "gpt2" and row.plan.layout.reduce_bucket_size == 100_000_000
    assert abs(row.error) <= 0.0005, in_words(row)


@pytest.mark.parametrize("framework", MODULES)
def test_predicted_training_state_is_exact(framework: str) -> None:
    """Shards with padding, moments and replicas are exact; tables and counters take up to a megabyte."""
    for row in read_rows(framework):
        predicted, rehearsed = row.predicted["parameters"], row.stored["parameters"]
        assert abs(predicted - rehearsed) <= 4 * 2**20, in_words(row)


@pytest.mark.parametrize("framework", MODULES)
def test_the_seed_determines_the_sample(framework: str) -> None:
    sampled = sample_plans(framework, SEED, 12)
    stored = {row.name.partition(":")[2]: row.plan for row in read_rows(framework)}
    indices = [index for index in range(12) if str(index) in stored]
    assert len(indices) >= 10
    assert all(is_same(stored[str(index)], sampled[index]) for index in indices)


@sample(1)
@pytest.mark.parametrize(
    ("framework", "index"),
    few(
        [(framework, index) for framework in MODULES for index in REPLAYED[framework]],
        [(framework, REPLAYED[framework][0]) for framework in MODULES],
    ),
)
def test_repeating_a_stored_rehearsal_gives_the_same_bytes(framework: str, index: int) -> None:
    row = next(row for row in read_rows(framework) if row.name == f"{framework}:{index}")
    (stage,) = MODULES[framework].rehearse(row.plan, lambda words, fraction: None)
    assert stage.peak.num_bytes == pytest.approx(sum(row.stored.values()), rel=1e-3)
    assert {peak.phase for peak in stage.peaks} == set(PHASES)


@pytest.mark.parametrize("framework", few(MODULES, []))
def test_rehearsals_run_the_attention_of_the_recipe(framework: str) -> None:
    """ "eager" allocates the scores of every query and key, as predicted."""
    cluster = sample_plans(framework, SEED, 1)[0].cluster
    arch = replace(Architecture.of_size("60m"), num_hidden_layers=3)
    peak_bytes = {}
    for attention in ("eager", "sdpa"):
        recipe = ss.Recipe(seq_len=2048, attention=attention)
        layout = ss.Layout.ddp() if framework == "ddp" else ss.Layout.fsdp2()
        plan = ss.Plan(arch, cluster, recipe, layout)
        (stage,) = MODULES[framework].rehearse(plan, lambda words, fraction: None)
        peak_bytes[attention] = stage.peak.num_bytes
        components = plan.memory().components
        assert sum(components[name] for name in COMPONENTS) == pytest.approx(peak_bytes[attention], rel=0.01)
    assert peak_bytes["eager"] > 1.5 * peak_bytes["sdpa"]
