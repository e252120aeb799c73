"""Where everything of a run lies on disk. The folder is the run; nothing about it lives only in memory."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal, get_args

from shardscope.core.errors import Value, refuse
from shardscope.machine.os_errors import describe_shortage
from shardscope.records.files import append_line

Status = Literal["starting", "running", "stopping", "finished", "stopped", "failed", "lost"]
FULL_BYTES = 2**20
"""With less left on its disk, what a run writes may be lost."""
STATUSES: frozenset[str] = frozenset(get_args(Status))
FINAL: frozenset[str] = frozenset({"finished", "stopped", "failed", "lost"})


class RunFolder:
    """The paths inside one run folder."""

    SUBFOLDERS = (
        "events",
        "logs",
        "errors",
        "ranks",
        "traces",
        "what_it_was",
        "stacks",
        "tensorboard",
        "tmp",
    )

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def run_json(self) -> Path:
        """Name, plan, versions, task: written once by ``launch``."""
        return self.path / "run.json"

    @property
    def status(self) -> Path:
        """Every transition with its time and reason; the last one counts."""
        return self.path / "status.jsonl"

    @property
    def control(self) -> Path:
        """Commands to the run; whoever can write here can stop it."""
        return self.path / "control.jsonl"

    @property
    def supervisor(self) -> Path:
        """Which process supervises, on which machine; touched every two seconds as a heartbeat."""
        return self.path / "supervisor.json"

    @property
    def task(self) -> Path:
        """The cloudpickled task: 0600, unlinked as soon as it was read."""
        return self.path / "task.pkl"

    @property
    def exits(self) -> Path:
        """How rank processes ended, as their parent saw it."""
        return self.path / "exits.jsonl"

    @property
    def launcher_error(self) -> Path:
        """The exception that ended the launcher."""
        return self.path / "errors" / "launcher.json"

    @property
    def launcher_log(self) -> Path:
        """What the launcher printed."""
        return self.path / "logs" / "launcher.log"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor printed."""
        return self.path / "supervisor.log"

    @property
    def cards(self) -> Path:
        """How busy, hot and hungry its cards were; a run on CPU ranks has none."""
        return self.path / "cards.jsonl"

    @property
    def note(self) -> Path:
        """What whoever launched it says of it to people who watch it."""
        return self.path / "note.json"

    @property
    def summary(self) -> Path:
        """What its metrics come to; written by whoever first lists the run after its end."""
        return self.path / "summary.json"

    @property
    def csv(self) -> Path:
        """All metrics as a table, written when the run has ended."""
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        """The same as TensorBoard's events, a folder per rank, written while the run goes on."""
        return self.path / "tensorboard"

    @property
    def traces(self) -> Path:
        """The profiler's recordings, a file per rank."""
        return self.path / "traces"

    @property
    def temporary(self) -> Path:
        """What the launcher and the profiler write meanwhile; deleted when the run has ended."""
        return self.path / "tmp"

    def events(self, rank: int) -> Path:
        """Metrics of one rank, as JSON lines."""
        return self.path / "events" / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """What one rank printed."""
        return self.path / "logs" / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """The exception that ended one rank."""
        return self.path / "errors" / f"rank-{rank}.json"

    def rank(self, rank: int) -> Path:
        """Process id, start and end of one rank."""
        return self.path / "ranks" / f"rank-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Where one rank stood when it was asked: faulthandler's text."""
        return self.path / "stacks" / f"rank-{rank}.txt"

    def trace(self, rank: int) -> Path:
        """The profiler's recording of one rank."""
        return self.traces / f"rank-{rank}.json.gz"

    def what_it_was(self, rank: int) -> Path:
        """What the engine of one rank really made."""
        return self.path / "what_it_was" / f"rank-{rank}.json"

    def memory_snapshot(self, rank: int) -> Path:
        """``torch.cuda.memory``'s snapshot of one rank: a pickle, which trace.memory_snapshot reads."""
        return self.path / "memory_snapshots" / f"rank-{rank}.pickle"

    def memory_snapshots(self) -> dict[int, Path]:
        """Those that were taken, by rank."""
        found = self.memory_snapshot(0).parent.glob("rank-*.pickle")
        numbers = ((path.stem.removeprefix("rank-"), path) for path in found)
        return {int(rank): path for rank, path in numbers if rank.isdecimal() and rank.isascii()}

    def create(self) -> None:
        """Make the folder, 0700, and those above it. Raises ``OSError``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        for name in self.SUBFOLDERS:
            (self.path / name).mkdir(mode=0o700)

    @property
    def is_on_full_disk(self) -> bool:
        """Whether what is written now may not be there later."""
        try:
            return shutil.disk_usage(self.path).free < FULL_BYTES
        except OSError:
            return False

    def set_status(self, status: Status, reason: str, **more: Any) -> None:
        """Append one transition. Raises ``OSError``."""
        append_line(self.status, {"time": time.time(), "status": status, "reason": reason, **more})


def checked_path(field: str, value: object) -> Path:
    """``value`` as a path if it is text or a ``Path`` that can name a folder. Raises ``ValueError``."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        refuse(field, value, "text or a Path, without null bytes", Value("runs"))
    return Path(text)


def unwritable(path: Path, error: OSError) -> OSError:
    """The same kind of ``OSError``, in words that name the folder or what is used up, and what to do."""
    shortage = describe_shortage(error)
    if shortage is not None:
        words = f"The run in {path} needs more than there is: {shortage}."
    else:
        cause = error.strerror or error
        words = f"The run folder {path} cannot be written: {cause}. Give folder= a place that can."
    return type(error)(error.errno, words)
