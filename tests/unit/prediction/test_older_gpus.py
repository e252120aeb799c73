"""Cards before Ampere: no flash attention, and SDPA's memory-efficient kernel takes no grouped queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.in_process_rehearsal import rehearsed_here
from tests.requirements import few, needs

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.plan import Plan

GROUPED = replace(ss.models["llama-3.2-1b"], num_hidden_layers=2)
ALONE = replace(ss.models["llama-2-7b"], num_hidden_layers=2)
GIB = 2**30


def plan(arch: ss.Architecture, gpu: str, precision: str) -> Plan:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=8, precision=precision)
    return Plan(arch, ss.Cluster.parse(f"8x{gpu}"), recipe, ss.Layout.fsdp2())


def activations(a_plan: Plan) -> int:
    return max(moment.components["activations"] for moment in a_plan.memory().worst_stage.phases)


@pytest.mark.parametrize("gpu", ["v100-sxm-32gb", "t4-16gb"])
def test_grouped_queries_keep_their_scores(gpu: str) -> None:
    """The fp32 softmax of each layer: heads x sequence squared."""
    scores = 2 * GROUPED.num_attention_heads * 2048**2 * 4
    more = activations(plan(GROUPED, gpu, "fp16-mixed")) - activations(
        plan(GROUPED, "a100-sxm-40gb", "fp16-mixed")
    )
    assert scores < more < 2 * scores


def test_as_many_keys_as_queries_have_a_fused_kernel_in_fp16_only() -> None:
    ampere = activations(plan(ALONE, "a100-sxm-40gb", "fp16-mixed"))
    assert activations(plan(ALONE, "v100-sxm-32gb", "fp16-mixed")) == ampere
    assert activations(plan(ALONE, "v100-sxm-32gb", "bf16-mixed")) > ampere + GIB


@pytest.mark.parametrize(
    ("arch", "precision"),
    few([(GROUPED, "fp16-mixed"), (ALONE, "fp16-mixed"), (ALONE, "bf16-mixed")], [(GROUPED, "fp16-mixed")]),
)
def test_the_rehearsal_agrees(arch: ss.Architecture, precision: str) -> None:
    """Torch's own plain operators on fake tensors, scores and all."""
    needs("torch")
    needs("transformers")
    a_plan = plan(arch, "v100-sxm-32gb", precision)
    assert rehearsed_here(a_plan).peak_bytes == pytest.approx(a_plan.memory().peak_bytes, rel=0.002)


def test_flash_attention_is_refused_by_name() -> None:
    with pytest.raises(FieldError, match="FlashAttention begins with Ampere"):
        Plan(
            GROUPED,
            ss.Cluster.parse("t4-16gb"),
            ss.Recipe(attention="flash", precision="fp16-mixed"),
            ss.Layout.ddp(),
        )
