"""Per-layer ``torch.compile``, as in torchtitan: ``Recipe.kernels="compiled"``."""

from __future__ import annotations

import types

import torch

from shardscope.training.model.recompute import list_decoder_layers, run_recomputed


def compile_layers(model: torch.nn.Module, device_type: str) -> None:
    """Wrap each decoder layer of ``model`` in ``torch.compile``; it is compiled at its first call.

    Call it after ``recompute.apply_recompute``, of which compiled layers support "full" only. A layer's
    ``forward`` is replaced, not its ``__call__``: FSDP2's all-gathers and DDP's reductions stay outside of
    the graphs, and parameter names do not change.
    """
    if device_type == "cpu":
        # Compile in the rank's own process: Inductor's worker processes would outlive it for a while.
        torch._inductor.config.compile_threads = 1
    for layer in list_decoder_layers(model):
        # Identical layers share one graph as long as the compiled function is the same code object.
        is_recomputed = "forward" in vars(layer)
        forward = types.MethodType(run_recomputed, layer) if is_recomputed else layer.forward
        layer.forward = torch.compile(forward, dynamic=False)


def check_compiled(model: torch.nn.Module, *, planned: bool) -> dict[str, object]:
    """Return the number of compiled decoder layers of ``model``, for the run's record.

    Raises ``RuntimeError`` if ``planned`` and some layers are not compiled: with TORCHDYNAMO_DISABLE set,
    ``torch.compile`` returns the function unchanged.
    """
    layers = list_decoder_layers(model)
    num_compiled = sum(hasattr(vars(layer).get("forward"), "_torchdynamo_orig_callable") for layer in layers)
    if planned and num_compiled < len(layers):
        raise RuntimeError(
            f"the plan says kernels='compiled', and {num_compiled} of {len(layers)} decoder layers are: is "
            "TORCHDYNAMO_DISABLE set?"
        )
    return {"num_compiled_layers": num_compiled}
