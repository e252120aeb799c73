"""``module.to(...)`` over fake parameters, which torch itself can do only while nothing watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def converting_by_replacing() -> Iterator[None]:
    """Parameters are replaced where torch would swap a fake one's insides; tied ones stay tied.

    ``Module._apply`` swaps fake tensors, and ``swap_tensors`` refuses any that has a weak reference, as those
    that a dispatch mode has seen do.
    """
    original = torch.nn.Module._apply
    replaced: dict[int, tuple[Any, Any]] = {}
    depth = 0

    def apply(self: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        nonlocal depth
        depth += 1
        try:
            own = [parameter for parameter in self._parameters.values() if parameter is not None]
            if any(isinstance(parameter, DTensor) for parameter in own):
                return original(self, function, recurse)
            if recurse:
                for module in self.children():
                    module._apply(function)
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    self._parameters[name] = _converted(parameter, function, replaced)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = function(buffer)
            return self
        finally:
            depth -= 1
            if depth == 0:
                replaced.clear()

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


def _converted(parameter: Any, function: Callable[[Any], Any], replaced: dict[int, tuple[Any, Any]]) -> Any:
    if id(parameter) not in replaced:
        with torch.no_grad():
            new = function(parameter)
        kept = new if new is parameter else torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
        replaced[id(parameter)] = (parameter, kept)
    return replaced[id(parameter)][1]
