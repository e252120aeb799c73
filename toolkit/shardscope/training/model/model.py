"""transformers models built from an ``Architecture``, with randomly initialized weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from shardscope.families.registry import find_family, get_family
from shardscope.families.unknown import UnknownFamily, build_transformers_config
from shardscope.memory.activations.modules.attention import find_window_layers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from transformers import PreTrainedConfig

    from shardscope.core.architecture import Architecture

OTHER_SPELLINGS = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "num_key_value_heads": ("num_kv_heads",),
    "qk_norm": ("qk_layernorm", "use_qk_norm"),
    "parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "attention_bias": ("qkv_bias", "use_bias", "bias"),
    "attention_output_bias": ("attention_out_bias",),
}
"""Other names of ``Architecture`` fields in the configs of some model families."""

DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    *("hidden_dropout", "residual_dropout", "embedding_dropout"),
)
"""Names of dropout probabilities in transformers configs; GPT-2's default to 0.1."""

NOISES = ("router_jitter_noise",)
"""Router noise, which exists only in transformers' own MoE block: with expert parallelism and in Megatron
there is none."""


def build_model(
    architecture: Architecture, dropout: float = 0.0, attention: str | None = None
) -> torch.nn.Module:
    """Build a causal language model with the sizes of ``architecture``: fp32, SDPA if supported, no KV cache.

    ``dropout`` is the probability of all dropouts of the family (``Recipe.dropout``); ``attention`` is the
    implementation (``Recipe.attention``), None for the family's default. All fields of the architecture that
    the family's transformers config has are passed by name. Raises ``RuntimeError`` if the number of
    parameters differs from the plan's.
    """
    return _build_checked(build_model_config(architecture, dropout), architecture, attention)


def build_model_config(architecture: Architecture, dropout: float = 0.0) -> PreTrainedConfig:
    """Return the transformers config of ``architecture``: of a family without formulas, its config.json's."""
    from transformers import AutoConfig

    if isinstance(architecture, UnknownFamily):
        # Its sizes are only those that degrees are checked against, and say nothing of its layers.
        config = build_transformers_config(architecture)
        _set_for_training(config.get_text_config(), dropout)
        return config
    values = config_values(architecture)
    known = AutoConfig.for_model(architecture.model_type).to_dict()
    values |= {name: dropout for name in DROPOUTS if name in known}
    built: PreTrainedConfig = AutoConfig.for_model(architecture.model_type, **values)
    return built


def build_from_config(
    config_json: Mapping[str, object], architecture: Architecture, dropout: float = 0.0
) -> torch.nn.Module:
    """Build the fp32 model of ``config_json``, a config.json's content, with the sizes of ``architecture``.

    Unlike :func:`build_model` it keeps the config's other settings (rotary angles, epsilons, the activation).
    No file is read: neither weights, nor a config that it refers to, nor code in its folder.
    """
    config = parse_config(config_json)
    of_language_model = config.get_text_config()
    of_language_model.use_cache = False
    _set_for_training(of_language_model, dropout)
    return _build_checked(config, architecture, None)


def _set_for_training(config: PreTrainedConfig, dropout: float) -> None:
    """Set what the recipe, not the config.json, decides: dropouts, router noise and the router's loss."""
    if hasattr(config, "output_router_logits"):
        # No auxiliary router loss: pipelines and Megatron have none, and all engines must train the same.
        config.output_router_logits = False
    values = dict.fromkeys(DROPOUTS, dropout) | dict.fromkeys(NOISES, 0.0)
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def parse_config(config_json: Mapping[str, object]) -> PreTrainedConfig:
    """Return the config that ``AutoConfig.from_pretrained`` would read from this config.json content."""
    from transformers import CONFIG_MAPPING

    family = str(config_json["model_type"])
    if "layer_types" in config_json:
        # transformers' own exception: a Mistral with windows on only some layers is another class there.
        family = get_family(family).model_type_with_layer_types or family
    config: PreTrainedConfig = CONFIG_MAPPING[family].from_dict(copy.deepcopy(dict(config_json)))
    return config


def _build_checked(
    config: PreTrainedConfig, architecture: Architecture, attention: str | None
) -> torch.nn.Module:
    """Build the model of a config. Raises ``RuntimeError`` if its size differs from ``architecture``'s."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=choose_attention(architecture, attention), dtype=torch.float32
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters != architecture.num_parameters:
        raise RuntimeError(
            f"the plan's {architecture.model_type} has {architecture.num_parameters:,} parameters, and the "
            f"one that transformers built has {num_parameters:,}: the plan's memory and time would be wrong"
        )
    return model


def choose_attention(architecture: Architecture, attention: str | None) -> str | None:
    """Return transformers' name of an attention implementation; ``attention`` None: the family's default.

    None is transformers' own choice: whether a family without formulas has SDPA is unknown here.
    """
    if attention is not None:
        return "flash_attention_2" if attention == "flash" else attention
    if isinstance(architecture, UnknownFamily):
        return None
    return "sdpa" if find_family(architecture).has_sdpa else "eager"


def config_values(architecture: Architecture) -> dict[str, object]:
    """Return the keyword arguments of the family's transformers config, with that family's field names."""
    from transformers import AutoConfig

    # Fields of the architecture that the family's config has, under its own or another family's names. Others
    # are left out: a config class accepts any keyword and silently stores it.
    family = AutoConfig.for_model(architecture.model_type)
    known = {*family.to_dict(), *getattr(family, "attribute_map", {})} - {"model_type"}
    values = {name: value for name, value in _flatten_fields(architecture).items() if value is not None}
    for name, spellings in OTHER_SPELLINGS.items():
        values |= {spelling: values[name] for spelling in spellings if name in values}
    known_values = {name: value for name, value in values.items() if name in known}
    if "head_dim" not in known and architecture.head_dim * architecture.num_attention_heads != (
        architecture.hidden_size
    ):
        # The attention module reads it from the config, although the config class does not declare it.
        known_values["head_dim"] = architecture.head_dim
    values = known_values | _family_values(architecture, family)
    # Where a config has layer_types, those say that no layer has a window.
    has_layer_types = hasattr(family, "layer_types")
    if "sliding_window" in known and not has_layer_types and not architecture.sliding_window_layers:
        # Some families default to a window (Mistral's 4,096), which the plan did not count.
        values["sliding_window"] = None
    num_groups = getattr(family, "n_group", None)
    num_experts = values.get("n_routed_experts", 0)
    if (
        num_groups
        and isinstance(num_experts, int)
        and (num_experts % num_groups or num_experts < 2 * num_groups)
    ):
        # DeepSeek routes by groups of experts, each scored by its two best ones (DeepseekV3MoE); how many
        # groups changes no size.
        values |= {"n_group": 1, "topk_group": 1}
    # A family's default token ids may exceed a small vocabulary; our tokenizer's only special token is 0.
    return {**values, "use_cache": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


def _family_values(architecture: Architecture, family: PreTrainedConfig) -> dict[str, object]:
    """Return the config values that only some families have."""
    extra_values = find_family(architecture).config_values
    values: dict[str, object] = dict(extra_values(architecture)) if extra_values else {}
    if architecture.latent_attention is not None:
        # Set it explicitly: None means no compression, but the family's default is a number.
        values["q_lora_rank"] = architecture.latent_attention.q_lora_rank
    if hasattr(family, "use_sliding_window"):
        values["use_sliding_window"] = bool(architecture.sliding_window_layers)
    if hasattr(family, "layer_types"):
        values["layer_types"] = _layer_types(
            architecture.num_hidden_layers, architecture.sliding_window_layers
        )
    return values


def _layer_types(num_layers: int, num_sliding: int) -> list[str]:
    """Return the attention type of each layer, with ``num_sliding`` windows evenly distributed."""
    windows = find_window_layers(num_layers, num_sliding)
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _flatten_fields(architecture: DataclassInstance) -> dict[str, object]:
    """Return the fields of an architecture and its nested parts (experts, latent attention) in one dict."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(architecture):
        value = getattr(architecture, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= _flatten_fields(value)
        else:
            # transformers configs expect lists, as in JSON.
            values[field.name] = list(value) if isinstance(value, tuple) else value
    shared, expert = values.get("shared_expert_intermediate_size"), values.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(expert, int) and shared and expert:
        # DeepSeek's config has a number of shared experts, each as wide as a routed one.
        values["n_shared_experts"] = shared // expert
    return values
