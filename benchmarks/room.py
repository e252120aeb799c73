"""``python -m benchmarks.room [--learners 8] [--room 40] [--write FILE]``: load of a workshop on one server.

Starts JupyterLab, then JupyterHub where it is installed, and, all at once, a session for each learner: its
pages and folder are fetched, a kernel is started, and the learner's cells are run over the websocket that a
page uses. Browsers are on the learners' own machines and are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import websocket

from benchmarks.room_servers import (
    START_SECONDS,
    Room,
    Seat,
    find_missing_for_hub,
    start_hub,
    start_server,
)

CELL_SECONDS = 600.0
NUM_CORES = 16
"""Cores of the server for which the report estimates the load."""
CELLS = {
    "import and Studio": """
import shardscope as ss
from shardscope_widgets import MemoryView, StepView, Studio
studio = Studio(); studio
""",
    "a plan, its memory and its step": """
plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"),
               ss.Recipe(seq_len=4096, global_batch_size=64), ss.Layout.fsdp2())
display(MemoryView(plan), StepView(plan))
""",
    "twenty changed plans": """
for length in range(512, 512 * 21, 512):
    changed = ss.Plan(plan.architecture, plan.cluster, ss.Recipe(seq_len=length, global_batch_size=64),
                      plan.layout)
    changed.memory(); changed.step()
""",
    "a search on 512 GPUs": """
ss.search(ss.models["llama-3.1-70b"], ss.Cluster.parse("64x8xh100-sxm-80gb"),
          ss.Recipe(seq_len=4096, global_batch_size=1024))
""",
}
RUN = """
small = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"),
    ss.Recipe(seq_len=64, micro_batch_size=4, global_batch_size=8, precision="fp32"), ss.Layout.ddp())
run = ss.launch(small, ss.Pretrain(num_steps=5))
assert run.wait() == "finished", run.reason
"""
"""The run of notebook 01, which all learners launch at about the same time."""


@dataclass
class Learner:
    """Measurements of one learner's session."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each cell while all sessions run."""
    kernel_bytes: int = 0
    """Memory of the kernel after its cells; shared pages are counted proportionally (PSS)."""
    kernel_cpu_seconds: float = 0.0
    run_bytes: int = 0
    """Highest memory of a run's processes (PSS); measured for one learner only."""
    run_seconds: float = 0.0
    run_cpu_seconds: float = 0.0


class Session:
    """One learner's session: a kernel of the server, and the websocket of its page."""

    def __init__(self, seat: Seat) -> None:
        self._address, self._token = seat
        self._id = uuid.uuid4().hex
        for page in ("/lab", "/api/contents?content=1", "/api/kernelspecs"):
            self.request(page)
        kernel = json.loads(self.request("/api/kernels", {"name": "python3"}))
        url = f"{seat.address.replace('http', 'ws', 1)}/api/kernels/{kernel['id']}/channels"
        self._socket = websocket.create_connection(
            f"{url}?session_id={self._id}",
            timeout=CELL_SECONDS,
            header=[f"Authorization: token {seat.token}"],
        )
        self.run("import os; print(os.getpid())")
        self.kernel = psutil.Process(int(self._printed))

    def request(self, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """Return the server's answer to a page's request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Authorization": f"token {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return bytes(answer.read())

    def run(self, code: str) -> float:
        """Run a cell and return its seconds. Raises ``RuntimeError`` if it fails."""
        number, self._printed = uuid.uuid4().hex, ""
        began = time.monotonic()
        header = {"msg_id": number, "msg_type": "execute_request", "session": self._id, "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"header": {**header, "username": "", "date": ""}, "parent_header": {}, "metadata": {}}
        self._socket.send(json.dumps({**message, "content": content, "channel": "shell", "buffers": []}))
        while True:
            frame = self._socket.recv()
            if not isinstance(frame, str):  # Binary buffers, of figures.
                continue
            received = json.loads(frame)
            if received["parent_header"].get("msg_id") != number:
                continue
            kind, content = received["header"]["msg_type"], received["content"]
            if kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            if kind == "stream":
                self._printed += content["text"]
            if kind == "status" and content["execution_state"] == "idle":
                return time.monotonic() - began


def count_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the memory of processes, in bytes; pages that several share are divided between them (PSS)."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def count_cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children that ended."""
    times = process.cpu_times()
    return float(sum((times.user, times.system, times.children_user, times.children_system)))


def measure_learners(sessions: Sequence[Session]) -> list[Learner]:
    """Run all learners' cells at the same time."""
    learners = [Learner() for _ in sessions]

    def work(session: Session, learner: Learner) -> None:
        for name, code in CELLS.items():
            learner.seconds[name] = session.run(code)
        learner.kernel_cpu_seconds = count_cpu_seconds(session.kernel)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(sessions, learners, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session, learner in zip(sessions, learners, strict=True):
        learner.kernel_bytes = count_bytes([session.kernel])
    return learners


def measure_run(session: Session, learner: Learner) -> None:
    """Measure memory and CPU time of one run with two ranks, while nothing else runs."""
    cpu, done = count_cpu_seconds(session.kernel), threading.Event()
    seen: dict[psutil.Process, float] = {}

    def watch() -> None:
        while not done.wait(0.1):
            with suppress(psutil.Error):
                below = session.kernel.children(recursive=True)
                learner.run_bytes = max(learner.run_bytes, count_bytes(below))
                for process in below:
                    # Without its children: those are seen themselves, while they live.
                    times = process.cpu_times()
                    seen[process] = times.user + times.system

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        learner.run_seconds = session.run(RUN)
    finally:
        done.set()
        watcher.join()
    learner.run_cpu_seconds = count_cpu_seconds(session.kernel) - cpu + sum(seen.values())


class ServerCost(NamedTuple):
    """Memory and CPU time of the servers, without kernels."""

    shared_bytes: int
    """Memory of JupyterLab, or of JupyterHub and its proxy."""
    own_bytes: float
    """Memory of each learner's own server, under JupyterHub."""
    cpu_seconds: float
    """CPU seconds of all servers."""


def measure_servers(room: Room, sessions: Sequence[Session]) -> ServerCost:
    """Return memory and CPU time of the servers until now."""
    own = {session.kernel.parent() for session in sessions} if room.has_own_servers else set()
    kernels = {session.kernel for session in sessions}
    below = set(room.server.children(recursive=True))
    for kernel in kernels:
        below -= {kernel, *kernel.children(recursive=True)}
    servers = [process for process in own if process is not None]
    shared = [room.server, *(below - set(servers))]
    seconds = 0.0
    for process in (*shared, *servers):
        times = process.cpu_times()
        seconds += times.user + times.system
    return ServerCost(count_bytes(shared), count_bytes(servers) / max(1, len(servers)), seconds)


def format_setup(setup: Room, learners: Sequence[Learner], servers: ServerCost, room: int) -> list[str]:
    """Return the Markdown lines of one server setup; ``room`` is the number of learners to estimate for."""
    gb = 1e9
    kernel = statistics.median(learner.kernel_bytes for learner in learners)
    cpu = statistics.median(learner.kernel_cpu_seconds for learner in learners)
    one = learners[0]
    runs = NUM_CORES // 2
    memory = servers.shared_bytes + room * (kernel + servers.own_bytes) + runs * one.run_bytes
    all_runs = room * one.run_cpu_seconds / NUM_CORES
    rows = [
        f"| {name} | {statistics.median(learner.seconds[name] for learner in learners):.1f} | "
        f"{max(learner.seconds[name] for learner in learners):.1f} |"
        for name in CELLS
    ]
    own = [f"| memory of each learner's own server | {servers.own_bytes / gb:.2f} GB |"]
    return [
        f"## {setup.name}",
        "",
        "| cell, run by all sessions at once | median, s | slowest, s |",
        "|---|---:|---:|",
        *rows,
        "",
        "| resource | measured |",
        "|---|---:|",
        f"| memory of a learner's kernel | {kernel / gb:.2f} GB |",
        f"| CPU time of a learner's kernel for these cells, with its start | {cpu:.1f} s |",
        f"| memory of the {'hub and its proxy' if setup.has_own_servers else 'server'} | "
        f"{servers.shared_bytes / gb:.2f} GB |",
        *(own if setup.has_own_servers else []),
        f"| CPU time of the server per learner | {servers.cpu_seconds / len(learners):.1f} s |",
        f"| memory of a run with two ranks, in addition to the kernel | {one.run_bytes / gb:.2f} GB |",
        f"| CPU time of that run; its duration | {one.run_cpu_seconds:.0f} s; {one.run_seconds:.0f} s |",
        "",
        f"Estimate for {room} learners on {NUM_CORES} such cores: {memory / gb:.0f} GB of memory with {runs} "
        f"runs at a time. If all {room} learners press Launch in the same minute, the last run ends after "
        f"about {max(all_runs, one.run_seconds):.0f} s.",
        "",
    ]


def measure_setup(
    start: Callable[[Path, int], AbstractContextManager[Room]], number: int, room: int
) -> list[str]:
    """Measure ``number`` learners on one server setup. Return its lines of the report."""
    with tempfile.TemporaryDirectory() as name, start(Path(name), number) as setup:
        sessions: list[Session] = []
        threads = [
            threading.Thread(target=lambda seat=seat: sessions.append(Session(seat))) for seat in setup.seats
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(sessions) != number:
            raise SystemExit(f"{number - len(sessions)} sessions did not start")
        learners = measure_learners(sessions)
        servers = measure_servers(setup, sessions)
        measure_run(sessions[0], learners[0])
        return format_setup(setup, learners, servers, room)


def main() -> None:
    """Measure and print the report."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m benchmarks.room", description=__doc__)
    parser.add_argument("--learners", type=int, default=4 * cores, help="at the same time")
    parser.add_argument("--room", type=int, default=40, help="number of learners to estimate for")
    parser.add_argument("--write", type=Path, help="file for the report")
    options = parser.parse_args()
    number, room = options.learners, options.room
    lines = [
        "# Server size for a workshop",
        "",
        "Written by `make room`; do not edit.",
        "",
        f"{number} sessions at the same time on {cores} cores (Linux {platform.release()}, Python "
        f"{platform.python_version()}), {number / cores:g} per core; {room} learners on {NUM_CORES} cores "
        f"are {room / NUM_CORES:g} per core. Each session fetched JupyterLab's pages, started a kernel and "
        "ran the cells below over a websocket, as a page does. Browsers run on the learners' machines and "
        "were not measured.",
        "",
        *measure_setup(start_server, number, room),
    ]
    if missing := find_missing_for_hub():
        lines += [f"JupyterHub was not measured: no {missing} here.", ""]
    else:
        lines += measure_setup(start_hub, number, room)
    report = "\n".join(lines)
    if options.write:
        options.write.write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
