"""A process that is connected to a Ray cluster for one launch: it reports nodes, and starts a coordinator.

``submission.py`` starts it as ``python -m shardscope.runs.backends.ray.submission_process`` and sends a
line of JSON for each request; each gets a line of JSON as its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from shardscope.records.folder import RunFolder
    from shardscope.runs.backends.ray.coordinator import Coordinator

NAMESPACE = "shardscope"
"""Ray's namespace of the names of coordinators."""
START_SECONDS = 150.0
END_SECONDS = 60.0
"""Time for the coordinator of a failed launch to end its nodes by itself."""
MAX_ERROR = 500
CLIENT = "ray[client]"
"""Package that an address with ray:// needs; Ray's error names it."""
LIFE_SECONDS = 900
"""Maximum life of this process, longer than a launch may take."""
CLOSE_SECONDS = 10.0
"""Time to disconnect after the launch has closed its end of the pipe, or has died."""
VISIBLE_SECONDS = 8.0
"""Time for the run folder to appear on a node that shares it."""


def main() -> None:
    """Connect, report the nodes, and start a coordinator if one is requested."""
    # Ray and its workers print to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # ray.init() waits for ever for a head that ends meanwhile, and takes SIGTERM for itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFE_SECONDS)
    threading.Thread(target=_end_without_launch, daemon=True).start()
    request = json.loads(sys.stdin.readline())
    try:
        answer = connect(request)
    except BaseException as error:
        _answer(answers, {"error": describe_error(error), "field": find_field(error, request)})
        return
    _answer(answers, answer)
    # Until the launch closes its end.
    while line := sys.stdin.readline():
        request = json.loads(line)
        try:
            answer = cancel_run(str(request["cancel"])) if "cancel" in request else start_coordinator(request)
        except BaseException as error:
            answer = {"error": describe_error(error)}
        _answer(answers, answer)


def _end_without_launch() -> None:
    """End this process soon after the other end of its input is closed."""
    poll = select.poll()
    poll.register(0, 0)  # POLLHUP is always reported.
    poll.poll()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def _answer(answers: object, answer: Mapping[str, object]) -> None:
    print(json.dumps(answer), file=answers, flush=True)  # type: ignore[call-overload]


class InspectionError(Exception):
    """A worker of the cluster could not be started."""


def connect(request: Mapping[str, object]) -> dict[str, object]:
    """Connect to the cluster. Return its nodes and, if requested, a worker's Python. Raises Ray's errors."""
    import ray

    from shardscope.runs.launch.environment import restore_python_path

    path = request["pythonpath"]
    restore_python_path(path if isinstance(path, str) else None)
    ray.init(
        address=request["address"],
        namespace=NAMESPACE,
        runtime_env=request["runtime_env"],
        log_to_driver=False,
        logging_level="ERROR",
    )
    free = _read_free_resources()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answer: dict[str, object] = {"nodes": [describe_node(node, free.get(node["NodeID"])) for node in nodes]}
    if request["inspects"]:
        inspect = ray.remote(num_cpus=0, max_retries=0)(inspect_python)
        try:
            answer["python"] = ray.get(inspect.remote(), timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise InspectionError(
                f"no worker of the cluster has started within {START_SECONDS:.0f} s; Ray's logs on its "
                "nodes (session_latest/logs) say why"
            ) from error
        except Exception as error:
            raise InspectionError(describe_error(error)) from error
    return answer


def find_field(error: BaseException, request: Mapping[str, object]) -> str:
    """Return the field of ``ss.Ray`` that an error of :func:`connect` is about; empty if that is unclear."""
    has_environment = bool(request["runtime_env"])
    if isinstance(error, InspectionError):
        return "runtime_env" if has_environment else ""
    # Ray checks the runtime environment before it connects. A wrong address, also in RAY_ADDRESS, is a
    # ValueError, too.
    text = str(error)
    is_address = CLIENT in text or "address" in text.lower()
    is_environment = isinstance(error, TypeError) or (isinstance(error, ValueError) and not is_address)
    return "runtime_env" if has_environment and is_environment else "address"


def _read_free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return each node's resources that nobody uses, by the node's id; none if this Ray does not tell.

    ``ray.available_resources()``, the public function, gives only the cluster's sum.
    """
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def describe_node(node: Mapping[str, object], free: Mapping[str, float] | None) -> dict[str, object]:
    """Return one node of ``ray.nodes()`` as the launch reads it. ``free``: its resources that nobody uses."""
    resources = node["Resources"]
    assert isinstance(resources, Mapping)
    prefix = "accelerator_type:"
    kinds = [name.removeprefix(prefix) for name in resources if name.startswith(prefix)]
    num_gpus = int(resources.get("GPU", 0))
    host = str(node.get("NodeManagerHostname") or node["NodeManagerAddress"])
    return {
        "name": host,
        "address": str(node["NodeManagerAddress"]),
        "host": host,
        "num_cpus": int(resources.get("CPU", 0)),
        "gpus": [[kinds[0] if len(kinds) == 1 else "", num_gpus]] if num_gpus else [],
        "memory_bytes": int(resources.get("memory", 0)),
        "is_idle": None
        if free is None
        # Ray leaves out a resource of which nothing is left.
        else all(free.get(name, 0.0) >= resources.get(name, 0.0) for name in ("CPU", "GPU")),
    }


def inspect_python() -> dict[str, object]:
    """Return the Python of this process, a worker of the cluster, and the versions of what a run needs."""
    # Pickled by value: Shardscope may be missing here.
    import importlib.metadata
    import platform
    import sys

    record: dict[str, object] = {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "version": platform.python_version(),
    }
    for package in ("shardscope", "torch"):
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return record


def start_coordinator(request: Mapping[str, object]) -> dict[str, object]:
    """Start the coordinator of a run, an actor that outlives this process. Raises Ray's errors."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from shardscope.records.folder import RunFolder
    from shardscope.records.json_files import write_json
    from shardscope.runs.backends.ray.coordinator import Coordinator

    folder = RunFolder(str(request["run"]))
    record = request["record"]
    assert isinstance(record, dict)
    is_shared = is_folder_shared(str(folder.job), str(request["actor"]))
    if request["retries"] and not is_shared:
        return {"needs_shared_folder": True}
    write_json(folder.job, {**record, "folder": "shared" if is_shared else "streamed"})
    # On the head, whose loss ends the run anyway: any other node would be one more that can be lost.
    heads = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and "node:__internal_head__" in node["Resources"]
    ]
    strategy = NodeAffinitySchedulingStrategy(node_id=heads[0], soft=False) if heads else "DEFAULT"
    actor_class = ray.remote(num_cpus=0, max_restarts=0)(Coordinator)
    coordinator = actor_class.options(
        name=request["actor"], lifetime="detached", scheduling_strategy=strategy
    ).remote(
        request["run"],
        request["num_nodes"],
        request["bundle"],
        is_shared=is_shared,
        node_folder=request["node_folder"],
        has_attempts=bool(request["retries"]),
    )
    try:
        if not is_shared:
            _send_folder(folder, coordinator)
        ray.get(coordinator.start.remote(), timeout=START_SECONDS)
    except BaseException:
        with contextlib.suppress(Exception):
            ray.kill(coordinator)
        raise
    return {"actor": request["actor"]}


def cancel_run(name: str) -> dict[str, object]:
    """End the coordinator ``name`` and its nodes, and wait until it has gone; no effect if there is none."""
    import ray

    with contextlib.suppress(ValueError):  # There is no such actor any more.
        coordinator = ray.get_actor(name)
        coordinator.cancel.remote()
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.2)
            ray.get_actor(name)
        ray.kill(coordinator)
    return {}


def is_folder_shared(path: str, token: str) -> bool:
    """Return whether every node of the cluster sees the file ``path``, which contains ``token``."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(sees_file)
    answers = [
        look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        ).remote(path, token, VISIBLE_SECONDS)
        for node in ray.nodes()
        if node["Alive"]
    ]
    return all(ray.get(answers, timeout=START_SECONDS))


def sees_file(path: str, token: str, seconds: float) -> bool:
    """Return whether a file with ``token`` in it appears on this machine within some seconds."""
    # Another machine may have another run at the same path. Pickled by value, as `inspect_python`.
    import time

    deadline = time.monotonic() + seconds
    while True:
        try:
            with open(path) as file:  # noqa: PTH123
                if token in file.read():
                    return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _send_folder(folder: RunFolder, coordinator: ActorHandle[Coordinator]) -> None:
    """Send the files of a launch to the coordinator's copy of the run folder. Raises Ray's errors."""
    import ray

    from shardscope.runs.backends.folder_stream import FolderSource, State, advance

    sent: dict[str, State] = {}
    source = FolderSource(folder.path, lambda name: "/" not in name)
    while chunks := source.read(sent):
        ray.get(coordinator.receive.remote(chunks), timeout=START_SECONDS)
        advance(sent, chunks)


def describe_error(error: BaseException) -> str:
    """Return the cause of an error of Ray as one line; Ray's own texts have tracebacks and many lines."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    if isinstance(error, InspectionError):  # Its text is a cause already.
        return str(error)[:MAX_ERROR]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The last line of a traceback names the exception.
    is_traceback = any(line.startswith("Traceback") for line in lines)
    text = (lines[-1] if is_traceback else " ".join(lines)) if lines else ""
    name = type(error).__name__
    return (text if isinstance(error, FileNotFoundError) else f"{name}: {text}" if text else name)[:MAX_ERROR]


if __name__ == "__main__":
    main()
