"""Tests of GPUs before Ampere: no flash attention, and no fused SDPA kernel for grouped queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import few, needs

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.plan import Plan

GROUPED = replace(ss.models["llama-3.2-1b"], num_hidden_layers=2)
ALONE = replace(ss.models["llama-2-7b"], num_hidden_layers=2)
GIB = 2**30


def build_plan(arch: ss.Architecture, gpu: str, precision: str) -> Plan:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=8, precision=precision)
    return Plan(arch, ss.Cluster.parse(f"8x{gpu}"), recipe, ss.Layout.fsdp2())


def compute_activations(a_plan: Plan) -> int:
    return max(moment.components["activations"] for moment in a_plan.memory().worst_stage.phases)


@pytest.mark.parametrize("gpu", ["v100-sxm-32gb", "t4-16gb"])
def test_grouped_queries_save_attention_scores_before_ampere(gpu: str) -> None:
    """Each layer saves its fp32 softmax: heads x sequence length squared."""
    scores = 2 * GROUPED.num_attention_heads * 2048**2 * 4
    more = compute_activations(build_plan(GROUPED, gpu, "fp16-mixed")) - compute_activations(
        build_plan(GROUPED, "a100-sxm-40gb", "fp16-mixed")
    )
    assert scores < more < 2 * scores


def test_ungrouped_queries_use_a_fused_kernel_in_fp16_only() -> None:
    ampere = compute_activations(build_plan(ALONE, "a100-sxm-40gb", "fp16-mixed"))
    assert compute_activations(build_plan(ALONE, "v100-sxm-32gb", "fp16-mixed")) == ampere
    assert compute_activations(build_plan(ALONE, "v100-sxm-32gb", "bf16-mixed")) > ampere + GIB


@pytest.mark.parametrize(
    ("arch", "precision"),
    few([(GROUPED, "fp16-mixed"), (ALONE, "fp16-mixed"), (ALONE, "bf16-mixed")], []),
)
def test_prediction_equals_rehearsal(arch: ss.Architecture, precision: str) -> None:
    """torch's unfused operators run on fake tensors and save the scores."""
    needs("torch")
    needs("transformers")
    a_plan = build_plan(arch, "v100-sxm-32gb", precision)
    assert rehearse_in_this_process(a_plan).peak_bytes == pytest.approx(a_plan.memory().peak_bytes, rel=0.002)


def test_flash_attention_is_rejected() -> None:
    with pytest.raises(FieldError, match="FlashAttention begins with Ampere"):
        Plan(
            GROUPED,
            ss.Cluster.parse("t4-16gb"),
            ss.Recipe(attention="flash", precision="fp16-mixed"),
            ss.Layout.ddp(),
        )
