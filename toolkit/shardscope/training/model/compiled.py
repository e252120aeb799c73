"""Decoder layers compiled one by one, as torchtitan does: ``Recipe.kernels="compiled"``."""

from __future__ import annotations

import types
from typing import Any

import torch

from shardscope.training.model.recompute import decoder_layers, recomputing


def compile_layers(model: torch.nn.Module, device_type: str) -> None:
    """Compile each decoder layer of ``model`` when it first runs.

    After ``recompute.apply_recompute``, of which a compiled layer knows "full".
    A layer's ``forward`` is replaced, not its ``__call__``: FSDP2's gathers and DDP's reductions stay outside
    of the graphs, and no parameter gets another name.
    """
    if device_type == "cpu":
        # A rank's compilers are its own: processes beside it would outlive it for a while.
        torch._inductor.config.compile_threads = 1
    for layer in decoder_layers(model):
        # Layers are alike, and share one graph as long as they share the code that is compiled.
        again = "forward" in vars(layer)
        forward = types.MethodType(recomputing, layer) if again else layer.forward
        layer.forward = torch.compile(forward, dynamic=False)


def check_compiled(model: torch.nn.Module, *, planned: bool) -> dict[str, Any]:
    """How many decoder layers of ``model`` are compiled, for a run's record.

    Raises ``RuntimeError`` if all were planned to be and some are not: where TORCHDYNAMO_DISABLE is set,
    ``torch.compile`` gives back what it was given.
    """
    layers = decoder_layers(model)
    found = sum(hasattr(vars(layer).get("forward"), "_torchdynamo_orig_callable") for layer in layers)
    if planned and found < len(layers):
        raise RuntimeError(
            f"the plan says kernels='compiled', and {found} of {len(layers)} decoder layers are: is "
            "TORCHDYNAMO_DISABLE set?"
        )
    return {"num_compiled_layers": found}
