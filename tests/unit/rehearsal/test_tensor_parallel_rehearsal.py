"""Tests of predictions against rehearsals of FSDP2 with tensor parallelism, and of unsupported models."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.accuracy.rehearsal_samples import SEED, in_words, is_same
from tests.accuracy.rehearsals import STORED, Rehearsed, read_rehearsals
from tests.accuracy.sampling import sample_plans
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import thorough

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.fsdp2.rehearsal.rehearse import rehearse
from shardscope.memory.report import PHASES
from shardscope.rehearsal.result import TENSOR_COMPONENTS

pytestmark = thorough()

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")


@cache
def read_rows() -> tuple[Rehearsed, ...]:
    stored, rejected = read_rehearsals([STORED / "fsdp2-tp.jsonl"])
    assert not rejected
    return tuple(stored)


def test_predictions_agree_with_stored_rehearsals() -> None:
    assert len(read_rows()) >= 25
    close = [row for row in read_rows() if abs(row.error) <= 0.01]
    worst = max(read_rows(), key=lambda row: abs(row.error))
    assert len(close) >= 0.95 * len(read_rows()), [in_words(row) for row in read_rows() if row not in close]
    assert abs(worst.error) <= 0.03, in_words(worst)


def test_predicted_training_state_is_exact() -> None:
    """Sharded by tp, then by rows, each rounded up; tables and counters take up to a megabyte."""
    for row in read_rows():
        for name in ("parameters", "gradients"):
            assert row.predicted[name] == pytest.approx(row.stored[name], abs=2**20), in_words(row)


def test_the_seed_determines_the_sample() -> None:
    sampled = sample_plans("fsdp2-tp", SEED, 12)
    stored = {row.name.partition(":")[2]: row.plan for row in read_rows()}
    indices = [index for index in range(12) if str(index) in stored]
    assert len(indices) >= 4
    assert all(is_same(stored[str(index)], sampled[index]) for index in indices)


@pytest.mark.parametrize("index", [0, 12])
def test_repeating_a_stored_rehearsal_gives_the_same_bytes(index: int) -> None:
    row = read_rows()[index]
    (stage,) = rehearse(row.plan, lambda words, fraction: None)
    assert stage.peak.num_bytes == pytest.approx(sum(row.stored.values()), rel=1e-3)
    assert {peak.phase for peak in stage.peaks} == set(PHASES)


def test_large_layers_with_tp_and_replicas() -> None:
    plan = Plan(
        replace(ss.models["llama-3.1-8b"], num_hidden_layers=8),
        ss.Cluster.parse("4x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=8),
        ss.Layout.fsdp2(replicate=2, tp=4),
    )
    report = rehearse_in_this_process(plan)
    rehearsed, predicted = (
        sum(one.components[name] for name in TENSOR_COMPONENTS) for one in (report, plan.memory())
    )
    assert predicted == pytest.approx(rehearsed, rel=0.01)


@pytest.mark.parametrize(
    ("model", "recipe", "named"),
    [
        ("mixtral-8x7b", {}, r"Architecture\.model_type is 'mixtral'.*tp=1"),
        ("phi-3-mini", {}, r"Architecture\.model_type is 'phi3'.*tp=1"),
        ("llama-3.1-8b", {"method": "lora"}, r"Recipe\.method is 'lora'.*tp=1"),
    ],
)
def test_models_without_a_tensor_parallel_plan_are_rejected(
    model: str, recipe: dict[str, Any], named: str
) -> None:
    plan = Plan(ss.models[model], EIGHT, ss.Recipe(**recipe), ss.Layout.fsdp2(tp=2))
    with pytest.raises(ValueError, match=named):
        rehearse(plan, lambda words, fraction: None)
