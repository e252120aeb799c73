"""LoRA adapters (arXiv:2106.09685) with peft; everything else is frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardscope.core.number_format import format_count
from shardscope.memory.state.lora import find_adapter_targets
from shardscope.training.optimizers.gradients import local_shard

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.recipe import Recipe
    from shardscope.training.model.quantization import BaseRecord


def add_adapters(
    model: torch.nn.Module, architecture: Architecture, recipe: Recipe, *, in_fp32: bool = False
) -> torch.nn.Module:
    """Return ``model`` in peft's wrapper, with only its adapters trainable.

    Adapters have the model's precision, or fp32 with ``in_fp32`` (peft's own default for a base in half
    precision): mixed precision keeps fp32 master weights of trainable parameters.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=recipe.adapter_rank,
        lora_alpha=recipe.adapter_alpha,  # type: ignore[arg-type]  # annotated as int, used as a factor.
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        lora_dropout=recipe.lora_dropout,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=list(find_adapter_targets(architecture, recipe)),
    )
    adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
    return adapted


def reset_magnitudes(model: torch.nn.Module) -> None:
    """Set DoRA's magnitudes to the norms of the base's rows, as peft does if these have their values.

    Shards of both have the same rows.
    """
    with torch.no_grad():
        for module in model.modules():
            for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
                base = module.get_submodule("base_layer").get_parameter("weight")
                weight, into = local_shard(base), local_shard(magnitude.weight)
                into.copy_(torch.linalg.vector_norm(weight, dim=1, dtype=into.dtype))


def describe_adapters(num_weights: int, base: BaseRecord | None) -> str:
    """Describe adapters of ``num_weights`` in all, and their base (None: not quantized)."""
    adapters = format_count(num_weights, "adapter weight")
    if base is None:
        return f"{adapters} over a frozen base"
    kind = {"nf4": "NF4", "int8": "int8"}[base["base_quantization"]]
    double = " with double quantization" if base["base_double_quantization"] else ""
    linears = format_count(base["num_quantized_linears"], "Linear")
    return f"{adapters} over a frozen base quantized to {kind}{double} ({linears})"
