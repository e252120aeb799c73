"""What a transformers config says beside sizes, in the words of ``TransformerConfig`` and ``GPTModel``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardscope.validation import refuse

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What ``RotaryEmbedding._apply_scaling`` has as constants (megatron-core 0.16.1)."""

_OTHER_ENGINE = "layout=Layout.fsdp2()"


def core_numbers(hf_config: Any, *, fused_activation: bool = False) -> dict[str, Any]:
    """Arguments of ``TransformerConfig`` that make a ``GPTModel`` compute what transformers does.

    Norm epsilon, activation function, the router's order of softmax and choice, no auxiliary loss.
    ``fused_activation`` is ``bias_activation_fusion``. Raises ``ValueError`` for what megatron-core computes
    in another way.
    """
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
    said = getattr(hf_config, "rope_parameters", None)
    if not said:
        return {}
    kind = said.get("rope_type", "default")
    found = {
        "rotary_base": said["rope_theta"],
        "rotary_percent": said.get("partial_rotary_factor") or 1.0,
    }
    if kind == "default":
        return found
    if kind == "linear":
        return {**found, "seq_len_interpolation_factor": said["factor"]}
    if kind == "llama3" and all(said.get(name) == value for name, value in LLAMA3_SCALING.items()):
        return {**found, "rope_scaling": True, "rope_scaling_factor": said["factor"]}
    return refuse(
        "config.rope_parameters",
        said,
        f"rope_type 'default', 'linear', or 'llama3' with {LLAMA3_SCALING}, which megatron-core's "
        "RotaryEmbedding has",
        _OTHER_ENGINE,
    )


def _activation(hf_config: Any, fused: bool) -> Any:
    said = getattr(hf_config, "hidden_act", None) or hf_config.activation_function
    if said == "silu":
        return torch.nn.functional.silu
    if said in ("gelu_new", "gelu_pytorch_tanh"):
        # Its fused kernel is the tanh form (fused_bias_gelu.py), under the name of the exact one.
        gelu = torch.nn.functional.gelu
        return gelu if fused else partial(gelu, approximate="tanh")
    return refuse(
        "config.hidden_act", said, "'silu' or 'gelu_new' with Megatron-core's fused kernels", _OTHER_ENGINE
    )


def _routing(hf_config: Any) -> dict[str, Any]:
    chosen = getattr(hf_config, "num_experts_per_tok", None)
    if chosen is None:
        return {}
    if getattr(hf_config, "output_router_logits", False):
        refuse("config.output_router_logits", True, "False: no auxiliary loss is added here", "False")
    # Mixtral has no such field, and always makes the weights of the chosen ones sum to 1.
    normalised = getattr(hf_config, "norm_topk_prob", True)
    if normalised and chosen == 1:
        refuse(
            "config.num_experts_per_tok",
            1,
            "2 or more where the weights of the chosen experts sum to 1: megatron-core's router has no such "
            "sum over one expert",
            _OTHER_ENGINE,
        )
    return {
        "moe_router_pre_softmax": not normalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
