"""Validated header of a safetensors file: eight bytes of length and a JSON object, read without the tensors.

The rules are the format's own (https://github.com/huggingface/safetensors, README "Format" and
``safetensors/src/tensor.rs``); no content of the file is executed. The tensors themselves are read by the
safetensors library. Imports no torch, so that an invalid file is rejected before any rank starts.
"""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeGuard

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
"""Bits per element of each type of the format."""
COPY_AGAIN = "copy or download the file again"


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str
    """Type in the format's spelling: a key of :data:`BITS`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte from the start of the file's tensor data."""

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def read_header(path: Path, field: str) -> dict[str, StoredTensor]:
    """Return the tensors of the file at ``path``, by name.

    Raises ``ValueError``, which calls the file ``field``, if it is not a regular safetensors file, is
    truncated or longer than its header says, has tensors that overlap or leave gaps, or an unknown type.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # Opening a FIFO would block.
        refuse(field, path.name, "a regular file", "the file itself")
    with path.open("rb") as file:
        length = _read_header_length(file, status.st_size, field)
        entries = _parse_entries(file.read(length), field)
    return _check_tensors(entries, status.st_size - LENGTH_BYTES - length, field)


def _read_header_length(file: BinaryIO, size: int, field: str) -> int:
    """Return the header's length in bytes. Raises ``ValueError`` if it does not fit into the file."""
    # A limit before the header is read: its length is up to the file, and would be allocated.
    length = int.from_bytes(file.read(LENGTH_BYTES), "little") if size >= LENGTH_BYTES else 0
    if size < LENGTH_BYTES + 2:
        refuse(field, size, f"more bytes: {LENGTH_BYTES} for the header's length, and a header", COPY_AGAIN)
    # The shortest JSON object, {}, has two bytes.
    if not 2 <= length <= MAX_HEADER_BYTES:
        allowed = f"a header of 2 to {MAX_HEADER_BYTES:,} bytes, whose length a safetensors file begins with"
        refuse(field, length, allowed, COPY_AGAIN)
    if length > size - LENGTH_BYTES:
        allowed = f"at most the {size - LENGTH_BYTES:,} bytes that the file has behind its header's length"
        refuse(field, length, allowed, COPY_AGAIN)
    return length


def _parse_entries(header: bytes, field: str) -> dict[str, object]:
    """Parse the header's JSON and return its entries by tensor name, without ``__metadata__``."""
    try:
        entries = parse_json("header", header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        refuse(field, f"a header that is not JSON: {why}", "the JSON of a safetensors file", COPY_AGAIN)
    if not isinstance(entries, dict):
        refuse(field, type(entries).__name__, "a header of tensors by their names", COPY_AGAIN)
    entries.pop("__metadata__", None)
    return entries


def _check_tensors(entries: dict[str, object], data_bytes: int, field: str) -> dict[str, StoredTensor]:
    """Return the tensors. Raises ``ValueError`` unless they fill the data contiguously to the last byte."""
    # In the order of their offsets each must begin where the last one ended (tensor.rs, Metadata::validate).
    sorted_entries = sorted(
        (_check_entry(name, entry, field) for name, entry in entries.items()), key=lambda entry: entry[2:]
    )
    end_of_last = 0
    for name, tensor, begin, end in sorted_entries:
        if begin != end_of_last or (end - begin) * 8 != math.prod(tensor.shape) * BITS[tensor.dtype]:
            shape = "x".join(map(str, tensor.shape)) or "one"
            allowed = (
                f"bytes from {end_of_last:,} on, as many as {shape} numbers of {tensor.dtype} take: tensors "
                "are stored without gaps"
            )
            refuse(f"{field}: {name}", [begin, end], allowed, COPY_AGAIN)
        end_of_last = end
    if end_of_last != data_bytes:
        problem = "truncated" if end_of_last > data_bytes else "longer than that"
        allowed = f"{end_of_last:,} bytes of tensors, as its header says: the file is {problem}"
        refuse(field, data_bytes, allowed, COPY_AGAIN)
    return {name: tensor for name, tensor, _, _ in sorted_entries}


def _check_entry(name: str, entry: object, field: str) -> tuple[str, StoredTensor, int, int]:
    """Return name, tensor, begin and end offset of one validated entry."""
    where = f"{field}: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        refuse(where, entry, "an object of dtype, shape and data_offsets", COPY_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        refuse(f"{where} dtype", dtype, ", ".join(BITS), "save it as BF16")
    if not _is_size_list(shape):
        refuse(f"{where} shape", shape, "a list of whole numbers from 0", COPY_AGAIN)
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"{where} data_offsets", offsets, "where its bytes begin and end", COPY_AGAIN)
    return name, StoredTensor(dtype, tuple(shape), offsets[0]), offsets[0], offsets[1]


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    # ``type`` and not ``isinstance``: JSON's true is an int to Python. Offsets beyond 2**63 fit in no file.
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
