"""Arguments of slices as typed columns, decoded once for the slices that analyses read."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.argument_blocks import EventArguments

Int64s = npt.NDArray[np.int64]
Count = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
"""A number that fits a column of int64; larger ones are malformed."""


_ABSENT = msgspec.Raw(b"")


class WorkArgs(msgspec.Struct, gc=False):
    """Arguments of kernels and copies; -1 where absent or malformed."""

    bytes: float = -1.0
    """Bytes that a copy moved."""
    occupancy: float = msgspec.field(default=-1.0, name="est. achieved occupancy %")
    """CUPTI's estimate, in percent."""
    blocks_per_sm: float = msgspec.field(default=-1.0, name="blocks per SM")
    """Thread blocks of the launch by the GPU's multiprocessors."""


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
    """Shapes and types of an operator's inputs, undecoded: many calls have the same ones."""

    dims: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input type")
    values: msgspec.Raw = msgspec.field(default=_ABSENT, name="Concrete Inputs")


class SequenceArgs(msgspec.Struct, gc=False):
    """The number that autograd gives an operator and its node in backward; -1 if there is none."""

    sequence_number: Count = msgspec.field(default=-1, name="Sequence number")


Args = TypeVar("Args", WorkArgs, CollectiveArgs, ShapeArgs, SequenceArgs)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_arguments(arguments: EventArguments, index: Int64s, kind: type[Args]) -> list[Args]:
    """Return the arguments of the slices ``index`` as objects of ``kind``."""
    # Not strict: some exporters write numbers as strings.
    decoder = msgspec.json.Decoder(kind, strict=False)
    decoded = [kind()] * len(index)
    for position, text in arguments.iterate(index):
        try:
            decoded[position] = decoder.decode(text)
        except _UNREADABLE:
            continue
    return decoded


def read_shapes(args: ShapeArgs) -> list[tuple[int, ...] | None]:
    """Return the shape of each input; None for a list of tensors. Empty if there are none."""
    try:
        entries = msgspec.json.decode(args.dims, type=list[msgspec.Raw])
    except _UNREADABLE:
        return []
    shapes: list[tuple[int, ...] | None] = []
    for entry in entries:
        try:
            shapes.append(tuple(msgspec.json.decode(entry, type=list[Count])))
        except _UNREADABLE:
            shapes.append(None)
    return shapes


def read_texts(raw: msgspec.Raw) -> list[str]:
    """Return a list of texts, such as ``Input type`` or ``Concrete Inputs``; empty if it is none."""
    try:
        entries = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except _UNREADABLE:
        return []
    # A list of tensors has a list of types, which is not text: an empty text keeps its place.
    return [_read_text(entry) for entry in entries]


def _read_text(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except _UNREADABLE:
        return ""
