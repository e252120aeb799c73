"""Where a model's first weights come from, tensor by tensor and no more of each than is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shardscope.training.model.on_meta import build_on_meta, give_memory

INITIALIZER_STD = 0.02
"""GPT-2's, and the default ``initializer_range`` of every decoder family in transformers."""

CPU = torch.device("cpu")

Region = Sequence[range]
"""Part of a tensor: of each dimension a run of places."""


class InitialWeights(Protocol):
    """Gives tensors of a model their first values, by the names that the model has for them."""

    def __contains__(self, name: str) -> bool:
        """Whether it has the buffer ``name``; others are tables that every model computes."""

    def write(self, name: str, shape: torch.Size, region: Region, into: torch.Tensor) -> None:
        """Give ``into`` the values of ``region`` of the tensor ``name``, which is of ``shape`` in all."""


class FreshWeights:
    """Random ones, the same whatever ranks there are.

    Each whole tensor is drawn on ``device`` from a generator seeded by ``seed`` and its name, a stack of
    experts matrix by matrix: the peak is one whole matrix, unless that is what is asked for. Matrices are
    normal with std 0.02 (``config.initializer_range`` if ``model`` has one), LoRA's A uniform as peft's, its
    B and biases zero, other vectors one. Those are a decoder's rules, so only tasks that say
    ``engine.fresh_weights`` get them, and adapters.
    """

    def __init__(self, model: torch.nn.Module, *, seed: int, device: torch.device) -> None:
        config = getattr(model, "config", None)
        self._std = float(getattr(config, "initializer_range", INITIALIZER_STD))
        self._seed, self._device = seed, device

    def __contains__(self, name: str) -> bool:
        return False

    def write(self, name: str, shape: torch.Size, region: Region, into: torch.Tensor) -> None:
        generator = torch.Generator(device=self._device)
        generator.manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
        if len(shape) < 3:
            self._write(name, shape, region, into, generator)
            return
        rows, *inner = region
        for place in range(shape[0]):
            if place in rows:
                self._write(name, shape[1:], inner, into[place - rows.start], generator)
            else:
                # What comes after it is drawn from where this leaves the generator.
                self._drawn(name, torch.empty(shape[1:], dtype=into.dtype, device=self._device), generator)

    def _write(
        self, name: str, shape: torch.Size, region: Region, into: torch.Tensor, generator: torch.Generator
    ) -> None:
        if into.shape == shape and into.device == self._device and into.is_contiguous():
            self._drawn(name, into, generator)
            return
        whole = torch.empty(shape, dtype=into.dtype, device=self._device)
        into.copy_(part(self._drawn(name, whole, generator), region))

    def _drawn(self, name: str, whole: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if name.endswith("bias") or "lora_B" in name:
            return whole.zero_()
        if "lora_A" in name:
            # kaiming_uniform_(a=sqrt(5)), as torch's Linear has it too.
            bound = whole.shape[-1] ** -0.5
            return whole.uniform_(-bound, bound, generator=generator)
        return whole.fill_(1.0) if whole.ndim < 2 else whole.normal_(0.0, self._std, generator=generator)


def build_filled(
    make: Callable[[], torch.nn.Module], weights_for: Callable[[torch.nn.Module], InitialWeights]
) -> torch.nn.Module:
    """What ``make`` makes, a model of transformers' or a part of one, in host memory with its first weights.

    Only those of what is there are read or drawn: of a pipeline stage its own layers'.
    """
    model = build_on_meta(make)
    weights = weights_for(model)
    give_memory(model, CPU, buffers_on=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights.write(name, parameter.shape, all_of(parameter.shape), parameter)
    fill_buffers(model, weights)
    return model


def fill_buffers(model: torch.nn.Module, weights: InitialWeights) -> None:
    """Give ``model`` those buffers that ``weights`` has."""
    for name, buffer in model.named_buffers():
        if name in weights:
            weights.write(name, buffer.shape, all_of(buffer.shape), buffer)


def draw_adapters(model: torch.nn.Module, seed: int) -> None:
    """Give the adapters in ``model`` the weights that every engine and every number of ranks begins from."""
    fresh = FreshWeights(model, seed=seed, device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                fresh.write(name, parameter.shape, all_of(parameter.shape), parameter)


def part(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """``region`` of ``whole``, as a view."""
    return whole[tuple(slice(run.start, run.stop) for run in region)]


def all_of(shape: torch.Size) -> Region:
    """The region that is a whole tensor."""
    return [range(size) for size in shape]
