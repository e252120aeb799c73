"""Run folders that have every file that is ever read, and text of a stranger in each of them."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from written_runs import PLAN, write_failure, write_run

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, write_json


def write_full_run(name: str, status: str = "running", *, parent: Path | str = "runs") -> Path:
    """Write a run folder that has every file that is ever read."""
    text = "some words"
    path = write_run(name, status, num_done=6, has_trace=True, reason=text, parent=parent)
    folder = RunFolder(path)
    append_line(folder.exits, {"rank": 1, "code": 3, "time": 1.0, "monotonic": 2.0})
    append_line(folder.control, {"command": "profile", "time": 1.0})
    append_line(folder.gpu_samples, {"time": 1.0, "utilisation_percent": [1, 2]})
    write_json(folder.note, {"note": text})
    append_line(folder.samples, {"step": 0, "prompt": text, "text": text, "is_complete": True})
    write_json(folder.launcher_error, {"summary": text, "traceback": text, "time": 1.0, "monotonic": 9.0})
    folder.launcher_log.write_text(text)
    folder.supervisor_log.write_text(text)
    folder.csv.write_text("step\n")
    folder.task.write_bytes(b"")
    folder.memory_snapshot(0).parent.mkdir()
    folder.memory_snapshot(0).write_bytes(b"N.")
    for rank in (0, 1):
        write_failure(path, rank, text)
        write_json(folder.rank(rank), {"pid": 2**22 + rank, "started": 1.0, "looks_for_stop": True})
        folder.stacks(rank).write_text(text)
        memory = {"device": "cpu", "step": 2, "phases": {"rest": {"parameters": 2**20}}}
        engine = {"sentence": text, "num_parameters": PLAN.architecture.num_parameters}
        write_json(folder.engine_report(rank), {"memory": memory, "engine": engine})
    return path


def plant_text(
    path: Path, name: str, place: tuple[str | int, ...], text: str, *, is_key: bool = False
) -> None:
    """Put ``text`` in the place of one value, or of one key beside it, of a JSON file."""
    file = path / name
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for record in lines:
        inside: Any = record
        with suppress(KeyError, IndexError, TypeError):
            for step in place[:-1]:
                inside = inside[step]
            if is_key:
                inside[text] = text
            else:
                inside[place[-1]] = text
    file.write_text("".join(json.dumps(record) + "\n" for record in lines))


TEXTS = {
    "run.json": ("name", "asked_name", "task", "device"),
    "status.jsonl": ("reason", "error"),
    "note.json": ("note",),
    "samples.jsonl": ("prompt", "text"),
    "errors/rank-0.json": ("summary", "traceback", "type"),
    "errors/rank-1.json": ("summary", "traceback", "type"),
    "errors/launcher.json": ("summary", "traceback"),
    "what_it_was/rank-0.json": ("engine",),
}
"""Values that may be any text, by file."""
TEXT_FILES = (
    "supervisor.log",
    "logs/rank-0.log",
    "logs/rank-1.log",
    "logs/launcher.log",
    "stacks/rank-0.txt",
)


def plant_text_everywhere(path: Path, text: str) -> None:
    """Put ``text`` wherever a run folder may have any text, so that it is still a run."""
    folder = RunFolder(path)
    for name in TEXT_FILES:
        (path / name).write_text(f"{text}\n\x1b[31m{text}\x1b[0m\n{text}")
    for name, keys in TEXTS.items():
        for key in keys:
            plant_text(path, name, (key,), text)
    plant_text(path, "what_it_was/rank-1.json", ("engine", "sentence"), text)
    for name in ("name", "model_type"):
        plant_text(path, "run.json", ("plan", "architecture", name), text)
    for place in (("asked", "x"), ("predicted", "x"), ("versions", "x"), ("plan", "x")):
        plant_text(path, "run.json", place, text, is_key=True)
    with folder.events(0).open("a") as file:
        for step in range(8):
            line = {"step": step, "rank": 0, "time": 1.0, text: 1.0 + step, "loss": text}
            file.write(json.dumps(line) + "\n")
    event = {"ph": "X", "cat": text, "name": text, "pid": text, "tid": text, "ts": 10.0, "dur": 5.0}
    named = {"ph": "M", "name": "process_name", "pid": text, "args": {"name": text}}
    with gzip.open(folder.trace(0), "wt") as packed:
        json.dump({"traceEvents": [event, named, {**named, "name": "thread_name", "tid": text}]}, packed)
