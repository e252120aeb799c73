"""Metadata of a trace file: rank, world size, clock, process groups and GPU names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shardscope.trace.loading.events import NO_ARGS
from shardscope.trace.loading.splitting import UNREADABLE

MAX_NAME_CHARACTERS = 100
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)
_RANK_IN_HEADER = re.compile(rb'"(rank|world_size)"\s*:\s*"?(\d{1,7})(?!\d)')
_BASE_IN_HEADER = re.compile(rb'"baseTimeNanoseconds"\s*:\s*"?(\d{1,19})(?!\d)')


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One process group of a rank, from ``distributedInfo.pg_config``."""

    name: str
    description: str
    """"TENSOR_MODEL_PARALLEL_GROUP", "mesh_dp", "default_pg"; empty if torch knows none."""
    size: int
    ranks: tuple[int, ...] | None
    """Global ranks in order; None if the file has them incomplete, as large worlds do."""


class Document(msgspec.Struct, kw_only=True):
    """Facts about one file's rank."""

    rank: int | None = None
    """Rank from ``distributedInfo``, else from the file name; None if neither has it."""
    world_size: int | None = None
    base_ns: int | None = None
    """Wall clock of ``ts`` 0, in nanoseconds since 1970; None if the file has none."""
    process_groups: dict[str, ProcessGroup] = {}
    """Process groups of the rank by name."""
    device_names: dict[int, str] = {}
    """Names of the machine's GPUs by index, as the driver spells them."""
    is_cut_off: bool = False
    """For a rank of a merged file: whether its own file ended in the middle."""
    merged_ranks: list[MergedRank] = []
    """Ranks of a file that ``Trace.to_chrome`` has written; empty for any other file."""


class MergedThread(msgspec.Struct, kw_only=True):
    """A track of a merged file, or a thread that has marks only, as the rank's own file had it."""

    number: int
    """Its thread in the merged file."""
    process: int | str
    thread: int | str
    kind: Literal["cpu", "gpu", "python", "async"] = "cpu"
    name: str = ""


class MergedRank(msgspec.Struct, kw_only=True):
    """One of the ranks of a merged file, whose process there is the rank."""

    document: Document
    threads: list[MergedThread]


class _Fields(msgspec.Struct):
    distributedInfo: msgspec.Raw = NO_ARGS  # noqa: N815 - Kineto's spelling
    baseTimeNanoseconds: msgspec.Raw = NO_ARGS  # noqa: N815
    deviceProperties: msgspec.Raw = NO_ARGS  # noqa: N815
    mergedRanks: msgspec.Raw = NO_ARGS  # noqa: N815


def read_document(path: Path, header: bytes, footer: bytes) -> Document:
    """Return the facts of the text around the events. A trace without rank or clock is still readable."""
    before = _decode_fields(header + b"]}")
    after = _decode_fields(b'{"traceEvents":[]' + footer)
    info = _decode_raw(before.distributedInfo) or _decode_raw(after.distributedInfo)
    base = _decode_raw(before.baseTimeNanoseconds) or _decode_raw(after.baseTimeNanoseconds)
    devices = _decode_raw(before.deviceProperties) or _decode_raw(after.deviceProperties)
    facts: Mapping[str, object] = info if isinstance(info, dict) else {}
    if not facts and not _is_readable(header + b"]}"):
        # The header is not JSON: find the most important fields by their keys.
        facts = {key.decode(): int(number) for key, number in _RANK_IN_HEADER.findall(header)}
        match = _BASE_IN_HEADER.search(header)
        base = base or (match[1].decode() if match else None)
    rank = read_small_int(facts.get("rank"))
    if rank is None:
        match_in_name = _RANK_IN_NAME.search(path.name)
        rank = int(match_in_name.group(1)) if match_in_name else None
    return Document(
        rank=rank,
        world_size=read_small_int(facts.get("world_size")),
        base_ns=_read_int(base, 2**62),
        process_groups=_read_process_groups(facts.get("pg_config")),
        device_names=_read_device_names(devices),
        merged_ranks=_read_merged_ranks(before.mergedRanks),
    )


def _read_merged_ranks(raw: msgspec.Raw) -> list[MergedRank]:
    """Return the ranks of a merged file; none unless all are readable and have different numbers."""
    if not bytes(raw):
        return []
    try:
        ranks = msgspec.json.decode(raw, type=list[MergedRank])
    except UNREADABLE:
        return []
    numbers = [read_small_int(rank.document.rank) for rank in ranks]
    sizes = [read_small_int(rank.document.world_size) for rank in ranks]
    return ranks if len(set(numbers)) == len(ranks) and None not in (*numbers, *sizes) else []


def _decode_fields(text: bytes) -> _Fields:
    try:
        return msgspec.json.decode(text, type=_Fields)
    except UNREADABLE:
        return _Fields()


def _is_readable(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=_Fields)
    except UNREADABLE:
        return False
    return True


def _decode_raw(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw) if bytes(raw) else None
    except UNREADABLE:
        return None


def _read_process_groups(config: object) -> dict[str, ProcessGroup]:
    """Return the groups of ``pg_config``; entries that are no groups are left out."""
    groups: dict[str, ProcessGroup] = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict):
            continue
        name, description = str(entry.get("pg_name", "")), str(entry.get("pg_desc", ""))
        ranks, size = entry.get("ranks"), read_small_int(entry.get("pg_size"))
        numbers = [read_small_int(rank) for rank in ranks] if isinstance(ranks, list) else []
        members = tuple(number for number in numbers if number is not None)
        is_complete = bool(members) and len(members) == len(numbers) and size in (None, len(members))
        groups[name] = ProcessGroup(
            name=name,
            description="" if description == "undefined" else description[:MAX_NAME_CHARACTERS],
            size=size or len(members),
            ranks=members if is_complete else None,
        )
    return groups


def _read_device_names(properties: object) -> dict[int, str]:
    names: dict[int, str] = {}
    for entry in properties if isinstance(properties, list) else []:
        if not isinstance(entry, dict):
            continue
        index = read_small_int(entry.get("id"))
        if index is not None and isinstance(entry.get("name"), str):
            names[index] = entry["name"][:MAX_NAME_CHARACTERS]
    return names


def read_small_int(value: object) -> int | None:
    """Return a number below ten million, also from its digits; None for anything else."""
    return _read_int(value, 10**7)


def _read_int(value: object, limit: int) -> int | None:
    # Some exporters write numbers as strings.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit else None
