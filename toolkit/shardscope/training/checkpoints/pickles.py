"""Safe loading of the pickles in checkpoints, with an allow-list of classes.

torch.distributed.checkpoint reads its ``.metadata`` with ``pickle.load`` and its items with ``torch.load(...,
weights_only=False)`` (torch 2.13: filesystem.py, default_planner.py), and so does Megatron-core on top of it;
DeepSpeed 0.19.8 reads its files with ``weights_only=False``. Other classes (such as those of the user's own
optimizer) are allowed only in a checkpoint whose manifest proves that this user's launch saved it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from shardscope.core.errors import refuse
from shardscope.training.checkpoints.manifest import Ranges, UnsignedError, check_signed, key_path

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

METADATA_FILE = ".metadata"
FORCE_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's variable that makes every ``torch.load`` ``weights_only`` (torch/serialization.py)."""

_BROKEN = (
    pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError,
    MemoryError, OverflowError, RecursionError,
)  # fmt: skip
"""Exceptions that unpickling of invalid metadata may raise."""


def _convert_path(*parts: str) -> str:
    """Replace ``PosixPath`` in metadata by plain text (the path where the checkpoint was saved)."""
    return str(PurePosixPath(*parts))


_METADATA_CLASSES: dict[tuple[str, str], object] = {
    **{
        (allowed_class.__module__, allowed_class.__qualname__): allowed_class
        for allowed_class in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            # Megatron-core stores the save plans of its ranks.
            filesystem._StoragePrefix,
            planner.BytesIOWriteData,
            planner.SavePlan,
            planner.TensorWriteData,
            planner.WriteItem,
            planner.WriteItemType,
        )
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Python 3.13 moved the class.
    ("pathlib", "PosixPath"): _convert_path,
    ("pathlib._local", "PosixPath"): _convert_path,
}
"""Classes that torch 2.13 and Megatron-core 0.16.1 write into ``.metadata``, besides dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that allows only the classes of torch.distributed.checkpoint's metadata."""

    refused = ""
    """The class or function in the pickle that is not allowed."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        if (module_name, global_name) in _METADATA_CLASSES:
            return _METADATA_CLASSES[module_name, global_name]
        # Dtypes are pickled by their name in torch, where the rest of the module must not be reached.
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        self.refused = f"{module_name}.{global_name}"
        raise pickle.UnpicklingError(f"refers to {self.refused}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("refers to an object outside of it")


def read_metadata(path: Path) -> Metadata:
    """Read torch.distributed.checkpoint's metadata.

    Raises ``ValueError`` if it contains a class that is not allowed or an item in a file outside of the
    checkpoint, ``OSError`` if it cannot be read.
    """
    unpickler = _MetadataUnpickler(io.BytesIO(path.read_bytes()))
    # Allowed classes may still be filled with anything: access the fields here, where errors are damage.
    try:
        loaded: Metadata = unpickler.load()
        storage = loaded.storage_meta
        is_metadata = (
            isinstance(loaded, Metadata)
            and isinstance(loaded.state_dict_metadata, dict)
            and isinstance(storage, StorageMeta | None)
        )
        paths = [info.relative_path for info in loaded.storage_data.values()]
    except _BROKEN as error:
        if unpickler.refused:
            _refuse_class(path, unpickler.refused)
        _refuse_damage(path, error)
    if not is_metadata:
        _refuse_damage(path, TypeError("it is not torch.distributed.checkpoint's Metadata"))
    # torch joins these paths to the checkpoint's folder: "../x" or an absolute path would leave it.
    for path_in_checkpoint in paths:
        if (
            not isinstance(path_in_checkpoint, str)
            or path_in_checkpoint != Path(path_in_checkpoint).name
            or path_in_checkpoint in ("", "..")
        ):
            refuse(
                "checkpoint",
                path.name,
                f"items in files of the folder {path.parent}, not in {path_in_checkpoint!r}",
                "another checkpoint",
            )
    return loaded


class CheckedReader(FileSystemReader):
    """Checkpoint reader that checks metadata and items in its constructor."""

    def __init__(self, folder: Path, *, trusted: bool) -> None:
        """Check the checkpoint. Raises ``ValueError`` if a pickle contains a class that is not allowed.

        The items of a ``trusted`` checkpoint (see :func:`is_trusted`) are not checked.
        """
        super().__init__(folder)
        self._metadata = read_metadata(folder / METADATA_FILE)
        # torch's own read_metadata fills it in, too (torch 2.13, checkpoint/filesystem.py).
        self._checked_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta = self._checked_meta
        if not trusted:
            for name, ranges in _list_pickled_ranges(self._metadata).items():
                _check_items(folder / name, ranges)

    # Without keyword arguments: torch then does not look for metadata of single ranks.
    def read_metadata(self) -> Metadata:
        self._checked_meta.load_id = self.load_id
        return self._metadata


def list_pickled_ranges(folder: Path) -> dict[str, Ranges]:
    """Return the ranges of non-tensor items in a checkpoint, by file."""
    return _list_pickled_ranges(read_metadata(folder / METADATA_FILE))


def _list_pickled_ranges(loaded: Metadata) -> dict[str, Ranges]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for index, info in loaded.storage_data.items():
        if isinstance(loaded.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            ranges.setdefault(info.relative_path, []).append((int(info.offset), int(info.length)))
    return {name: sorted(spans) for name, spans in ranges.items()}


def _check_items(path: Path, ranges: Ranges) -> None:
    with path.open("rb") as file:
        for offset, length in ranges:
            file.seek(offset)
            _load_checked(io.BytesIO(file.read(length)), path, (), map_location="cpu")


def load_file(path: Path, classes: Sequence[type], map_location: MAP_LOCATION = None) -> object:
    """Load a ``torch.save`` file of tensors, plain values and ``classes``, else raise ``ValueError``."""
    return _load_checked(path, path, classes, map_location)


def _load_checked(
    source: Path | io.BytesIO, path: Path, classes: Sequence[type], map_location: MAP_LOCATION
) -> object:
    # weights_only rejects all other classes by itself; the names are only for the message.
    with torch.serialization.safe_globals(list(classes)):
        try:
            loaded: object = torch.load(source, map_location=map_location, weights_only=True)
            return loaded
        except pickle.UnpicklingError as error:
            names = _find_refused_classes(source)
            if names:
                _refuse_class(path, names)
            _refuse_damage(path, error)


def _find_refused_classes(source: Path | io.BytesIO) -> str:
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source)))
    except Exception:  # For old formats and damaged files there are no names: torch's own error is reported.
        return ""


def is_trusted(checkpoint: Path) -> bool:
    """Return whether a manifest proves that this user's launch saved ``checkpoint``."""
    try:
        check_signed(checkpoint)
    except UnsignedError:
        return False
    return True


@contextmanager
def checked_loading(classes: Sequence[type] = (), *, trusted: bool) -> Iterator[None]:
    """Limit each ``torch.load`` inside to tensors, plain values and ``classes``, whatever its arguments.

    A ``trusted`` checkpoint (see :func:`is_trusted`) is loaded without limits.
    """
    if trusted:
        yield
        return
    # The variable also overrides weights_only=False, which frameworks pass.
    previous = os.environ.get(FORCE_VARIABLE)
    os.environ[FORCE_VARIABLE] = "1"
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    finally:
        if previous is None:
            del os.environ[FORCE_VARIABLE]
        else:
            os.environ[FORCE_VARIABLE] = previous


def _refuse_class(path: Path, names: str) -> NoReturn:
    refuse(
        "checkpoint",
        path.name,
        f"one of tensors, plain values and the classes of its format: {path} refers to {names}, and loading "
        "a pickle can execute what it refers to",
        f"another checkpoint or, if you saved it on another machine, that machine's key as {key_path()}",
    )


def _refuse_damage(path: Path, error: Exception) -> NoReturn:
    reason = (str(error).splitlines() or [""])[0][:200]
    allowed = f"one that is not damaged: {path} cannot be read ({type(error).__name__}: {reason})"
    refuse("checkpoint", path.name, allowed, "an earlier checkpoint")
