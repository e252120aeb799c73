"""Arguments of megatron-core's ``TransformerConfig`` for a plan, and the padded vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div
from shardscope.families.registry import find_family
from shardscope.frameworks.megatron.families import check_family
from shardscope.frameworks.megatron.layout import get_layout
from shardscope.frameworks.megatron.pipeline_split import split_pipeline

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MAKE_VOCAB_SIZE_DIVISIBLE_BY = 128
"""Megatron-LM's default for ``--make-vocab-size-divisible-by``, which it multiplies by tp."""


def compute_padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the embedding's rows, padded to a multiple of 128 x tp (megatron/training/tokenizer)."""
    multiple = MAKE_VOCAB_SIZE_DIVISIBLE_BY * tp
    return ceil_div(vocab_size, multiple) * multiple


def check_rehearsed(plan: Plan) -> None:
    """Raise ``ValueError`` for what megatron-core's GPT cannot build, or cannot build without CUDA."""
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    check_family(arch)
    if arch.norms_per_layer != 2:
        refuse(
            "Architecture.norms_per_layer",
            arch.norms_per_layer,
            "2 in a rehearsal: megatron-core's TransformerLayer has no norms after attention and MLP",
            "plan.memory()",
        )
    if degrees.cp > 1:
        refuse(
            "Layout.cp",
            degrees.cp,
            "1 in a rehearsal: context parallelism is Transformer Engine's, which needs CUDA",
            "plan.memory()",
        )
    if recipe.precision == "fp8-mixed":
        refuse(
            "Recipe.precision",
            recipe.precision,
            "16 or 32 bits in a rehearsal: fp8 is Transformer Engine's, which needs CUDA",
            {"precision": "bf16-mixed"},
        )
    experts = arch.mixture_of_experts
    if experts is not None and not arch.gated_mlp:
        refuse("Architecture.gated_mlp", False, "True with experts in a rehearsal", "plan.memory()")
    if get_layout(plan).use_precision_aware_optimizer:
        refuse(
            "Layout.use_precision_aware_optimizer",
            True,
            "False in a rehearsal: it is Transformer Engine's Adam, which needs CUDA",
            "plan.memory()",
        )
    if recipe.loss == "fused" and get_layout(plan).cross_entropy_fusion_impl == "te":
        refuse(
            "Layout.cross_entropy_fusion_impl",
            "te",
            "'native' in a rehearsal: Transformer Engine's kernel needs CUDA",
            "plan.memory()",
        )
    if recipe.optimizer not in ("adamw", "sgd"):
        refuse("Recipe.optimizer", recipe.optimizer, "'adamw', 'sgd' in a rehearsal", {"optimizer": "adamw"})


def build_transformer_config(plan: Plan) -> dict[str, object]:
    """Return the arguments of ``TransformerConfig``, without dtypes.

    With latent attention they are those of ``MLATransformerConfig``.
    """
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    biases = arch.attention_output_bias or arch.mlp_bias or find_family(arch).projections == "conv1d"
    config: dict[str, object] = {
        "num_layers": arch.num_hidden_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.intermediate_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_key_value_heads,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm" if arch.norm == "rmsnorm" else "LayerNorm",
        "gated_linear_unit": arch.gated_mlp,
        "add_bias_linear": biases,
        "add_qkv_bias": arch.attention_bias,
        "qk_layernorm": arch.qk_norm or arch.latent_attention is not None,
        "hidden_dropout": recipe.dropout,
        "attention_dropout": recipe.dropout,
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "virtual_pipeline_model_parallel_size": degrees.vpp if degrees.vpp > 1 else None,
        "sequence_parallel": get_layout(plan).splits_sequence,
        "context_parallel_size": degrees.cp,
        "expert_model_parallel_size": degrees.ep,
        "bias_activation_fusion": arch.gated_mlp or biases,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": arch.latent_attention is None,
        "gradient_accumulation_fusion": True,
        "cross_entropy_loss_fusion": recipe.loss == "fused",
        "deallocate_pipeline_outputs": True,
        **_build_recompute_options(plan),
        **_build_expert_options(plan),
        **_build_split_options(plan),
    }
    latent = arch.latent_attention
    if latent is not None:
        config |= {
            "q_lora_rank": latent.q_lora_rank,
            "kv_lora_rank": latent.kv_lora_rank,
            "qk_head_dim": latent.qk_nope_head_dim,
            "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
            "v_head_dim": latent.v_head_dim,
            "rope_type": "rope",
            "multi_latent_attention": True,
        }
    return config


def _build_recompute_options(plan: Plan) -> dict[str, object]:
    recipe = plan.recipe
    if recipe.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recipe.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


def _build_expert_options(plan: Plan) -> dict[str, object]:
    arch, recipe, layout = plan.architecture, plan.recipe, get_layout(plan)
    experts = arch.mixture_of_experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "expert_tensor_parallel_size": layout.expert_tp,
        "moe_router_topk": experts.num_experts_per_tok,
        # A softmax over one expert has no gradient, so megatron-core rejects top-1 without this option.
        "moe_router_pre_softmax": experts.num_experts_per_tok == 1,
        "moe_ffn_hidden_size": experts.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": experts.shared_expert_intermediate_size or None,
        "moe_layer_freq": [int(arch.is_moe_layer(index)) for index in range(arch.num_hidden_layers)],
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        # Fake tensors have no values, so nothing can be routed: every expert gets a padded batch of its
        # expected tokens.
        "moe_expert_capacity_factor": float(recipe.expert_capacity_factor or recipe.expert_imbalance),
        "moe_pad_expert_input_to_capacity": True,
    }


def _build_split_options(plan: Plan) -> dict[str, object]:
    """Return the options that give the plan's pipeline split (``MegatronLayout.stage_layers``)."""
    layers, degrees = plan.architecture.num_hidden_layers, plan.degrees
    if degrees.pp == 1:
        return {}
    split = split_pipeline(layers, degrees.pp, degrees.vpp)
    return {
        "account_for_embedding_in_pipeline_split": bool(split.embedding),
        "account_for_loss_in_pipeline_split": bool(split.loss),
        "num_layers_in_first_pipeline_stage": split.first,
        "num_layers_in_last_pipeline_stage": split.last,
    }
