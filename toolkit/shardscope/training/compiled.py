"""Decoder layers compiled one by one, as torchtitan does: ``Recipe.kernels="compiled"``."""

from __future__ import annotations

import types

import torch

from shardscope.training.recompute import decoder_layers, recomputing


def compile_layers(model: torch.nn.Module, device_type: str) -> int:
    """Compile each decoder layer of ``model`` when it first runs; return how many will be.

    After :func:`~shardscope.training.recompute.apply_recompute`, of which a compiled layer knows "full".
    A layer's ``forward`` is replaced, not its ``__call__``: FSDP2's gathers and DDP's reductions stay outside
    of the graphs, and no parameter gets another name.
    """
    if device_type == "cpu":
        # A rank's compilers are its own: processes beside it would outlive it for a while.
        torch._inductor.config.compile_threads = 1
    layers = decoder_layers(model)
    for layer in layers:
        # Layers are alike, and share one graph as long as they share the code that is compiled.
        again = "forward" in vars(layer)
        forward = types.MethodType(recomputing, layer) if again else layer.forward
        layer.forward = torch.compile(forward, dynamic=False)
    return len(layers)
