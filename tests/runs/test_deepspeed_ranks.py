"""ZeRO for real on two CPU ranks: what its own tensors hold is what the formulas say, to the byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs, needs_installed

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
def found(plan: ss.Plan) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("deepspeed_ranks.py")
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script), plan.to_json()],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    answers = []
    try:
        for rank in ranks:
            out, problems = rank.communicate(timeout=240)
            assert rank.returncode == 0, problems[-3000:]
            answers.append(json.loads(next(x for x in reversed(out.splitlines()) if x.startswith("{"))))
    finally:
        for rank in ranks:
            rank.kill()
    return answers


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensors_of_real_ranks_are_what_the_formulas_say(
    plan: ss.Plan, found: list[dict[str, Any]], stage: int
) -> None:
    layout = ss.Layout.zero(stage, reduce_bucket_size=BUCKET)
    report = ss.Plan(plan.architecture, plan.cluster, plan.recipe, layout).memory()
    ranks = [answer[str(stage)] for answer in found]
    assert {rank["parameters"] for rank in ranks} == {report.at("rest")["parameters"]}
    assert {rank["optimizer"] for rank in ranks} == {report.at("rest")["optimizer"]}
    # Whole tensors that a partition touches: ranks differ, and the report is of the fullest.
    assert max(rank["gradients"] for rank in ranks) == report.at("optimizer")["gradients"]
    # Stage 3 keeps its bucket, and parameters under the threshold gathered.
    persistent = report.at("rest")["gather_buffers"] - ranks[0]["bucket"]
    if stage == 3:
        assert ranks[0]["bucket"] == 2 * BUCKET
        assert persistent == 2 * plan.architecture.num_parameters - 2 * sum(
            size for size in sizes(plan.architecture) if size > 100_000
        )
    else:
        assert report.at("rest")["gather_buffers"] == ranks[0]["bucket"] == 0


def sizes(arch: ss.Architecture) -> list[int]:
    """Elements of every tensor, as transformers makes them."""
    torch = needs("torch")
    from shardscope.training.model import build_model

    with torch.device("meta"):
        return [parameter.numel() for parameter in build_model(arch).parameters()]
