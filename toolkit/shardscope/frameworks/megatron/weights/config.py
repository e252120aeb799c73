"""Arguments of ``TransformerConfig`` and ``GPTModel`` from a transformers config, sizes excluded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardscope.core.errors import Value, refuse
from shardscope.frameworks.megatron.config_limits import (
    TANH_GELUS,
    check_computed,
    get_activation_name,
    read_rope,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def convert_config(hf_config: PretrainedConfig, *, fused_activation: bool = False) -> dict[str, object]:
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
        "activation_func": _choose_activation(hf_config, fused_activation),
        **_convert_routing(hf_config),
    }


def convert_rope(hf_config: PretrainedConfig) -> dict[str, object]:
    """Return the ``GPTModel`` arguments for the rotary base and scaling; empty without rotary embedding.

    Raises ``ValueError`` for a scaling that megatron-core does not support.
    """
    if not getattr(hf_config, "rope_parameters", None):
        return {}
    config = hf_config.to_dict()
    check_computed(config)
    rope = read_rope(config)
    arguments = {"rotary_base": rope["rope_theta"]}
    if rope["rope_type"] == "linear":
        return {**arguments, "seq_len_interpolation_factor": rope["factor"]}
    if rope["rope_type"] == "llama3":
        return {**arguments, "rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return arguments


def _choose_activation(hf_config: PretrainedConfig, fused: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    # Megatron-core's fused kernel computes the tanh form (fused_bias_gelu.py) if this is the exact GELU.
    gelu = torch.nn.functional.gelu
    if get_activation_name(hf_config.to_dict()) in TANH_GELUS:
        return gelu if fused else partial(gelu, approximate="tanh")
    silu: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu
    return silu


def _convert_routing(hf_config: PretrainedConfig) -> dict[str, object]:
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
