"""``PerfLLM.analysis_mem`` and ``PerfLLM.analysis_cost``, from the checkout that SIMUMAX_CHECKOUT names.

Inputs follow its docs/model.md, strategy.md and system.md. B200 uses its own system file; other GPUs use the
closest of its two ("usually better than writing a new one", system.md), with the row's datasheet and links.
fp16 is estimated as bf16, which has the same sizes. It also estimates reserved memory, which is compared with
nvidia-smi's figure.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from protocol import ADAM, MIXED, Answer, Plan, refuse, refuse_other_recipes, refuse_other_recompute, serve
from simumax.core import perf_llm
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig

_NEAREST = {
    "ampere": ("a100_pcie", 1935e9),
    "hopper": ("a100_pcie", 1935e9),
    "blackwell": ("b200_bf16_ceperm", 8e12),
}
"""Generation of a GPU -> system file, and the memory bandwidth by the datasheet of the GPU it is of."""
_LINK_OPERATORS = {
    "all_reduce": {"scale": 2, "offset": -1},
    "all_gather": {"scale": 1, "offset": -1},
    "reduce_scatter": {"scale": 1, "offset": -1},
    "p2p": {"scale": 1, "offset": 0},
    "all2all": {"scale": 1, "offset": -1},
}
"""Of system.md's template."""
_RECOMPUTE = {"none": None, "selective": "sdp_only", "full": "full_block"}


def estimate(plan: Plan) -> Answer:
    """Return memory of the fullest stage and the duration of one iteration."""
    refuse({"models Megatron only": plan.layout.framework != "megatron"})
    refuse_other_recipes(plan, ADAM, (*MIXED, "fp8-mixed"))
    refuse_other_recompute(plan)
    refuse({"has no precision-aware optimizer": plan.layout.use_precision_aware_optimizer})
    perf = perf_llm.PerfLLM()
    perf.configure(
        strategy_config=_describe_strategy(plan),
        model_config=_describe_model(plan),
        system_config=SystemConfig.init_from_dict(_describe_system(plan)),
    )
    perf.run_estimate()
    memory = perf.analysis_mem().data
    stages = [memory] if "peak_mem" in memory else list(memory.values())
    return {
        "tensors": max(stage["peak_mem"] for stage in stages),
        "device": max(stage["peak_mem_with_reserved"] for stage in stages),
        "states": max(stage["model_mem"] for stage in stages),
        "seconds": _estimate_seconds(plan, perf) if plan.is_timed else "not asked",
    }


def _estimate_seconds(plan: Plan, perf: perf_llm.PerfLLM) -> float:
    refuse({f"ships no system near {plan.gpu.name}": plan.gpu.architecture not in _NEAREST})
    return float(perf.analysis_cost().data["duration_time_per_iter"]) / 1000


def _describe_strategy(plan: Plan) -> StrategyConfig:
    recipe, layout, degrees, stages = plan.recipe, plan.layout, plan.degrees, plan.stage_layers
    is_uneven, kind = len(set(stages)) > 1, recipe.recompute
    refuse(
        {
            "allows uneven layers in the first and the last stage only": is_uneven
            and len(set(stages[1:-1])) > 1
        }
    )
    reduces_in_half = layout.grad_reduce_in_fp32 is False or (
        layout.grad_reduce_in_fp32 is None and recipe.precision == "fp16-mixed"
    )
    return StrategyConfig(
        seq_len=recipe.seq_len, micro_batch_size=recipe.micro_batch_size,
        micro_batch_num=plan.num_micro_batches, world_size=plan.world_size,
        tp_size=degrees.tp, cp_size=degrees.cp, pp_size=degrees.pp, ep_size=degrees.ep,
        etp_size=layout.etp or (degrees.tp if plan.architecture.mixture_of_experts else 1),
        interleaving_size=degrees.vpp, enable_sequence_parallel=plan.sequence_parallel,
        num_layers_in_first_pipeline_stage=stages[0] if is_uneven else None,
        num_layers_in_last_pipeline_stage=stages[-1] if is_uneven else None,
        fp8=recipe.precision == "fp8-mixed", zero_state=int(layout.distributed_optimizer),
        grad_reduce_in_bf16=reduces_in_half, overlap_grad_reduce=layout.overlap_grad_reduce,
        enable_recompute=kind != "none", recompute_granularity=_RECOMPUTE[kind],
        recompute_layer_num=plan.architecture.num_hidden_layers if kind != "none" else 0,
        use_flash_sdp=not plan.has_unfused_attention, use_math_sdp=plan.has_unfused_attention,
        cross_entropy_loss_fusion=recipe.loss == "fused", pp_comm_async=degrees.vpp > 1 and degrees.pp == 2,
        dispatch_probs=True, te_version=plan.transformer_engine,
    )  # fmt: skip


def _describe_model(plan: Plan) -> ModelConfig:
    arch = plan.architecture
    experts, latent = arch.mixture_of_experts, arch.latent_attention
    more: dict[str, Any] = {}
    if experts:
        apart = experts.decoder_sparse_step > 1 or experts.mlp_only_layers
        refuse({"allows dense layers only before those with experts": apart})
        more |= {
            "expert_num": experts.num_experts, "topk": experts.num_experts_per_tok,
            "moe_ffn_hidden_size": experts.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": experts.shared_expert_intermediate_size or None,
            "dense_layers": experts.first_k_dense_replace,
        }  # fmt: skip
    if latent:
        more |= {
            "attention_type": "mla", "v_head_dim": latent.v_head_dim, "qk_head_dim": latent.qk_nope_head_dim,
            "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
            "q_lora_rank": latent.q_lora_rank, "kv_lora_rank": latent.kv_lora_rank,
        }  # fmt: skip
    return ModelConfig(
        model_name=arch.name, model_type="moe" if experts else "dense", layer_num=arch.num_hidden_layers,
        hidden_size=arch.hidden_size, intermediate_size=arch.intermediate_size, vocab_size=arch.vocab_size,
        head_num=arch.num_attention_heads, kv_head_num=arch.num_key_value_heads,
        head_size=latent.v_head_dim if latent else arch.head_dim, use_swiglu=arch.gated_mlp, **more,
    )  # fmt: skip


def _describe_system(plan: Plan) -> dict[str, Any]:
    gpu = plan.gpu
    name, bandwidth = _NEAREST.get(gpu.architecture, _NEAREST["ampere"])
    file = Path(os.environ["SIMUMAX_CHECKOUT"]) / "configs" / "system" / f"{name}.json"
    system: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if gpu.name.startswith("b200") or gpu.architecture not in _NEAREST:
        return system
    peaks, accelerator = vars(gpu.peak_flops), system["accelerator"]
    for operator, figures in accelerator["op"].items():
        figures["tflops"] = (
            peaks[("fp8" if "fp8" in peaks else "bf16") if "fp8" in operator else "bf16"] / 1e12
        )
    for figures in accelerator["bandwidth"].values():
        figures["gbps"] *= gpu.memory_bandwidth_bytes_per_second / bandwidth
    inside, between = (
        {
            "processor_usage": 0.0,
            "bandwidth": {"efficient_factor": 0.5, "gbps": rate / 1e9, "latency_us": 10},
            "op": _LINK_OPERATORS,
        }
        for rate in (plan.links.intra_node, plan.links.inter_node * plan.gpus_per_node)
    )
    system["num_per_node"] = plan.gpus_per_node
    system["networks"] = {"low_intra_node": inside, "high_intra_node": inside, "inter_node": between}
    return system


if __name__ == "__main__":
    # Its results are rounded texts ("66.4383 GB"); without this step they stay bytes and milliseconds.
    perf_llm.convert_final_result_to_human_format = lambda result: None
    serve(estimate, os.environ["CHECKOUT_COMMIT"])
