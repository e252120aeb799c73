"""A real Ray of two nodes on this machine: a GCS, and a raylet with its agents for each node.

The nodes have one CPU each and listen on the loopback interface only. Only the processes that were started
here are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import psutil
from tests.cluster.ports import find_free_ports

if TYPE_CHECKING:
    from ray._private.node import Node

ADDRESSES = ("127.0.0.2", "127.0.0.3")
"""One for each node, on the loopback interface. Ray replaces 127.0.0.1 by the machine's own address."""
OBJECT_STORE_BYTES = 100 * 2**20
START_SECONDS = 180
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
EMPTY_SECONDS = 90.0
END_SECONDS = 20.0
PORTS = ("metrics_agent_port", "runtime_env_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
RAY_ENVIRONMENT = {
    # A busy machine starts Ray's agents slowly.
    "RAY_raylet_start_wait_time_s": str(START_SECONDS),
    "RAY_agent_register_timeout_ms": str(1000 * START_SECONDS),
    "RAY_USAGE_STATS_ENABLED": "0",
}


class TwoNodeRay:
    """The cluster. ``address`` is what ``ss.Ray(address=...)`` takes."""

    def __init__(
        self, hidden: Path | None = None, scratch: Path | None = None, last_disk: str | None = None
    ) -> None:
        """``hidden`` is a folder of which the nodes see nothing, and ``scratch`` one that is another on each:
        each node's processes are in a mount namespace of their own, with an empty file system there.
        ``last_disk`` is the size of the last node's ``scratch``, such as "20m"."""
        self._covered = {path: "" for path in (hidden, scratch) if path is not None}
        self._last_disk = {} if scratch is None or last_disk is None else {scratch: f"size={last_disk}"}
        os.environ |= RAY_ENVIRONMENT  # Before ray is imported, which reads it then.
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=False)
        self._nodes: list[Node] = []
        self._threads: list[ThreadPoolExecutor] = []
        # Of another cluster of this process.
        self._others = set(psutil.Process().children(recursive=True))
        self._is_started = threading.Event()

    @property
    def address(self) -> str:
        """The address of the head."""
        return str(self._cluster.address)

    def start(self) -> None:
        """Start both nodes and wait until they are registered. Raises an exception of Ray."""
        threading.Thread(target=self._write_ports, daemon=True).start()
        for address in ADDRESSES:
            if not self._covered:
                self.add_node(address)
                continue
            # In a thread, because a mount namespace belongs to one; its child processes get it, and end with
            # the thread (PR_SET_PDEATHSIG). Ray's handler of SIGTERM can only be set in the main thread.
            thread = ThreadPoolExecutor(1)
            self._threads.append(thread)
            last = self._last_disk if address == ADDRESSES[-1] else {}
            thread.submit(cover_folders, {**self._covered, **last}).result()
            with mock.patch("ray._private.utils.set_sigterm_handler"):
                thread.submit(self.add_node, address).result()
        self._is_started.set()

    def add_node(self, address: str) -> None:
        """Start a node and wait until it is registered. Raises an exception of Ray."""
        self._nodes.append(
            self._cluster.add_node(
                num_cpus=1,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                node_ip_address=address,
                **dict(zip(PORTS, find_free_ports(len(PORTS)), strict=True)),
            )
        )

    def _write_ports(self) -> None:
        """Write the files in which raylets look for their agents' ports.

        A raylet gives up after 15 s without them (node_manager.cc, WaitForPersistedPort, ray 2.60), and on a
        busy machine the agents, which are Python, take longer than that to start.
        """
        written: set[int] = set()
        while not self._is_started.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError, KeyError):
                    line = process.cmdline()
                    if process.pid in written or not line or Path(line[0]).name != "raylet":
                        continue
                    options = dict(part.removeprefix("--").split("=", 1) for part in line[1:] if "=" in part)
                    for name in PORTS:
                        port = options.get(name.replace("_", "-"), options.get(name, "1"))
                        Path(options["session_dir"], f"{name}_{options['node_id']}").write_text(port)
                    written.add(process.pid)

    def list_left(self) -> list[str]:
        """Return the live actors and placement groups of the cluster, and resources that are in use."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions

        state = GlobalState()
        # Without a driver: this process stays out of the cluster.
        state._initialize_global_state(
            GcsClientOptions.create(
                self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
            )
        )
        actors = state.actor_table(None, None, None).values()
        groups = state.placement_group_table().values()
        free = sum(node.get("CPU", 0.0) for node in state.available_resources_per_node().values())
        return [
            *(f"actor {actor['ActorClassName']}" for actor in actors if actor["State"] != "DEAD"),
            *(f"placement group {group['state']}" for group in groups if group["state"] != "REMOVED"),
            *([] if free == len(ADDRESSES) else [f"{free:g} CPUs are free"]),
        ]

    def wait_until_empty(self) -> list[str]:
        """Wait until no run has anything on the cluster. Return what is left."""
        left: list[str] = []

        def is_empty() -> bool:
            left[:] = self.list_left()
            return not left

        wait_until(is_empty, EMPTY_SECONDS)
        return left

    def look_into(self, number: int, folder: Path) -> Path:
        """Return the path by which this process sees what a node sees as ``folder``."""
        (raylet,) = self._nodes[number].all_processes["raylet"]
        return Path(f"/proc/{raylet.process.pid}/root") / folder.relative_to("/")

    def find_actors(self, name: str) -> list[psutil.Process]:
        """Return the processes of the actors of a class."""
        return [
            process
            for process in self._list_processes()
            if f"ray::{name}" in " ".join(get_command_line(process))
        ]

    def kill_head(self, *, only_gcs: bool) -> None:
        """Kill the head's GCS, or all of its processes and their children, with SIGKILL."""
        head = self._nodes[0].all_processes
        entries = head["gcs_server"] if only_gcs else [entry for kind in head.values() for entry in kind]
        doomed = [psutil.Process(entry.process.pid) for entry in entries]
        for process in list(doomed):
            if get_command_line(process)[:1] and "raylet" in get_command_line(process)[0]:
                doomed += process.children()  # Its workers: the actors.
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(doomed, 10)

    def kill_node(self, number: int) -> None:
        """Kill a node that is not the head: its raylet, and all that it has started, with SIGKILL."""
        entries = [entry for kind in self._nodes[number].all_processes.values() for entry in kind]
        doomed = [psutil.Process(entry.process.pid) for entry in entries]
        for process in list(doomed):
            with contextlib.suppress(psutil.Error):
                doomed += process.children(recursive=True)
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(doomed, 10)

    def _list_processes(self) -> list[psutil.Process]:
        """Return the processes of Ray that were started here, directly or by them."""
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if process not in self._others
            and any(part in " ".join(get_command_line(process)) for part in ("/ray/", "ray::"))
        ]

    def stop(self) -> list[str]:
        """End the cluster. Return the command lines of workers of it that are left."""
        self._is_started.set()
        processes = self._list_processes()
        with contextlib.suppress(Exception):  # Of a head that was killed.
            self._cluster.shutdown()
        for node in self._nodes:  # Then its other node was not stopped.
            with contextlib.suppress(Exception):
                node.kill_all_processes(check_alive=False, allow_graceful=False)
        _, alive = psutil.wait_procs(processes, END_SECONDS)
        for thread in self._threads:
            thread.shutdown()
        left = [" ".join(get_command_line(process)).strip() for process in alive]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        # Ray's agents end seconds after a raylet that was killed, on a busy machine more.
        return [line for line in left if line and not line.endswith("Agent")]


def cover_folders(folders: Mapping[Path, str]) -> None:
    """Give this thread a mount namespace in which ``folders`` are empty file systems. Raises ``OSError``.

    The values are options of tmpfs(5).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    # Without it the mounts would appear in the namespace of the tests, too.
    mount = [(b"none", b"/", None, MS_REC | MS_PRIVATE, None)]
    mount += [
        (b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options.encode()) for folder, options in folders.items()
    ]
    for source, target, kind, flags, options in mount:
        if libc.mount(source, target, kind, flags, options):
            raise OSError(ctypes.get_errno(), f"mount {target.decode()}")


def find_why_not_covered() -> str:
    """Return why mount namespaces cannot be made here; empty if they can."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        try:
            executor.submit(cover_folders, {Path(folder): ""}).result()
        except OSError as error:
            return str(error)
    return ""


def get_command_line(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether ``condition()`` became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.5)
    return False
