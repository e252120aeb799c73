"""Models too large to build whole on every rank: built without memory, sharded, filled shard by shard."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.memory.arithmetic import ceil_div

INITIALIZER_STD = 0.02
"""GPT-2's, and the default ``initializer_range`` of every decoder family in transformers."""


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


def check_has_weights(model: torch.nn.Module) -> None:
    """Raise ``ValueError`` if ``model`` has parameters without values: it would train on what memory held."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(
            f"build_model gives {len(empty)} parameters on the meta device ({', '.join(empty[:3])}), which "
            "have no values; allowed: real weights. Nearest fix: build without torch.device('meta'), and set "
            "engine.fresh_weights = True before setup for a decoder from random weights."
        )


def materialise(model: torch.nn.Module, *, device: torch.device, seed: int, compute: torch.device) -> None:
    """Give every sharded parameter memory on ``device`` and initial weights that no world size changes.

    Each whole tensor is drawn on ``compute`` from a generator seeded by ``seed`` and its name, a stack of
    experts matrix by matrix, and this rank keeps its shard: the peak is one whole matrix, and 1 rank or 64
    start from the same model. Matrices are normal with std 0.02 (``config.initializer_range`` if the model
    has one), LoRA's B and biases zero, other vectors one. Those are a decoder's rules, so only tasks that
    say ``engine.fresh_weights`` come here.
    """
    std = float(getattr(getattr(model, "config", None), "initializer_range", INITIALIZER_STD))
    # A tied weight is one parameter with two homes; `to_empty` would make it two.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    tied = tied_names(model)
    model.to_empty(device=device)
    tie(model, tied)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(compute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=compute).manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
            draw = functools.partial(_drawn, name, parameter, std, generator)
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.ndim < 3:
                own.copy_(_own_part(draw(parameter.shape), parameter))
                continue
            rows = _own_rows(parameter)
            for place in range(parameter.shape[0]):
                matrix = draw(parameter.shape[1:])
                if place in rows:
                    own[place - rows.start].copy_(matrix)
                del matrix


def _drawn(
    name: str, parameter: torch.Tensor, std: float, generator: torch.Generator, shape: torch.Size
) -> torch.Tensor:
    """Initial weights of ``parameter``, or of one matrix in its stack, where ``generator`` is."""
    drawn = torch.empty(shape, dtype=parameter.dtype, device=generator.device)
    if name.endswith("bias") or "lora_B" in name:
        return drawn.zero_()
    return drawn.fill_(1.0) if parameter.ndim < 2 else drawn.normal_(0.0, std, generator=generator)


def _own_rows(parameter: torch.Tensor) -> range:
    """Which rows of a stack, along its first dimension, this rank keeps: cut as in :func:`_own_part`."""
    rows = range(parameter.shape[0])
    if isinstance(parameter, DTensor):
        for axis, placement in reversed(list(enumerate(parameter.placements))):
            if isinstance(placement, Shard | _StridedShard):
                if placement.dim != 0:
                    raise ValueError(f"a stack of matrices is cut along dimension {placement.dim}, not 0")
                each = ceil_div(len(rows), parameter.device_mesh.size(axis))
                first = each * parameter.device_mesh.get_local_rank(axis)
                rows = rows[first : first + each]
    return rows


def _own_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of ``whole``, cut as ``Shard`` cuts: equal chunks, the last ones short or empty."""
    if not isinstance(parameter, DTensor):
        return whole
    # The last axis cut first: under a tensor-parallel cut FSDP2 shards what that left (_StridedShard).
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if isinstance(placement, Shard | _StridedShard):
            chunks = whole.chunk(parameter.device_mesh.size(axis), dim=placement.dim)
            index = parameter.device_mesh.get_local_rank(axis)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


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
