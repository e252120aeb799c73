"""ZeRO for real on two CPU ranks: what its own tensors hold is what the formulas say, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deepspeed_ranks import held_by_stage
from gloo_ranks import on_ranks
from tests.requirements import needs, needs_installed

import shardscope as ss

pytestmark = needs_installed("deepspeed")
BUCKET = 1_000_000


@pytest.fixture(scope="module")
def plan() -> ss.Plan:
    arch = replace(
        ss.Architecture.of_size("2m"),
        hidden_size=120,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=30,
        intermediate_size=331,
        vocab_size=1013,
        num_hidden_layers=3,
    )
    recipe = ss.Recipe(seq_len=32, global_batch_size=2, precision="bf16-mixed")
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.zero(1, reduce_bucket_size=BUCKET))


@pytest.fixture(scope="module")
def rank_results(plan: ss.Plan, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, plan, held_by_stage, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensor_bytes_of_real_ranks_equal_the_formulas(
    plan: ss.Plan, rank_results: list[dict[str, Any]], stage: int
) -> None:
    layout = ss.Layout.zero(stage, reduce_bucket_size=BUCKET)
    report = ss.Plan(plan.architecture, plan.cluster, plan.recipe, layout).memory()
    ranks = [answer[str(stage)] for answer in rank_results]
    assert {rank["parameters"] for rank in ranks} == {report.at("rest")["parameters"]}
    assert {rank["optimizer"] for rank in ranks} == {report.at("rest")["optimizer"]}
    # Whole tensors that a partition touches: ranks differ, and the report is of the fullest.
    assert max(rank["gradients"] for rank in ranks) == report.at("optimizer")["gradients"]
    # Stage 3 keeps its bucket, and parameters under the threshold gathered.
    persistent = report.at("rest")["gather_buffers"] - ranks[0]["bucket"]
    if stage == 3:
        assert ranks[0]["bucket"] == 2 * BUCKET
        assert persistent == 2 * plan.architecture.num_parameters - 2 * sum(
            size for size in count_tensor_elements(plan.architecture) if size > 100_000
        )
    else:
        assert report.at("rest")["gather_buffers"] == ranks[0]["bucket"] == 0


def count_tensor_elements(arch: ss.Architecture) -> list[int]:
    """Count the elements of every tensor, as transformers makes them."""
    torch = needs("torch")
    from shardscope.training.model.model import build_model

    with torch.device("meta"):
        return [parameter.numel() for parameter in build_model(arch).parameters()]
