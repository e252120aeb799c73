"""One launch after another, each with its fault, each looked at afterwards."""

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
from tests.soak.launched import Launched, StuckError, wait_until
from tests.soak.residue import MARK, Before, be_the_parent_of_orphans, end, left_in_folder, left_processes
from tests.soak.tasks import KEY

from shardscope.records.folder import FINAL
from shardscope.runs.launch.launch import launch
from shardscope.runs.run import Run

MOST_SECONDS = 20.0
"""From the strike to the last process: the product's own bound is 5, on a machine with nothing else to do."""
MOST_SECONDS_ALONE = 120.0
"""From the launch, of runs that end by themselves."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one choice."""

    choice: Choice
    work: str
    ended: str
    """``status: reason``; of two at once, of both."""
    seconds: float
    """Until the last process was gone: from the strike, or from the launch of a run that ends alone."""
    wrong: tuple[str, ...]
    """What was left, what the folder did not say, what took too long."""


def outcomes(chosen: Sequence[Choice], folder: Path, keep: Path) -> Iterator[Outcome]:
    """Run them below ``folder``, one after another; folders of those that went wrong go to ``keep``."""
    be_the_parent_of_orphans()
    scratch = folder / "scratch"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ[KEY] = "soak-0123456789-of-the-user"
    os.environ["SHARDSCOPE_DATA_HOME"] = str(folder / "data")
    for choice in chosen:
        place = folder / f"launch-{choice.number:03}"
        outcome = _soak(choice, place, scratch)
        if outcome.wrong and place.is_dir():
            shutil.copytree(place, keep / place.name, dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(place, ignore_errors=True)
        yield outcome


def _soak(choice: Choice, place: Path, scratch: Path) -> Outcome:
    fault, mark, wrong = choice.fault, f"{os.getpid()}/{choice.number}", []
    os.environ[MARK] = mark
    before = Before(mark, scratch)
    launched = _launch(choice, place)
    sessions = {each.supervisor for each in launched}
    ours = {each.supervisor for each in launched if each.kernel is None}
    first, most = launched[0], MOST_SECONDS_ALONE if fault.ends_alone else MOST_SECONDS
    try:
        fault.strike(first, choice.chance)
        since = first.began if fault.ends_alone else first.struck
        wait_until(lambda: all(_has_ended(each) for each in launched), most)
        wait_until(lambda: not left_processes(mark, sessions, ours), 5)
    except StuckError as error:
        since = first.struck
        wrong.append(f"{error} of the fault: {', '.join(map(repr, (each.run for each in launched)))}")
    seconds = time.monotonic() - since
    if seconds > most:
        wrong.append(f"took {seconds:.1f} s")
    ports = {port for each in launched for port in each.ports}
    wrong += before.left(sessions, ours, ports)
    ended = [f"{each.run.status}: {each.run.reason}" for each in launched]
    for each, words in zip(launched, ended, strict=True):
        wrong += _folder_says(each, words, fault.expected)
    end(left_processes(mark, sessions, ours))
    for each in launched:
        each.close()
    _, _, what = choice.work()
    return Outcome(choice=choice, work=what, ended=" and ".join(ended), seconds=seconds, wrong=tuple(wrong))


def _launch(choice: Choice, place: Path) -> list[Launched]:
    plan, task, _ = choice.work()
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


def _folder_says(launched: Launched, words: str, expected: str) -> Iterator[str]:
    """What is wrong with it: what was seen while it ended, and what anybody sees who comes later."""
    if not re.match(expected, words):
        yield f"it says {words!r}, not {expected!r}"
    folder = launched.run.folder
    if folder.is_dir():
        later = Run.attach(folder)
        if f"{later.status}: {later.reason}" != words:
            yield f"seen anew it says {later.status}: {later.reason}"
        yield from left_in_folder(folder, secret=os.environ[KEY].encode())
    elif "folder is gone" not in words:
        yield "its folder is gone"
