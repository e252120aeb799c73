"""Arguments of ``TransformerConfig`` and ``GPTModel`` from a transformers config, sizes excluded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardscope.core.errors import Value, refuse
from shardscope.frameworks.megatron.config_limits import (
    TANH_GELUS,
    activation_name,
    check_computed,
    rope_of,
)


def core_numbers(hf_config: Any, *, fused_activation: bool = False) -> dict[str, Any]:
    """Return the ``TransformerConfig`` arguments that make a ``GPTModel`` compute what transformers does.

    They are the norm epsilon, the activation function, the router's order of softmax and top-k, and no
    auxiliary loss. ``fused_activation`` is ``bias_activation_fusion``. Raises ``ValueError`` for options that
    megatron-core computes differently
    (:func:`~shardscope.frameworks.megatron.config_limits.check_computed`).
    """
    check_computed(hf_config.to_dict())
    epsilon = getattr(hf_config, "rms_norm_eps", None) or hf_config.layer_norm_epsilon
    return {
        "layernorm_epsilon": epsilon,
        "activation_func": _activation(hf_config, fused_activation),
        **_routing(hf_config),
    }


def model_numbers(hf_config: Any) -> dict[str, Any]:
    """Return the ``GPTModel`` arguments for the rotary base and scaling; empty without rotary embedding.

    Raises ``ValueError`` for a scaling that megatron-core does not support.
    """
    if not getattr(hf_config, "rope_parameters", None):
        return {}
    config = hf_config.to_dict()
    check_computed(config)
    said = rope_of(config)
    found = {"rotary_base": said["rope_theta"]}
    if said["rope_type"] == "linear":
        return {**found, "seq_len_interpolation_factor": said["factor"]}
    if said["rope_type"] == "llama3":
        return {**found, "rope_scaling": True, "rope_scaling_factor": said["factor"]}
    return found


def _activation(hf_config: Any, fused: bool) -> Any:
    # Megatron-core's fused kernel computes the tanh form (fused_bias_gelu.py) if this is the exact GELU.
    gelu = torch.nn.functional.gelu
    if activation_name(hf_config.to_dict()) in TANH_GELUS:
        return gelu if fused else partial(gelu, approximate="tanh")
    return torch.nn.functional.silu


def _routing(hf_config: Any) -> dict[str, Any]:
    if getattr(hf_config, "num_experts_per_tok", None) is None:
        return {}
    if getattr(hf_config, "output_router_logits", False):
        refuse("config.output_router_logits", True, "False: no auxiliary loss is added here", Value(False))
    return {
        # Mixtral has no such field, and always normalizes the top-k weights to sum to 1.
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
