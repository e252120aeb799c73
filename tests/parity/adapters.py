"""Adapters as somebody who knows peft and bitsandbytes puts them over a model, without any of our code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def with_adapters(model: torch.nn.Module, recipe: Any) -> torch.nn.Module:
    """LoRA over ``model``, in NF4 with double quantisation or in int8 where the recipe says so."""
    import torch
    from peft import LoraConfig, get_peft_model

    if recipe.method == "qlora" or recipe.quantization:
        # What packing draws for modules that it fills at once is no part of the adapters' draw.
        with torch.random.fork_rng(devices=[]):
            pack_linears(model, recipe)
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        lora_dropout=0.0,
        target_modules=list(recipe.lora_targets),
        task_type="CAUSAL_LM",
    )
    adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def pack_linears(model: Any, recipe: Any) -> None:
    """Pack every Linear except the head's, as QLoRA's authors do (artidoro/qlora, ``qlora.py``)."""
    import bitsandbytes as bnb
    import torch

    in_int8 = recipe.quantization == "int8"
    for parent in list(model.model.modules()):
        for name, linear in list(parent.named_children()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            sizes = (linear.in_features, linear.out_features)
            if in_int8:
                packed: Any = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            else:
                packed = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compress_statistics=True)
            packed.load_state_dict(linear.state_dict())
            setattr(parent, name, packed.to("cpu"))
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = in_int8, not in_int8
