"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from shardscope.core.errors import whole_number
from shardscope.core.size_limits import LIMITS
from shardscope.families.common import Fields, HfConfig, bias, sizes, window
from shardscope.families.family import LLAMA_SUPPORT, Family, Names


def _window_from(c: HfConfig, fields: Fields, *, from_layer: bool) -> Fields:
    """Add the sliding window; ``from_layer``: the first ``max_window_layers`` layers have none."""
    if not c.flag("use_sliding_window", False):
        return fields
    first = c.get("max_window_layers", default=28)
    first = whole_number("config.json max_window_layers", first, low=0, high=LIMITS["num_hidden_layers"][1])
    return window(
        c, fields, default=4_096, layers=lambda total: max(0, total - first) if from_layer else total
    )


def _read_qwen2(c: HfConfig) -> Fields:
    """Read Qwen2Config (Qwen 2, 2.5): biases of query, key and value; head_dim may be overridden."""
    fields = {**sizes(c, kv_heads=32, positions=32_768), "attention_bias": True}
    return _window_from(c, fields, from_layer=True)


def _read_qwen3(c: HfConfig) -> Fields:
    """Read Qwen3Config: head_dim defaults to 128 for any width; queries and keys are normalised."""
    fields = {**sizes(c, kv_heads=32, positions=32_768), **bias(c), "qk_norm": True}
    fields["head_dim"] = c.size("head_dim", limit="head_dim", default=128)
    return _window_from(c, fields, from_layer=True)


def _read_qwen3_moe(c: HfConfig) -> Fields:
    """Read Qwen3MoeConfig: some layers may be dense."""
    fields = {**sizes(c, kv_heads=4, positions=32_768), **bias(c), "qk_norm": True}
    fields["mixture_of_experts"] = {
        "num_experts": c.size("num_experts", "num_local_experts", limit="num_experts", default=128),
        "num_experts_per_tok": c.size("num_experts_per_tok", limit="num_experts", default=8),
        "moe_intermediate_size": c.size("moe_intermediate_size", limit="moe_intermediate_size", default=768),
        "decoder_sparse_step": c.get("decoder_sparse_step", default=1),
        "mlp_only_layers": c.get("mlp_only_layers", default=()),
    }
    return _window_from(c, fields, from_layer=False)


def _read_qwen2_moe(c: HfConfig) -> Fields:
    """Read Qwen2MoeConfig: a shared expert with its own gate; windows, if any, on every other layer."""
    fields = sizes(c, kv_heads=16, positions=32_768)
    fields["attention_bias"] = c.flag("qkv_bias", True)
    fields["mixture_of_experts"] = {
        "num_experts": c.size("num_experts", limit="num_experts", default=60),
        "num_experts_per_tok": c.size("num_experts_per_tok", limit="num_experts", default=4),
        "moe_intermediate_size": c.size(
            "moe_intermediate_size", limit="moe_intermediate_size", default=1_408
        ),
        "shared_expert_intermediate_size": c.size(
            "shared_expert_intermediate_size", limit="intermediate_size", default=5_632
        ),
        "decoder_sparse_step": c.get("decoder_sparse_step", default=1),
        "mlp_only_layers": c.get("mlp_only_layers", default=()),
    }
    if not c.flag("use_sliding_window", False):
        return fields
    last = c.get("max_window_layers", default=28)
    last = whole_number("config.json max_window_layers", last, low=0, high=LIMITS["num_hidden_layers"][1])
    return window(c, fields, default=4_096, layers=lambda total: (min(total, last) + 1) // 2)


QWEN2 = Family(model_type="qwen2", read=_read_qwen2, supports=LLAMA_SUPPORT)

QWEN3 = Family(model_type="qwen3", read=_read_qwen3, supports=LLAMA_SUPPORT)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    read=_read_qwen3_moe,
    supports=frozenset({
        "pipeline_stages", "fsdp2_context_parallel", "megatron_weights", "attention_choice", "dropout",
    }),
    router="softmax_cast",
    is_zero3_leaf=True,
    registers_router_last=True,
)  # fmt: skip

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    read=_read_qwen2_moe,
    unlike_megatron_core="a gate before its shared expert",
    names=Names(shared_experts="mlp.shared_expert"),
    has_shared_expert_gate=True,
    router="softmax_cast",
    is_zero3_leaf=True,
)
