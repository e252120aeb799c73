"""Parsing of one Chrome/Kineto JSON file into raw columns. Readable irregularities are counted, not fatal."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.records.json_files import read_json
from shardscope.trace.files import list_trace_files, read_bytes, refuse_file

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

_NO_ARGS = msgspec.Raw(b"")
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)


class Event(msgspec.Struct, gc=False):
    """One entry of ``traceEvents``. ``args`` stay undecoded bytes, which keeps a million events fast."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str = ""
    tid: int | str = ""
    args: msgspec.Raw = _NO_ARGS


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """One process group of a rank, from ``distributedInfo.pg_config``."""

    name: str
    description: str
    """"TENSOR_MODEL_PARALLEL_GROUP", "mesh_dp", "default_pg"; empty if torch knows none."""
    size: int
    ranks: tuple[int, ...] | None
    """Global ranks in order; None if the file has them incomplete, as large worlds do."""


class _NameArgs(msgspec.Struct):
    name: str = ""


_NAME_DECODER = msgspec.json.Decoder(_NameArgs)


class _Document(msgspec.Struct):
    traceEvents: list[Event] | None = None  # noqa: N815 - Chrome's spelling
    distributedInfo: msgspec.Raw = _NO_ARGS  # noqa: N815
    baseTimeNanoseconds: msgspec.Raw = _NO_ARGS  # noqa: N815
    deviceProperties: msgspec.Raw = _NO_ARGS  # noqa: N815


class _LooseDocument(msgspec.Struct):
    traceEvents: list[msgspec.Raw] | None = None  # noqa: N815
    distributedInfo: msgspec.Raw = _NO_ARGS  # noqa: N815
    deviceProperties: msgspec.Raw = _NO_ARGS  # noqa: N815
    baseTimeNanoseconds: msgspec.Raw = _NO_ARGS  # noqa: N815


@dataclass(kw_only=True)
class Recording:
    """Content of one file, before the ranks are put on one time axis."""

    path: Path
    rank: int | None
    """Rank from ``distributedInfo``, else from the file name; None if neither has it."""
    world_size: int | None
    base_ns: int
    """Wall clock of ``ts`` 0, in nanoseconds since 1970; 0 if the file has none."""
    slices: list[Event]
    """Complete events (``ph`` X), in file order."""
    start_us: npt.NDArray[np.float64]
    """``ts`` as written, NaN where absent."""
    duration_us: npt.NDArray[np.float64]
    """``dur`` as written, NaN where absent."""
    gpu_processes: set[int | str]
    """Processes that the metadata labels as a GPU, and not also as a CPU."""
    process_names: dict[int | str, str]
    """``process_name`` metadata: "python", "trainer 3"."""
    thread_names: dict[tuple[int | str, int | str], str]
    """``thread_name`` metadata by process and thread: "pt_autograd_0"."""
    process_groups: dict[str, ProcessGroup]
    """Process groups of the rank by name."""
    device_names: dict[int, str]
    """Names of the machine's GPUs by index, as the driver spells them."""
    memory: list[Event]
    """``[memory]`` instants, which ``profile_memory=True`` records at every allocation and free."""
    memory_us: npt.NDArray[np.float64]
    """Their ``ts``, NaN where absent."""
    oddities: Counter[str] = field(default_factory=Counter)
    """Messages about what was left out or corrected -> count."""


def read_recordings(source: object) -> list[Recording]:
    """Read all files of ``source``: a file, a folder of ranks or a Run. Raises ``ValueError``."""
    return [read_recording(path) for path in list_trace_files(source)]


def read_recording(path: Path) -> Recording:
    """Read one file. Raises ``ValueError`` if it is not a Chrome trace."""
    oddities: Counter[str] = Counter()
    document = _decode_document(path, read_bytes(path), oddities)
    events = document.traceEvents
    if events is None:
        refuse_file(
            path, "has no traceEvents: it is not a profiler trace", "give what torch.profiler exported"
        )
    # 1. Sort the events by phase: complete slices are shown, metadata names their tracks, all others are
    # counted.
    slices: list[Event] = []
    metadata: list[Event] = []
    memory: list[Event] = []
    for event in events:
        if event.ph == "X":
            # Category "Trace" is the profiler's record of its own window, not work of the rank.
            if event.cat != "Trace":
                slices.append(event)
        elif event.ph == "M":
            metadata.append(event)
        elif event.ph == "i" and event.name == "[memory]":
            memory.append(event)
        else:
            oddities[_OTHER_PHASES.get(event.ph, "events of an unknown kind left out")] += 1
    # Both fields are decoded leniently: a trace without rank or clock is still readable.
    info = _decode_raw(document.distributedInfo)
    info = info if isinstance(info, dict) else {}
    base = _decode_raw(document.baseTimeNanoseconds)
    return Recording(
        path=path,
        rank=_find_rank(info, path),
        world_size=_read_small_int(info.get("world_size")),
        base_ns=base if isinstance(base, int) and 0 <= base < 2**62 else 0,
        slices=slices,
        start_us=_to_float_array(event.ts for event in slices),
        duration_us=_to_float_array(event.dur for event in slices),
        gpu_processes=_find_gpu_processes(metadata),
        process_names={event.pid: text for event, text in _iterate_names(metadata, "process_name")},
        thread_names={
            (event.pid, event.tid): _parse_thread_name(text)
            for event, text in _iterate_names(metadata, "thread_name")
        },
        process_groups=_read_process_groups(info.get("pg_config")),
        device_names=_read_device_names(_decode_raw(document.deviceProperties)),
        memory=memory,
        memory_us=_to_float_array(event.ts for event in memory),
        oddities=oddities,
    )


def find_plan(source: object) -> tuple[Plan | None, bool]:
    """Return the plan of the run that ``source`` belongs to, and whether it trained the plan's model.

    None without a readable ``run.json``.
    """
    from shardscope.core.plan import Plan

    folder = getattr(source, "folder", source)
    if not isinstance(folder, str | os.PathLike):
        return None, False
    path = Path(folder)
    # A run's folder, its "traces", or one file in there.
    for candidate in (path, path.parent, path.parent.parent):
        record = read_json(candidate / "run.json")
        if record is None:
            continue
        try:
            return Plan.from_json(json.dumps(record.get("plan"))), record.get("trains_the_plan") is True
        except ValueError:
            return None, False  # of an older version, or damaged
    return None, False


def _read_process_groups(config: object) -> dict[str, ProcessGroup]:
    """Return the groups of ``pg_config``; entries that are no groups are left out."""
    groups: dict[str, ProcessGroup] = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict):
            continue
        name, description = str(entry.get("pg_name", "")), str(entry.get("pg_desc", ""))
        ranks, size = entry.get("ranks"), _read_small_int(entry.get("pg_size"))
        numbers = [_read_small_int(rank) for rank in ranks] if isinstance(ranks, list) else []
        members = tuple(number for number in numbers if number is not None)
        is_complete = bool(members) and len(members) == len(numbers) and size in (None, len(members))
        groups[name] = ProcessGroup(
            name=name,
            description="" if description == "undefined" else description[:_MAX_NAME_CHARACTERS],
            size=size or len(members),
            ranks=members if is_complete else None,
        )
    return groups


def _read_device_names(properties: object) -> dict[int, str]:
    names: dict[int, str] = {}
    for entry in properties if isinstance(properties, list) else []:
        if not isinstance(entry, dict):
            continue
        index = _read_small_int(entry.get("id"))
        if index is not None and isinstance(entry.get("name"), str):
            names[index] = entry["name"][:_MAX_NAME_CHARACTERS]
    return names


_MAX_NAME_CHARACTERS = 100
_NUMBERED_NAME = re.compile(r"thread \S+ \((.*)\)")


def _find_gpu_processes(metadata: list[Event]) -> set[int | str]:
    """Return the process ids that denote a GPU.

    Kineto labels the ids 0 to 15 as GPUs. In a container the training process may have one of these ids too;
    then it is also labeled "CPU".
    """
    # Kineto writes several process_labels for one id: join them before looking for "CPU" and "GPU".
    labels: dict[int | str, bytes] = {}
    for event in metadata:
        if event.name == "process_labels":
            labels[event.pid] = labels.get(event.pid, b"") + bytes(event.args)
    return {process for process, text in labels.items() if b"GPU" in text and b"CPU" not in text}


def _iterate_names(metadata: list[Event], kind: str) -> Iterator[tuple[Event, str]]:
    """Yield the events of one kind of metadata that carry a name, with that name."""
    for event in metadata:
        if event.name != kind:
            continue
        try:
            text = _NAME_DECODER.decode(event.args).name.strip()
        except _UNREADABLE:
            continue
        if text:
            yield event, text[:_MAX_NAME_CHARACTERS]


def _parse_thread_name(text: str) -> str:
    """Return the OS name of a thread, which Kineto writes as ``thread 123 (pt_autograd_0)``."""
    numbered = _NUMBERED_NAME.fullmatch(text)
    return numbered.group(1).strip() if numbered else text


_OTHER_PHASES = {
    "i": "instant events (such as memory records) left out: they have no duration",
    "I": "instant events (such as memory records) left out: they have no duration",
    "s": "ends of flow arrows left out",
    "t": "ends of flow arrows left out",
    "f": "ends of flow arrows left out",
    "C": "counter samples left out",
    "B": "begin/end events left out: only complete slices (ph X) are shown",
    "E": "begin/end events left out: only complete slices (ph X) are shown",
}


def _decode_document(path: Path, text: bytes, oddities: Counter[str]) -> _Document:
    """Decode a file in one call; if that fails, decode event by event and count malformed ones."""
    # Chrome's format is an object with traceEvents, or the list alone, which some exporters write.
    is_list = text[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    try:
        if is_list:
            return _Document(traceEvents=msgspec.json.decode(text, type=list[Event]))
        return msgspec.json.decode(text, type=_Document)
    except _UNREADABLE:
        pass
    try:
        if is_list:
            loose = _LooseDocument(traceEvents=msgspec.json.decode(text, type=list[msgspec.Raw]))
        else:
            loose = msgspec.json.decode(text, type=_LooseDocument)
    except _UNREADABLE:
        loose = _decode_leniently(path, text, oddities)
    events = None if loose.traceEvents is None else _decode_events(loose.traceEvents, oddities)
    return _Document(
        traceEvents=events,
        distributedInfo=loose.distributedInfo,
        baseTimeNanoseconds=loose.baseTimeNanoseconds,
        deviceProperties=loose.deviceProperties,
    )


def _decode_events(raw_events: list[msgspec.Raw], oddities: Counter[str]) -> list[Event]:
    decoder = msgspec.json.Decoder(Event, strict=False)  # lax: some exporters write numbers as strings
    events: list[Event] = []
    for raw in raw_events:
        try:
            events.append(decoder.decode(raw))
        except _UNREADABLE:
            oddities["malformed events left out"] += 1
    return events


def _decode_leniently(path: Path, text: bytes, oddities: Counter[str]) -> _LooseDocument:
    """Decode JSON with NaN, Infinity and invalid UTF-8, which profilers have written (pytorch#130622).

    Raises ``ValueError``.
    """
    try:
        data = json.loads(text.decode("utf-8-sig", errors="replace"), strict=False)
    except json.JSONDecodeError as error:
        refuse_file(
            path,
            f"is not JSON: {error.msg} at line {error.lineno:,}, column {error.colno:,}",
            "record it again; the rank was probably killed while writing",
        )
    except (RecursionError, ValueError) as error:
        refuse_file(path, f"is not a profiler trace ({error})", "give what torch.profiler exported")
    oddities["file read leniently: it is not strict JSON"] += 1
    if isinstance(data, list):
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list | None):
        refuse_file(
            path, "holds no traceEvents list: it is not a profiler trace", "give what torch.profiler exported"
        )
    events = data.get("traceEvents")
    return _LooseDocument(
        traceEvents=None if events is None else [_encode_raw(event) for event in events],
        distributedInfo=_encode_raw(data.get("distributedInfo")),
        deviceProperties=_encode_raw(data.get("deviceProperties")),
        baseTimeNanoseconds=_encode_raw(data.get("baseTimeNanoseconds")),
    )


def _encode_raw(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError):
        return _NO_ARGS  # fails to decode later and is counted as malformed


def _decode_raw(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw) if bytes(raw) else None
    except _UNREADABLE:
        return None


def _find_rank(info: Mapping[str, object], path: Path) -> int | None:
    rank = _read_small_int(info.get("rank"))
    if rank is not None:
        return rank
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else None


def _read_small_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**7 else None


def _to_float_array(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    return np.array(list(values), dtype=np.float64)
