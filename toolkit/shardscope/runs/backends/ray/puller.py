"""Download of the records of a Ray run without a shared run folder, into the notebook's run folder.

It is a process on the kernel's machine that outlives the kernel. It asks the run's coordinator for what the
folder lacks and brings it the commands of ``control.jsonl``. It may be killed at any moment: the next one,
which ``ss.Run.attach(folder)`` starts, continues at the same bytes. A lock keeps it the only one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shardscope.machine.processes import die_with_parent
from shardscope.machine.python_process import build_module_command
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.records.regular_files import open_to_append, open_to_read
from shardscope.runs.backends.folder_stream import CHUNK_BYTES, MAX_BYTES, Chunk, FolderCopy
from shardscope.runs.backends.ray.stream import FROM_KERNEL
from shardscope.runs.backends.ray.watch import is_streamed, puller_file, received_file
from shardscope.runs.launch.environment import add_toolkit_to_path, remove_rank_variables

PROGRAM = "shardscope.runs.backends.ray.puller"
POLL_SECONDS = 0.5
ANSWER_SECONDS = 60.0
RETRY_SECONDS = 5.0
GONE_SECONDS = 120.0
"""Time for which the cluster may answer that it does not know the coordinator."""
UNREACHABLE_SECONDS = 86400.0
"""Time for which it may not answer at all: the coordinator keeps the records as long."""
GONE_CODE = 3
"""Exit code of a connection to a cluster that has no coordinator of the run."""
OWN = frozenset({"puller.json", "received.json", "puller.log"})
"""Files of this process."""


def start_puller(folder: RunFolder) -> None:
    """Start a puller, which ends at once if the run has one or has been received. Raises ``OSError``."""
    with open_to_append(folder.path / "puller.log") as log:
        subprocess.Popen(
            # A shell's child of a child: nobody has to wait for it.
            ["/bin/sh", "-c", '"$@" &', "sh", *build_module_command(PROGRAM, str(folder.path))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=add_toolkit_to_path(remove_rank_variables(os.environ)),
            start_new_session=True,  # Ctrl-C in the notebook is not for it.
        ).wait()


def continue_stream(folder: RunFolder) -> None:
    """Start a puller if this run needs one. Raises ``OSError``."""
    if is_streamed(folder) and not received_file(folder).exists():
        start_puller(folder)


def keep_pulling(folder: RunFolder) -> None:
    """Connect to the cluster, again and again, until everything has been received."""
    import fcntl  # Imported lazily: runs are also read on Windows, which has no fcntl.

    with open_to_append(folder.path / "puller.log") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # Another puller is at work.
            return
        if received_file(folder).exists():
            return
        write_json(puller_file(folder), {"pid": os.getpid(), "time": time.time()})
        # Kept here, for the case that the folder is deleted.
        job = read_json(folder.job) or {}
        known = answered = time.monotonic()
        beat = puller_file(folder).stat().st_mtime
        # In a process of its own: Ray ends a driver that has lost its cluster.
        while (code := _connect(folder, job)) != 0:
            known = time.monotonic() if code != GONE_CODE else known
            now = time.monotonic()
            if not folder.path.exists():  # A run without its folder is still to be stopped.
                if code == GONE_CODE or now - answered > GONE_SECONDS:
                    return
                time.sleep(RETRY_SECONDS)
                continue
            before = beat
            with contextlib.suppress(FileNotFoundError):  # The folder is being deleted.
                beat = puller_file(folder).stat().st_mtime
            answered = now if beat != before else answered
            if now - known > GONE_SECONDS or now - answered > UNREACHABLE_SECONDS:
                reason = "the Ray cluster has lost its coordinator, and with it what was not yet received"
                write_json(received_file(folder), {"time": time.time(), "missing": reason})
                break
            time.sleep(RETRY_SECONDS)
        folder.task.unlink(missing_ok=True)


def _connect(folder: RunFolder, job: Mapping[str, object]) -> int:
    arguments = (str(folder.path), str(os.getpid()), str(job.get("address")), str(job.get("job_id")))
    command = build_module_command(PROGRAM, *arguments)
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode


def pull(folder: RunFolder, address: str, job_id: str) -> int:
    """Pull until the run has ended and everything is received. Return the exit code. Raises Ray's errors.

    Once the folder is deleted, the run is stopped, and the coordinator need not keep its records.
    """
    import ray

    from shardscope.runs.backends.ray.submission_process import NAMESPACE

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    try:
        coordinator = ray.get_actor(job_id)
    except ValueError:
        return GONE_CODE
    copy = FolderCopy(folder.path, lambda name: name not in FROM_KERNEL | OWN)
    commands: Chunk | None = None
    while True:
        received = copy.list_received()
        answer = coordinator.pull.remote(received, commands)
        chunks, control_size, is_ended = ray.get(answer, timeout=ANSWER_SECONDS)
        try:
            copy.write(chunks)
            os.utime(puller_file(folder))
        except FileNotFoundError:
            if folder.path.exists():
                raise
            # A failed launch deletes it, or the user: nobody could stop the run.
            commands = Chunk("control.jsonl", control_size, STOP, 0, 0)
            ray.get(coordinator.pull.remote(received, commands), timeout=ANSWER_SECONDS)
            ray.get(coordinator.leave.remote(), timeout=ANSWER_SECONDS)
            return 0
        commands = _read_commands(folder, control_size)
        if is_ended and not chunks:
            ray.get(coordinator.leave.remote(), timeout=ANSWER_SECONDS)
            write_json(received_file(folder), {"time": time.time()})
            return 0
        if sum(len(chunk.data) for chunk in chunks) < MAX_BYTES:
            time.sleep(POLL_SECONDS)


STOP = b'{"command": "stop"}\n'


def _read_commands(folder: RunFolder, offset: int) -> Chunk | None:
    """Return what the coordinator lacks of the commands."""
    with contextlib.suppress(OSError), open_to_read(folder.control) as file:
        data = os.pread(file.fileno(), CHUNK_BYTES, offset)
        if data:
            return Chunk("control.jsonl", offset, data, offset + len(data), 0)
    return None


def main() -> None:
    """Pull as the child of a puller, or be one."""
    folder = RunFolder(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        die_with_parent(int(sys.argv[2]))
        sys.exit(pull(folder, *sys.argv[3:]))
    keep_pulling(folder)


if __name__ == "__main__":
    main()
