"""Where calibrations and measured steps of finished runs are kept: one file for a machine and its GPU type.

The folder is ``$SHARDSCOPE_DATA_HOME``, or else ``shardscope`` in the user's data folder by the XDG Base
Directory Specification 0.8 (``$XDG_DATA_HOME``, ``~/.local/share``). Files are 0600, replaced as a whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardscope.core.errors import Value, refuse
from shardscope.core.serialization import JsonNoun
from shardscope.machine.host import host_cores
from shardscope.timing.calibration.curves import Calibration
from shardscope.timing.calibration.finished_runs import MAX_RUNS, MeasuredStep

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.timing.rates import Rates

FOLDER_VARIABLE = "SHARDSCOPE_DATA_HOME"
MAX_FILE_BYTES = 32 * 2**20
"""More than the most that is ever written."""
MAX_CALIBRATIONS = 16
"""Of one machine and GPU type: one for each number of ranks."""


class NotStoredError(OSError):
    """A calibration or a measured step could not be written; the message names the folder and what to do."""


@dataclass(frozen=True, kw_only=True)
class MachineRecord(JsonNoun):
    """All that is known of one machine's GPUs of one type. Raises ``ValueError`` for bad values."""

    machine: str
    gpu: str
    calibrations: tuple[Calibration, ...] = ()
    """At most one for each number of ranks; the newest last."""
    steps: tuple[MeasuredStep, ...] = ()
    """Of finished runs, the newest last."""

    def __post_init__(self) -> None:
        for name, noun in (("calibrations", Calibration), ("steps", MeasuredStep)):
            found = getattr(self, name)
            if not isinstance(found, tuple) or not all(isinstance(one, noun) for one in found):
                refuse(f"MachineRecord.{name}", found, f"a tuple of {noun.__name__}", "ss.calibrate()")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The record that ``to_dict`` described. Raises ``ValueError`` for unknown or bad values."""
        given = dict(data)
        for name, noun in (("calibrations", Calibration), ("steps", MeasuredStep)):
            found = given.get(name, [])
            if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
                refuse(f"MachineRecord.{name}", found, f"a list of {noun.__name__}", "ss.calibrate()")
            given[name] = tuple(noun.from_dict(one) for one in found)
        return super().from_dict(given)

    def with_calibration(self, calibration: Calibration) -> MachineRecord:
        """The same with ``calibration`` in place of an earlier one of as many ranks."""
        others = [one for one in self.calibrations if one.num_ranks != calibration.num_ranks]
        kept = (*others, calibration)[-MAX_CALIBRATIONS:]
        return MachineRecord(machine=self.machine, gpu=self.gpu, calibrations=kept, steps=self.steps)

    def with_step(self, step: MeasuredStep) -> MachineRecord:
        """The same with one more measured step; the oldest gives way."""
        kept = (*self.steps, step)[-MAX_RUNS:]
        return MachineRecord(machine=self.machine, gpu=self.gpu, calibrations=self.calibrations, steps=kept)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """``folder``, or where this user's measurements are kept. Raises ``ValueError`` for what is no path."""
    if folder is not None:
        text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
        if not isinstance(text, str) or not text or "\0" in text:
            refuse("calibrate.folder", folder, "a folder's path, or None", Value(None))
        return Path(text).expanduser().absolute()
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME", "")
    # The specification: a relative path there is invalid, and ignored.
    home = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    return home / "shardscope"


def file_for(gpu: str, folder: Path, machine: str | None = None) -> Path:
    """The file of ``machine`` (this one by default) and ``gpu``."""
    return folder / "calibration" / _file_name(machine or machine_name(), gpu)


@lru_cache(maxsize=1)
def machine_name() -> str:
    """This host's name, as files and reports call it."""
    return _plain(socket.gethostname()) or "unnamed"


def stored_rates(cluster: Cluster) -> Rates | None:
    """Rates of the stored calibration that fits ``cluster``, or None. Microseconds, while nothing changed.

    Raises as :func:`stored` does.
    """
    folder = _calibrations(os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_DATA_HOME"))
    every = _stamp(folder)
    if every is None:
        return None
    gpu = cluster.gpu.name
    own = _stamp(f"{folder}/{_file_name(machine_name(), gpu)}")
    # Those of other hosts in the same folder count only where this one has none.
    others = None if own or gpu == "cpu" else every
    if own is None and others is None:
        return None
    return _rates(cluster, folder, own, others, host_cores() if gpu == "cpu" else None)


def calibration_for(cluster: Cluster, folder: str | os.PathLike[str] | None = None) -> Calibration | None:
    """The stored calibration that fits ``cluster``: of such GPUs here, or on another host of the folder.

    CPU ranks share their host's cores, so theirs must be of this host, with as many ranks and cores as then.
    Of GPUs that of as many in a node is taken, or else the one of most. Raises as :func:`stored` does.
    """
    place = data_folder(folder)
    record = stored(file_for(cluster.gpu.name, place))
    if cluster.gpu.name == "cpu":
        fitting = [
            one
            for one in (record.calibrations if record else ())
            if one.num_ranks == cluster.num_gpus and one.num_cores == host_cores()
        ]
        return fitting[-1] if fitting else None
    found = record.calibrations if record else _of_other_hosts(cluster.gpu.name, place)
    same = [one for one in found if one.num_ranks == cluster.gpus_per_node]
    return same[-1] if same else max(found, key=lambda one: one.num_ranks, default=None)


def stored(path: Path) -> MachineRecord | None:
    """What ``path`` holds, read when it changed; None if there is no such file.

    Raises ``ValueError`` naming the file and what is wrong with it.
    """
    stamp = _stamp(str(path))
    return None if stamp is None else _read(path, *stamp)


def store_calibration(calibration: Calibration, folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep ``calibration`` in place of an earlier one of as many ranks; the file's path.

    A damaged file is put aside, for a new calibration is what mends it. Raises :class:`NotStoredError`.
    """
    path = file_for(calibration.gpu, data_folder(folder), calibration.machine)
    with locked(path):
        try:
            record = stored(path)
        except ValueError:
            path.replace(path.with_suffix(".damaged"))
            record = None
        record = record or MachineRecord(machine=calibration.machine, gpu=calibration.gpu)
        _write(path, record.with_calibration(calibration))
    return path


def store_step(step: MeasuredStep, gpu: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep a finished run's step; the file's path. Raises :class:`NotStoredError` and ``ValueError``."""
    path = file_for(gpu, data_folder(folder))
    with locked(path):
        record = stored(path) or MachineRecord(machine=machine_name(), gpu=gpu)
        _write(path, record.with_step(step))
    return path


def check_writable(folder: str | os.PathLike[str] | None = None) -> None:
    """Raise :class:`NotStoredError` before a minute is spent on what could then not be kept."""
    place = data_folder(folder) / "calibration"
    with _in_words(place):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = place / f".probe.{os.getpid()}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        probe.unlink()


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock beside ``path``, which ends with this process. ``BlockingIOError`` without ``wait``."""
    import fcntl

    lock = path.with_name(f".{path.name}.lock")
    with _in_words(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


@lru_cache(maxsize=64)
def _read(path: Path, _modified: int, size: int, _inode: int) -> MachineRecord:
    wrong = "delete it, or measure anew with ss.calibrate()"
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is {size:,} bytes, which no stored calibration is; {wrong}.")
    try:
        return MachineRecord.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no stored calibration ({error}); {wrong}.") from error


@lru_cache(maxsize=64)
def _rates(cluster: Cluster, folder: str, *_read_anew_when_these_change: Any) -> Rates | None:
    calibration = calibration_for(cluster, Path(folder).parent)
    return None if calibration is None else calibration.rates(cluster)


@lru_cache(maxsize=8)
def _calibrations(_named: str | None, _base: str | None) -> str:
    return str(data_folder() / "calibration")


@lru_cache(maxsize=64)
def _file_name(machine: str, gpu: str) -> str:
    return f"{_plain(machine)}--{_plain(gpu)}.json"


def _stamp(path: str) -> tuple[int, int, int] | None:
    """What tells whether a file or a folder is another than at the last look."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path takes longer to make than to ask
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _of_other_hosts(gpu: str, folder: Path) -> tuple[Calibration, ...]:
    """Of a folder that several hosts share: the calibrations of the one that was measured last."""
    place = folder / "calibration"
    try:
        modified = place.stat().st_mtime_ns
    except OSError:
        return ()
    records = [
        stored(path) for path in _listed(place, modified) if path.name.endswith(f"--{_plain(gpu)}.json")
    ]
    measured = [record.calibrations for record in records if record is not None and record.calibrations]
    return max(measured, key=lambda found: found[-1].measured_at, default=())


@lru_cache(maxsize=8)
def _listed(folder: Path, _modified: int) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.json")))


def _write(path: Path, record: MachineRecord) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with _in_words(path.parent):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(record.to_json())
        partial.replace(path)


@contextlib.contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotStoredError(
            error.errno,
            f"measurements cannot be kept in {folder}: {error.strerror or error}. Name a folder that can be "
            f"written in the environment variable {FOLDER_VARIABLE}, or in ss.calibrate(folder=...)",
        ) from error


def _plain(name: str) -> str:
    """``name`` as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100]
