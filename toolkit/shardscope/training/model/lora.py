"""LoRA adapters (arXiv:2106.09685) with peft; everything else is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardscope.core.number_format import format_count
from shardscope.memory.state.lora import find_adapter_targets

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.recipe import Recipe


def add_adapters(
    model: torch.nn.Module, architecture: Architecture, recipe: Recipe, *, in_fp32: bool = False
) -> torch.nn.Module:
    """Return ``model`` in peft's wrapper, with only its adapters trainable.

    Adapters have the model's precision, or fp32 with ``in_fp32`` (peft's own default for a base in half
    precision): mixed precision keeps fp32 master weights of trainable parameters.
    """
    from peft import LoraConfig, get_peft_model

    rank = recipe.adapter_rank
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=recipe.lora_dropout,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=list(find_adapter_targets(architecture, recipe)),
    )
    adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
    return adapted


def describe_adapters(built: Mapping[str, Any]) -> str:
    """Describe the adapters and the result of :func:`shardscope.training.model.quantized.check_base`."""
    number = format_count(built["num_trained_parameters"], "adapter weight")
    if "base_quantization" not in built:
        return f"{number} over a frozen base"
    kind = {"nf4": "NF4", "int8": "int8"}[built["base_quantization"]]
    double = " with double quantisation" if built["base_double_quantization"] else ""
    return (
        f"{number} over a base in {kind}{double} ({format_count(built['num_quantized_linears'], 'Linear')})"
    )
