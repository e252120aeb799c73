"""Transformers config options that megatron-core computes differently. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from shardscope.core.errors import refuse
from shardscope.families.registry import get_family

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants in ``RotaryEmbedding._apply_scaling`` (megatron-core 0.16.1)."""
ROPES = ("default", "linear", "llama3")
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")
ACTIVATIONS = ("silu", *TANH_GELUS)

SUPPORTED_VALUES: Mapping[str, tuple[object, str]] = {
    "scale_attn_weights": (True, "megatron-core always divides scores by the root of a head's width"),
    "scale_attn_by_inverse_layer_idx": (False, "megatron-core does not divide scores by the layer's index"),
}
"""Config option -> the only value that the engine supports, and why."""

OTHER_ENGINE = {"layout": "fsdp2"}


def check_computed(config: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for an option of ``config`` that megatron-core computes differently or not at all.

    ``config`` is a config.json, or ``to_dict()`` of a transformers config. A missing option has its family's
    default, which is supported for every family that trains.
    """
    for name, (computed, why) in SUPPORTED_VALUES.items():
        if config.get(name, computed) != computed:
            refuse(f"config.{name}", config[name], f"{computed!r} with Megatron: {why}", OTHER_ENGINE)
    activation = get_activation_name(config)
    if activation is not None and activation not in ACTIVATIONS:
        refuse(
            "config.hidden_act",
            activation,
            f"{', '.join(map(repr, ACTIVATIONS))} with Megatron-core",
            OTHER_ENGINE,
        )
    _check_routing(config)
    _check_rope(read_rope(config))


def _check_routing(config: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for normalized top-1 routing, which always has the weight 1 in transformers."""
    normalizes = config.get("norm_topk_prob", get_family(config.get("model_type")).normalizes_top_k)
    if normalizes and config.get("num_experts_per_tok") == 1:
        refuse(
            "config.num_experts_per_tok",
            1,
            "2 or more where the weights of the chosen experts sum to 1: megatron-core's router does not "
            "normalize the weight of one expert",
            OTHER_ENGINE,
        )


def get_activation_name(config: Mapping[str, object]) -> object:
    """Return the name of the MLP's activation function, or None if the config does not set it."""
    return config.get(get_family(config.get("model_type")).activation_key)


def read_rope(config: Mapping[str, object]) -> dict[str, object]:
    """Return the rotary embedding options, normalized as transformers 5 does for configs of all versions.

    Source: ``RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`` of transformers 5.
    """
    # transformers 4 has ``rope_scaling`` or nothing, transformers 5 ``rope_parameters``.
    options = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(options, Mapping):
        refuse("config.rope_parameters", options, "a mapping of options", OTHER_ENGINE)
    rope = dict(options)
    # Early configs of transformers 4 name the type "type".
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") is None:
        rope["partial_rotary_factor"] = config.get("partial_rotary_factor") or 1.0
    if rope["rope_type"] == "llama3":
        # transformers reads the original length at the top level first (Phi-3), then from the options.
        top_level = config.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        rope["original_max_position_embeddings"] = top_level or rope["original_max_position_embeddings"]
    return rope


def _check_rope(rope: Mapping[str, object]) -> None:
    rope_type = rope["rope_type"]
    # The factor is an argument of GPTModel (rope_scaling_factor); these three are constants.
    is_other_llama3 = rope_type == "llama3" and any(
        rope.get(name) != value for name, value in LLAMA3_SCALING.items()
    )
    if rope_type not in ROPES or is_other_llama3:
        refuse(
            "config.rope_parameters",
            dict(rope),
            f"rope_type 'default', 'linear', or 'llama3' with {LLAMA3_SCALING}, which megatron-core's "
            "RotaryEmbedding has",
            OTHER_ENGINE,
        )
    if rope["partial_rotary_factor"] != 1.0:
        refuse(
            "config.partial_rotary_factor",
            rope["partial_rotary_factor"],
            "1.0: transformers rotates whole heads of the families that train with Megatron",
            OTHER_ENGINE,
        )
