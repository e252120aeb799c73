"""Weights read from safetensors files, addressed by the tensor names of the model in memory.

The files are memory-mapped (``safetensors.safe_open``): only the requested slices are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from shardscope.training.weights.initial_weights import CPU, FreshWeights, Region, slice_indices
from shardscope.training.weights.stored_names import find_sources

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.training.weights.weights_folder import WeightsFolder


class _TensorSlice(Protocol):
    """The library's view of one stored tensor (``PySafeSlice``); indexing it reads the file."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(
        self, index: int | slice[None, None, None] | tuple[slice[int, int, None], ...]
    ) -> torch.Tensor: ...


class _OpenFile(Protocol):
    """A memory-mapped file (``safe_open``)."""

    def get_slice(self, name: str) -> _TensorSlice: ...


class StoredWeights:
    """Weights of a checked folder, for one rank; values are cast to the type of the target tensor."""

    def __init__(self, folder: WeightsFolder, architecture: Architecture) -> None:
        self.folder = folder
        self._files: Mapping[str, Path] = {name: file for name, (file, _) in folder.tensors.items()}
        self._sources = find_sources(architecture, self._files)
        self._open: dict[Path, _OpenFile] = {}

    def __contains__(self, name: str) -> bool:
        return strip_adapter_prefixes(name) in self._sources

    def write(self, name: str, shape: torch.Size, region: Region, into: torch.Tensor) -> None:
        """See :class:`InitialWeights`. Raises ``RuntimeError`` for a missing tensor or another shape."""
        source = self._sources.get(strip_adapter_prefixes(name))
        if source is None or source.shape != tuple(shape):
            raise RuntimeError(
                f"the model has {name} of shape {tuple(shape)}, and {self.folder.path} "
                f"{'has no such tensor' if source is None else source.shape}"
            )
        if not source.is_stack:
            self._write_joined(source.names[0], region, into)
            return
        rows, *inner = region
        for index in rows:
            self._write_joined(source.names[index], inner, into[index - rows.start])

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return one whole tensor in its stored type, experts stacked."""
        source = self._sources[name]
        # transformers stacks experts that files have one by one (stored_names.py).
        if source.is_stack:
            return torch.stack([self.read_row(name, index) for index in range(source.shape[0])])
        return self._read_joined(source.names[0])

    def read_row(self, name: str, index: int) -> torch.Tensor:
        """Return one matrix of a stack of experts."""
        source = self._sources[name]
        return (
            self._read_joined(source.names[index])
            if source.is_stack
            else self._open_slice(source.names[0][0])[index]
        )

    def list_names(self) -> Iterator[str]:
        """Return an iterator over the names in memory."""
        return iter(self._sources)

    def close(self) -> None:
        """Close the memory-mapped files."""
        # safe_open has no close(): a file's mapping ends with the last reference to it.
        self._open.clear()

    def _write_joined(self, names: tuple[str, ...], region: Region, into: torch.Tensor) -> None:
        """Copy ``region`` of several stored tensors, concatenated along their rows, into ``into``."""
        rows, *rest = region
        # ``begin`` is a stored tensor's first row in the concatenation of all; ``num_written`` counts
        # the rows of ``into`` that are filled.
        num_written, begin = 0, 0
        for name in names:
            stored = self._open_slice(name)
            end = begin + stored.get_shape()[0]
            first, last = max(rows.start, begin), min(rows.stop, end)
            if first < last:
                local_region = [range(first - begin, last - begin), *rest]
                values = stored[slice_indices(local_region)]
                into[num_written : num_written + last - first].copy_(values)
                num_written += last - first
            begin = end

    def _read_joined(self, names: tuple[str, ...]) -> torch.Tensor:
        slices = [self._open_slice(name)[:] for name in names]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _open_slice(self, name: str) -> _TensorSlice:
        """Return the lazy slice of one stored tensor."""
        from safetensors import safe_open

        # Opened on first use: a pipeline stage needs few of the files.
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path].get_slice(name)


def strip_adapter_prefixes(name: str) -> str:
    """Return the name without peft's prefixes, as in the model without adapters."""
    # PeftModel has the tuner as base_model and that has the model; an adapted layer has the original one as
    # base_layer (peft 0.21, tuners/lora/layer.py).
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


class WithAdapters:
    """Stored weights of the base model, with randomly initialized adapters."""

    def __init__(self, stored: StoredWeights, model: torch.nn.Module, seed: int) -> None:
        # Generated on the host: the random generators of CPU and GPU give different values.
        self._stored, self._fresh = stored, FreshWeights(model, seed=seed, device=CPU)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def write(self, name: str, shape: torch.Size, region: Region, into: torch.Tensor) -> None:
        (self._fresh if "lora_" in name else self._stored).write(name, shape, region, into)


class TensorsByName(Mapping[str, "StoredTensorOf"]):
    """Stored weights as a lazy ``state_dict()``: a tensor is read when it is indexed or detached."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> StoredTensorOf:
        if name not in self._stored:
            raise KeyError(name)
        return StoredTensorOf(self._stored, name)

    def __iter__(self) -> Iterator[str]:
        return self._stored.list_names()

    def __len__(self) -> int:
        return sum(1 for _ in self._stored.list_names())


class StoredTensorOf:
    """Lazily read tensor: whole, or one matrix of a stack."""

    def __init__(self, stored: StoredWeights, name: str) -> None:
        self._stored, self._name = stored, name

    def detach(self) -> torch.Tensor:
        return self._stored.read_tensor(self._name)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._stored.read_row(self._name, index)
