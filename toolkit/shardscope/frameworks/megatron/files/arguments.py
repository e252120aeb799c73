"""Megatron-LM command line of a plan: flag -> value, None for a flag without a value.

Names and meanings are those of megatron/training/arguments.py; a test lists all flags in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from shardscope.families.registry import find_family
from shardscope.frameworks.megatron.core_config import MAKE_VOCAB_SIZE_DIVISIBLE_BY
from shardscope.frameworks.megatron.layout import get_layout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.frameworks.megatron.pipeline_split import split_pipeline

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan

Flags = dict[str, object]

RECIPE = (
    *("seq_len", "micro_batch_size", "global_batch_size", "precision", "optimizer", "recompute", "dropout"),
    *("attention", "loss", "expert_capacity_factor", "method"),
)
"""Recipe fields that the flags express; Megatron-LM always trains all weights."""
LAYOUT = (
    *("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel", "distributed_optimizer"),
    *("grad_reduce_in_fp32", "use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"),
)
"""Layout fields that the flags express; ``cross_entropy_fusion_impl`` only with a fused loss."""
BACKENDS = {"flash": "flash", "eager": "unfused"}
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}


def build_arguments(plan: Plan) -> Flags:
    """Return every flag that the plan determines."""
    flags = {
        **build_architecture_flags(plan.architecture),
        **_build_layout_flags(plan),
        **_build_recipe_flags(plan),
    }
    if "bf16" not in flags:
        flags.pop("moe-grouped-gemm", None)  # validate_args asserts bf16 with it.
    return flags


def build_architecture_flags(arch: Architecture) -> Flags:
    """Return the flags of the architecture, including those whose Megatron-LM default differs from it."""
    flags: Flags = {
        "num-layers": arch.num_hidden_layers,
        "hidden-size": arch.hidden_size,
        "ffn-hidden-size": arch.intermediate_size,
        "num-attention-heads": arch.num_attention_heads,
        "kv-channels": arch.head_dim,
        "max-position-embeddings": arch.max_position_embeddings,
        "position-embedding-type": "rope" if arch.position_embedding == "rope" else "learned_absolute",
        "normalization": "RMSNorm" if arch.norm == "rmsnorm" else "LayerNorm",
        "vocab-size": arch.vocab_size,
        "make-vocab-size-divisible-by": MAKE_VOCAB_SIZE_DIVISIBLE_BY,
    }
    if arch.num_key_value_heads != arch.num_attention_heads:
        flags |= {"group-query-attention": None, "num-query-groups": arch.num_key_value_heads}
    if arch.gated_mlp:
        flags["swiglu"] = None
    if not has_biases(arch):
        flags["disable-bias-linear"] = None
    if arch.attention_bias:
        flags["add-qkv-bias"] = None
    if arch.qk_norm or arch.latent_attention is not None:
        flags["qk-layernorm"] = None
    if not arch.tie_word_embeddings:
        flags["untie-embeddings-and-output-weights"] = None
    return {**flags, **_build_latent_attention_flags(arch), **_build_expert_flags(arch)}


def has_biases(arch: Architecture) -> bool:
    """Return whether the linear layers have biases; Megatron has one switch for all of them."""
    return arch.attention_output_bias or arch.mlp_bias or find_family(arch).projections == "conv1d"


def _build_latent_attention_flags(arch: Architecture) -> Flags:
    latent = arch.latent_attention
    if latent is None:
        return {}
    compressed = {} if latent.q_lora_rank is None else {"q-lora-rank": latent.q_lora_rank}
    return {
        "multi-latent-attention": None,
        **compressed,
        "kv-lora-rank": latent.kv_lora_rank,
        "qk-head-dim": latent.qk_nope_head_dim,
        "qk-pos-emb-head-dim": latent.qk_rope_head_dim,
        "v-head-dim": latent.v_head_dim,
        "rope-type": "rope",
    }


def _build_expert_flags(arch: Architecture) -> Flags:
    experts = arch.mixture_of_experts
    if experts is None:
        return {}
    flags: Flags = {
        "num-experts": experts.num_experts,
        "moe-router-topk": experts.num_experts_per_tok,
        "moe-ffn-hidden-size": experts.moe_intermediate_size,
        "moe-layer-freq": render_layer_pattern(
            arch.is_moe_layer(index) for index in range(arch.num_hidden_layers)
        ),
        "moe-token-dispatcher-type": "alltoall",
        # Predictions are those of TEGroupedMLP; the default runs a rank's experts one after the other.
        "moe-grouped-gemm": None,
    }
    if experts.shared_expert_intermediate_size:
        flags["moe-shared-expert-intermediate-size"] = experts.shared_expert_intermediate_size
    if experts.num_experts_per_tok == 1:
        # A softmax over one expert has no gradient, so megatron-core rejects top-1 without this flag.
        flags["moe-router-pre-softmax"] = None
    return flags


def render_layer_pattern(has_experts: Iterable[bool]) -> str:
    """Return the runs of dense layers (0) and layers with experts (1), such as ``([0]*3+[1]*58)``."""
    runs = [f"[{int(kind)}]*{len(list(run))}" for kind, run in groupby(has_experts)]
    return f"({'+'.join(runs)})"


def _build_layout_flags(plan: Plan) -> Flags:
    layout, degrees = get_layout(plan), plan.degrees
    flags: Flags = {
        "tensor-model-parallel-size": degrees.tp,
        "pipeline-model-parallel-size": degrees.pp,
        "context-parallel-size": degrees.cp,
    }
    if degrees.vpp > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = degrees.vpp
    if degrees.pp > 1:
        split = split_pipeline(plan.architecture.num_hidden_layers, degrees.pp, degrees.vpp)
        if split.embedding:
            flags["account-for-embedding-in-pipeline-split"] = None
        if split.loss:
            flags["account-for-loss-in-pipeline-split"] = None
        if split.first is not None and split.last is not None:
            flags["decoder-first-pipeline-num-layers"] = split.first
            flags["decoder-last-pipeline-num-layers"] = split.last
    if plan.architecture.mixture_of_experts is not None:
        flags["expert-model-parallel-size"] = degrees.ep
        flags["expert-tensor-parallel-size"] = layout.expert_tp
    if layout.splits_sequence:
        flags["sequence-parallel"] = None
    if layout.distributed_optimizer:
        flags["use-distributed-optimizer"] = None
    for field in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"):
        if getattr(layout, field):
            flags[field.replace("_", "-")] = None
    if layout.use_precision_aware_optimizer:
        flags |= {
            "use-precision-aware-optimizer": None,
            "exp-avg-dtype": layout.exp_avg_dtype,
            "exp-avg-sq-dtype": layout.exp_avg_sq_dtype,
        }
    return flags


def _build_recipe_flags(plan: Plan) -> Flags:
    recipe, layout = plan.recipe, get_layout(plan)
    flags: Flags = {
        "seq-length": recipe.seq_len,
        "micro-batch-size": recipe.micro_batch_size,
        "global-batch-size": recipe.global_batch_size,
        "optimizer": OPTIMIZERS[recipe.optimizer],
        "hidden-dropout": recipe.dropout,
        "attention-dropout": recipe.dropout,
    }
    if recipe.precision == "fp16-mixed":
        flags["fp16"] = None
        if reduces_in_fp32(layout, recipe):
            flags["accumulate-allreduce-grads-in-fp32"] = None
    elif recipe.precision != "fp32":
        flags["bf16"] = None
        if not reduces_in_fp32(layout, recipe):
            flags["grad-reduce-in-bf16"] = None
    if recipe.precision == "fp8-mixed":
        flags["fp8-format"] = "hybrid"
    if recipe.attention is not None:
        flags["attention-backend"] = BACKENDS[recipe.attention]
    if recipe.loss == "fused":
        flags["cross-entropy-loss-fusion"] = None
        flags["cross-entropy-fusion-impl"] = layout.cross_entropy_fusion_impl
    if recipe.recompute == "selective":
        flags["recompute-granularity"] = "selective"
    if recipe.recompute == "full":
        flags |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    if recipe.expert_capacity_factor is not None:
        flags["moe-expert-capacity-factor"] = recipe.expert_capacity_factor
    return flags
