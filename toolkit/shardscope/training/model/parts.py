"""Pipeline stages of a transformers model: its own modules under their original names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from shardscope.training.model.recompute import decoder_layers


class NumberedLayers(torch.nn.ModuleList):  # type: ignore[misc]
    """Layers under their numbers in the whole model, so that parameter names match its checkpoints."""

    def __init__(self, layers: dict[int, torch.nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self._modules[str(number)] = layer

    def __getitem__(self, index: Any) -> Any:
        """Index by position, not by number: transformers' models slice the list of layers."""
        return list(self._modules.values())[index]


def extract_stage(
    model: torch.nn.Module, numbers: Sequence[int], *, is_first: bool, is_last: bool
) -> torch.nn.Module:
    """Return a copy of ``model``, a transformers causal LM, with only the layers of ``numbers``.

    The embedding is kept if ``is_first``, the final norm and the head if ``is_last``. Modules and parameters
    are the same objects as the whole model's and have the same names; ``model`` is not changed.
    """
    stage: Any = copy_shallow(model)
    body: Any = copy_shallow(stage.model)
    layers_by_number = dict(enumerate(decoder_layers(model)))
    if isinstance(body.layers, NumberedLayers):
        layers_by_number = {int(name): layer for name, layer in body.layers.named_children()}
    config = copy.deepcopy(model.config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        by_number = dict(zip(layers_by_number, layer_types, strict=True))
        config.layer_types = [by_number[number] for number in numbers]
    body.layers = NumberedLayers({number: layers_by_number[number] for number in numbers})
    if not is_first:
        body.embed_tokens = None
        if hasattr(body, "embedding_multiplier"):  # Granite's, which the first stage applies.
            body.embedding_multiplier = 1.0
    if not is_last:
        body.norm = torch.nn.Identity()
        stage.lm_head = None
    stage.model = body
    stage.config = body.config = config
    return stage


def copy_shallow(module: torch.nn.Module) -> torch.nn.Module:
    """Return a shallow copy of ``module`` whose children can be replaced without changing ``module``."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell
