"""``ss.calibrate()`` in the kernel: the start and end of the measuring ranks, and their results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from shardscope.core.cluster import Cluster
from shardscope.core.errors import check_number, refuse
from shardscope.machine.host import count_cores
from shardscope.machine.python_process import build_import_path, build_module_command
from shardscope.records.private_file import open_private_file
from shardscope.runs.calibrate.rank import Settings
from shardscope.runs.launch.environment import build_launcher_environment
from shardscope.runs.requirements import check_train_extra
from shardscope.timing.calibration.curves import Calibration
from shardscope.timing.calibration.files import build_record_path, find_data_folder, get_machine_name
from shardscope.timing.calibration.store import check_writable, lock_file, store_calibration

Progress = Callable[[str, float], object]
"""Callback with a description and the completed fraction, 0 to 1."""

NEEDED = ("torch", "transformers")
START_SECONDS = 60.0
"""Time that ranks may take besides measuring: importing torch, initializing the process group."""
CHECK_SECONDS = 0.05
REPEAT_SECONDS = 0.25
"""Interval of repeated progress calls while nothing changes: the callback may cancel by an exception."""
MEMORY_SHARE = 1 / 16
"""Maximum share of a rank's usable memory for one measured call."""


class CalibrationError(RuntimeError):
    """Failure of the measuring ranks; the message ends with their error output."""


def calibrate(
    cluster: Cluster | None = None,
    *,
    seconds: float = 60.0,
    progress: Progress | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Measure this machine in separate processes, and store the result for predictions.

    Measures matmuls by size and precision, attention, memory bandwidth, kernel launches, the host's
    optimizer, copies between GPU and host, and collectives over all ranks (NCCL on GPUs, gloo on CPU ranks).
    All ranks measure at once, with as many threads as launched ranks. ``cluster`` is this machine as returned
    by ``Cluster.detect()``, fewer GPUs of it, or any number of CPU ranks ("2xcpu"). ``seconds`` is the
    approximate duration (5 to 3,600). ``progress(words, fraction)`` is called on this thread; an exception in
    it, KeyboardInterrupt included, ends the processes and propagates.

    The result is stored in ``folder``, by default this user's data folder (``timing/calibration/store.py``),
    where ``plan.step()`` reads it; set ``SHARDSCOPE_DATA_HOME`` to read another folder.

    Raises ``ValueError`` for a cluster that is not this machine, ``ImportError`` without the extra "train",
    ``RuntimeError`` while another calibration of it is running, ``OSError`` if the folder cannot be written,
    ``TimeoutError``, and ``CalibrationError`` with the error output of the failed rank.
    """
    # Check arguments, extra and folder first: a mistake must not cost a minute of measuring.
    check_number("calibrate.seconds", seconds, low=5.0, high=3_600.0)
    data = find_data_folder(folder)
    check_train_extra("Calibrating", NEEDED)
    cluster = _check_cluster(cluster)
    check_writable(data)
    with _lock_calibration(build_record_path(cluster.gpu.name, data)):
        # The load before the ranks start is that of other programs.
        began, load = time.monotonic(), _measure_load()
        measured_at = datetime.now(UTC).isoformat(timespec="seconds")
        measured = _run_ranks(cluster, float(seconds), progress)
        calibration = Calibration.from_dict(
            {
                **measured,
                "machine": get_machine_name(),
                "processor": _read_processor_name(),
                "num_cores": count_cores(),
                "gpu": cluster.gpu.name,
                "num_ranks": cluster.num_gpus,
                "measured_at": measured_at,
                "measuring_seconds": round(time.monotonic() - began, 1),
                "load": load,
            }
        )
    # Only after all ranks succeeded: a partial measurement would change every prediction.
    store_calibration(calibration, data)
    if progress is not None:
        progress("done", 1.0)
    return calibration


def _check_cluster(cluster: Cluster | None) -> Cluster:
    """Return ``cluster`` if it is this machine or a part of it. Raises ``ValueError`` otherwise."""
    from shardscope.runs.backends.this_machine import max_cpu_ranks

    if cluster is None:
        return Cluster.detect()
    if not isinstance(cluster, Cluster):
        refuse("calibrate.cluster", cluster, "a Cluster, or None for this machine", "Cluster.detect()")
    if cluster.num_nodes > 1:
        fix = f"Cluster.parse('{cluster.gpus_per_node}x{cluster.gpu.name}')"
        refuse("calibrate.cluster", str(cluster), "one node: this machine", fix)
    if cluster.gpu.name == "cpu":
        max_ranks = max_cpu_ranks()
        if cluster.num_gpus > max_ranks:
            allowed = f"1 to {max_ranks} CPU ranks on {count_cores()} cores here"
            refuse("calibrate.cluster", str(cluster), allowed, f"Cluster.parse('{max_ranks}xcpu')")
        return cluster
    machine = Cluster.detect()
    if machine.gpu.name != cluster.gpu.name or cluster.num_gpus > machine.num_gpus:
        available = "no GPU, only CPU ranks" if machine.gpu.name == "cpu" else str(machine)
        refuse("calibrate.cluster", str(cluster), f"this machine: {available}", f"Cluster.parse('{machine}')")
    return cluster


@contextlib.contextmanager
def _lock_calibration(path: Path) -> Iterator[None]:
    """Hold the calibration lock, because two calibrations would disturb each other.

    Raises ``RuntimeError`` if another process holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(path.with_name(f"measuring-{path.name}"), wait=False))
        except BlockingIOError:
            raise RuntimeError(
                f"a calibration of {path.stem.replace('--', ', ')} is already running; "
                "wait for it: two at once would disturb each other's measurements."
            ) from None
        yield


def _run_ranks(cluster: Cluster, seconds: float, progress: Progress | None) -> dict[str, object]:
    """Run the ranks and return the first one's result. No process is left behind, even after an error."""
    # The time limits of the curves are approximate: a case that has begun is finished.
    limit = 1.5 * seconds + START_SECONDS
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end_ranks, ranks)
        # The ranks' FileStore is a private file, as in a run (runs/launch/rendezvous/local_store.py).
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardscope-"))
        store, store_path = open_private_file(Path(folder))
        stack.callback(os.close, store)
        error_files: list[IO[bytes]] = [
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(cluster.num_gpus)
        ]
        for rank, error_file in enumerate(error_files):
            ranks.append(_start_rank(cluster, rank, seconds, limit, store, store_path, error_file))
        return _read_result(ranks, error_files, limit, progress)


def _start_rank(
    cluster: Cluster,
    rank: int,
    seconds: float,
    limit: float,
    store: int,
    store_path: str,
    error_file: IO[bytes],
) -> subprocess.Popen[bytes]:
    device = "cpu" if cluster.gpu.vendor == "cpu" else "cuda"
    settings: Settings = {
        "rank": rank,
        "num_ranks": cluster.num_gpus,
        "device": device,
        "seconds": seconds,
        "timeout_seconds": limit,
        "max_bytes": int(cluster.usable_bytes_per_gpu * MEMORY_SHARE),
        "store": store_path,
    }
    # Use the environment of launched ranks: the same number of threads, and gloo on the loopback interface.
    environment = build_launcher_environment(dict(os.environ), cluster.num_gpus, device)
    environment["PYTHONPATH"] = build_import_path()
    return subprocess.Popen(
        build_module_command("shardscope.runs.calibrate.rank", str(os.getpid()), json.dumps(settings)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else error_file,
        stderr=error_file,
        env=environment,
        pass_fds=(store,),
        start_new_session=True,  # Ctrl-C must reach only the kernel, which ends the ranks itself.
    )


def _read_result(
    ranks: list[subprocess.Popen[bytes]],
    error_files: list[IO[bytes]],
    limit: float,
    progress: Progress | None,
) -> dict[str, object]:
    first = ranks[0].stdout
    assert first is not None
    os.set_blocking(first.fileno(), False)
    deadline, repeat = time.monotonic() + limit, 0.0
    latest, pending = ("starting", 0.0), b""
    while True:
        # Check whether it ended before reading: otherwise its last lines could come between the two.
        ended = ranks[0].poll() is not None
        pending += first.read() or b""
        *lines, pending = pending.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "measured" in message:
                return dict(message["measured"])
            if "error" in message:
                raise CalibrationError(_describe_error(message, ranks, error_files))
            # A new description is shown at once.
            latest, repeat = (str(message["progress"][0]), float(message["progress"][1])), 0.0
        if progress is not None and time.monotonic() >= repeat:
            repeat = time.monotonic() + REPEAT_SECONDS
            progress(*latest)
        for rank, process in enumerate(ranks):
            # Other ranks end only after the first one's result, so an earlier end is a failure.
            if process.poll() not in (None, 0) or (rank == 0 and ended):
                output = _read_tail(error_files[rank])
                raise CalibrationError(
                    f"rank {rank} exited with code {process.returncode} and no result\n{output}"
                )
        if time.monotonic() > deadline:
            raise TimeoutError(f"the calibration took longer than {limit:.0f} seconds")
        time.sleep(CHECK_SECONDS)


def _describe_error(
    message: dict[str, object], ranks: list[subprocess.Popen[bytes]], error_files: list[IO[bytes]]
) -> str:
    """Return the first rank's error and the output of other failed ranks, which is often the cause."""
    time.sleep(CHECK_SECONDS)
    failed = [rank for rank, process in enumerate(ranks) if rank and process.poll() not in (None, 0)]
    outputs = "".join(f"\nrank {rank}: {_read_tail(error_files[rank])}" for rank in failed)
    return f"{message['error']}\n{message['traceback']}{outputs}"


def _end_ranks(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _read_tail(error_file: IO[bytes]) -> str:
    error_file.seek(0)
    return error_file.read()[-4_000:].decode(errors="replace")


def _measure_load() -> float:
    """Return the load average per core over the last minute."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2) if hasattr(os, "getloadavg") else 0.0


def _read_processor_name() -> str:
    """Return the processor's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()[:200] or platform.machine()
    return platform.processor() or platform.machine() or "unknown"
