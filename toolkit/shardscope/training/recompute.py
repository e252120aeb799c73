"""Recomputation of activations, per decoder layer: ``Recipe.recompute``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT_BY_SELECTIVE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
)
"""Outputs that "selective" keeps: products and attention. Norms, activations, rotary and residuals are cheap
to compute again. The same list as torchtitan's, less its collectives (there is none inside a layer here)."""


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers of ``model``: its longest ``ModuleList``; empty if it has none."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # Lists of experts inside a layer can be longer than the list of layers: the outermost come first.
    outer: list[torch.nn.ModuleList] = []
    for candidate in lists:
        if not any(candidate is inner for taken in outer for inner in taken.modules()):
            outer.append(candidate)
    found: list[torch.nn.Module] = []
    for candidate in outer:
        found = list(candidate) if len(candidate) > len(found) else found
    return found


def apply_recompute(model: torch.nn.Module, recompute: str) -> int:
    """Make each decoder layer recompute in the backward pass; return how many do.

    The layer's ``forward`` is replaced, not its ``__call__``: FSDP2's all-gather hooks stay outside of what
    is recomputed, and no parameter gets another name (``checkpoint_wrapper`` would add a prefix). Raises
    ``ValueError`` for an unknown choice and for a model without layers.
    """
    if recompute == "none":
        return 0
    if recompute not in ("full", "selective"):
        raise ValueError(
            f"Recipe.recompute is {recompute!r}; allowed: 'none', 'selective', 'full'. Nearest fix: 'full'."
        )
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(
            f"Recipe.recompute is {recompute!r}, but {type(model).__name__} has no ModuleList of layers; "
            "allowed: a model with one, or recompute='none'. Nearest fix: 'none'."
        )
    context: dict[str, Any] = {}
    if recompute == "selective":
        context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **context)
    return len(layers)


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT_BY_SELECTIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
