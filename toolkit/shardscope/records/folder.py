"""Paths of a run folder. The folder is the run: no state exists in memory only."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Literal, get_args

from shardscope.core.errors import Value, refuse
from shardscope.machine.os_errors import describe_shortage
from shardscope.machine.user_folders import check_home
from shardscope.records.json_files import append_line, read_json

Status = Literal["queued", "starting", "running", "stopping", "finished", "stopped", "failed", "lost"]
FULL_BYTES = 2**20
"""Free disk space below which writes of a run may be lost."""
STATUSES: frozenset[str] = frozenset(get_args(Status))
EXPORT = "export"
"""Subfolder of a run with the exported Hugging Face checkpoint."""
RECORDINGS = "recordings"
"""Subfolder of a run with the recordings that ``run.profile`` requested, a folder each."""
MERGED = "merged"
"""Subfolder of a run with its adapters merged into their base."""
NODES = "nodes"
"""Subfolder of a scheduler's run: a folder for each node, which only that node writes."""
ATTEMPTS = "attempts"
"""Subfolder of a run that may be started again: a folder for each attempt, from 1."""
SUBMISSION = "slurm"
"""Subfolder of a Slurm run with the job script, the pickles and the logs of submitit."""
TEMPORARY = "tmp"
"""Subfolder of a run on one machine, and of each node's folder; deleted when its ranks have ended."""
RAY = "ray"
"""Subfolder of a Ray run with the state of its coordinator, which alone writes it."""
ENGINE_REPORTS = "what_it_was"
"""Subfolder of a run with the reports of what the ranks' engines built."""
FINAL: frozenset[str] = frozenset({"finished", "stopped", "failed", "lost"})
"""Statuses of a run that has ended, as far as a reader can tell."""
CERTAINLY_ENDED = FINAL - {"lost"}
"""Those that stay. ``lost`` is inferred: a stalled supervisor may go on, and a file system may come back."""


class RunFolder:
    """The paths inside one run folder."""

    SUBFOLDERS = (
        "events",
        "logs",
        "errors",
        "ranks",
        "traces",
        ENGINE_REPORTS,
        "stacks",
        "tensorboard",
    )

    def __init__(self, path: str | os.PathLike[str], attempt: int | None = None) -> None:
        self.path = Path(path).absolute()
        self.fixed_attempt = attempt
        """The attempt whose files the paths name; None: the latest one, at each access."""

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 1; 1 for a run that is never started again."""
        if self.fixed_attempt is not None:
            return self.fixed_attempt
        return max(list_numbers(self.path / ATTEMPTS), default=1)

    @property
    def state(self) -> Path:
        """Folder of the files that no two attempts share: records of ranks and of nodes, and errors.

        The first attempt's is the run folder itself.
        """
        attempt = self.attempt
        return self.attempt_folder(attempt) if attempt > 1 else self.path

    def attempt_folder(self, attempt: int) -> Path:
        """Return the folder of the records of one attempt."""
        return self.path / ATTEMPTS / str(attempt)

    def select_attempt(self, attempt: int) -> RunFolder:
        """Return this folder with the paths of one attempt."""
        return RunFolder(self.path, attempt)

    def create_attempt(self) -> None:
        """Create the folders of this attempt with mode 0700; no effect if they exist. Raises ``OSError``."""
        folder = self.attempt_folder(self.attempt)
        names = ("ranks", "errors", *((NODES,) if self.has_nodes else ())) if self.attempt > 1 else ()
        for path in (folder.parent, folder, *(folder / name for name in names)):
            path.mkdir(mode=0o700, exist_ok=True)

    @property
    def is_lead(self) -> bool:
        """Return whether the supervisor of this folder writes the run's status."""
        return True

    def select_ranks(self, world_size: int) -> range:
        """Return the ranks whose processes the supervisor of this folder watches."""
        return range(world_size)

    @property
    def has_nodes(self) -> bool:
        """Return whether a scheduler runs it, with a folder for each node."""
        return (self.path / NODES).is_dir()

    def list_nodes(self) -> list[NodeFolder]:
        """Return the folders of the nodes that have started, in order; none for a run of one machine."""
        numbers = list_numbers(self.state / NODES)
        return [NodeFolder(self.path, number, attempt=self.fixed_attempt) for number in numbers]

    @property
    def job(self) -> Path:
        """The scheduler's job of this run, written once at launch; missing for a run of this machine."""
        return self.path / "job.json"

    @property
    def job_end(self) -> Path:
        """End of a job none of whose nodes has started; written once, by the process that saw it first."""
        return self.path / "job_end.json"

    @property
    def run_json(self) -> Path:
        """Description of the run: name, plan, versions, task. Written once by ``launch``."""
        return self.path / "run.json"

    @property
    def status(self) -> Path:
        """Status transitions with time and reason; the last one is the current status."""
        return self.path / "status.jsonl"

    @property
    def control(self) -> Path:
        """Commands to the run, as JSON lines; write access permits stopping it."""
        return self.path / "control.jsonl"

    @property
    def supervisor(self) -> Path:
        """Supervisor process and machine; its mtime is the heartbeat, updated every two seconds."""
        return self.path / "supervisor.json"

    @property
    def task(self) -> Path:
        """The cloudpickled task, mode 0600; deleted after it was loaded."""
        return self.path / "task.pkl"

    @property
    def exits(self) -> Path:
        """Exit codes of rank processes, recorded by their parent."""
        return self.state / "exits.jsonl"

    @property
    def launcher_error(self) -> Path:
        """Exception that ended the launcher."""
        return self.state / "errors" / "launcher.json"

    @property
    def launcher_log(self) -> Path:
        """Output of the launcher."""
        return self.path / "logs" / "launcher.log"

    @property
    def supervisor_log(self) -> Path:
        """Output of the supervisor."""
        return self.path / "supervisor.log"

    @property
    def gpu_samples(self) -> Path:
        """Samples of GPU utilization, temperature and power; missing for CPU ranks."""
        return self.path / "cards.jsonl"

    @property
    def samples(self) -> Path:
        """Answers of the model to fixed prompts while it trains; missing if the task has no prompts."""
        return self.path / "samples.jsonl"

    @property
    def note(self) -> Path:
        """The user's note on the run."""
        return self.path / "note.json"

    @property
    def summary(self) -> Path:
        """Summary of the metrics; written when the finished run is first listed."""
        return self.path / "summary.json"

    @property
    def csv(self) -> Path:
        """All metrics as CSV, written when the run has ended."""
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files, a folder per rank, written during the run."""
        return self.path / "tensorboard"

    @property
    def traces(self) -> Path:
        """Folder of the profiler traces of ``profile=True`` and ``ctx.profile()``, a file per rank."""
        return self.path / "traces"

    @property
    def temporary(self) -> Path:
        """Temporary files of the launcher and the profiler; deleted when the run has ended."""
        return self.path / TEMPORARY

    def events(self, rank: int) -> Path:
        """Return the path of one rank's metrics, as JSON lines."""
        # One join: a run folder may claim 16,384 ranks, each of which is followed.
        return self.path.joinpath("events", f"rank-{rank}.jsonl")

    def log(self, rank: int) -> Path:
        """Return the path of one rank's output."""
        return self.path / "logs" / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """Return the path of the exception that ended one rank."""
        return self.state / "errors" / f"rank-{rank}.json"

    def rank(self, rank: int) -> Path:
        """Return the path of one rank's process id, start and end."""
        return self.state / "ranks" / f"rank-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Return the path of one rank's stack dump (faulthandler), written on request."""
        return self.path / "stacks" / f"rank-{rank}.txt"

    def trace(self, rank: int, recording: int = 0) -> Path:
        """Return the path of one rank's profiler trace in one of the run's recordings."""
        return self.recording(recording) / f"rank-{rank}.json.gz"

    def recording(self, number: int) -> Path:
        """Return the folder of one recording: 0 is the task's own, others are those of ``run.profile``."""
        return self.path / RECORDINGS / str(number) if number else self.traces

    def list_recordings(self) -> list[int]:
        """Return the numbers of the recordings of which a rank has written its trace, oldest first."""
        numbers = [0, *(number for number in list_numbers(self.path / RECORDINGS) if number)]
        return [number for number in numbers if any(self.recording(number).glob("*.json.gz"))]

    def engine_report(self, rank: int) -> Path:
        """Return the path of the report of what one rank's engine built."""
        return self.path / ENGINE_REPORTS / f"rank-{rank}.json"

    def memory_snapshot(self, rank: int) -> Path:
        """Return the path of one rank's ``torch.cuda.memory`` snapshot (see trace.memory_snapshot)."""
        return self.path / "memory_snapshots" / f"rank-{rank}.pickle"

    def memory_snapshots(self) -> dict[int, Path]:
        """Return the existing memory snapshots by rank."""
        paths = self.memory_snapshot(0).parent.glob("rank-*.pickle")
        ranks = ((path.stem.removeprefix("rank-"), path) for path in paths)
        return {int(rank): path for rank, path in ranks if _is_number(rank)}

    def create(self, *further: str) -> None:
        """Create the folder with mode 0700, its parents and its folders. Raises ``OSError``."""
        # The parents with the user's umask, as any tool makes them; the run itself is private.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700)
        for name in (*self.SUBFOLDERS, *further):
            (self.path / name).mkdir(mode=0o700)

    @property
    def is_on_full_disk(self) -> bool:
        """Return whether the disk is so full that writes may be lost."""
        return self.measure_full_disk() is not None

    def measure_full_disk(self) -> dict[str, object] | None:
        """Return the folder, and the free and all bytes of its disk, if that is full; else None."""
        try:
            usage = shutil.disk_usage(self.path)
        except OSError:
            return None
        if usage.free >= FULL_BYTES:
            return None
        return {"folder": str(self.path), "free": usage.free, "total": usage.total}

    def set_status(self, status: Status, reason: str, **more: object) -> None:
        """Append a status transition. Raises ``OSError``."""
        append_line(self.status, {"time": time.time(), "status": status, "reason": reason, **more})


class NodeFolder(RunFolder):
    """Paths for one node of a scheduler's run, whose supervisor and launcher write into ``nodes/<n>``.

    Node 0 also writes the run's status. The ranks' files are in the run folder, as in a run on one machine.
    """

    NODE_SUBFOLDERS = ("logs", "errors", TEMPORARY)

    def __init__(
        self, path: str | os.PathLike[str], node: int, num_nodes: int = 1, attempt: int | None = None
    ) -> None:
        super().__init__(path, attempt)
        self.node = node
        self.num_nodes = num_nodes

    @property
    def title(self) -> str:
        """Number of this node, with its name once it has started: ``node 1 (gpu-07)``."""
        name = (read_json(self.node_json) or {}).get("name")
        return f"node {self.node} ({name})" if isinstance(name, str) else f"node {self.node}"

    @property
    def own(self) -> Path:
        """Folder of the files that only this node writes."""
        return self.state / NODES / str(self.node)

    @property
    def is_lead(self) -> bool:
        return self.node == 0

    def select_ranks(self, world_size: int) -> range:
        ranks_per_node = world_size // self.num_nodes
        return range(self.node * ranks_per_node, (self.node + 1) * ranks_per_node)

    def create_own(self) -> None:
        """Create this node's folders with mode 0700. Raises ``OSError``."""
        self.own.mkdir(mode=0o700)
        for name in self.NODE_SUBFOLDERS:
            (self.own / name).mkdir(mode=0o700)

    def create_peer(self, node: int) -> NodeFolder:
        """Return the folder of another node of the same run."""
        return NodeFolder(self.path, node, self.num_nodes, self.fixed_attempt)

    @property
    def status(self) -> Path:
        return super().status if self.is_lead else self.own / "status.jsonl"

    @property
    def supervisor(self) -> Path:
        return self.own / "supervisor.json"

    @property
    def supervisor_log(self) -> Path:
        return self.own / "supervisor.log"

    @property
    def exits(self) -> Path:
        return self.own / "exits.jsonl"

    @property
    def gpu_samples(self) -> Path:
        return self.own / "cards.jsonl"

    @property
    def launcher_error(self) -> Path:
        return self.own / "errors" / "launcher.json"

    @property
    def launcher_log(self) -> Path:
        return self.own / "logs" / "launcher.log"

    @property
    def temporary(self) -> Path:
        return self.own / TEMPORARY

    @property
    def node_json(self) -> Path:
        """Name, address and network interface of this node; written once, before its supervisor starts."""
        return self.own / "node.json"

    @property
    def rendezvous(self) -> Path:
        """Address and port of the ranks' store, which the launcher of node 0 serves."""
        return self.own / "rendezvous.json"

    @property
    def reserve(self) -> Path:
        """Space for the last records of this node, which is freed when its ranks have ended."""
        return self.own / ".reserve"

    @property
    def hang(self) -> Path:
        """Positions of this node's ranks when they were last found to hang; missing if they never were."""
        return self.own / "hang.json"

    @property
    def ended(self) -> Path:
        """Final status of this node's ranks; written once, after all of their processes have ended."""
        return self.own / "ended.json"


def list_numbers(folder: Path) -> list[int]:
    """Return the numbers among the names in ``folder``, in order; none if it cannot be listed."""
    try:
        # Not Path.iterdir: readers ask for the paths of thousands of ranks.
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    return sorted(int(name) for name in names if _is_number(name))


def _is_number(name: str) -> bool:
    # The folder may come from anybody: int() also accepts digits of other scripts.
    return name.isdecimal() and name.isascii()


def checked_path(field: str, value: object) -> Path:
    """Return ``value`` as a path, ``~`` expanded.

    Raises ``ValueError`` unless it is text or a ``Path``, and ``FileNotFoundError`` for a relative one if
    there is no working directory.
    """
    # Path("a\0b") is accepted by pathlib and fails only when the file is opened.
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        refuse(field, value, "text or a Path, without null bytes", Value("runs"))
    path = check_home(field, text, Value("runs"))
    if not path.is_absolute():
        check_working_directory()
    return path


def check_working_directory() -> None:
    """Raise ``FileNotFoundError`` if this process's working directory is deleted.

    Python's own error names no path, and libraries of new processes, such as MKL, fail to load there.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT,
            "The working directory of this process, such as the folder of the notebook, was deleted or "
            "replaced. Nearest fix: os.chdir() to a folder that exists, or restart the kernel there.",
        ) from error


def explain_write_error(path: Path, error: OSError) -> OSError:
    """Return an ``OSError`` of the same type whose message names the folder or resource and a fix."""
    # A full disk or quota is not a matter of permissions: another folder is no fix for it.
    shortage = describe_shortage(error)
    if shortage is not None:
        message = f"The run in {path} lacks a resource: {shortage}."
    else:
        cause = error.strerror or error
        message = f"The run folder {path} cannot be written: {cause}. Nearest fix: a writable folder=."
    return type(error)(error.errno, message)
