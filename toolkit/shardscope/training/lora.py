"""LoRA (arXiv:2106.09685) through peft: adapters train, everything else is frozen."""

from __future__ import annotations

from typing import Any

import torch

from shardscope.memory.lora import adapter_targets


def check_peft() -> None:
    """Raise ``ValueError`` with the pip line if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ValueError(
            "Recipe.method is 'lora', which trains through peft, and peft is not installed; allowed: 'full', "
            "or 'lora' with peft. Nearest fix: pip install peft."
        ) from None


def add_adapters(model: torch.nn.Module, architecture: Any, recipe: Any) -> torch.nn.Module:
    """``model`` inside peft's wrapper, with only its adapters trainable.

    Adapters keep the precision of the model: peft's default would make them fp32 in a bf16 model, which is
    not what the plan counted.
    """
    check_peft()
    from peft import LoraConfig, get_peft_model

    rank = recipe.adapter_rank
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=list(adapter_targets(architecture, recipe)),
    )
    adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted
