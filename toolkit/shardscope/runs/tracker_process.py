"""Process that reports a run's metrics: ``python -m shardscope.runs.tracker_process folder wandb trackio``.

It reads the metrics of rank 0 until its standard input ends, which is the end of the run. Nothing is sent
over a network unless the environment asks for it (WANDB_MODE, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL).
"""

from __future__ import annotations

import functools
import importlib
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import LineTail, parse_lines, read_json
from shardscope.records.json_values import is_int
from shardscope.records.regular_files import size_of
from shardscope.runs.tensorboard import find_numbers
from shardscope.runs.trackers import FINISH_SECONDS

POLL_SECONDS = 1.0
PROJECT = "shardscope"
"""Name of the project, unless WANDB_PROJECT or TRACKIO_PROJECT is set."""


class TrackedRun(Protocol):
    """A run of trackio or wandb, as ``init`` of both packages returns it."""

    def log(self, metrics: dict[str, float], *, step: int) -> object: ...
    def finish(self) -> object: ...


def report_run(folder: RunFolder, names: list[str]) -> None:
    """Report the metrics of rank 0 to the trackers ``names``, until standard input ends."""
    description = read_json(folder.run_json) or {}
    config = describe_config(description)
    trackers = {name: run for name in names if (run := _start(name, folder, config)) is not None}
    lines, has_ended = LineTail(folder.events(0)), False
    if folder.attempt > 1:  # Earlier attempts have reported theirs.
        lines.offset = size_of(folder.events(0))
    while trackers:
        # The metrics are complete before standard input ends, so this reads the last ones.
        for step, numbers in _iterate_metrics(lines):
            for name, run in list(trackers.items()):
                if not _try(name, functools.partial(run.log, dict(numbers), step=step)):
                    del trackers[name]
        if has_ended:
            break
        has_ended = _wait_for_end()
    for name, run in trackers.items():
        _try(name, run.finish)


def describe_config(description: Mapping[str, object]) -> dict[str, object]:
    """Return the plan, the task's fields and the versions of ``run.json``, paths by their last name only."""
    fields = description.get("asked")
    task = {name: _shorten_path(value) for name, value in fields.items()} if isinstance(fields, dict) else {}
    return {"plan": description.get("plan"), "task": task, "versions": description.get("versions")}


def _shorten_path(value: object) -> object:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _iterate_metrics(lines: LineTail) -> Iterator[tuple[int, dict[str, float]]]:
    for piece in lines.read_pieces():
        for record in parse_lines(piece).records:
            step, numbers = record.get("step"), dict(find_numbers(record))
            if is_int(step) and step >= 0 and numbers:
                yield step, numbers


def _start(name: str, folder: RunFolder, config: dict[str, object]) -> TrackedRun | None:
    started: list[TrackedRun] = []
    start = {"wandb": _start_wandb, "trackio": _start_trackio}[name]
    _try(name, lambda: started.append(start(importlib.import_module(name), folder, config)))
    return started[0] if started else None


def _start_wandb(wandb: ModuleType, folder: RunFolder, config: dict[str, object]) -> TrackedRun:
    run: TrackedRun = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=folder.path.name,
        dir=str(folder.path),
        config=config,
        # Only the metrics: neither this process's output, nor code, nor anything of the machine.
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )
    return run


def _start_trackio(trackio: ModuleType, folder: RunFolder, config: dict[str, object]) -> TrackedRun:
    run: TrackedRun = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
        name=folder.path.name,
        config=config,
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return run


def _try(name: str, action: Callable[[], object]) -> bool:
    """Return whether ``action()`` succeeded; log why not. One tracker's failure must not end the other."""
    try:
        action()
    except Exception:
        print(f"gave up reporting to {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return False
    return True


def _wait_for_end() -> bool:
    """Wait for the next look at the metrics. Return whether standard input has ended."""
    ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _end_in_time() -> None:
    """End this process soon after standard input has ended, whatever a tracker waits for."""
    select.select([sys.stdin], [], [])
    threading.Event().wait(FINISH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_in_time, daemon=True).start()
    report_run(RunFolder(sys.argv[1]), sys.argv[2:])
