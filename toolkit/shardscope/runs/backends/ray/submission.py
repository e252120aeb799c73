"""Launch on Ray: the checks before a run is submitted, and its submission.

Ray is never imported into the kernel, where the user may use it: a process of its own connects to the
cluster (``submission_process.py``), reports the nodes, and starts the run's coordinator.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
import select
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.machine.python_process import build_module_command
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.records.json_values import parse_object
from shardscope.runs.backends.nodes import (
    Node,
    NodePool,
    build_inventory,
    check_nodes,
    is_same_gpu,
)
from shardscope.runs.backends.ray.puller import start_puller
from shardscope.runs.backends.ray.submission_process import CLIENT
from shardscope.runs.backends.ray.target import Ray
from shardscope.runs.backends.ray.watch import is_streamed
from shardscope.runs.launch.environment import add_toolkit_to_path, remove_rank_variables

if TYPE_CHECKING:
    from types import TracebackType

    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan

REACH_SECONDS = 10.0
"""Maximum time for the head's port to accept a connection."""
CONNECT_SECONDS = 180.0
"""Time to import Ray, connect, and start a worker process on the cluster."""
SUBMIT_SECONDS = 180.0
CANCEL_SECONDS = 90.0
"""Time for the coordinator of a failed launch to end its nodes; it is killed a little earlier."""
CLOSE_SECONDS = 10.0
INVENTORY_FIELD = "Ray.inventory"
GPU_SHARE = 0.001
"""Share of a node's accelerator type that a bundle requests, as Ray's ``accelerator_type=`` does."""


class RayError(OSError):
    """Ray does not answer now, or did not do what was requested."""


class RayConnection:
    """A process that is connected to a Ray cluster, and the cluster's nodes; a context manager."""

    def __init__(self, target: Ray, *, inspects: bool) -> None:
        """Connect. ``inspects``: ask a worker of the cluster for its Python.

        Raises ``ImportError`` without Ray, ``ValueError`` if there is no such cluster, ``RayError`` if it
        does not answer.
        """
        if importlib.util.find_spec("ray") is None:
            raise ImportError('Launching on Ray needs ray: pip install "shardscope[ray]".')
        self.target = target
        _check_head(target)
        self._process = subprocess.Popen(
            build_module_command("shardscope.runs.backends.ray.submission_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=add_toolkit_to_path(remove_rank_variables(os.environ)),
            start_new_session=True,  # Ctrl-C in the notebook is not for it.
        )
        self._received = b""
        try:
            runtime_env = None if target.runtime_env is None else dict(target.runtime_env)
            request = {"address": target.address, "runtime_env": runtime_env, "inspects": inspects}
            answer = self.ask({**request, "pythonpath": os.environ.get("PYTHONPATH")}, CONNECT_SECONDS)
            self.pool = NodePool(self.title, tuple(_read_nodes(answer)))
            python = answer.get("python")
            self.python: dict[str, object] = python if isinstance(python, dict) else {}
        except BaseException:
            self.close()
            raise

    @property
    def title(self) -> str:
        """Display name of the cluster."""
        return (
            "the Ray cluster" if self.target.address == "auto" else f"the Ray cluster {self.target.address}"
        )

    def ask(self, request: dict[str, object], seconds: float) -> dict[str, object]:
        """Send a request and return the answer.

        Raises ``ValueError`` if Ray refuses it, ``RayError`` without an answer in time.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        answer = parse_object(self._read_line(seconds))
        if "error" in answer:
            allowed = f"what Ray accepts; it says: {str(answer['error']).rstrip('.')}"
            if answer.get("field") == "address":
                fix = "the address of a running cluster, which `ray start` prints"
                if CLIENT in allowed:
                    fix = f'pip install "{CLIENT}"'
                refuse("Ray.address", self.target.address, allowed, fix)
            if answer.get("field") == "runtime_env":
                value = dict(self.target.runtime_env or {})
                refuse("Ray.runtime_env", value, allowed, "change what the message names")
            refuse("launch.on", self.title, allowed, "in ss.Ray(...), change what the message names")
        return answer

    def _read_line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN | select.POLLHUP)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise RayError(f"{self.title} did not answer within {seconds:.0f} s")
            chunk = os.read(descriptor, 2**16)
            if not chunk:
                code = self._process.wait()
                raise RayError(f"the process that connects to {self.title} ended with exit code {code}")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """End the process; what it has started on the cluster stays."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> RayConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_head(target: Ray) -> None:
    """Raise ``ValueError`` if nothing listens at the head's address; Ray itself would wait for minutes."""
    is_auto = target.address == "auto"
    address = os.environ.get("RAY_ADDRESS", "") if is_auto else target.address
    host, _, port = address.rpartition(":")
    # A ray:// address may be reached through a proxy only, as gRPC uses it.
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        allowed = f"the address of a running cluster; nothing answers there: {error}"
        field = "RAY_ADDRESS" if is_auto else "Ray.address"
        refuse(field, address, allowed, "the address that `ray start` prints on the head")


def _read_nodes(answer: dict[str, object]) -> list[Node]:
    nodes = answer["nodes"]
    assert isinstance(nodes, list)
    return [
        Node(
            name=node["name"],
            address=node["address"],
            host=node["host"],
            num_cpus=node["num_cpus"],
            gpus=tuple((kind, count) for kind, count in node["gpus"]),
            memory_bytes=node["memory_bytes"],
            is_idle=node["is_idle"],
        )
        for node in nodes
    ]


def read_inventory(target: Ray, gpu_name: str | None, *, only_idle: bool) -> Cluster:
    """Return the cluster of :meth:`Ray.inventory`, which describes the arguments and the errors."""
    with RayConnection(target, inspects=False) as connection:
        pool = select_nodes(connection.pool)
    return build_inventory(pool, gpu_name, INVENTORY_FIELD, only_idle=only_idle)


def select_nodes(pool: NodePool) -> NodePool:
    """Return the nodes on which work may run: a cluster's head often has neither CPUs nor GPUs for it."""
    return NodePool(
        pool.title, tuple(node for node in pool.nodes if node.num_cpus or node.gpus) or pool.nodes
    )


def check_ray_submission(connection: RayConnection, plan: Plan, *, force: bool) -> str:
    """Check all that is known before a run is submitted. Return a warning, empty if there is none.

    Raises ``ValueError`` if the cluster has not what the plan needs, its Python lacks Shardscope or has
    another version of it (not with ``force``).
    """
    pool = select_nodes(connection.pool)
    if plan.cluster.gpu.name == "cpu":
        pool = NodePool(pool.title, tuple(node for node in pool.nodes if node.num_cpus))
    check_nodes(plan, pool)
    python = connection.python
    where = f"the nodes of {connection.title}"
    fix = 'install it there, or name it in runtime_env={"pip": [...]}'
    for package in ("shardscope", "torch"):
        theirs, ours = python.get(package), importlib.metadata.version(package)
        if not isinstance(theirs, str):
            problem = f"nodes whose Python ({python.get('executable')}) has {package}"
            refuse("launch.on", where, problem, fix)
        # The pickled task names Shardscope's classes.
        if package == "shardscope" and theirs != ours and not force:
            refuse("launch.on", f"{where} with shardscope {theirs}", f"shardscope {ours}, as here", fix)
    differing = [
        f"{name} {theirs} on the nodes, {ours} here"
        for name, theirs, ours in (
            ("Python", python.get("version"), platform.python_version()),
            ("torch", python.get("torch"), importlib.metadata.version("torch")),
        )
        if theirs != ours
    ]
    return "; ".join(differing)


def build_bundle(plan: Plan, pool: NodePool) -> dict[str, float]:
    """Return what one node of the run requests of Ray: GPUs and their share of the node's cores."""
    cluster = plan.cluster
    num_ranks = cluster.gpus_per_node
    if cluster.gpu.name == "cpu":
        cores = min(node.num_cpus for node in pool.nodes if node.num_cpus)
        return {"CPU": float(min(cores, num_ranks))}
    nodes = [node for node in pool.nodes if node.count_gpus(cluster.gpu.name) >= num_ranks]
    bundle = {"GPU": float(num_ranks)}
    cores = min(node.num_cpus * num_ranks // node.count_gpus(cluster.gpu.name) for node in nodes)
    if cores:
        bundle["CPU"] = float(cores)
    kinds = {kind for node in nodes for kind, _ in node.gpus if is_same_gpu(kind, cluster.gpu.name)}
    if len(kinds) == 1 and all(kinds):
        bundle[f"accelerator_type:{kinds.pop()}"] = GPU_SHARE
    return bundle


def submit_to_ray(connection: RayConnection, folder: RunFolder, plan: Plan, retries: int) -> None:
    """Start the run's coordinator on the cluster. Raises ``ValueError`` if Ray refuses it, ``RayError``.

    If its nodes do not see the run folder, the process that receives their records is started here; with
    ``retries`` that raises ``ValueError``, because other nodes would not see the checkpoints.
    """
    name = f"shardscope-{folder.path.name}-{secrets.token_hex(4)}"
    record = {"scheduler": "ray", "job_id": name, "address": connection.target.address}
    # Before the coordinator starts: without its name nobody could find it again.
    write_json(folder.job, record)
    request = {
        "run": str(folder.path),
        "actor": name,
        "num_nodes": plan.cluster.num_nodes,
        "bundle": build_bundle(plan, select_nodes(connection.pool)),
        "record": record,
        "node_folder": connection.target.node_folder,
        "retries": retries,
    }
    if connection.ask(request, SUBMIT_SECONDS).get("needs_shared_folder"):
        allowed = "0, because the nodes do not see the run folder, and so not each other's checkpoints"
        fix = "a folder= that every node of the cluster sees at the same path, or 0"
        refuse("launch.retries", retries, allowed, fix)
    if is_streamed(folder):
        start_puller(folder)


def cancel_on_ray(connection: RayConnection, folder: RunFolder) -> None:
    """End the coordinator of a launch that has failed, and with it all that the run has on the cluster.

    No effect if there is none. Raises ``RayError`` if the cluster does not answer.
    """
    connection.ask({"cancel": (read_json(folder.job) or {}).get("job_id")}, CANCEL_SECONDS)
