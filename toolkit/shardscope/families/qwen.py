"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from shardscope.core.errors import check_integer
from shardscope.core.size_limits import LIMITS
from shardscope.families.common import Fields, HfConfig, read_bias, read_sizes, read_window
from shardscope.families.family import LLAMA_SUPPORT, Family, Names


def _add_window(config: HfConfig, fields: Fields, *, skips_first_layers: bool) -> Fields:
    """Add the sliding window; the first ``max_window_layers`` layers may have none."""
    if not config.read_flag("use_sliding_window", False):
        return fields
    first = _read_max_window_layers(config)
    # Qwen2Config and Qwen3Config: windows from layer ``max_window_layers`` on. Qwen3MoeModel: one mask for
    # all layers, so a window is on every layer.
    return read_window(
        config,
        fields,
        default=4_096,
        layers=lambda total: max(0, total - first) if skips_first_layers else total,
    )


def _read_max_window_layers(config: HfConfig) -> int:
    value = config.get("max_window_layers", default=28)
    return check_integer("config.json max_window_layers", value, low=0, high=LIMITS["num_hidden_layers"][1])


def _read_qwen2(config: HfConfig) -> Fields:
    """Read Qwen2Config (Qwen 2, 2.5): biases of query, key and value; head_dim may be overridden."""
    fields = read_sizes(config, kv_heads=32, positions=32_768)
    fields["attention_bias"] = True
    return _add_window(config, fields, skips_first_layers=True)


def _read_qwen3(config: HfConfig) -> Fields:
    """Read Qwen3Config: head_dim defaults to 128 for any width; queries and keys are normalized."""
    fields: Fields = {
        **read_sizes(config, kv_heads=32, positions=32_768),
        **read_bias(config),
        "qk_norm": True,
        "head_dim": config.read_size("head_dim", limit="head_dim", default=128),
    }
    return _add_window(config, fields, skips_first_layers=True)


def _read_qwen3_moe(config: HfConfig) -> Fields:
    """Read Qwen3MoeConfig: some layers may be dense."""
    fields: Fields = {
        **read_sizes(config, kv_heads=4, positions=32_768),
        **read_bias(config),
        "qk_norm": True,
    }
    fields["mixture_of_experts"] = {
        "num_experts": config.read_size("num_experts", "num_local_experts", limit="num_experts", default=128),
        "num_experts_per_tok": config.read_size("num_experts_per_tok", limit="num_experts", default=8),
        "moe_intermediate_size": config.read_size(
            "moe_intermediate_size", limit="moe_intermediate_size", default=768
        ),
        "decoder_sparse_step": config.get("decoder_sparse_step", default=1),
        "mlp_only_layers": config.get("mlp_only_layers", default=()),
    }
    return _add_window(config, fields, skips_first_layers=False)


def _read_qwen2_moe(config: HfConfig) -> Fields:
    """Read Qwen2MoeConfig: a shared expert with its own gate; windows, if any, on every other layer."""
    fields = read_sizes(config, kv_heads=16, positions=32_768)
    fields["attention_bias"] = config.read_flag("qkv_bias", True)
    fields["mixture_of_experts"] = {
        "num_experts": config.read_size("num_experts", limit="num_experts", default=60),
        "num_experts_per_tok": config.read_size("num_experts_per_tok", limit="num_experts", default=4),
        "moe_intermediate_size": config.read_size(
            "moe_intermediate_size", limit="moe_intermediate_size", default=1_408
        ),
        "shared_expert_intermediate_size": config.read_size(
            "shared_expert_intermediate_size", limit="intermediate_size", default=5_632
        ),
        "decoder_sparse_step": config.get("decoder_sparse_step", default=1),
        "mlp_only_layers": config.get("mlp_only_layers", default=()),
    }
    if not config.read_flag("use_sliding_window", False):
        return fields
    # Qwen2MoeConfig.__post_init__: windows on layers 0, 2, 4, ... below max_window_layers, the other way
    # round than in the dense Qwen2Config.
    last = _read_max_window_layers(config)
    return read_window(config, fields, default=4_096, layers=lambda total: (min(total, last) + 1) // 2)


QWEN2 = Family(model_type="qwen2", read=_read_qwen2, supports=LLAMA_SUPPORT)

QWEN3 = Family(model_type="qwen3", read=_read_qwen3, supports=LLAMA_SUPPORT)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    read=_read_qwen3_moe,
    supports=frozenset({
        "pipeline_stages", "fsdp2_context_parallel", "megatron_weights", "attention_choice", "document_masks",
        "dropout",
    }),
    router="softmax_cast",
    is_zero3_leaf=True,
    # Qwen3MoeSparseMoeBlock.__init__ assigns ``experts`` before ``gate``.
    registers_router_last=True,
)  # fmt: skip

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    supports=frozenset({"document_masks"}),
    read=_read_qwen2_moe,
    unlike_megatron_core="a gate before its shared expert",
    names=Names(shared_experts="mlp.shared_expert"),
    # Qwen2MoeSparseMoeBlock.forward: sigmoid(shared_expert_gate(x)) times the shared expert's output.
    has_shared_expert_gate=True,
    router="softmax_cast",
    is_zero3_leaf=True,
)
