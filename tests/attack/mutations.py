"""Random damage to a run folder: that of a broken disk, another version or an attacker."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAG = "xss-canary"
"""Element that no view may have; ``onxss`` is its attribute."""
HOSTILE_TEXTS = (
    f"<{TAG}>",
    f"</script></style><{TAG} onxss=1>",
    f'"><{TAG}>',
    '" onxss="1',
    "' onxss='1",
    f"&lt;{TAG}&gt;",
    f"</b><img src=x onxss=1><{TAG}/>",
)
FOLDERS = (
    "events",
    "logs",
    "errors",
    "ranks",
    "traces",
    "what_it_was",
    "stacks",
    "tensorboard",
    "checkpoints",
)
RANK_FILES = (
    ("events", ".jsonl"),
    ("ranks", ".json"),
    ("errors", ".json"),
    ("logs", ".log"),
    ("traces", ".json.gz"),
    ("memory_snapshots", ".pickle"),
    ("what_it_was", ".json"),
)
STATUSES = ("queued", "starting", "running", "stopping", "finished", "stopped", "failed", "lost")


@dataclass(frozen=True)
class Surroundings:
    """Files beside the damaged folder, which no call on it may change."""

    folder: Path
    """Folder of ``precious.txt`` and other files of the user."""
    canary: Path
    """File that exists once any code of the folder was executed."""

    @property
    def precious(self) -> Path:
        """A file of the user that planted links point to."""
        return self.folder / "precious.txt"


class RawJson(str):
    """Text that goes into JSON as it is, for numbers that Python's encoder does not write."""


class _Evil:
    """An object that creates the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch '{self.canary}'",)


Mutation = Callable[[random.Random, Path, Surroundings], str | None]
"""Changes the folder and returns what it did; None if there was nothing to change."""


def mutate_run(rng: random.Random, path: Path, around: Surroundings) -> list[str]:
    """Damage the run in ``path`` in one to three ways. Return their descriptions."""
    descriptions: list[str] = []
    count = rng.choice((1, 1, 1, 2, 3))
    for _ in range(50):
        description = rng.choice(MUTATIONS)(rng, path, around)
        if description is not None:
            descriptions.append(description)
        if len(descriptions) == count:
            break
    return descriptions


# ---- bytes


def flip_bytes(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    file, data = _some_file(rng, path)
    if not data:
        return None
    count = rng.choice((1, 3, 30, len(data) // 2 + 1))
    changed = bytearray(data)
    for _ in range(count):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    file.write_bytes(changed)
    return f"{count} bytes of {_format_name(file, path)} are others"


def truncate(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    file, data = _some_file(rng, path)
    if not data:
        return None
    length = rng.choice((0, 1, rng.randrange(len(data))))
    file.write_bytes(data[:length])
    return f"{_format_name(file, path)} ends after {length} bytes"


def replace_encoding(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    file, data = _some_file(rng, path)
    how, encoded = rng.choice((
        ("is UTF-16", data.decode(errors="replace").encode("utf-16")),
        ("begins with a byte-order mark", b"\xef\xbb\xbf" + data),
        ("has bytes that are no UTF-8", data.replace(b'"', b'"\xff\xfe\xc0\x80', 3) + b"\xf0\x28\x8c\x28\n"),
        ("has null bytes", data.replace(b" ", b"\0", 3) + b"\0" * 1000 + b"\n"),
        ("has carriage returns", data.replace(b"\n", b"\r\r\n")),
    ))  # fmt: skip
    file.write_bytes(encoded)
    return f"{_format_name(file, path)} {how}"


def append_long_line(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    file, _data = _some_file(rng, path)
    size = rng.choice((10**5, 3 * 10**6))
    line = rng.choice((
        b"x" * size,
        b'{"loss": "' + b"y" * size + b'"}',
        b'{"step": 1, "rank": 0, "loss": ' + b"9" * size + b"}",
        b"\x1b[" * (size // 2),
        b"a" * 50 + b"<b>" * (size // 3),
    ))  # fmt: skip
    end = rng.choice((b"", b"\n"))
    with file.open("ab") as opened:
        opened.write(line + end)
    return (
        f"{_format_name(file, path)} ends in a line of {len(line):,} bytes{'' if end else ' without its end'}"
    )


def append_many_lines(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    file = path / rng.choice(
        ("events/rank-0.jsonl", "status.jsonl", "exits.jsonl", "cards.jsonl", "samples.jsonl")
    )
    if file.is_symlink() or (file.exists() and not file.is_file()):
        return None  # an earlier mutation put a folder, a link or a pipe here
    count = rng.choice((2_000, 20_000))
    kind = rng.choice(("names", "equal", "numbers", "empty"))
    with file.open("a") as opened:
        for n in range(count):
            record: Any = {"step": n, "rank": 0, "time": n, "status": "running", "reason": "", "loss": 1.0}
            if kind == "names":
                record[f"metric-{n}"] = n
            text = "{}" if kind == "empty" else str(n) if kind == "numbers" else json.dumps(record)
            opened.write(text + "\n")
    return f"{_format_name(file, path)} has {count:,} more lines ({kind})"


def nest_deeply(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    file, _data = _some_file(rng, path, (".json", ".jsonl"))
    depth = rng.choice((200, 2_000, 100_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    value = f"{opening * depth}1{closing * depth}"
    whole = rng.choice((True, False))
    file.write_text((value if whole else f'{{"world_size": 2, "plan": {value}, "status": {value}}}') + "\n")
    return f"{_format_name(file, path)} nests {depth:,} deep"


# ---- values


def replace_value(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    return _change_record(
        rng, path, lambda record: _replace_somewhere(rng, record, _draw_hostile_value(rng, around))
    )


def replace_run_json_value(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    def change(record: Any) -> str | None:
        if not isinstance(record, dict) or not record:
            return None
        key = rng.choice(sorted(record))
        record[key], words = _draw_hostile_value(rng, around)
        return f"{key} is {words}"

    return _change_record(rng, path, change, "run.json")


def replace_plan_value(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    def change(record: Any) -> str | None:
        plan = record.get("plan") if isinstance(record, dict) else None
        return (
            _replace_somewhere(rng, plan, _draw_hostile_value(rng, around))
            if isinstance(plan, dict)
            else None
        )

    return _change_record(rng, path, change, "run.json")


def change_keys(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    def change(record: Any) -> str | None:
        spots = [spot for spot in _list_containers(record) if isinstance(spot, dict) and spot]
        if not spots:
            return None
        spot = rng.choice(spots)
        key = rng.choice(sorted(spot))
        value = spot.pop(key)
        kind = rng.choice(("removed", "renamed", "twice"))
        if kind == "renamed":
            spot[rng.choice((key.upper(), f" {key}", *HOSTILE_TEXTS))] = value
        elif kind == "twice":
            other, _ = _draw_hostile_value(rng, around)
            spot[RawJson(f"{json.dumps(key)}: {_encode_json(value)}, {json.dumps(key)}")] = other
        return f"{key} is {kind}"

    return _change_record(rng, path, change)


def add_status(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    value, words = rng.choice(((rng.choice(STATUSES), "known"), _draw_hostile_value(rng, around)))
    if rng.random() < 0.3:  # Then the last status is what is shown.
        (path / "supervisor.json").unlink(missing_ok=True)
    reason, _ = rng.choice((("as it was", ""), _draw_hostile_value(rng, around)))
    when = rng.choice((1.0, 4e9, 9e15, -1e12, "soon", None, RawJson("1e999")))
    record = {"time": when, "status": value, "reason": reason, "error": rng.choice((None, HOSTILE_TEXTS[1]))}
    return _append_text(path, "status.jsonl", record, f"a status that is {words}, at {when}")


def add_metrics(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    value, words = _draw_hostile_value(rng, around)
    name = rng.choice(("loss", "step", "rank", "time", "step_seconds", "memory_bytes", *HOSTILE_TEXTS))
    rank = rng.choice((0, 1))
    record = {"step": 9, "rank": rank, "time": 1.0, "loss": 1.0, name: value}
    return _append_text(path, f"events/rank-{rank}.jsonl", record, f"{name} that is {words}")


def add_failure(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    file = rng.choice(
        (
            "errors/rank-0.json",
            "errors/launcher.json",
            "exits.jsonl",
            "note.json",
            "cards.jsonl",
            "samples.jsonl",
        )
    )
    record: dict[str, Any] = {
        "rank": rng.choice((0, 7, -1, 10**9, True)),
        "time": 1.0,
        "monotonic": 1.0,
        "summary": rng.choice(HOSTILE_TEXTS),
        "traceback": rng.choice(HOSTILE_TEXTS),
        "code": rng.choice((-9, 1, 0, 10**9)),
        "note": rng.choice(HOSTILE_TEXTS),
        "step": rng.choice((0, -1, 10**9, True)),
        "prompt": rng.choice(HOSTILE_TEXTS),
        "text": rng.choice(HOSTILE_TEXTS),
        "gpu": 0,
    }
    record[rng.choice(sorted(record))], words = _draw_hostile_value(rng, around)
    status = path / "status.jsonl"
    # An earlier mutation may have put a FIFO, a socket or a link there, whose opening would hang or fail.
    is_ordinary = not status.is_symlink() and (status.is_file() or not status.exists())
    if rng.random() < 0.5 and is_ordinary:
        status.write_text('{"time": 1.0, "status": "failed", "reason": "r"}\n')
    return _append_text(path, file, record, f"a record with a value that is {words}")


def add_output(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    file = path / rng.choice(("logs/rank-0.log", "logs/rank-1.log", "logs/launcher.log", "supervisor.log"))
    text = rng.choice(
        (*HOSTILE_TEXTS, "\x1b]0;x\x07\x1bc", "\x9b2J\x85", "\x1b[\x1b[31m1m", "\r\b\v\0", "\u202e")
    )
    if file.is_symlink() or not file.is_file():
        return None
    with file.open("a") as opened:
        opened.write(f"{text}\n" * rng.choice((1, 100)))
    return f"{_format_name(file, path)} ends in {text!a}"


def change_ranks(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    sizes: tuple[Any, ...] = (0, -1, 1, 3, 16_384, 16_385, 10**9, True, 2.5, "2", [2], RawJson("1e400"))

    def change(record: Any) -> str | None:
        if not isinstance(record, dict):
            return None
        record["world_size"] = rng.choice(sizes)
        return f"world_size is {str(record['world_size'])[:20]}"

    if rng.random() < 0.5:
        return _change_record(rng, path, change, "run.json")
    name = rng.choice(("rank-99", "rank--1", "rank-٣", "rank-0x1", "rank-", f"rank-{10**30}", "rank-0 "))
    folder, suffix = rng.choice(RANK_FILES)
    try:
        (path / folder).mkdir(exist_ok=True)
        (path / folder / f"{name}{suffix}").write_text('{"rank": 99, "pid": 1}\n')
    except OSError:
        return None
    return f"{folder} has {name}{suffix}"


def change_times(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    when = rng.choice((0.0, 1.0, 4e9, 9e9))
    for file in _list_files(path):
        os.utime(file, (when, when))
    return f"every file is of {when:.0f} s after 1970"


# ---- kinds of files


def replace_by_special(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    if rng.random() < 0.2:
        names = [name for name in FOLDERS if os.path.lexists(path / name)]
        if not names:
            return None
        target = path / rng.choice(names)
    elif rng.random() < 0.6:
        target = path / rng.choice(READ_FILES)
    else:
        target, _data = _some_file(rng, path)
    kind = rng.choice(KINDS)
    try:
        _remove_path(target)
        target.parent.mkdir(exist_ok=True)
        SPECIALS[kind](target, around)
    except OSError:  # Its folder is something else already.
        return None
    return f"{_format_name(target, path)} is {kind}"


def _make_socket(target: Path, _: Surroundings) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(target.parent)  # A socket's path has 107 bytes.
        try:
            made.bind(target.name)
        finally:
            os.chdir(here)


def _make_sparse(target: Path, _: Surroundings) -> None:
    with target.open("wb") as file:
        file.truncate(2**40)


SPECIALS: dict[str, Callable[[Path, Surroundings], None]] = {
    "a named pipe": lambda target, _: os.mkfifo(target),
    "a socket": _make_socket,
    "a folder": lambda target, _: target.mkdir(),
    "a sparse file of 1 TiB": _make_sparse,
    "a link to itself": lambda target, _: target.symlink_to(target.name),
    "a link to a file of the user's": lambda target, around: target.symlink_to(around.precious),
    "a link to a folder of the user's": lambda target, around: target.symlink_to(around.folder),
    "a link to /dev/zero": lambda target, _: target.symlink_to("/dev/zero"),
    "a link to nothing": lambda target, around: target.symlink_to(around.folder / "nothing"),
    "a link to its run folder": lambda target, _: target.symlink_to(target.parent),
    "an empty file": lambda target, _: target.touch(),
}
KINDS = tuple(SPECIALS)
READ_FILES = (
    *("run.json", "status.jsonl", "supervisor.json", "control.jsonl", "exits.jsonl", "note.json"),
    *(
        "cards.jsonl",
        "samples.jsonl",
        "summary.json",
        "supervisor.log",
        "events/rank-0.jsonl",
        "logs/rank-0.log",
    ),
    *("errors/rank-0.json", "errors/launcher.json", "ranks/rank-1.json", "what_it_was/rank-0.json"),
    *("traces/rank-0.json.gz", "memory_snapshots/rank-0.pickle", "checkpoints/step-000008/position.json"),
)
"""Files that a reader opens, whether this run has them or not."""


def swap_files(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    first, data = _some_file(rng, path)
    second, _data = _some_file(rng, path)
    second.write_bytes(data)
    return f"{_format_name(second, path)} is a copy of {_format_name(first, path)}"


def delete_files(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    files = _list_files(path)
    left = rng.choice((len(files) - 1, len(files) // 2, 1, 0))
    for file in rng.sample(files, len(files) - max(0, left)):
        file.unlink()
    return f"{max(0, left)} files are left"


# ---- what would run code


def plant_pickles(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    payload = pickle.dumps(_Evil(around.canary), protocol=rng.choice((0, 2, 5)))
    metadata = [file for file in _list_files(path) if file.name in (".metadata", "metadata.pt")]
    name = rng.choice(
        ("task.pkl", "memory_snapshots/rank-0.pickle", ".metadata", "checkpoint", "traces/rank-0.json.gz")
    )
    if name == ".metadata" and metadata:
        for file in metadata:
            file.write_bytes(payload)
    elif name == "checkpoint":  # One that is newer than the run's own.
        folder = path / "checkpoints" / "step-999999"
        folder.mkdir(parents=True, exist_ok=True)
        for file in (".metadata", "__0_0.distcp", "mp_rank_00_model_states.pt", "common.pt", "latest"):
            (folder / file).write_bytes(payload)
        (folder / "position.json").write_text('{"num_steps_done": 999999, "seed": 0}')
    else:
        file = path / ("task.pkl" if name == ".metadata" else name)
        _remove_path(file)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(payload)
    return f"an evil pickle is planted: {name}"


def plant_trace(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    text = rng.choice(HOSTILE_TEXTS)
    event = {"ph": "X", "cat": "cpu_op", "name": text, "pid": text, "tid": 1, "ts": 1.0, "dur": 5.0}
    trace = {"traceEvents": [event] * 20, "distributedInfo": {"rank": rng.choice((0, 99, text))}}
    data = rng.choice((
        gzip.compress(json.dumps(trace).encode()),
        gzip.compress(b" " * 2**26),
        gzip.compress(b'{"traceEvents": [' + b"[" * 10**5),
        json.dumps(trace).encode(),
        b"\x1f\x8b" + bytes(rng.randrange(256) for _ in range(100)),
    ))  # fmt: skip
    target = path / "traces" / rng.choice(("rank-0.json.gz", "rank-1.json.gz", "more.json.gz"))
    try:
        _remove_path(target)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
    except OSError:
        return None
    return f"{_format_name(target, path)} is another trace"


def plant_code(rng: random.Random, path: Path, around: Surroundings) -> str:
    program = f"import pathlib; pathlib.Path({str(around.canary)!r}).touch()\n"
    name = rng.choice(
        ("sitecustomize.py", "shardscope.py", "torch.py", "plan.py", "__init__.py", "config.json")
    )
    (path / name).write_text(program)
    return f"{name} is planted"


def name_files(rng: random.Random, path: Path, _: Surroundings) -> str | None:
    folder = path / rng.choice(("logs", "events", "traces", "checkpoints", "."))
    name = rng.choice(("<xss-canary>", "a\nb", "\x1b[2J", "\udcff", ".hidden", "x" * 250, "--help", "* ?"))
    suffix = rng.choice(("", ".log", ".json.gz", ".jsonl"))
    try:
        folder.mkdir(exist_ok=True)
        (folder / f"{name}{suffix}"[:250]).write_text("{}\n")
    except OSError:
        return None
    return f"a file is called {name[:20]!r}{suffix}"


def claim_resume(rng: random.Random, path: Path, around: Surroundings) -> str | None:
    places = ("/dev/zero", str(around.folder), "../good", "..", str(path), "", "~", "a\0b", 7, True, ["x"])

    def change(record: Any) -> str | None:
        if not isinstance(record, dict):
            return None
        record["asked_name"] = rng.choice(("good", record.get("asked_name")))
        record["created"] = rng.choice((4e9, 1e12, record.get("created")))
        asked = record.get("asked")
        place = rng.choice(places)
        if isinstance(asked, dict):
            asked["resume"] = place
        return f"it was asked to resume {place!r}, and claims the name {record['asked_name']!r}"

    return _change_record(rng, path, change, "run.json")


MUTATIONS: tuple[Mutation, ...] = (
    flip_bytes, truncate, replace_encoding, append_long_line, append_many_lines, nest_deeply,
    replace_value, replace_value, replace_value, replace_run_json_value, replace_run_json_value,
    replace_plan_value, change_keys, change_keys, add_status, add_status, add_metrics, add_metrics,
    add_failure, add_output, change_ranks, change_times, *[replace_by_special] * 8,
    swap_files, delete_files, plant_pickles, plant_pickles, plant_trace, plant_code, name_files, claim_resume,
)  # fmt: skip


# ---- helpers


def _draw_hostile_value(rng: random.Random, around: Surroundings) -> tuple[Any, str]:
    """Draw a value of another type, size or meaning, and its description."""
    text = rng.choice(HOSTILE_TEXTS)
    if rng.random() < 0.25:
        return text, "hostile HTML"
    return rng.choice((
        (None, "null"),
        (True, "true"),
        (rng.choice((-1, 0, 2**31, 2**63, 2**64, -(2**63) - 1)), "an odd integer"),
        (RawJson("9" * rng.choice((400, 5000))), "an integer beyond float range"),
        (rng.choice((float("nan"), float("inf"), float("-inf"))), "not finite"),
        (RawJson("1e999"), "1e999"),
        (rng.choice((1e308, -1e300, 5e-324)), "at the end of float range"),
        (rng.choice(("NaN", "Infinity", "-Infinity")), "a special float as text"),
        ("", "empty text"),
        ("x" * 10**6, "a megabyte of text"),
        ([text], "a list of hostile HTML"),
        ({text: text}, "an object of hostile HTML"),
        ([], "an empty list"),
        ({}, "an empty object"),
        (["x"] * 1000, "a long list"),
        (RawJson("[" * 500 + "]" * 500), "deeply nested"),
        (RawJson('"\\ud800"'), "half a surrogate pair"),
        ("a\0b", "text with a null byte"),
        ("\x1b]0;x\x07\x1bc\x9b2J\x85", "control characters"),
        ("\u202e\u202d\u2066", "text that changes direction"),
        (rng.choice(("/dev/zero", "../../..", str(around.precious), str(around.folder), "~root")), "a path"),
        (rng.choice(STATUSES), "a status"),
        ("os.system", "a name of code"),
    ))  # fmt: skip


def _list_containers(value: Any) -> list[Any]:
    found = [value] if isinstance(value, dict | list) else []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        found += _list_containers(item)
    return found


def _replace_somewhere(rng: random.Random, record: Any, hostile: tuple[Any, str]) -> str | None:
    spots = [spot for spot in _list_containers(record) if spot]
    if not spots:
        return None
    spot = rng.choice(spots)
    key = rng.choice(sorted(spot)) if isinstance(spot, dict) else rng.randrange(len(spot))
    spot[key], words = hostile
    return f"{key} is {words}"


def _change_record(
    rng: random.Random, path: Path, change: Callable[[Any], str | None], name: str | None = None
) -> str | None:
    """Change one record, of a file of JSON or of one line in a file of JSON lines."""
    if name is None:
        file, data = _some_file(rng, path, (".json", ".jsonl"))
    else:
        file = path / name
        if file.is_symlink() or not file.is_file() or file.stat().st_size > 2**20:
            return None
        data = file.read_bytes()
    lines = data.splitlines() if file.suffix == ".jsonl" else [data]
    if not lines or len(data) > 2**20:
        return None
    number = rng.randrange(len(lines))
    try:
        record = json.loads(lines[number])
        words = change(record)
        encoded = _encode_json(record).encode(errors="surrogatepass")
    except (ValueError, RecursionError):  # It was damaged before.
        return None
    if words is None:
        return None
    lines[number] = encoded
    file.write_bytes(b"\n".join(lines) + b"\n")
    return f"in {_format_name(file, path)}, {words}"


def _append_text(path: Path, name: str, record: dict[str, Any], words: str) -> str | None:
    file = path / name
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        return None
    text = _encode_json(record) + "\n"
    try:
        file.parent.mkdir(exist_ok=True)
        if file.suffix == ".jsonl":
            with file.open("a", errors="surrogatepass") as opened:
                opened.write(text)
        else:
            file.write_text(text, errors="surrogatepass")
    except OSError:
        return None
    return f"{name} has {words}"


def _encode_json(value: Any) -> str:
    """Encode as JSON as Python's encoder does, except :class:`RawJson`."""
    if isinstance(value, RawJson):
        return str(value)
    if isinstance(value, dict):
        items = (
            f"{key if isinstance(key, RawJson) else json.dumps(key)}: {_encode_json(item)}"
            for key, item in value.items()
        )
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_encode_json, value)) + "]"
    return json.dumps(value)


def _list_files(path: Path) -> list[Path]:
    """List the regular files of the run, in an order that is the same each time."""
    files = []
    for place, folders, names in os.walk(path):
        folders.sort()
        files += [Path(place, name) for name in sorted(names)]
    return [file for file in files if not file.is_symlink() and file.is_file()]


def _some_file(rng: random.Random, path: Path, suffixes: tuple[str, ...] = ()) -> tuple[Path, bytes]:
    """A file and what is in it; files at the top, which every use reads, as often as all others."""
    files = [file for file in _list_files(path) if not suffixes or file.suffix in suffixes]
    top = [file for file in files if file.parent == path]
    chosen = rng.choice(top if top and rng.random() < 0.5 else files) if files else path / "run.json"
    if not chosen.exists() or chosen.stat().st_size > 2**24:
        return chosen, b""
    return chosen, chosen.read_bytes()


def _format_name(file: Path, path: Path) -> str:
    return str(file.relative_to(path))


def _remove_path(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
