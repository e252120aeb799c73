"""The coordinator of a run on Ray: a detached actor that requests nodes, starts their processes, cleans up.

It owns the run's placement group and node actors, so that Ray removes them however it ends: a run leaves
nothing on the cluster. Training needs it for nothing else: the nodes' supervisors meet in the run folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.records.attempts import has_ended
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import LineTail, append_line, read_json, read_lines, write_json
from shardscope.records.redaction import redact
from shardscope.records.regular_files import open_to_append
from shardscope.runs.backends.folder_stream import Chunk
from shardscope.runs.backends.folder_stream import State as FileState
from shardscope.runs.backends.next_attempt import begin_attempt, conclude_without_lead
from shardscope.runs.backends.node_process import wait_for_folder
from shardscope.runs.backends.ray.node import NodeActor
from shardscope.runs.backends.ray.stream import StreamHub, create_copy, delete_copy
from shardscope.runs.backends.ray.submission_process import describe_error
from shardscope.runs.backends.ray.watch import State, describe_lost_node, lost_node_file, state_file
from shardscope.runs.stop_request import describe_stop_request

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

POLL_SECONDS = 2.0
HEAD_SECONDS = 20.0
"""Time without an answer of Ray's head (GCS) after which the run ends. Ray's own limit is 60 s
(gcs_rpc_server_reconnect_timeout_s), after which its nodes kill all actors."""
END_SECONDS = 120.0
"""Time for the other nodes' supervisors to end after a node is lost. Their ranks end within seconds; the rest
is for the final status and what follows it."""
CLEANUP_SECONDS = 30.0
KEEP_SECONDS = 86400.0
"""Time for which a run's records are kept for a notebook that is not connected."""
STREAMED = "they share no run folder with the notebook, so records are streamed to it"
STOP_SECONDS = 10.0
"""Time for nodes that are still starting to begin, after a stop."""


class Coordinator:
    """The actor. Its methods return at once: the work is done in a thread."""

    def __init__(
        self,
        run: str,
        num_nodes: int,
        bundle: Mapping[str, float],
        *,
        is_shared: bool = True,
        node_folder: str | None = None,
        has_attempts: bool = False,
    ) -> None:
        """``run`` is the path of the run folder; its name counts if the nodes do not share it.

        ``has_attempts``: it may be started again, which needs a shared folder.
        """
        self._hub = None if is_shared else StreamHub(create_copy(Path(run).name, node_folder))
        self._node_folder = node_folder
        self._path = Path(run) if self._hub is None else self._hub.path
        self._folder = RunFolder(self._path, 1 if has_attempts else None)
        """With the paths of the attempt that is running or waits for its nodes."""
        self._num_nodes = num_nodes
        self._bundle = dict(bundle)
        self._control = LineTail(self._folder.control)
        self._state = State("waiting", "the coordinator has started", time.time(), "")
        self._group: PlacementGroup | None = None
        self._nodes: dict[int, ActorHandle[NodeActor]] = {}
        self._answered = time.monotonic()
        """When Ray's head last answered."""
        self._lost = ""
        """Why a node is lost, the first one's reason; empty if none is."""
        self._verdict = "failed"
        """What the run is if a node is lost."""
        self._end = ""
        """Why the nodes were sent a signal; empty if they were not."""
        self._is_ended = False
        """Whether nothing follows in the run folder."""
        self._stop = ""
        """Who has requested a stop; empty if nobody has."""
        self._again = ""
        """Why the run was put back into the queue, for the reason of its status; empty in attempt 1."""

    def receive(self, chunks: list[Chunk]) -> None:
        """Write files of the launch into this copy of the run folder. Raises ``OSError``."""
        assert self._hub is not None
        self._hub.receive(chunks)

    def pull(
        self, received: Mapping[str, FileState], commands: Chunk | None
    ) -> tuple[list[Chunk], int, bool]:
        """Return the bytes that the notebook's run folder lacks, the size of the commands here, and whether
        the run has ended."""
        assert self._hub is not None
        is_ended = self._is_ended
        return (*self._hub.pull(received, commands), is_ended)

    def leave(self) -> None:
        """Mark the notebook's run folder as complete, or as deleted: this copy is no longer needed."""
        assert self._hub is not None
        self._hub.is_released = True

    def cancel(self) -> None:
        """End the nodes and this actor: the launch has failed, and its run folder is deleted."""
        append_line(self._folder.control, {"command": "stop", "time": time.time()})
        if self._hub is not None:
            self._hub.is_released = True

    def start(self) -> None:
        """Begin. Raises ``FileNotFoundError`` if the run folder is not visible on this node."""
        import ray

        wait_for_folder(self._path)
        way = "they share the run folder" if self._hub is None else STREAMED
        self._write("waiting", f"Ray looks for its nodes; {way}")
        self._me = ray.get_runtime_context().current_actor
        for work in (self._watch_head, self._keep_nodes, self._run):
            threading.Thread(target=work, daemon=True).start()

    def _run(self) -> None:
        try:
            self._coordinate()
        except BaseException as error:
            self._write("ended", f"its Ray coordinator failed: {describe_error(error)}", "failed")
            # The text of an exception may have any characters, surrogates included.
            text = redact(traceback.format_exc()).encode(errors="backslashreplace")
            log = state_file(self._folder).with_name("coordinator.log")
            with contextlib.suppress(OSError), open_to_append(log) as file:
                file.write(text)
        finally:
            self._give_back()

    def _coordinate(self) -> None:
        while self._run_attempt():
            self._release_nodes()
            self._folder = self._folder.select_attempt(self._folder.attempt + 1)
            self._lost = ""
            self._write("waiting", f"{self._again}Ray looks for nodes")
        if self._hub is None:  # Node 0 deletes it, unless it is lost.
            with contextlib.suppress(OSError):
                self._folder.task.unlink(missing_ok=True)

    def _run_attempt(self) -> bool:
        """Run one attempt on the nodes that Ray gives it. Return whether another one follows."""
        attempt = self._folder.fixed_attempt
        if not self._wait_for_nodes():
            what = "any rank" if not self._again else f"attempt {attempt}"
            self._write("ended", f"{self._stop} before {what} started", "stopped")
            return False
        if attempt is not None:
            begin_attempt(self._folder)
        self._write("starting", f"Ray starts a process on each of {self._num_nodes} nodes")
        self._create_actors()
        is_started = self._start_nodes()
        if self._hub is not None:  # Each node has its own, and deletes it.
            self._folder.task.unlink(missing_ok=True)
        if is_started:
            self._write("running", f"{self._num_nodes} nodes at work")
        self._watch_nodes()
        if attempt is not None and self._is_to_start_again():
            return True
        self._write("ended", self._lost or "all nodes have ended", self._verdict if self._lost else "")
        return False

    def _is_to_start_again(self) -> bool:
        """Return whether another attempt follows: node 0 has decided it, unless it is lost."""
        next_attempt = self._folder.attempt + 1
        if has_ended(self._folder):
            last = (read_lines(self._folder.status) or [{}])[-1]
            self._again = f"{last.get('reason')}; "
            return last.get("status") == "queued"
        if self._end or self._verdict == "stopped" or self._is_stopped():
            return False
        reasons = {node: describe_lost_node(self._folder, node) for node in range(self._num_nodes)}
        node, reason = next(((node, text) for node, text in reasons.items() if text), (None, self._lost))
        reason = reason or "the supervisor of node 0 has ended without a final status"
        why_not = conclude_without_lead(self._folder, read_json(self._folder.run_json) or {}, reason, node)
        self._again = f"attempt {next_attempt} follows: {reason}; "
        if why_not:
            self._lost = f"{self._lost or reason}; it is not started again: {why_not}"
        return not why_not

    def _wait_for_nodes(self) -> bool:
        """Wait for the placement group. Return False if a stop was requested before."""
        import ray.util

        # One bundle for each node; STRICT_SPREAD puts no two on the same one.
        bundles = [self._bundle] * self._num_nodes
        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        while not self._group.wait(timeout_seconds=POLL_SECONDS):
            if self._is_stopped():
                return False
            self._write("waiting", f"{self._again}Ray's placement group waits: {self._describe_wait()}")
        return not self._is_stopped()

    def _describe_wait(self) -> str:
        """Return what the run requests and what is free now."""
        import ray

        wanted = describe_resources(self._bundle)
        nodes = f"{self._num_nodes} node{'s' * (self._num_nodes > 1)} with {wanted} free"
        total = ray.available_resources()
        free = describe_resources({name: total.get(name, 0.0) for name in self._bundle})
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        return f"{nodes} requested, on {alive} nodes together {free} free"

    def _create_actors(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for node in range(self._num_nodes):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=node
            )
            actor_class = ray.remote(
                num_cpus=self._bundle.get("CPU", 0.0), num_gpus=self._bundle.get("GPU", 0.0), max_restarts=0
            )(NodeActor)
            self._nodes[node] = actor_class.options(scheduling_strategy=strategy).remote()

    def _start_nodes(self) -> bool:
        """Start the process of each node. Return whether all have started."""
        cpus = self._bundle.get("CPU", 0.0)
        starting: dict[ObjectRef[object], int] = {}
        for node, actor in self._nodes.items():
            path = str(self._path)
            if self._hub is not None:
                try:
                    path = self._hub.begin(node, actor, self._path.name, self._node_folder)
                except Exception as problem:
                    self._give_up(node, f"it got no copy of the run folder: {describe_error(problem)}")
                    return False
            starting[actor.start.remote(path, node, cpus, self._folder.fixed_attempt)] = node
        deadline = float("inf")
        while starting and not self._is_head_lost():
            for reference, error in self._collect(starting).items():
                node = starting.pop(reference)
                if error is not None:
                    self._give_up(node, f"its process was not started: {describe_error(error)}")
                    # The others are not started any more.
                    return False
            if self._is_stopped():
                deadline = min(deadline, time.monotonic() + STOP_SECONDS)
            if time.monotonic() > deadline:
                self._verdict = "stopped"
                self._lost = f"{self._stop} before any rank started"
                for node in starting.values():
                    self._give_up(node, "it had not started when the run was stopped")
                return False
            self._touch()
        return True

    def _collect(
        self, references: Mapping[ObjectRef[object], int]
    ) -> dict[ObjectRef[object], Exception | None]:
        """Wait a moment. Return the calls that have returned, with the error of those that raised one."""
        import ray

        done, _ = ray.wait(list(references), num_returns=len(references), timeout=POLL_SECONDS)
        answers: dict[ObjectRef[object], Exception | None] = {}
        for reference in done:
            try:
                ray.get(reference)
                answers[reference] = None
            except Exception as error:
                answers[reference] = error
        return answers

    def _watch_nodes(self) -> None:
        """Ask the nodes until the supervisor of each has ended, or is lost."""
        import ray
        from ray.exceptions import ActorUnavailableError

        pending: dict[ObjectRef[Any], int] = {}
        deadline = float("inf")
        is_ended_here = False
        while self._nodes and time.monotonic() < deadline:
            for node, actor in self._nodes.items():
                if node not in pending.values():
                    pending[actor.poll.remote()] = node
            began = time.monotonic()
            for reference, error in self._collect(pending).items():
                node = pending.pop(reference)
                # It may come back. If not, it ends by itself (node.py), and Ray reports that.
                if isinstance(error, ActorUnavailableError):
                    continue
                if error is not None:
                    self._give_up(node, f"its Ray actor has ended: {describe_error(error)}")
                    continue
                code, output = ray.get(reference)
                if code is not None:
                    self._drain(node)
                    self._nodes.pop(node, None)
                    if code:
                        self._give_up(node, f"its process {describe_node_exit(code, output)}")
            if self._lost and deadline == float("inf"):
                deadline = time.monotonic() + END_SECONDS
            if self._is_head_lost() and not is_ended_here:
                is_ended_here, deadline = True, time.monotonic() + END_SECONDS
                self._end = f"Ray's head has not answered for {HEAD_SECONDS:.0f} s"
                self._lost = self._lost or self._end
                self._write("running", self._lost)
                for actor in self._nodes.values():
                    actor.end.remote()
            self._touch()
            # A node that answers at once must not be asked at once again.
            time.sleep(max(0.0, POLL_SECONDS - (time.monotonic() - began)))

    def _give_up(self, node: int, reason: str) -> None:
        """Record that a node is lost: the supervisors of the others read it."""
        self._nodes.pop(node, None)
        self._drain(node)
        self._lost = self._lost or f"node {node}: {reason}"
        with contextlib.suppress(OSError):
            write_json(lost_node_file(self._folder, node), {"time": time.time(), "reason": reason})
        self._write("running", self._lost)

    def _drain(self, node: int) -> None:
        """Take all that a node has written; a shared folder has it already."""
        if self._hub is None:
            return
        drain = threading.Thread(target=self._hub.drain, args=(node,), daemon=True)
        drain.start()
        while drain.is_alive():  # It may take minutes.
            self._touch()
            drain.join(POLL_SECONDS)

    def _is_stopped(self) -> bool:
        for command in self._control.read():
            if command.get("command") == "stop" and not self._stop:
                self._stop = describe_stop_request(command)
        # Without its folder, which a failed launch deletes, the run could not be seen or stopped any more.
        with contextlib.suppress(OSError):
            if not self._stop and not self._path.exists():
                self._stop = "the run folder is gone"
        return bool(self._stop)

    def _watch_head(self) -> None:
        """Note when Ray's head answers: in a thread of its own, because a lost head lets calls wait."""
        import ray

        while True:
            with contextlib.suppress(Exception):
                ray.nodes()
                self._answered = time.monotonic()
            time.sleep(POLL_SECONDS)

    def _keep_nodes(self) -> None:
        """Tell the nodes that they are not alone: in a thread that no slow file system delays."""
        while True:
            for actor in list(self._nodes.values()):
                with contextlib.suppress(Exception):
                    actor.stay.remote()
            time.sleep(POLL_SECONDS)

    def _is_head_lost(self) -> bool:
        return time.monotonic() - self._answered > HEAD_SECONDS

    def _write(self, phase: str, reason: str, verdict: str = "") -> None:
        self._state = State(phase, reason, time.time(), verdict, self._end, self._folder.attempt)
        with contextlib.suppress(OSError):
            write_json(state_file(self._folder), self._state._asdict())

    def _touch(self) -> None:
        """Send a sign of life to the readers of the state."""
        with contextlib.suppress(OSError):
            os.utime(state_file(self._folder))
            if self._hub is not None:
                self._hub.stop_if_abandoned()

    def _give_back(self) -> None:
        """Remove everything that the run has on the cluster, this actor last."""
        import ray

        # Without the head these calls wait, and Ray removes all by itself.
        bound = threading.Timer(CLEANUP_SECONDS, os._exit, (1,))
        bound.start()
        self._release_nodes()
        if self._hub is not None:
            bound.cancel()
            self._wait_for_puller(self._hub)
            threading.Timer(CLEANUP_SECONDS, os._exit, (1,)).start()
        with contextlib.suppress(Exception):
            ray.kill(self._me)

    def _release_nodes(self) -> None:
        """Give the nodes of an attempt back to Ray."""
        import ray
        import ray.util

        for actor in self._nodes.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._nodes.clear()
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
        self._group = None

    def _wait_for_puller(self, hub: StreamHub) -> None:
        """Keep the copy until the notebook's folder has everything, at most a day; then delete it."""
        self._is_ended = True
        deadline = time.monotonic() + KEEP_SECONDS
        while not hub.is_released and time.monotonic() < deadline and not self._is_head_lost():
            time.sleep(POLL_SECONDS)
        delete_copy(hub.path)


def describe_resources(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as ``8 GPU and 32 CPU``."""
    names = [name for name in resources if not name.startswith("accelerator_type")]
    return " and ".join(f"{resources[name]:g} {name}" for name in names)


def describe_node_exit(code: int, output: str) -> str:
    """Return how a node's process ended, as a phrase to follow its name; ``output``: the end of its log."""
    known = {number.value: number.name for number in signal.Signals}
    how = f"was ended by {known[-code]}" if -code in known else f"ended with exit code {code}"
    return f"{how}: {output.strip()}" if output.strip() else how
