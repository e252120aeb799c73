"""Model construction on the meta device, and allocation once each rank knows its part of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch

REGISTER_METHOD = "register_parameter"
"""Method of ``torch.nn.Module`` that is replaced while a model is built."""


def build_on_meta(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return ``build()`` with parameters on the meta device and real buffers: rotary tables are computed.

    Similar to ``accelerate.init_empty_weights``, but keeps tied weights tied: accelerate's copies a
    parameter that is already on the meta device.
    """
    # Modules create parameters in __init__ and register them at once: each is freed before the next one.
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    setattr(torch.nn.Module, REGISTER_METHOD, register_on_meta)
    try:
        return build()
    finally:
        setattr(torch.nn.Module, REGISTER_METHOD, register)


def allocate_parameters(model: torch.nn.Module, device: torch.device, *, buffers_on: torch.device) -> None:
    """Allocate every parameter of ``model`` on ``device``, uninitialized; buffers keep their values."""
    # `to_empty` would make two parameters of a tied weight.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    groups = find_tied_names(model)
    model.to_empty(device=device)
    tie_parameters(model, groups)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffers_on)


def find_tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return groups of names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_parameters(model: torch.nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group share one parameter again."""
    for first, *other_names in groups:
        parameter = model.get_parameter(first)
        for name in other_names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
