"""The transformers model that an ``Architecture`` describes, with fresh weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

OTHER_SPELLINGS = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "intermediate_size": ("n_inner",),
}
"""What Mixtral, DeepSeek and GPT-2 call a field of ``Architecture``."""

WITHOUT_SDPA = frozenset({"gemma2"})
"""Families whose soft-capped attention transformers runs in plain operations only."""


def build_model(architecture: Any) -> torch.nn.Module:
    """A causal language model of exactly ``architecture``'s sizes, fp32, SDPA where there is, no KV cache.

    Every field of the architecture that the family's own transformers config knows goes into it by name.
    Raises ``RuntimeError`` if the model that comes out has another number of parameters than planned.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture.model_type, **config_values(architecture))
    attention = "eager" if architecture.model_type in WITHOUT_SDPA else "sdpa"
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
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
    values = {name: value for name, value in values.items() if name in known}
    if "sliding_window" in known and not architecture_has_windows(architecture):
        # Some families default to a window (Mistral's 4,096), which the plan did not count.
        values["sliding_window"] = None
    if "n_group" in known and values.get("n_routed_experts", 0) % family.n_group:
        # DeepSeek routes by groups of experts; how many groups changes no size.
        values |= {"n_group": 1, "topk_group": 1}
    # A family's default ids may lie outside of a small vocabulary; our tokenizer's only special token is 0.
    return {**values, "use_cache": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


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
