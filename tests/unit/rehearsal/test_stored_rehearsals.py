"""Predictions against stored rehearsals of DDP and FSDP2 plans, and a dozen of those played again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.accuracy.rehearsal_samples import HELD_OUT_SEEDS, SEED, in_words, is_same, stored_file
from tests.accuracy.rehearsals import COMPONENTS, STORED, Rehearsed, read_rehearsals
from tests.accuracy.sampling import plans
from tests.requirements import few

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.frameworks.ddp.rehearsal import rehearse as ddp
from shardscope.frameworks.fsdp2.rehearsal import rehearse as fsdp2
from shardscope.memory.report import PHASES

MODULES: dict[str, Any] = {"ddp": ddp, "fsdp2": fsdp2}
WITHIN_ONE_PERCENT = {"ddp": 1.0, "fsdp2": 1.0}
"""Shares that are reached; the goal is 0.95."""
WORST = {"ddp": 0.01, "fsdp2": 0.01}
"""The worst error that is reached; the goal is 0.03."""
REPLAYED = {"ddp": (1, 3, 5, 6), "fsdp2": (5, 6, 20, 42)}
"""The shorter ones: seconds each."""


def rows_of(framework: str) -> list[Rehearsed]:
    rows, refused = read_rehearsals([STORED / f"{framework}.jsonl"])
    assert not refused
    return rows


@pytest.mark.parametrize("framework", MODULES)
def test_predictions_agree_with_stored_rehearsals(framework: str) -> None:
    rows = rows_of(framework)
    assert len(rows) >= 60
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= WITHIN_ONE_PERCENT[framework], close
    assert abs(worst.error) <= WORST[framework], in_words(worst)


@pytest.mark.parametrize("sample", HELD_OUT_SEEDS)
@pytest.mark.parametrize("framework", MODULES)
def test_predictions_agree_with_samples_over_the_whole_space(framework: str, sample: int) -> None:
    """Every family, published widths, every k-th layer, shards on fewer ranks, adapters on any projection."""
    rows, refused = read_rehearsals([stored_file(framework, wide=sample)])
    assert not refused and len(rows) >= 25
    assert len({row.plan.architecture.model_type for row in rows}) >= 12
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= WORST[framework], in_words(worst)


ADAPTERS_WITHIN_ONE_PERCENT = {"ddp": 1.0, "fsdp2": 1.0, "deepspeed": 0.84}
"""Shares that are reached, none beyond 3 %. When first rehearsed, DDP's were up to 20 % below."""


@pytest.mark.parametrize("framework", ADAPTERS_WITHIN_ONE_PERCENT)
def test_adapters_on_every_projection_are_predicted_where_no_logits_hide_them(framework: str) -> None:
    rows, refused = read_rehearsals([STORED / f"{framework}-adapters.jsonl"])
    assert not refused and len(rows) >= 16
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= ADAPTERS_WITHIN_ONE_PERCENT[framework], close
    assert abs(worst.error) <= 0.03, in_words(worst)


ZERO_HELD_OUT = {1: 0.9, 2: 0.95}
"""Shares of ZeRO's samples within 1 % that are reached. Of the second, 36 of 43 plans were as close, and 39
within 3 %, before any formula had met it."""


@pytest.mark.parametrize("sample", ZERO_HELD_OUT)
def test_predictions_agree_with_zero_s_samples_over_the_whole_space(sample: int) -> None:
    rows, refused = read_rehearsals([stored_file("deepspeed", wide=sample)])
    assert not refused and len(rows) >= 25
    assert len({row.plan.architecture.model_type for row in rows}) >= 12
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.03, in_words(worst)
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    assert close >= ZERO_HELD_OUT[sample], close


@pytest.mark.parametrize("framework", ["fsdp2-pp", "fsdp2-tp"])
def test_predictions_agree_with_samples_in_stages_and_under_tensor_parallelism(framework: str) -> None:
    rows, refused = read_rehearsals([STORED / f"{framework}.jsonl", stored_file(framework, wide=2)])
    assert not refused and len(rows) >= 40
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= 0.95, close
    assert abs(worst.error) <= 0.03, in_words(worst)


@pytest.mark.parametrize("framework", [*MODULES, "fsdp2-pp", "fsdp2-tp"])
def test_predictions_agree_with_the_sample_that_no_formula_had_seen(framework: str) -> None:
    """Drawn after the last change of FSDP2's formulas: 48 of its 48 were within 1 %, 12 of DDP's 16."""
    rows, refused = read_rehearsals([stored_file(framework, wide=3)])
    assert not refused and len(rows) >= 16
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= {"ddp": 0.015}.get(framework, 0.01), in_words(worst)


@pytest.mark.parametrize("framework", MODULES)
def test_what_is_held_between_steps_is_exact(framework: str) -> None:
    """Shards with their padding, moments, whole replicas: no estimate; tables and counters are a megabyte."""
    for row in rows_of(framework):
        predicted, rehearsed = row.predicted["parameters"], row.stored["parameters"]
        assert abs(predicted - rehearsed) <= 4 * 2**20, in_words(row)


@pytest.mark.parametrize("framework", MODULES)
def test_the_seed_determines_the_sample(framework: str) -> None:
    sampled = plans(framework, SEED, 12)
    stored = {row.name.partition(":")[2]: row.plan for row in rows_of(framework)}
    found = [index for index in range(12) if str(index) in stored]
    assert len(found) >= 10
    assert all(is_same(stored[str(index)], sampled[index]) for index in found)


@pytest.mark.parametrize(
    ("framework", "index"),
    few(
        [(framework, index) for framework in MODULES for index in REPLAYED[framework]],
        [(framework, REPLAYED[framework][0]) for framework in MODULES],
    ),
)
def test_repeating_a_stored_rehearsal_gives_the_same_bytes(framework: str, index: int) -> None:
    row = next(row for row in rows_of(framework) if row.name == f"{framework}:{index}")
    (stage,) = MODULES[framework].rehearse(row.plan, lambda words, fraction: None)
    assert stage.peak.num_bytes == pytest.approx(sum(row.stored.values()), rel=1e-3)
    assert {moment.phase for moment in stage.moments} == set(PHASES)


@pytest.mark.parametrize("framework", few(MODULES, ["ddp"]))
def test_a_rehearsal_runs_the_recipes_attention(framework: str) -> None:
    """Scores of every query and key are there with "eager", and the prediction says how many."""
    cluster = plans(framework, SEED, 1)[0].cluster
    arch = replace(Architecture.of_size("60m"), num_hidden_layers=3)
    held = {}
    for attention in ("eager", "sdpa"):
        recipe = ss.Recipe(seq_len=2048, attention=attention)
        layout = ss.Layout.ddp() if framework == "ddp" else ss.Layout.fsdp2()
        plan = ss.Plan(arch, cluster, recipe, layout)
        (stage,) = MODULES[framework].rehearse(plan, lambda words, fraction: None)
        held[attention] = stage.peak.num_bytes
        components = plan.memory().components
        assert sum(components[name] for name in COMPONENTS) == pytest.approx(held[attention], rel=0.01)
    assert held["eager"] > 1.5 * held["sdpa"]
