"""``LLMAnalysis.training``.

Inputs follow its README: 0.5 as the FLOPS efficiency of large training runs and 0.9 as the memory efficiency,
its table of ``ds_zero`` for DDP, ZeRO and FSDP, and datasheet values for other GPUs. Gated MLPs are 1.5 times
as wide, as in its own configs (Llama-2-7b's 11,008 are 16,384 there).
"""

from __future__ import annotations

import logging
from importlib.metadata import version

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig
from protocol import ADAM, MIXED, Answer, Plan, refuse, refuse_other_recipes, refuse_other_recompute, serve

_RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
_OPTIMIZER_BYTES = dict.fromkeys(ADAM, 8) | {"sgd": 4, "lion": 4}
"""``other_op_bytes``: fp32 states beside the master weights, as its docstring counts Lion's."""


def estimate(plan: Plan) -> Answer:
    """Return memory of one GPU and the latency of one iteration."""
    recipe, degrees, arch, layout = plan.recipe, plan.degrees, plan.architecture, plan.layout
    refuse_other_recipes(plan, tuple(_OPTIMIZER_BYTES), MIXED)
    refuse_other_recompute(plan)
    experts = arch.mixture_of_experts
    away = [getattr(layout, name, None) for name in ("offload", "offload_optimizer", "offload_params")]
    refuse({
        "has no context parallelism": degrees.cp > 1,
        "has no hybrid sharding": degrees.replicate > 1 and degrees.shard > 1,
        "has no multi-head latent attention": arch.latent_attention,
        "has no offload": any(away),
        "has no shared experts": experts and experts.shared_expert_intermediate_size,
        "has experts in every layer or in none": experts and plan.num_dense_layers,
    })  # fmt: skip
    width = experts.moe_intermediate_size if experts else arch.intermediate_size
    width = width * 3 // 2 if arch.gated_mlp else width
    model = ModelConfig(
        arch.name, arch.num_hidden_layers, arch.num_attention_heads, arch.hidden_size, arch.vocab_size,
        max_seq_len=recipe.seq_len, num_key_value_heads=arch.num_key_value_heads,
        ffn_embed_dim=width, expansion_ratio=width / arch.hidden_size,
        moe_num_experts=experts.num_experts if experts else 1,
        moe_top_k=experts.num_experts_per_tok if experts else 1,
    )  # fmt: skip
    gpu = GPUConfig(
        plan.gpu.name, plan.gpu.memory_bytes / 2**30,
        hbm_bandwidth_in_GB_per_sec=(plan.gpu.memory_bandwidth_bytes_per_second or 1e12) / 1e9,
        intra_node_bandwidth_in_GB_per_sec=plan.links.intra_node / 1e9, intra_node_min_message_latency=8e-6,
        inter_node_bandwidth_in_GB_per_sec=plan.links.inter_node / 1e9,
        peak_fp16_TFLOPS=getattr(plan.gpu.peak_flops, "bf16", 1e12) / 1e12,
    )  # fmt: skip
    spread = ParallelismConfig(
        degrees.tp, degrees.pp, degrees.data_parallel, degrees.ep, degrees.tp if plan.sequence_parallel else 1
    )
    analysis = LLMAnalysis(model, gpu, DtypeConfig(), spread, flops_efficiency=0.5, hbm_memory_efficiency=0.9)
    summary = analysis.training(
        batch_size_per_gpu=recipe.micro_batch_size, gradient_accumulation_steps=plan.num_micro_batches,
        global_batch_size=recipe.global_batch_size, seq_len=recipe.seq_len,
        activation_recomputation=ActivationRecomputation(_RECOMPUTE[recipe.recompute]),
        ds_zero=DSZeRO(plan.zero_stage), other_op_bytes=_OPTIMIZER_BYTES[recipe.optimizer],
        flash_attn=not plan.has_unfused_attention, softmax_dropout=recipe.dropout > 0,
        mlp_gated_linear_units=arch.gated_mlp,
    )  # fmt: skip
    return {
        "tensors": summary["(weight+op_state+grad+act)_memory_per_gpu"],
        "states": summary["(weight+op_state+grad)_memory_per_gpu"],
        "seconds": summary["latency_per_iter"],
    }


if __name__ == "__main__":
    logging.disable()
    serve(estimate, version("llm-analysis"))
