"""One node of a run on Ray: the actor that holds the node's resources, and the process that it starts.

The actor runs no rank code: the process becomes the supervisor of the node's ranks, and is killed with the
actor by the operating system.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from shardscope.machine.processes import die_with_parent
from shardscope.machine.python_process import build_module_command
from shardscope.records.attempts import BEGAN
from shardscope.records.folder import NodeFolder
from shardscope.records.folder_checks import open_part
from shardscope.records.json_files import read_json
from shardscope.runs.backends.folder_stream import Chunk, State
from shardscope.runs.backends.node_process import (
    become_supervisor,
    list_addresses,
    record_node,
    wait_for_file,
    wait_for_folder,
)
from shardscope.runs.backends.peers import START_SECONDS
from shardscope.runs.backends.ray.stream import NodeStream
from shardscope.runs.launch.environment import add_toolkit_to_path
from shardscope.training.checkpoints.folders import OWN_FOLDER

ALONE_SECONDS = 24.0
"""Time without a sign of the coordinator after which the node ends. More than the time after which the
other nodes notice a lost one (``peers.py``), so that they can record its loss first."""
END_SECONDS = 4.0
"""Time from SIGTERM to SIGKILL for a supervisor."""
MAX_OUTPUT = 500


class NodeActor:
    """The actor of one node, to which the coordinator speaks every few seconds."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = time.monotonic()
        self._stream: NodeStream | None = None

    def prepare(self, node: int, name: str, parent: str | None) -> str:
        """Create this node's copy of a run folder that is not shared. Return its path. Raises ``OSError``."""
        self._stream = NodeStream(node, name, parent)
        return str(self._stream.path)

    def begin(self, chunks: list[Chunk]) -> None:
        """Write files of the launch into the copy. Raises ``OSError``."""
        assert self._stream is not None
        self._stream.begin(chunks)

    def exchange(
        self, received: Mapping[str, State], chunks: list[Chunk]
    ) -> tuple[list[Chunk], dict[str, int]]:
        """Exchange what is new in the copies of this node and of the coordinator."""
        assert self._stream is not None
        return self._stream.exchange(received, chunks)

    def close(self) -> None:
        """Delete the copy, unless checkpoints stay in it."""
        assert self._stream is not None
        self._stream.close()

    def start(self, run: str, node: int, num_cpus: float, attempt: int | None) -> None:
        """Start the node's process. ``attempt``: None for a run without ``retries``. Raises ``OSError``."""
        import ray
        import ray.util

        # The parent-death signal comes when the thread ends that has started the process; an actor's methods
        # run in its main thread.
        assert threading.current_thread() is threading.main_thread()
        environment = add_toolkit_to_path(dict(os.environ))
        # Ray sets it to the CPUs of the actor, which are those of all ranks.
        if environment.get("OMP_NUM_THREADS") == str(max(1, int(num_cpus))):
            del environment["OMP_NUM_THREADS"]
        environment.pop("PYTHONBREAKPOINT", None)  # Ray's debugger, which needs a Ray worker.
        if self._stream is not None:
            environment[OWN_FOLDER] = "1"
        node_id = ray.get_runtime_context().get_node_id()
        arguments = [run, str(node), str(os.getpid()), ray.util.get_node_ip_address(), node_id]
        arguments += [] if attempt is None else [str(attempt)]
        self._process = subprocess.Popen(
            build_module_command("shardscope.runs.backends.ray.node", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C in `ray start --block` is not for it.
        )
        self._heard = time.monotonic()
        threading.Thread(target=self._end_alone, daemon=True).start()

    def poll(self) -> tuple[int | None, str]:
        """Return the exit code of the node's process, None while it runs, and the last line of its output."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None, ""
        assert self._process.stderr is not None
        # The process writes to the supervisor's log once it has one, so this is short.
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return code, lines[-1][-MAX_OUTPUT:] if lines else ""

    def stay(self) -> None:
        """Note that the coordinator is there."""
        self._heard = time.monotonic()

    def end(self) -> None:
        """Ask the supervisor to end its ranks."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _end_alone(self) -> None:
        """End the node once the coordinator is lost, if Ray does not do it: its head may be lost too."""
        assert self._process is not None
        while time.monotonic() - self._heard < ALONE_SECONDS:
            time.sleep(1.0)
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        os._exit(1)  # What is left of the node's processes dies with this one.


def run_ray_node(
    run: str, node: int, actor: int, address: str, node_id: str, attempt: int | None = None
) -> NoReturn:
    """Replace this process, a child of the actor, by the supervisor of this node.

    Raises ``FileNotFoundError`` if the run folder is not visible on this node, ``OSError`` if ``address`` is
    none of its own.
    """
    die_with_parent(actor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it.
    wait_for_folder(Path(run))
    folder = open_part(run, node, attempt)
    assert isinstance(folder, NodeFolder)
    if attempt is not None:  # The coordinator has chosen the checkpoint, maybe on another machine.
        wait_for_file(folder.attempt_folder(attempt) / BEGAN, START_SECONDS)
    folder.create_own()
    job_id = (read_json(folder.job) or {}).get("job_id")
    ids = {"job_id": job_id, "actor_pid": actor, "ray_node_id": node_id}
    record_node(folder, socket.gethostname(), address, find_interface(address), ids)
    # The parent-death signal stays over exec (prctl(2)).
    become_supervisor(folder, attempt)


def find_interface(address: str) -> str:
    """Return the network interface of this machine that has an address. Raises ``OSError`` if none has it."""
    interfaces = list_addresses()
    # All of 127.0.0.0/8 is the loopback interface's, which lists 127.0.0.1 only.
    is_loopback = ipaddress.ip_address(address).is_loopback
    interface = interfaces.get(address, interfaces.get("127.0.0.1") if is_loopback else None)
    if interface is None:
        raise OSError(f"Ray's address of this node, {address}, is none of its interfaces'")
    return interface


if __name__ == "__main__":
    run_ray_node(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], *map(int, sys.argv[6:])
    )
