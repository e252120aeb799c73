"""Models without memory: built on the meta device, and given memory when each rank knows what it keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch


def build_on_meta(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """``make()`` with parameters on the meta device and buffers real: rotary tables are computed, not loaded.

    Like ``accelerate.init_empty_weights``, which unties tied weights: it copies a parameter that it already
    moved.
    """
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_on_meta
    try:
        return make()
    finally:
        torch.nn.Module.register_parameter = register


def give_memory(model: torch.nn.Module, device: torch.device, *, buffers_on: torch.device) -> None:
    """Memory on ``device`` for every parameter of ``model``, without values yet; buffers keep theirs."""
    # A tied weight is one parameter with two homes; `to_empty` would make it two.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    tied = tied_names(model)
    model.to_empty(device=device)
    tie(model, tied)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffers_on)


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Names that share one parameter, grouped."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: torch.nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group share one parameter again."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
