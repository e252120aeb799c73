"""The transformers model that an ``Architecture`` describes, with fresh weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from shardscope.families.registry import family_named, family_of
from shardscope.memory.activations.modules.attention import layers_with_windows

OTHER_SPELLINGS = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "num_key_value_heads": ("num_kv_heads",),
    "qk_norm": ("qk_layernorm",),
    "parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "attention_bias": ("qkv_bias", "use_bias", "bias"),
}
"""What some families call a field of ``Architecture``."""

DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("hidden_dropout", "residual_dropout", "embedding_dropout"),
)
"""What families call the probabilities of their dropouts; GPT-2's are 0.1 by themselves."""

NOISES = ("router_jitter_noise",)
"""Noise on what is routed, in transformers' own block alone: experts on their own ranks, and Megatron's, are
routed without."""


def build_model(architecture: Any, dropout: float = 0.0, attention: str | None = None) -> torch.nn.Module:
    """A causal language model of exactly ``architecture``'s sizes, fp32, SDPA where there is, no KV cache.

    ``dropout`` is the probability of every dropout that the family has (``Recipe.dropout``);
    ``attention`` the implementation (``Recipe.attention``), where it is not the one that the family uses.
    Every field of the architecture that the family's own transformers config knows goes into it by name.
    Raises ``RuntimeError`` if the model that comes out has another number of parameters than planned.
    """
    from transformers import AutoConfig

    values = config_values(architecture)
    known = AutoConfig.for_model(architecture.model_type).to_dict()
    values |= {name: dropout for name in DROPOUTS if name in known}
    return _built(AutoConfig.for_model(architecture.model_type, **values), architecture, attention)


def build_from_config(said: Mapping[str, Any], architecture: Any, dropout: float = 0.0) -> torch.nn.Module:
    """The model that ``said``, a config.json that was read, describes, of ``architecture``'s sizes, fp32.

    As :func:`build_model`, but what sizes do not tell (angles, epsilons, the activation) is the config's. No
    file is read for it: neither weights, nor another config that it names, nor code that lies beside it.
    """
    config = _read_as_transformers_does(said)
    config.use_cache = False
    if hasattr(config, "output_router_logits"):
        # A router's own loss is none of a pipeline's, nor of Megatron's: every engine trains the same.
        config.output_router_logits = False
    values = dict.fromkeys(DROPOUTS, dropout) | dict.fromkeys(NOISES, 0.0)
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return _built(config, architecture, None)


def _read_as_transformers_does(said: Mapping[str, Any]) -> Any:
    """What ``AutoConfig.from_pretrained`` makes of a config.json with this in it, without looking for one."""
    from transformers import CONFIG_MAPPING

    family = said["model_type"]
    if "layer_types" in said:
        # Its own exception: a Mistral some of whose layers have no window is another class there.
        family = family_named(family).model_type_with_layer_types or family
    kind = CONFIG_MAPPING[family]
    return kind.from_dict(copy.deepcopy(dict(said)))


def _built(config: Any, architecture: Any, attention: str | None) -> torch.nn.Module:
    """The model of a config of transformers'; ``RuntimeError`` if it is not ``architecture``'s in size."""
    from transformers import AutoModelForCausalLM

    own = attention or ("sdpa" if family_of(architecture).has_sdpa else "eager")
    spelled = "flash_attention_2" if own == "flash" else own
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=spelled, dtype=torch.float32
    )
    made = sum(parameter.numel() for parameter in model.parameters())
    if made != architecture.num_parameters:
        raise RuntimeError(
            f"the plan's {architecture.model_type} has {architecture.num_parameters:,} parameters, and "
            f"transformers made {made:,}: what was planned is not what would train"
        )
    return model


def config_values(architecture: Any) -> dict[str, Any]:
    """Keyword arguments of the family's transformers config, in that family's spelling."""
    from transformers import AutoConfig

    family = AutoConfig.for_model(architecture.model_type)
    known = {*family.to_dict(), *getattr(family, "attribute_map", {})} - {"model_type"}
    values = {name: value for name, value in _flat(architecture).items() if value is not None}
    for name, spellings in OTHER_SPELLINGS.items():
        values |= {spelling: values[name] for spelling in spellings if name in values}
    spelled = {name: value for name, value in values.items() if name in known}
    if "head_dim" not in known and architecture.head_dim * architecture.num_attention_heads != (
        architecture.hidden_size
    ):
        # Attention reads it off the config all the same, though the family's config class does not list it.
        spelled["head_dim"] = architecture.head_dim
    values = spelled | _special(architecture, family)
    by_layer = hasattr(family, "layer_types")  # which then say that no layer has a window
    if "sliding_window" in known and not by_layer and not architecture_has_windows(architecture):
        # Some families default to a window (Mistral's 4,096), which the plan did not count.
        values["sliding_window"] = None
    if getattr(family, "n_group", None) and values.get("n_routed_experts", 0) % family.n_group:
        # DeepSeek routes by groups of experts; how many groups changes no size.
        values |= {"n_group": 1, "topk_group": 1}
    # A family's default ids may lie outside of a small vocabulary; our tokenizer's only special token is 0.
    return {**values, "use_cache": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


def _special(architecture: Any, family: Any) -> dict[str, Any]:
    """What a family's config has and no other's."""
    own = family_of(architecture).config_values
    values: dict[str, Any] = dict(own(architecture)) if own else {}
    if architecture.latent_attention is not None:
        # None means no compression, which the family's default is not.
        values["q_lora_rank"] = architecture.latent_attention.q_lora_rank
    if hasattr(family, "use_sliding_window"):
        values["use_sliding_window"] = architecture_has_windows(architecture)
    if hasattr(family, "layer_types"):
        values["layer_types"] = _layer_types(
            architecture.num_hidden_layers, architecture.sliding_window_layers
        )
    return values


def _layer_types(num_layers: int, num_sliding: int) -> list[str]:
    """Windows on ``num_sliding`` layers, and layers that attend to everything evenly between them."""
    windows = layers_with_windows(num_layers, num_sliding)
    return ["sliding_attention" if window else "full_attention" for window in windows]


def architecture_has_windows(architecture: Any) -> bool:
    """Whether any layer attends to a sliding window only."""
    return bool(getattr(architecture, "sliding_window_layers", 0))


def _flat(architecture: Any) -> dict[str, Any]:
    """The fields of an architecture with those of its parts (experts, latent attention) beside them."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(architecture):
        value = getattr(architecture, field.name)
        if dataclasses.is_dataclass(value):
            values |= _flat(value)
        else:
            # Configs come from JSON and want lists.
            values[field.name] = list(value) if isinstance(value, tuple) else value
    shared, expert = values.get("shared_expert_intermediate_size"), values.get("moe_intermediate_size")
    if shared and expert:
        values["n_shared_experts"] = shared // expert
    return values
