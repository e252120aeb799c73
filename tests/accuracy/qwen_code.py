"""Modelled code of QwenLM/Qwen's scripts: no DDP, QLoRA under DeepSpeed, AutoGPTQ.

finetune.py and finetune/finetune_{lora,qlora}_single_gpu.sh of QwenLM/Qwen, whose README has the figures (of
1.8B and 72B since 2023-11-30, when peft was at 0.6.2 and AutoGPTQ at 0.5.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardscope import Layout, Plan
from shardscope.core.precision import FP32
from shardscope.memory.report import Component, PhaseMemory, Term
from shardscope.memory.state.quantization import measure_layer_linears

HALF = 2
BUCKET = 200_000_000
"""Numbers in a bucket: finetune/ds_config_zero2.json."""


def no_ddp(plan: Plan, moments: Iterable[PhaseMemory]) -> tuple[PhaseMemory, ...]:
    """One GPU without DDP: gradients without buckets.

    With several micro-batches per step they stay from the first backward to the optimizer step.
    """
    trained = FP32 * _count_adapter_parameters(plan)
    return tuple(
        _add_bytes(moment, {"gradients": trained * (moment.phase in ("forward", "backward", "optimizer"))})
        for moment in moments
    )


def zero2_over_gptq(plan: Plan, moments: Iterable[PhaseMemory]) -> tuple[PhaseMemory, ...]:
    """QLoRA under DeepSpeed's ZeRO-2 in fp16, even on one GPU, with AutoGPTQ's unfused Linears.

    finetune_qlora_single_gpu.sh (``--fp16 --deepspeed ds_config_zero2.json``), which the product refuses: its
    own plan of ZeRO-2 over an unquantised base, whose Linears shrink to the plan's 4 bits. AutoGPTQ's
    ``disable_exllama`` and 128 tokens or more unpack each matrix to int32 and int8 and multiply it out in
    fp16, which autograd keeps for the input's gradient (nn_modules/qlinear/qlinear_cuda_old.py, ``forward``):
    of a recomputed layer all of them are there. DeepSpeed's fp16 has no autocast, so the loss
    (modeling_qwen.py: a shifted copy and its logarithms) stays in 2 bytes where the plan counts fp32: half.
    """
    arch = plan.architecture
    fields = {"method": "lora", "precision": "fp16-mixed", "lora_dropout": 0.0, "optimizer": "adamw"}
    recipe = replace(plan.recipe, **fields)
    layout = Layout.zero(stage=2, reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET, overlap_comm=True)
    theirs = Plan(arch, plan.cluster, recipe, layout).memory().worst_stage
    packed = min(moment.components["parameters"] for moment in moments)
    # The plan has adapters in fp32, ZeRO beside their fp32 copies in fp16.
    packed -= (FP32 - HALF) * _count_adapter_parameters(plan)
    smaller = theirs.at("rest").components["parameters"] - packed
    numel, _, _ = measure_layer_linears(arch, False, "nf4_double")
    last = arch.hidden_size * arch.intermediate_size
    results = []
    for moment in theirs.phases:
        parts = moment.components
        more: dict[Component, int] = {
            "parameters": parts["parameters"] - smaller,
            "logits": parts["logits"] // 2,
        }
        if moment.phase == "backward" and parts["activations"] and not parts["logits"]:
            more["activations"] = parts["activations"] + HALF * (numel - last) + (FP32 + 1) * last
        results.append(_add_bytes(moment, more))
    return tuple(results)


def _count_adapter_parameters(plan: Plan) -> int:
    targets = plan.recipe.lora_targets or ()
    sizes = [sum(shape) for name, shape in plan.architecture.lora_shapes if name in targets]
    return (plan.recipe.lora_rank or 16) * sum(sizes) * plan.architecture.num_hidden_layers


def _add_bytes(moment: PhaseMemory, more: dict[Component, int]) -> PhaseMemory:
    terms = dict(moment.terms)
    terms.update({name: Term(num_bytes, lambda: "Qwen's own scripts") for name, num_bytes in more.items()})
    return PhaseMemory.from_terms(moment.phase, moment.fraction, terms)
