"""What a safetensors file says that it holds, read without touching a tensor: eight bytes and some JSON.

The rules are the format's own (https://github.com/huggingface/safetensors, README "Format" and
``safetensors/src/tensor.rs``): nothing runs, whatever is in the file. Tensors themselves are read by the
library. Imports no torch, so that a file is refused before any rank starts.
"""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardscope.core.errors import refuse
from shardscope.core.json_text import parse_json

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
LENGTH_BYTES = 8
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""The types that the format knows, and bits of one number."""
COPY_AGAIN = "copy or download the file again"


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str
    """As the format spells it: one of :data:`BITS`."""
    shape: tuple[int, ...]
    begin: int
    """Its first byte, counted from the first of all tensors' in the file."""

    @property
    def num_bytes(self) -> int:
        """What it takes there."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def read_header(path: Path, field: str) -> dict[str, StoredTensor]:
    """The tensors of the file at ``path``, by name.

    Raises ``ValueError``, naming it ``field``, for a file that is none, is cut off or longer than it says,
    whose tensors overlap or leave bytes between them, or have a type that nobody knows.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # A FIFO would be waited for.
        refuse(field, path.name, "a regular file", "the file itself")
    with path.open("rb") as file:
        length = _header_bytes(file, status.st_size, field)
        entries = _entries(file.read(length), field)
    return _tensors(entries, status.st_size - LENGTH_BYTES - length, field)


def _header_bytes(file: BinaryIO, size: int, field: str) -> int:
    """What the file's first bytes say, which fits into it."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little") if size >= LENGTH_BYTES else 0
    if size < LENGTH_BYTES + 2:
        refuse(field, size, f"more bytes: {LENGTH_BYTES} for the header's length, and a header", COPY_AGAIN)
    if not 2 <= length <= MAX_HEADER_BYTES:
        allowed = f"a header of 2 to {MAX_HEADER_BYTES:,} bytes, whose length a safetensors file begins with"
        refuse(field, length, allowed, COPY_AGAIN)
    if length > size - LENGTH_BYTES:
        allowed = f"at most the {size - LENGTH_BYTES:,} bytes that the file has behind its header's length"
        refuse(field, length, allowed, COPY_AGAIN)
    return length


def _entries(header: bytes, field: str) -> dict[str, Any]:
    """Of tensors, by their names."""
    try:
        found = parse_json("header", header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        refuse(field, f"a header that is no JSON: {why}", "the JSON of a safetensors file", COPY_AGAIN)
    if not isinstance(found, dict):
        refuse(field, type(found).__name__, "a header of tensors by their names", COPY_AGAIN)
    found.pop("__metadata__", None)
    return found


def _tensors(entries: dict[str, Any], data_bytes: int, field: str) -> dict[str, StoredTensor]:
    """Entries that are whole, one behind the other from the first byte to the last."""
    placed = sorted((_entry(name, entry, field) for name, entry in entries.items()), key=lambda one: one[2:])
    reached = 0
    for name, tensor, begin, end in placed:
        if begin != reached or (end - begin) * 8 != math.prod(tensor.shape) * BITS[tensor.dtype]:
            shape = "x".join(map(str, tensor.shape)) or "one"
            allowed = (
                f"bytes from {reached:,} on, as many as {shape} numbers of {tensor.dtype} take: tensors lie "
                "one behind the other"
            )
            refuse(f"{field}: {name}", [begin, end], allowed, COPY_AGAIN)
        reached = end
    if reached != data_bytes:
        what = "cut off" if reached > data_bytes else "followed by something else"
        allowed = f"{reached:,} bytes of tensors, as its header says: the file is {what}"
        refuse(field, data_bytes, allowed, COPY_AGAIN)
    return {name: tensor for name, tensor, _, _ in placed}


def _entry(name: str, entry: Any, field: str) -> tuple[str, StoredTensor, int, int]:
    """Name, tensor, its first byte and the one behind it."""
    where = f"{field}: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        refuse(where, entry, "an object of dtype, shape and data_offsets", COPY_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        refuse(f"{where} dtype", dtype, ", ".join(BITS), "save it as BF16")
    if not _sizes(shape):
        refuse(f"{where} shape", shape, "a list of whole numbers from 0", COPY_AGAIN)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"{where} data_offsets", offsets, "where its bytes begin and end", COPY_AGAIN)
    return name, StoredTensor(dtype, tuple(shape), offsets[0]), offsets[0], offsets[1]


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
