"""Watch over the other nodes of a run: which have ended, and which are lost.

Node 0 watches all others, and they watch node 0. A node writes ``ended.json`` when its ranks have ended. A
node whose supervisor was killed, or that is cut off, only stops its heartbeat.
"""

from __future__ import annotations

import os
import re
import time
from typing import NamedTuple

from shardscope.machine.os_errors import is_absent
from shardscope.records.folder import SUBMISSION, NodeFolder
from shardscope.records.json_files import read_json, read_tail_text
from shardscope.runs.backends.ray.watch import lost_node_file
from shardscope.runs.backends.slurm_job import SlurmError, run_command

LOST_SECONDS = 20.0
"""Time without a heartbeat, which is sent every two seconds, after which a node is lost."""
SIGNALLED_LOST_SECONDS = 6.0
"""The same once the scheduler ends the job, which leaves no time to wait."""
START_SECONDS = 300.0
"""Time for a node's supervisor to start: Python may be read from a slow shared file system."""
PAUSE_SECONDS = 5.0
"""Time between two looks after which this process itself was paused: Slurm suspends all nodes of a job."""
LAUNCH_SECONDS = 5.0
"""Minimum time between two looks at the job's log for a node whose process did not start."""
LAUNCH_FAILURE = re.compile(r"^srun: error: task (\d+) launch failed: (.+)$", re.MULTILINE)
"""Line of srun for a task, of which there is one on each node; it then waits for the other tasks."""
LOG_CHARACTERS = 100_000


class Ended(NamedTuple):
    """Final status of the ranks of another node."""

    node: int
    status: str
    """finished, stopped or failed."""
    reason: str


class Peers:
    """The other nodes that the supervisor of ``folder`` watches, by their heartbeats and ``ended.json``."""

    def __init__(self, folder: NodeFolder) -> None:
        others = range(1, folder.num_nodes) if folder.is_lead else range(1)
        self._folder = folder
        self._folders = {node: folder.create_peer(node) for node in others}
        self._beats: dict[int, tuple[float, float]] = {node: (0.0, time.monotonic()) for node in others}
        self.ended: dict[int, Ended] = {}
        self._given_up: dict[int, str] = {}
        """Why the scheduler has lost a node, where it knows."""
        self._names: dict[int, str] = {}
        """Slurm's names of nodes that have not written theirs."""
        self._look_time = self._launch_time = time.monotonic()
        self._lost: set[int] = set()

    def look(self) -> None:
        """Read the heartbeat and ``ended.json`` of each node that has not ended."""
        self._forgive_pause()
        for node, folder in self._folders.items():
            if node not in self.ended:
                record = read_json(folder.ended)
                if record is not None:
                    status, reason = str(record.get("status")), str(record.get("reason"))
                    self.ended[node] = Ended(node, status, reason)
                self._look_at_heartbeat(node, folder)
                given_up = read_json(lost_node_file(folder, node))
                if given_up is not None and node not in self.ended:
                    self._given_up[node] = str(given_up.get("reason"))
        self._look_at_launch()

    def _forgive_pause(self) -> None:
        """Count no silence during which this process did not look: the others were paused as well."""
        now = time.monotonic()
        pause, self._look_time = now - self._look_time, now
        if pause > PAUSE_SECONDS:
            self._beats = {node: (beat, seen + pause) for node, (beat, seen) in self._beats.items()}

    def _look_at_launch(self) -> None:
        """Read in the job's log which nodes never start, because Slurm could not create their log files."""
        silent = [node for node, (beat, _) in self._beats.items() if not beat and node not in self.ended]
        now = time.monotonic()
        # Later attempts append to the same log.
        if not silent or self._folder.attempt > 1 or now - self._launch_time < LAUNCH_SECONDS:
            return
        self._launch_time = now
        for node, message in read_launch_failures(self._folder).items():
            if node in silent and node not in self._given_up:
                name = find_node_name(node)
                if name:
                    self._names[node] = name
                self._given_up[node] = (
                    f"Slurm could not start its process{f' on {name}' if name else ''} ({message}). Is "
                    f"{self._folder.path} visible there?"
                )

    def _look_at_heartbeat(self, node: int, folder: NodeFolder) -> None:
        try:
            beat = folder.supervisor.stat().st_mtime
        except OSError as error:
            if not is_absent(error):  # The file system may come back.
                self._beats[node] = (self._beats[node][0], time.monotonic())
            return
        # The age is measured by our own clock: those of two nodes may differ.
        if beat != self._beats[node][0]:
            self._beats[node] = (beat, time.monotonic())

    def find_failed(self) -> Ended | None:
        """Return a node whose ranks ended before their task had returned; None if there is none."""
        return next((ended for ended in self.ended.values() if ended.status != "finished"), None)

    def describe_lost(self, patience_seconds: float = LOST_SECONDS) -> str:
        """Return which nodes are lost, and for how long; empty if none is."""
        texts = []
        for node, (beat, seen) in self._beats.items():
            silent = time.monotonic() - seen
            if node in self._given_up:
                self._lost.add(node)
                texts.append(f"{self._folders[node].title} is lost: {self._given_up[node]}")
            elif node not in self.ended and silent > (patience_seconds if beat else START_SECONDS):
                what = f"no sign of it for {silent:.0f} s" if beat else "its supervisor never started"
                self._lost.add(node)
                texts.append(f"{self._folders[node].title} is lost: {what}")
        return "; ".join(texts)

    def is_every_end_known(self, patience_seconds: float = LOST_SECONDS) -> bool:
        """Return whether each node has ended or is lost."""
        now = time.monotonic()
        return all(
            node in self.ended
            or node in self._given_up
            or now - seen > (patience_seconds if beat else START_SECONDS)
            for node, (beat, seen) in self._beats.items()
        )

    @property
    def lost(self) -> tuple[int, ...]:
        """The numbers of the nodes that were found lost."""
        return tuple(sorted(self._lost))

    def list_lost_names(self) -> list[str]:
        """Return the scheduler's names of the nodes that were found lost, as far as they are known."""
        names = [
            (read_json(self._folders[node].node_json) or {}).get("name", self._names.get(node))
            for node in sorted(self._lost)
        ]
        return [name for name in names if isinstance(name, str)]


def read_launch_failures(folder: NodeFolder) -> dict[int, str]:
    """Return srun's message for each node of a Slurm job on which it could not start a process."""
    logs = sorted((folder.path / SUBMISSION).glob("*.err"))
    texts = [read_tail_text(path, LOG_CHARACTERS) for path in logs]
    return {int(node): message for text in texts for node, message in LAUNCH_FAILURE.findall(text)}


def find_node_name(node: int) -> str:
    """Return Slurm's name of a node of this process's job; empty if it is not known."""
    try:
        names = run_command("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    except SlurmError:
        return ""
    return names[node] if node < len(names) else ""
