"""What a transformers config says beside sizes, in the words of ``TransformerConfig`` and ``GPTModel``."""

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
    """Arguments of ``TransformerConfig`` that make a ``GPTModel`` compute what transformers does.

    Norm epsilon, activation function, the router's order of softmax and choice, no auxiliary loss.
    ``fused_activation`` is ``bias_activation_fusion``. Raises ``ValueError`` for what megatron-core computes
    in another way (:func:`~shardscope.frameworks.megatron.config_limits.check_computed`).
    """
    check_computed(hf_config.to_dict())
    epsilon = getattr(hf_config, "rms_norm_eps", None) or hf_config.layer_norm_epsilon
    return {
        "layernorm_epsilon": epsilon,
        "activation_func": _activation(hf_config, fused_activation),
        **_routing(hf_config),
    }


def model_numbers(hf_config: Any) -> dict[str, Any]:
    """Arguments of ``GPTModel``: the base of the rotary angles and their scaling; none where there are none.

    Raises ``ValueError`` for angles that megatron-core cannot scale so.
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
    # Its fused kernel is the tanh form (fused_bias_gelu.py), under the name of the exact one.
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
        # Mixtral has no such field, and always makes the weights of the chosen ones sum to 1.
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
