"""Replacement of DeepSpeed's ``async_io`` extension that records the sizes of files instead of writing them.

DeepSpeed's own code decides what is swapped, when, and through which buffers; its extension only moves bytes
between page-locked memory and a file (``csrc/aio/py_lib``), and fake tensors have no bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardscope.rehearsal.patching import patch_attributes

_SWAPPERS = ("partitioned_param_swapper", "partitioned_optimizer_swapper", "pipelined_optimizer_swapper")


class FakeFiles:
    """Replacement of ``AsyncIOBuilder``, with handles whose reads and writes complete at once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        """Folder in which DeepSpeed creates its own, which stay empty."""
        self.sizes: dict[str, int] = {}
        """Bytes of every written file, by path."""
        self._pinned = WeakIdKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return the extension's module."""
        return SimpleNamespace(aio_handle=lambda **options: _Handle(self))

    def pin(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Allocate page-locked host memory."""
        buffer = torch.empty(int(numel), dtype=like.dtype, device="cpu")
        self._pinned[buffer.untyped_storage()] = True
        return buffer

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in memory that :meth:`pin` allocated."""
        return tensor.untyped_storage() in self._pinned


class _Handle:
    """Replacement of ``aio_handle``: operations complete when submitted, and are counted until ``wait``."""

    def __init__(self, files: FakeFiles) -> None:
        self._files = files
        self._pending = 0
        self.is_pinned = files.is_pinned
        self.new_cpu_locked_tensor = files.pin

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self._files.sizes[path] = offset + buffer.numel() * buffer.element_size()
        self._pending += 1
        return 0

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        assert path in self._files.sizes, f"{path} is read and was never written"
        self._pending += 1
        return 0

    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return self._files.is_pinned(tensor)


@contextlib.contextmanager
def fake_files() -> Iterator[FakeFiles]:
    """Context in which DeepSpeed's swappers write to fake files, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="shardscope-nvme-") as folder:
        files = FakeFiles(folder)
        modules = [importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in _SWAPPERS]
        with patch_attributes([(module, "AsyncIOBuilder", lambda: files) for module in modules]):
            yield files
