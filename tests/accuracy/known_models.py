"""Models of measured runs that the catalogue does not have, by their own config.json on huggingface.co."""

from __future__ import annotations

import re

from tests.accuracy.model_names import normalize_name

import shardscope as ss
from shardscope.core.architecture import LatentAttention, MixtureOfExperts


def beyond_the_catalogue(name: str) -> ss.Architecture | None:
    """The model of that name in any spelling; None if it is not one of these."""
    found = normalize_name(name)
    for pattern, make in (
        (r"moonlight16b.*", _make_moonlight),
        (r"kimik2.*", _kimi_k2),
        (r"grok1.*", _grok_1),
        (r"llama4maverick.*", _make_maverick),
    ):
        if re.fullmatch(pattern, found):
            return make()
    return None


def _make_moonlight() -> ss.Architecture:
    # moonshotai/Moonlight-16B-A3B: DeepSeek-V3's layers without a query rank.
    return ss.Architecture(
        name="moonlight-16b-a3b",
        model_type="deepseek_v3",
        hidden_size=2048,
        intermediate_size=11264,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        vocab_size=163840,
        max_position_embeddings=8192,
        latent_attention=LatentAttention(
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        mixture_of_experts=MixtureOfExperts(
            num_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=2816,
            first_k_dense_replace=1,
        ),
    )


def _kimi_k2() -> ss.Architecture:
    # moonshotai/Kimi-K2-Base: DeepSeek-V3's layers with fewer heads and more experts.
    return ss.Architecture(
        name="kimi-k2",
        model_type="deepseek_v3",
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=64,
        vocab_size=163840,
        max_position_embeddings=131072,
        latent_attention=LatentAttention(
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        mixture_of_experts=MixtureOfExperts(
            num_experts=384,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            shared_expert_intermediate_size=2048,
            first_k_dense_replace=1,
        ),
    )


def _grok_1() -> ss.Architecture:
    # xai-org/grok-1, RunConfig of its run.py: Mixtral's layers.
    return ss.Architecture(
        name="grok-1",
        model_type="mixtral",
        hidden_size=6144,
        intermediate_size=32768,
        num_hidden_layers=64,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=8192,
        mixture_of_experts=MixtureOfExperts(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32768
        ),
    )


def _make_maverick() -> ss.Architecture:
    # meta-llama/Llama-4-Maverick-17B-128E, its text model: every second layer has experts and a shared one.
    return ss.Architecture(
        name="llama-4-maverick",
        model_type="qwen3_moe",
        hidden_size=5120,
        intermediate_size=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=202048,
        max_position_embeddings=8192,
        mixture_of_experts=MixtureOfExperts(
            num_experts=128,
            num_experts_per_tok=1,
            moe_intermediate_size=8192,
            shared_expert_intermediate_size=8192,
            decoder_sparse_step=2,
        ),
    )
