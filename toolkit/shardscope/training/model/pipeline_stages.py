"""Pipeline stages of a transformers model: its own modules under their original names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, TypeVar, overload

import torch

from shardscope.training.model.recompute import list_decoder_layers

if TYPE_CHECKING:
    PositionSlice = slice[int | None, int | None, int | None]

Module = TypeVar("Module", bound=torch.nn.Module)
GRANITE_MULTIPLIER = "embedding_multiplier"
"""Attribute of Granite's body: a factor of the embedding's output, which only the first stage applies."""


class NumberedLayers(torch.nn.ModuleList):
    """Layers under their numbers in the whole model, so that parameter names match its checkpoints."""

    def __init__(self, layers: dict[int, torch.nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self._modules[str(number)] = layer

    @overload
    def __getitem__(self, index: PositionSlice) -> Self: ...
    @overload
    def __getitem__(self, index: int) -> torch.nn.Module: ...
    def __getitem__(self, index: int | PositionSlice) -> torch.nn.Module:
        """Index by position, not by number: transformers' models slice the list of layers."""
        numbered = [(int(number), layer) for number, layer in self.named_children()]
        return type(self)(dict(numbered[index])) if isinstance(index, slice) else numbered[index][1]


def extract_stage(
    model: torch.nn.Module, numbers: Sequence[int], *, is_first: bool, is_last: bool
) -> torch.nn.Module:
    """Return a copy of ``model``, a transformers causal LM, with only the layers of ``numbers``.

    The embedding is kept if ``is_first``, the final norm and the head if ``is_last``. Modules and parameters
    are the same objects as the whole model's and have the same names; ``model`` is not changed.
    """
    from transformers import PreTrainedModel

    assert isinstance(model, PreTrainedModel)
    stage = copy_shallow(model)
    body = copy_shallow(stage.get_submodule("model"))
    assert isinstance(body, PreTrainedModel)
    # If ``model`` is a stage itself, its layers keep the numbers that they have in the whole model.
    layers = body.get_submodule("layers")
    layers_by_number = dict(enumerate(list_decoder_layers(model)))
    if isinstance(layers, NumberedLayers):
        layers_by_number = {int(name): layer for name, layer in layers.named_children()}
    # transformers' forward indexes config.layer_types by the position in this stage.
    config = copy.deepcopy(model.config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        by_number = dict(zip(layers_by_number, layer_types, strict=True))
        config.layer_types = [by_number[number] for number in numbers]
    # Children are replaced in ``_modules``, as Module.__setattr__ does; None keeps the name without a module.
    body._modules["layers"] = NumberedLayers({number: layers_by_number[number] for number in numbers})
    if not is_first:
        body._modules["embed_tokens"] = None
        if hasattr(body, GRANITE_MULTIPLIER):
            setattr(body, GRANITE_MULTIPLIER, 1.0)
    if not is_last:
        body._modules["norm"] = torch.nn.Identity()
        stage._modules["lm_head"] = None
    stage._modules["model"] = body
    stage.config = body.config = config
    return stage


def copy_shallow(module: Module) -> Module:
    """Return a shallow copy of ``module`` whose children can be replaced without changing ``module``."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell
