"""Storage of calibrations and of finished runs' measured steps: one file per machine and GPU type.

Files (``files.py``) have mode 0600 and are replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shardscope.core.errors import Value, refuse
from shardscope.core.serialization import Serializable
from shardscope.machine.host import count_cores
from shardscope.timing.calibration.curves import Calibration
from shardscope.timing.calibration.files import (
    FOLDER_VARIABLE,
    NotStoredError,
    build_record_path,
    find_data_folder,
    get_machine_name,
    make_name_safe,
    read_stamp,
)
from shardscope.timing.calibration.finished_runs import MAX_RUNS, MeasuredStep
from shardscope.timing.calibration.traced import TracedRates

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster

PROBE_BYTES = 2**18
"""More than the record of a machine usually has."""
_CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)  # Windows has no such flag.
MAX_FILE_BYTES = 32 * 2**20
"""Maximum file size: more than is ever written."""
MAX_CALIBRATIONS = 16
"""Maximum per machine and GPU type: one for each number of ranks."""


@dataclass(frozen=True, kw_only=True)
class MachineRecord(Serializable):
    """Calibrations and measured steps of one machine's GPUs of one type.

    Raises ``ValueError`` for bad values.
    """

    machine: str
    gpu: str
    calibrations: tuple[Calibration, ...] = ()
    """At most one for each number of ranks; the newest last."""
    steps: tuple[MeasuredStep, ...] = ()
    """Measured steps of finished runs; the newest last."""
    traced: TracedRates | None = None
    """Speeds that the trace of a run measured, used in place of the calibration's."""

    def __post_init__(self) -> None:
        for name, noun in (("calibrations", Calibration), ("steps", MeasuredStep)):
            entries = getattr(self, name)
            if not isinstance(entries, tuple) or not all(isinstance(entry, noun) for entry in entries):
                refuse(f"MachineRecord.{name}", entries, f"a tuple of {noun.__name__}", "ss.calibrate()")
        if self.traced is not None and not isinstance(self.traced, TracedRates):
            refuse("MachineRecord.traced", self.traced, "TracedRates or None", Value(None))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return the record from its ``to_dict``. Raise ``ValueError`` for unknown or bad values."""
        fields = dict(data)
        for name, noun in (("calibrations", Calibration), ("steps", MeasuredStep)):
            entries = data.get(name, [])
            if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
                refuse(f"MachineRecord.{name}", entries, f"a list of {noun.__name__}", "ss.calibrate()")
            fields[name] = tuple(noun.from_dict(entry) for entry in entries)
        traced = data.get("traced")
        if isinstance(traced, Mapping):
            fields["traced"] = TracedRates.from_dict(traced)
        return super().from_dict(fields)

    def with_calibration(self, calibration: Calibration) -> MachineRecord:
        """Return a copy with ``calibration`` instead of an earlier one with as many ranks."""
        remaining = [one for one in self.calibrations if one.num_ranks != calibration.num_ranks]
        newest = (*remaining, calibration)[-MAX_CALIBRATIONS:]
        return replace(self, calibrations=newest)

    def with_step(self, step: MeasuredStep) -> MachineRecord:
        """Return a copy with one more measured step; the oldest is dropped beyond ``MAX_RUNS``."""
        newest = (*self.steps, step)[-MAX_RUNS:]
        return replace(self, steps=newest)


def find_calibration(cluster: Cluster, folder: str | os.PathLike[str] | None = None) -> Calibration | None:
    """Return the stored calibration that matches ``cluster``: of this host, or of another one in the folder.

    CPU ranks share their host's cores, so theirs must be of this host, with the same numbers of ranks and
    cores. For GPUs, one with as many ranks as GPUs per node is preferred, else the one with the most. Raises
    as :func:`read_record` does.
    """
    try:
        data_folder = find_data_folder(folder)
    except NotStoredError:
        return None
    record = read_record(build_record_path(cluster.gpu.name, data_folder))
    if cluster.gpu.name == "cpu":
        fitting = [
            one
            for one in (record.calibrations if record else ())
            if one.num_ranks == cluster.num_gpus and one.num_cores == count_cores()
        ]
        return fitting[-1] if fitting else None
    calibrations = (
        record.calibrations if record else _read_calibrations_of_other_hosts(cluster.gpu.name, data_folder)
    )
    same = [one for one in calibrations if one.num_ranks == cluster.gpus_per_node]
    return same[-1] if same else max(calibrations, key=lambda one: one.num_ranks, default=None)


def read_stored_record(gpu: str, folder: str | os.PathLike[str] | None = None) -> MachineRecord | None:
    """Return this machine's record of ``gpu`` in the data folder; None if there is none.

    Raises as :func:`read_record` does.
    """
    try:
        path = build_record_path(gpu, find_data_folder(folder))
    except NotStoredError:  # No home folder, so nothing was stored.
        return None
    return read_record(path)


def read_record(path: Path) -> MachineRecord | None:
    """Return the record in ``path``, cached until the file changes; None if there is no such file.

    Raises ``ValueError`` naming the file and the problem.
    """
    stamp = read_stamp(str(path))
    return None if stamp is None else _parse_record(path, *stamp)


def store_calibration(calibration: Calibration, folder: str | os.PathLike[str] | None = None) -> Path:
    """Store ``calibration`` instead of an earlier one with as many ranks. Return the file's path.

    A damaged file is renamed, because a new calibration is its fix. Raises :class:`NotStoredError`.
    """
    path = build_record_path(calibration.gpu, find_data_folder(folder), calibration.machine)
    # Read and write under one lock, or of two calibrations that end together one would be lost.
    with lock_file(path):
        try:
            record = read_record(path)
        except ValueError:
            path.replace(path.with_suffix(".damaged"))
            record = None
        record = record or MachineRecord(machine=calibration.machine, gpu=calibration.gpu)
        _write_record(path, record.with_calibration(calibration))
    return path


def store_step(step: MeasuredStep, gpu: str) -> Path:
    """Store a finished run's step. Return the file's path.

    Raises :class:`NotStoredError`, and ``ValueError`` for a damaged file.
    """
    path = build_record_path(gpu, find_data_folder())
    with lock_file(path):
        record = read_record(path) or MachineRecord(machine=get_machine_name(), gpu=gpu)
        _write_record(path, record.with_step(step))
    return path


def store_traced_rates(traced: TracedRates, folder: str | os.PathLike[str] | None = None) -> Path:
    """Store the speeds that a trace measured instead of earlier ones. Return the file's path.

    Raises :class:`NotStoredError`, and ``ValueError`` for a damaged file.
    """
    return _replace_traced_rates(traced.gpu, traced, folder)


def remove_traced_rates(gpu: str) -> None:
    """Predict from the calibration alone again. Raises as :func:`store_traced_rates` does."""
    _replace_traced_rates(gpu, None)


def _replace_traced_rates(
    gpu: str, traced: TracedRates | None, folder: str | os.PathLike[str] | None = None
) -> Path:
    path = build_record_path(gpu, find_data_folder(folder))
    with lock_file(path):
        record = read_record(path) or MachineRecord(machine=get_machine_name(), gpu=gpu)
        _write_record(path, replace(record, traced=traced))
    return path


def find_traced_rates(cluster: Cluster, folder: str | os.PathLike[str] | None = None) -> TracedRates | None:
    """Return the speeds of a trace that predictions for ``cluster`` use; None if they use none.

    Those of a trace that was compared with another calibration do not count. Raises as :func:`read_record`
    does.
    """
    from shardscope.timing.rates import look_up_rates

    record = read_stored_record(cluster.gpu.name, folder)
    if record is None or record.traced is None:
        return None
    calibration = find_calibration(cluster, folder)
    base = look_up_rates(cluster).source if calibration is None else calibration.source
    return record.traced if record.traced.base == base else None


def check_writable(folder: str | os.PathLike[str] | None = None) -> None:
    """Raise :class:`NotStoredError` early, before a minute of measurements that could not be stored."""
    place = find_data_folder(folder) / "calibration"
    with _raise_not_stored(place):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = place / f".probe.{os.getpid()}"
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | _CLOSE_ON_EXEC, 0o600)
        try:
            # On a full disk an empty file can be created all the same.
            left = PROBE_BYTES
            while left:  # A disk with a little space takes a part, without an error.
                left -= os.write(descriptor, bytes(left))
            os.fsync(descriptor)  # A network file system may check the quota only now.
        finally:
            os.close(descriptor)
            probe.unlink()


@contextlib.contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file of ``path``; it is released if the process ends.

    Raises ``BlockingIOError`` without ``wait`` if it is held elsewhere. On Windows, which has no fcntl and
    never calibrates, nothing is locked: of two writers the last one wins.
    """
    # A file of its own: writers replace the record, and a lock on the old file would not stop the next one.
    lock = path.with_name(f".{path.name}.lock")
    with _raise_not_stored(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _CLOSE_ON_EXEC, 0o600)
    try:
        with contextlib.suppress(ModuleNotFoundError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


@lru_cache(maxsize=64)
def _parse_record(path: Path, _modified: int, size: int, _inode: int) -> MachineRecord:
    wrong = "delete it, or measure again with ss.calibrate()"
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is {size:,} bytes, which no stored calibration is; {wrong}.")
    try:
        return MachineRecord.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no stored calibration ({error}); {wrong}.") from error


def _read_calibrations_of_other_hosts(gpu: str, folder: Path) -> tuple[Calibration, ...]:
    """Return the most recently measured host's calibrations in a folder shared by several hosts."""
    place = folder / "calibration"
    try:
        modified = place.stat().st_mtime_ns
    except OSError:
        return ()
    records = [
        read_record(path)
        for path in _list_records(place, modified)
        if path.name.endswith(f"--{make_name_safe(gpu)}.json")
    ]
    measured = [record.calibrations for record in records if record is not None and record.calibrations]
    return max(measured, key=lambda calibrations: calibrations[-1].measured_at, default=())


@lru_cache(maxsize=8)
def _list_records(folder: Path, _modified: int) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.json")))


def _write_record(path: Path, record: MachineRecord) -> None:
    # In the same folder, because a rename is atomic only within one file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with _raise_not_stored(path.parent):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _CLOSE_ON_EXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(record.to_json())
        partial.replace(path)


@contextlib.contextmanager
def _raise_not_stored(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotStoredError(
            error.errno,
            f"measurements cannot be kept in {folder}: {error.strerror or error}. Name a folder that can be "
            f"written in the environment variable {FOLDER_VARIABLE}, or in ss.calibrate(folder=...)",
        ) from error
