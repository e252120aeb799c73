"""Llama, and the decoders that differ from it in biases, norms or nothing: Granite, OLMo 2, Nemotron."""

from __future__ import annotations

from shardscope.families.common import Fields, HfConfig, bias, even_heads, sizes


def llama(c: HfConfig) -> Fields:
    """LlamaConfig: Llama 1 to 3.3 and the many models that share its layers."""
    fields = even_heads(sizes(c, kv_heads=None, positions=2_048))
    return {**fields, **bias(c), "mlp_bias": c.flag("mlp_bias", False)}


def granite(c: HfConfig) -> Fields:
    """GraniteConfig: Llama's layers, scaled by constants."""
    fields = sizes(c, kv_heads=None, positions=2_048)
    return {**fields, **bias(c), "mlp_bias": c.flag("mlp_bias", False)}


def olmo2(c: HfConfig) -> Fields:
    """Olmo2Config: norms after each half of the layer, and over all query and all key heads together."""
    return {**sizes(c, kv_heads=None, positions=2_048), **bias(c), "qk_norm": True}


def nemotron(c: HfConfig) -> Fields:
    """NemotronConfig: LayerNorm1P, and an MLP of two matrices with a squared ReLU between them."""
    c.size("num_key_value_heads", limit="num_key_value_heads")  # without it transformers builds no model
    fields = {**sizes(c, kv_heads=None, positions=4_096), **bias(c)}
    return {**fields, "mlp_bias": c.flag("mlp_bias", False), "gated_mlp": False, "norm": "layernorm"}
