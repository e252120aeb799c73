"""Tests of plans without flash attention: GPUs before Ampere, and Megatron-core in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.accuracy.measurement_kinds import tensor_bytes
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


MIXED_WINDOWS = [(ss.Layout.ddp(), "full"), (ss.Layout.fsdp2(), "selective"), (ss.Layout.zero(2), "none")]


@pytest.mark.parametrize(("layout", "recompute"), few(MIXED_WINDOWS, []))
def test_layers_without_a_window_equal_their_rehearsal(layout: Any, recompute: Any) -> None:
    """Gemma's other layers pass a mask, with which CUDA's memory-efficient kernel takes their queries."""
    needs("torch")
    needs("transformers")
    arch = replace(ss.models["gemma-3-4b"], num_hidden_layers=6, sliding_window_layers=5, vocab_size=8000)
    recipe = ss.Recipe(seq_len=4096, global_batch_size=2, precision="fp32", recompute=recompute)
    a_plan = Plan(arch, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, layout)
    assert rehearse_in_this_process(a_plan).peak_bytes == pytest.approx(a_plan.memory().peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "layout", "recompute", "rehearsed_gib"),
    [
        ("olmo-3-32b", ss.Layout.fsdp2(), "full", 23.650),
        ("olmo-3-32b", ss.Layout.zero(1), "none", 38.845),
        ("olmo-3-32b", ss.Layout.zero(3), "offload", 26.326),
        ("gemma-3-4b", ss.Layout.ddp(), "full", 11.756),
        ("gemma-3-4b", ss.Layout.fsdp2(), "selective", 8.701),
        ("gemma-3-4b", ss.Layout.zero(1), "selective", 11.970),
    ],
)
def test_layers_without_a_window_have_no_fused_kernel(
    name: str, layout: Any, recompute: Any, rehearsed_gib: float
) -> None:
    """With all layers as if they had a window, these were 3 to 31 % too low."""
    layers = {"olmo-3-32b": 4, "gemma-3-4b": 6}[name]
    arch = replace(
        ss.models[name], num_hidden_layers=layers, sliding_window_layers=layers - 1, vocab_size=8003
    )
    recipe = ss.Recipe(seq_len=5000, global_batch_size=4, precision="fp32", recompute=recompute)
    report = Plan(arch, ss.Cluster.parse("4xh100-sxm-80gb"), recipe, layout).memory()
    predicted = max(tensor_bytes(moment) for moment in report.worst_stage.phases)
    assert predicted == pytest.approx(rehearsed_gib * GIB, rel=0.01)


def test_flash_attention_is_rejected() -> None:
    with pytest.raises(FieldError, match="FlashAttention begins with Ampere"):
        Plan(
            GROUPED,
            ss.Cluster.parse("t4-16gb"),
            ss.Recipe(attention="flash", precision="fp16-mixed"),
            ss.Layout.ddp(),
        )


def build_megatron_plan(gpu: str, cp: int = 1, attention: Any = None) -> Plan:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=8, precision="fp16-mixed", attention=attention)
    return Plan(ALONE, ss.Cluster.parse(f"8x{gpu}"), recipe, ss.Layout.megatron(tp=4, cp=cp))


@pytest.mark.parametrize("gpu", ["v100-sxm-32gb", "t4-16gb"])
def test_megatron_has_unfused_attention_before_ampere(gpu: str) -> None:
    """Transformer Engine's FlashAttention and cuDNN kernels need sm80: it takes unfused operators."""
    default, unfused = build_megatron_plan(gpu), build_megatron_plan(gpu, attention="eager")
    assert default.memory().peak_bytes == unfused.memory().peak_bytes
    assert default.step().seconds == unfused.step().seconds
    with pytest.raises(FieldError, match=r"None or .eager. .* FlashAttention begins with Ampere"):
        build_megatron_plan(gpu, attention="flash")


def test_megatron_has_fused_attention_from_ampere_on() -> None:
    default, unfused = (build_megatron_plan("a100-sxm-40gb", attention=kind) for kind in (None, "eager"))
    assert default.memory().peak_bytes < unfused.memory().peak_bytes


def test_megatron_has_no_context_parallelism_before_ampere() -> None:
    with pytest.raises(FieldError, match=r"kernels for it need Ampere .* Nearest fix: cp=1"):
        build_megatron_plan("v100-sxm-32gb", cp=2)
    ranking = ss.search(
        ALONE,
        ss.Cluster.parse("8xv100-sxm-32gb"),
        build_plan(ALONE, "v100-sxm-32gb", "fp16-mixed").recipe,
        ["megatron"],
    )
    assert ranking.num_feasible and set(ranking.to_frame()["cp"]) == {1}


def build_fp32_plan(cp: int = 1, attention: Any = None) -> Plan:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=8, precision="fp32", attention=attention)
    return Plan(ALONE, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.megatron(tp=4, cp=cp))


def test_megatron_has_unfused_attention_without_context_parallelism_in_fp32() -> None:
    """Transformer Engine's FlashAttention and cuDNN kernels compute in 16 bits."""
    default, unfused = build_fp32_plan(), build_fp32_plan(attention="eager")
    scores = 2 * ALONE.num_attention_heads // 4 * 2048**2 * 4
    assert default.memory().components["activations"] > scores
    assert default.memory().peak_bytes == unfused.memory().peak_bytes
    assert default.step().seconds == unfused.step().seconds
    with pytest.raises(FieldError, match=r"FlashAttention computes in 16 bits"):
        build_fp32_plan(attention="flash")
    with pytest.raises(FieldError, match=r"cp > 1 .* need 16 bits; .* Nearest fix: precision='bf16-mixed'"):
        build_fp32_plan(cp=2)
    recipe = build_fp32_plan().recipe
    ranking = ss.search(ALONE, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ["megatron"])
    assert ranking.num_feasible and set(ranking.to_frame()["cp"]) == {1}


@pytest.mark.parametrize("recompute", few(["none", "selective", "full"], ["none"]))
def test_megatron_in_fp32_equals_its_rehearsal(recompute: Any) -> None:
    """Between the backwards of values and softmax, the fused projection's output is freed."""
    needs("torch")
    needs("megatron")
    base = build_fp32_plan()
    a_plan = replace(base, recipe=replace(base.recipe, recompute=recompute))
    assert rehearse_in_this_process(a_plan).peak_bytes == pytest.approx(
        a_plan.memory().peak_bytes, rel=0.0005 if recompute == "none" else 0.002
    )


def test_fp8_is_replaced_by_a_format_of_the_gpu() -> None:
    for layout in (ss.Layout.fsdp2(), ss.Layout.megatron()):
        with pytest.raises(FieldError, match="Nearest fix: precision='fp16-mixed'"):
            Plan(ALONE, ss.Cluster.parse("8xv100-sxm-32gb"), ss.Recipe(precision="fp8-mixed"), layout)


def test_rounded_updates_are_fixed_in_a_format_of_the_gpu() -> None:
    plan = build_plan(ALONE, "v100-sxm-32gb", "bf16")
    finding = next(finding for finding in plan.findings() if finding.name == "updates-round-away")
    assert finding.plan is not None and finding.plan.recipe.precision == "fp16-mixed"
    assert finding.change.startswith("Mixed precision (fp16)")
