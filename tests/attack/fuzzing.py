"""Tries: each damages a copy of a recorded run, has a worker open it, and looks for what it did."""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attack.mutations import HOSTILE_TEXTS, Surroundings, mutate_run
from tests.attack.recorded_runs import NAMES, make_living

CALL_SECONDS = 2.0
HANG_SECONDS = 8.0
"""When a call counts as one that never ends; a machine that has other things to do may be slow."""
START_SECONDS = 120.0
GOOD = "good"
WARM_UP = ("stopped", "adapters", "weights")
MADE_BY_READERS = frozenset({"summary.json"})
"""Files that reading a run may add to its folder."""


@dataclass
class Outcome:
    """One try."""

    number: int
    damage: list[str]
    wrong: list[str] = field(default_factory=list)
    """Calls that failed, each with how; empty if the folder was survived."""


class Worker:
    """The process that opens folders, started again whenever it had to be killed."""

    def __init__(self, home: Path, warm_up: list[Path]) -> None:
        """``warm_up``: runs in good order, on which every call is made before the first that counts."""
        self.home = home
        self.warm_up = warm_up
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def open(self, folder: Path, calls: list[str]) -> Iterator[tuple[str, str | None]]:
        """Make ``calls`` on ``folder``. Yield the name of each, and what is wrong with it."""
        self._start()
        self._request(folder, calls)
        current = "the worker"
        while True:
            answer = self._answer(HANG_SECONDS)
            if answer is None:
                died = None if self._process is None else self._process.poll()
                how = "it hangs" if died is None else f"the process ended with code {died}"
                self.close()
                yield current, how
                return
            if "begin" in answer:
                current = answer["begin"]
            elif "end" in answer:
                wrong = answer["wrong"]
                if wrong is None and answer["seconds"] > CALL_SECONDS:
                    wrong = f"it takes {answer['seconds']:.1f} s"
                yield current, wrong
            else:
                return

    def close(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._rest = None, b""

    def _start(self) -> None:
        if self._process is not None:
            return
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "SHARDSCOPE_DATA_HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "OMP_NUM_THREADS": "1",
            # Each arena reserves 64 MiB or more of the address space, which the worker limits.
            "MALLOC_ARENA_MAX": "2",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        for folder in self.warm_up:
            self._request(folder, self.calls)
            answer: dict[str, Any] | None = {}
            while answer is not None and "folder" not in answer:
                answer = self._answer(START_SECONDS)
                if answer is None or answer.get("wrong"):
                    raise RuntimeError(f"a run in good order is not survived: {answer}")

    def _request(self, folder: Path, calls: list[str]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "calls": calls}).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def calls(self) -> list[str]:
        """Names of all calls."""
        from tests.attack.calls import CALLS  # Not above: it imports every view.

        return list(CALLS)

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if none came in time, or the process ended."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            piece = os.read(self._process.stdout.fileno(), 2**16)
            if not piece:
                self._process.wait()
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run_tries(
    numbers: list[int], seed: int, recorded: Path, failed_folder: Path | None = None
) -> Iterator[Outcome]:
    """Make the tries of these numbers. Failed ones are copied to ``failed_folder``."""
    with tempfile.TemporaryDirectory(prefix="shardscope-attack-") as parent:
        runs = Path(parent) / "warm-up" / "runs"
        worker = Worker(Path(parent) / "home", [runs / name for name in WARM_UP])
        worker.home.mkdir()
        shutil.copytree(recorded / "stopped", runs / GOOD)
        for name in WARM_UP:
            shutil.copytree(recorded / name, runs / name)
        try:
            for number in numbers:
                yield _run_try(number, seed, recorded, Path(parent) / str(number), worker, failed_folder)
                shutil.rmtree(Path(parent) / str(number))
        finally:
            worker.close()


def _run_try(
    number: int, seed: int, recorded: Path, parent: Path, worker: Worker, failed_folder: Path | None
) -> Outcome:
    damaged, around, damage = _prepare_runs(number, seed, recorded, parent)
    outcome = Outcome(number, damage)
    before = _read_outside(parent, damaged)
    late: list[tuple[str, str]] = []
    calls = worker.calls
    while calls:
        left = calls
        for name, wrong in worker.open(damaged, calls):
            # A call that was killed is not made again; attaching is, for those after it.
            left = left[left.index(name) + 1 :] if name in left else []
            if wrong is not None and ("hangs" in wrong or "takes" in wrong):
                late.append((name, wrong))
            elif wrong is not None:
                outcome.wrong.append(f"{name}: {wrong}")
        calls = ["Run.attach", *left] if left and not any(name == "Run.attach" for name, _ in late) else left
    changed = _list_changes(before, _read_outside(parent, damaged))
    outcome.wrong += [f"outside of the folder, {change}" for change in changed]
    if around.canary.exists():
        outcome.wrong.append("code of the folder was executed")
    # The machine may have been busy: what was late is tried once more, on the folder as it was.
    for name, wrong in late:
        shutil.rmtree(parent)
        damaged, around, _ = _prepare_runs(number, seed, recorded, parent)
        again = dict(worker.open(damaged, list(dict.fromkeys(["Run.attach", name]))))
        if again.get(name, wrong) is not None:
            outcome.wrong.append(f"{name}: {again.get(name, wrong)}")
    if outcome.wrong and failed_folder is not None:
        _copy_failed(number, seed, recorded, failed_folder)
    return outcome


def _prepare_runs(
    number: int, seed: int, recorded: Path, parent: Path
) -> tuple[Path, Surroundings, list[str]]:
    """Copy two recorded runs to ``parent``, damage one. Return it, what is around it, and the damage."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(NAMES)
    hostile = draw.choice(HOSTILE_TEXTS).replace("/", "")
    damaged = (
        parent / "runs" / draw.choice(("victim", "victim", "victim", f"{GOOD}-2", "a b", "-rf", hostile))
    )
    shutil.copytree(recorded / "stopped", parent / "runs" / GOOD)
    shutil.copytree(recorded / kind, damaged)
    if kind == "living":
        make_living(damaged)
    around = Surroundings(parent / "outside", parent / "canary")
    around.folder.mkdir()
    around.precious.write_text('{"world_size": 2, "status": "the user\'s own file"}\n')
    (around.folder / "rank-0.jsonl").write_text('{"step": 0, "rank": 0, "time": 1.0, "loss": 7.0}\n')
    return damaged, around, [f"a run that is {kind}", *mutate_run(draw, damaged, around)]


def _read_outside(parent: Path, damaged: Path) -> dict[str, tuple[Any, ...]]:
    """Every file in ``parent`` that is not the damaged run's, with its content."""
    contents: dict[str, tuple[Any, ...]] = {}
    for folder, inside, names in os.walk(parent):
        inside[:] = [name for name in inside if Path(folder, name) != damaged]
        for name in (*inside, *names):
            path = Path(folder, name)
            status = path.lstat()
            data = path.read_bytes() if name in names and path.is_file() else b""
            contents[str(path)] = (status.st_mode, hashlib.sha256(data).hexdigest())
    return contents


def _list_changes(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> list[str]:
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    return [
        f"{Path(path).name} {'changed' if path in before and path in after else 'came or went'}"
        for path in sorted(changed)
        if Path(path).name not in MADE_BY_READERS and Path(path).name != "canary"
    ]


def _copy_failed(number: int, seed: int, recorded: Path, failed_folder: Path) -> None:
    """Make the damaged folder once more, where it stays."""
    parent = failed_folder / f"{seed}-{number}"
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir(parents=True)
    _prepare_runs(number, seed, recorded, parent)
