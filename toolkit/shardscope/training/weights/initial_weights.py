"""Initial weights of a model, written tensor by tensor and only for the requested region of each."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shardscope.training.model.meta_device import allocate_parameters, build_on_meta

INITIALIZER_STD = 0.02
"""GPT-2's, and the default ``initializer_range`` of every decoder family in transformers."""

CPU = torch.device("cpu")

Region = Sequence[range]
"""Slice of a tensor: one index range per dimension."""


class InitialWeights(Protocol):
    """Source of a model's initial values, addressed by the model's own tensor names."""

    def __contains__(self, name: str) -> bool:
        """Return whether the source has the buffer ``name``; a model computes its other buffers itself."""

    def write(self, name: str, shape: torch.Size, region: Region, into: torch.Tensor) -> None:
        """Write ``region`` of the tensor ``name`` into ``into``; ``shape`` is that of the whole tensor."""


class FreshWeights:
    """Randomly initialized weights, independent of the number of ranks.

    Each tensor is generated whole on ``device`` from a generator seeded by ``seed`` and its name; stacked
    experts are generated matrix by matrix. The temporary memory is one whole matrix, or none if the whole
    matrix is requested. Matrices are normal with std 0.02 (``config.initializer_range`` if ``model`` has
    one), LoRA's A is uniform as in peft, LoRA's B and biases are zero, other vectors are one. These are the
    rules of decoders: they apply to adapters and to tasks that set ``engine.fresh_weights`` only.
    """

    def __init__(self, model: torch.nn.Module, *, seed: int, device: torch.device) -> None:
        config = getattr(model, "config", None)
        self._std = float(getattr(config, "initializer_range", INITIALIZER_STD))
        self._seed, self._device = seed, device

    def __contains__(self, name: str) -> bool:
        return False

    def write(self, name: str, shape: torch.Size, region: Region, into: torch.Tensor) -> None:
        # zlib's hash, because Python's hash of a string differs between processes.
        generator = torch.Generator(device=self._device)
        generator.manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
        if len(shape) < 3:
            self._write_matrix(name, shape, region, into, generator)
            return
        rows, *inner = region
        for index in range(shape[0]):
            if index in rows:
                self._write_matrix(name, shape[1:], inner, into[index - rows.start], generator)
            else:
                # Generate and drop the matrix: the values of the next one depend on the generator's state.
                self._fill(name, torch.empty(shape[1:], dtype=into.dtype, device=self._device), generator)

    def _write_matrix(
        self, name: str, shape: torch.Size, region: Region, into: torch.Tensor, generator: torch.Generator
    ) -> None:
        # The whole matrix is requested: fill it in place, without temporary memory.
        if into.shape == shape and into.device == self._device and into.is_contiguous():
            self._fill(name, into, generator)
            return
        full = torch.empty(shape, dtype=into.dtype, device=self._device)
        into.copy_(self._fill(name, full, generator)[slice_indices(region)])

    def _fill(self, name: str, full: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if name.endswith("bias") or "lora_B" in name:
            return full.zero_()
        if "lora_A" in name:
            # kaiming_uniform_(a=sqrt(5)), as in torch.nn.Linear.
            bound = full.shape[-1] ** -0.5
            return full.uniform_(-bound, bound, generator=generator)
        return full.fill_(1.0) if full.ndim < 2 else full.normal_(0.0, self._std, generator=generator)


def build_initialized(
    build: Callable[[], torch.nn.Module], weights_for: Callable[[torch.nn.Module], InitialWeights]
) -> torch.nn.Module:
    """Build a transformers model, or a part of one, with ``build``, and return it initialized in host memory.

    Only the weights of existing modules are read or generated: a pipeline stage reads its own layers' only.
    """
    # On meta, so that transformers initializes no weight that is overwritten at once.
    model = build_on_meta(build)
    weights = weights_for(model)
    allocate_parameters(model, CPU, buffers_on=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights.write(name, parameter.shape, full_region(parameter.shape), parameter)
    fill_buffers(model, weights)
    return model


def fill_buffers(model: torch.nn.Module, weights: InitialWeights) -> None:
    """Write the buffers of ``model`` that ``weights`` contains."""
    for name, buffer in model.named_buffers():
        if name in weights:
            weights.write(name, buffer.shape, full_region(buffer.shape), buffer)


def initialize_adapters(model: torch.nn.Module, seed: int) -> None:
    """Initialize the adapters in ``model``, identically for every engine and every number of ranks."""
    fresh = FreshWeights(model, seed=seed, device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                fresh.write(name, parameter.shape, full_region(parameter.shape), parameter)


def slice_indices(region: Region) -> tuple[slice[int, int, None], ...]:
    """Return the index of ``region`` in a whole tensor."""
    return tuple(slice(indices.start, indices.stop, None) for indices in region)


def full_region(shape: torch.Size) -> Region:
    """Return the region that covers a whole tensor of ``shape``."""
    return [range(size) for size in shape]
