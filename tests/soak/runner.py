"""Runner of the soak: one launch after another, each with its fault and checked afterwards."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.soak.choices import Choice
from tests.soak.launched_run import Launched, StuckError, wait_until
from tests.soak.residue import (
    MARK,
    Before,
    adopt_orphans,
    find_residue_in_folder,
    kill_all,
)
from tests.soak.tasks import KEY

from shardscope.records.folder import FINAL
from shardscope.runs.launch.launch import launch
from shardscope.runs.run import Run

MAX_SECONDS = 20.0
"""Maximum time from the fault to the end of the last process; on an idle machine it must be 5 s."""
MAX_SECONDS_FROM_LAUNCH = 120.0
"""Maximum time from the launch, of runs that end by themselves."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one choice."""

    choice: Choice
    task: str
    ended: str
    """``status: reason``; for two runs at once, of both."""
    seconds: float
    """Seconds from the fault (or the launch, of a run that ends by itself) to the end of the last process."""
    wrong: tuple[str, ...]
    """Problems: residue, a wrong status or reason, or too long a time."""


def run_choices(chosen: Sequence[Choice], folder: Path, keep: Path) -> Iterator[Outcome]:
    """Run the choices one after another in ``folder``; copy the folders of failed ones to ``keep``."""
    adopt_orphans()
    scratch = folder / "scratch"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ[KEY] = "soak-0123456789-of-the-user"
    os.environ["SHARDSCOPE_DATA_HOME"] = str(folder / "data")
    for choice in chosen:
        place = folder / f"launch-{choice.number:03}"
        outcome = _run_choice(choice, place, scratch)
        if outcome.wrong and place.is_dir():
            shutil.copytree(place, keep / place.name, dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(place, ignore_errors=True)
        yield outcome


def _run_choice(choice: Choice, place: Path, scratch: Path) -> Outcome:
    fault, mark, wrong = choice.fault, f"{os.getpid()}/{choice.number}", []
    os.environ[MARK] = mark
    before = Before(mark, scratch)
    launched_runs = _launch(choice, place)
    sessions = {launched_run.supervisor for launched_run in launched_runs}
    own_children = {launched_run.supervisor for launched_run in launched_runs if launched_run.kernel is None}
    first, max_seconds = launched_runs[0], MAX_SECONDS_FROM_LAUNCH if fault.ends_by_itself else MAX_SECONDS
    try:
        fault.inject(first, choice.make_rng())
        since = first.started_at if fault.ends_by_itself else first.clock_started
        wait_until(lambda: all(_has_ended(launched_run) for launched_run in launched_runs), max_seconds)
        wait_until(lambda: not before.find_processes(sessions, own_children), 5)
    except StuckError as error:
        since = first.clock_started
        runs = ", ".join(repr(launched_run.run) for launched_run in launched_runs)
        wrong.append(f"{error} of the fault: {runs}")
    seconds = time.monotonic() - since
    if seconds > max_seconds:
        wrong.append(f"took {seconds:.1f} s")
    ports = {port for launched_run in launched_runs for port in launched_run.ports}
    wrong += before.find_residue(sessions, own_children, ports)
    ended = [f"{launched_run.run.status}: {launched_run.run.reason}" for launched_run in launched_runs]
    for launched_run, outcome_text in zip(launched_runs, ended, strict=True):
        wrong += _check_folder(launched_run, outcome_text, fault.expected)
    kill_all(before.find_processes(sessions, own_children))
    for launched_run in launched_runs:
        launched_run.close()
    _, _, task = choice.build_task()
    return Outcome(choice=choice, task=task, ended=" and ".join(ended), seconds=seconds, wrong=tuple(wrong))


def _launch(choice: Choice, place: Path) -> list[Launched]:
    plan, task, _ = choice.build_task()
    if choice.fault.where in ("kernel", "outlived"):
        arguments = [str(choice.seed), str(choice.number), choice.fault.name, str(place)]
        kernel = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.kernel", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert kernel.stdout is not None
        with kernel.stdout:
            where = kernel.stdout.readline().strip()
        return [Launched(Run.attach(where), kernel)]
    if choice.fault.where == "twice":
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(launch, plan, task, folder=place) for _ in range(2)]
            return [Launched(run.result()) for run in runs]
    return [Launched(launch(plan, task, folder=place))]


def _has_ended(launched: Launched) -> bool:
    launched.note_ports()
    return launched.run.status in FINAL


def _check_folder(launched: Launched, outcome_text: str, expected: str) -> Iterator[str]:
    """Yield problems of a run's final status, its status by a new handle, and its folder."""
    if not re.match(expected, outcome_text):
        yield f"it says {outcome_text!r}, not {expected!r}"
    folder = launched.run.folder
    if folder.is_dir():
        later = Run.attach(folder)
        if f"{later.status}: {later.reason}" != outcome_text:
            yield f"a new handle says {later.status}: {later.reason}"
        yield from find_residue_in_folder(folder, secret=os.environ[KEY].encode())
    elif "folder is gone" not in outcome_text:
        yield "its folder is gone"
