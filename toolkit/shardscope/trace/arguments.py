"""Arguments of slices as typed columns, decoded once for the slices that analyses ask about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Count = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
"""A number that fits a column of int64; larger ones are malformed."""


class WorkArgs(msgspec.Struct, gc=False):
    """Arguments of kernels, copies and launches; -1 where absent or malformed."""

    correlation: Count = -1
    """Links a kernel to the runtime call that launched it."""
    bytes: float = -1.0
    """Bytes that a copy moved."""
    occupancy: float = msgspec.field(default=-1.0, name="est. achieved occupancy %")
    """CUPTI's estimate, in percent."""
    blocks_per_sm: float = msgspec.field(default=-1.0, name="blocks per SM")


class CollectiveArgs(msgspec.Struct, gc=False):
    """Arguments of a communication kernel (kineto, libkineto/src/output_json.cpp)."""

    collective: str = msgspec.field(default="", name="Collective name")
    in_elements: Count = msgspec.field(default=-1, name="In msg nelems")
    out_elements: Count = msgspec.field(default=-1, name="Out msg nelems")
    group_size: Count = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    description: str = msgspec.field(default="", name="Process Group Description")
    group_ranks: str = msgspec.field(default="", name="Process Group Ranks")


class ShapeArgs(msgspec.Struct, gc=False):
    """Shapes and types of an operator's inputs; None if the profiler recorded none."""

    dims: list[msgspec.Raw] | None = msgspec.field(default=None, name="Input Dims")
    types: list[str] | None = msgspec.field(default=None, name="Input type")
    values: list[msgspec.Raw] | None = msgspec.field(default=None, name="Concrete Inputs")
    sequence_number: Count = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Count = msgspec.field(default=0, name="Fwd thread id")


Args = TypeVar("Args", WorkArgs, CollectiveArgs, ShapeArgs)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_arguments(raw: Sequence[msgspec.Raw], index: Int64s, kind: type[Args]) -> list[Args]:
    """Return the arguments of the slices ``index`` as objects of ``kind``."""
    # Not strict: some exporters write numbers as strings.
    decoder = msgspec.json.Decoder(kind, strict=False)
    absent = kind()
    decoded = []
    for position in index.tolist():
        try:
            decoded.append(decoder.decode(raw[position]))
        except _UNREADABLE:
            decoded.append(absent)
    return decoded


def read_shape(raw: msgspec.Raw) -> tuple[int, ...] | None:
    """Return one entry of ``Input Dims`` as a shape; None for a list of tensors or anything else."""
    try:
        return tuple(msgspec.json.decode(raw, type=list[int]))
    except _UNREADABLE:
        return None
