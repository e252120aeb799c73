"""Named ranges of a step's phases and layers in a recording: torch.profiler's, and NVTX's on GPUs.

Nsight Systems shows the NVTX ranges; both have the same names. Nothing is named while nothing records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

_open_range: Callable[[str], Callable[[], None]] | None = None
"""Opens a range in the recordings in progress and returns the function that closes it; None: none is."""


@contextlib.contextmanager
def name_range(name: str) -> Iterator[None]:
    """Name what runs inside, such as "forward", in the recordings in progress."""
    if _open_range is None:
        yield
        return
    close = _open_range(name)
    try:
        yield
    finally:
        close()


class Hook(Protocol):
    """A forward hook: it takes the module, its arguments, and of a finished forward the output."""

    def __call__(self, *_: object) -> None: ...


class Ranges:
    """The named ranges of one recording."""

    def __init__(self) -> None:
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._close: dict[str, Callable[[], None]] = {}
        self._before: Callable[[str], Callable[[], None]] | None = None

    def begin(self, device: torch.device, layers: Mapping[str, torch.nn.Module]) -> None:
        """Name phases from now on, and the forward of each of ``layers``."""
        global _open_range
        self._before = _open_range
        _open_range = _open_with_nvtx if device.type == "cuda" else _open_in_profiler
        for name, layer in layers.items():
            self._hooks.append(layer.register_forward_pre_hook(self._make_opening_hook(name)))
            # Of a forward that raises as well: its range would otherwise contain all that follows.
            self._hooks.append(layer.register_forward_hook(self._make_closing_hook(name), always_call=True))

    def end(self) -> None:
        """Remove the hooks, and restore the ranges that were active before :meth:`begin`."""
        global _open_range
        _open_range = self._before
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._close = {}

    def _make_opening_hook(self, name: str) -> Hook:
        def open_range(*_: object) -> None:
            if _open_range is not None:
                self._close[name] = _open_range(name)

        return open_range

    def _make_closing_hook(self, name: str) -> Hook:
        def close_range(*_: object) -> None:
            close = self._close.pop(name, None)
            if close is not None:
                close()

        return close_range


def name_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the model's repeated layers by name, such as "layers.3", numbered in the whole model from 0."""
    from shardscope.training.model.recompute import list_decoder_layers

    paths = {module: path for path, module in model.named_modules()}
    names: dict[str, torch.nn.Module] = {}
    for layer in list_decoder_layers(model):
        kind, number = paths[layer].split(".")[-2:]
        # Megatron's layers know their number in the whole model, from 1 (transformer_layer.py).
        known = getattr(layer, "layer_number", None)
        names[f"{kind}.{known - 1 if isinstance(known, int) else number}"] = layer
    return names


def _open_in_profiler(name: str) -> Callable[[], None]:
    from torch.profiler import record_function

    annotation = record_function(name)
    annotation.__enter__()
    return lambda: annotation.__exit__(None, None, None)


def _open_with_nvtx(name: str) -> Callable[[], None]:
    from torch.cuda import nvtx

    close_in_profiler = _open_in_profiler(name)
    nvtx.range_push(name)

    def close() -> None:
        nvtx.range_pop()
        close_in_profiler()

    return close
