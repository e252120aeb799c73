"""First program on each node of a Slurm job: it records the node, then becomes its ranks' supervisor.

The nodes of a run on Ray share its steps: ``ray/node.py``.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from shardscope.machine.python_process import build_module_command
from shardscope.records.attempts import BEGAN, has_final_status
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.folder_checks import open_part
from shardscope.records.json_files import write_json
from shardscope.runs.backends.end_notice import SLURM_SIGNALS
from shardscope.runs.backends.next_attempt import begin_attempt, read_restart_attempt
from shardscope.runs.backends.peers import START_SECONDS
from shardscope.runs.backends.slurm_job import SlurmError, cancel, parse_records, read_job_id, run_command

VISIBLE_SECONDS = 60.0
"""Time for the run folder to appear on a node: an NFS client caches that a name is missing (nfs(5))."""


def run_node(path: str) -> None:
    """Replace this process, a task of Slurm's step, by the supervisor of this node.

    ``exec`` removes the signal handlers that submitit has installed. Raises ``FileNotFoundError`` if the run
    folder is not visible on this node, ``OSError`` if none of the node's names resolves to its own address.
    """
    node, attempt = int(os.environ["SLURM_NODEID"]), read_restart_attempt()
    wait_for_folder(Path(path))
    folder = open_part(path, node, attempt)
    assert isinstance(folder, NodeFolder)
    if attempt > 1 and has_final_status(RunFolder(path)):
        # Slurm has requeued the job while the run ended by itself.
        _leave_queue(folder)
        return
    # Node 0 chooses the checkpoint for all.
    if folder.is_lead:
        begin_attempt(folder)
    else:
        wait_for_file(folder.attempt_folder(attempt) / BEGAN, START_SECONDS)
    folder.create_own()
    try:
        _describe_node(folder)
    except Exception as error:  # The other nodes must not wait for this one.
        reason = f"node {node} did not start: {error}"
        write_json(folder.ended, {"time": time.time(), "status": "failed", "reason": reason})
        raise
    # Slurm signals all processes of the step. The supervisor reads its signals when it is ready to; without
    # the mask they would end the ranks. Programs that these start ignore SIGUSR2.
    signal.pthread_sigmask(signal.SIG_BLOCK, SLURM_SIGNALS)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    become_supervisor(folder, attempt)


def _leave_queue(folder: NodeFolder) -> None:
    job_id = read_job_id(folder)
    if job_id is not None and folder.is_lead:
        cancel(job_id)


def _describe_node(folder: NodeFolder) -> None:
    """Write the name and the address of this node. Raises ``OSError``."""
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    address, interface = find_address(name)
    record_node(folder, name, address, interface, {"job_id": os.environ.get("SLURM_JOB_ID")})


def record_node(
    folder: NodeFolder, name: str, address: str, interface: str, scheduler_ids: Mapping[str, object]
) -> None:
    """Write the name and the address of this node, and the scheduler's ids of it. Raises ``OSError``."""
    record = {
        "name": name,
        "host": socket.gethostname(),
        "address": address,
        "interface": interface,
        **scheduler_ids,
        "time": time.time(),
    }
    write_json(folder.node_json, record, as_is=("name", "host", "address", "interface", "ray_node_id"))


def become_supervisor(folder: NodeFolder, attempt: int | None) -> NoReturn:
    """Replace this process by the supervisor of its node, whose log gets all output. Raises ``OSError``."""
    log = os.open(folder.supervisor_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    arguments = [str(folder.path), "--node", str(folder.node), *([] if attempt is None else [str(attempt)])]
    command = build_module_command("shardscope.runs.launch.supervisor", *arguments)
    os.execv(command[0], command)


def wait_for_folder(path: Path) -> None:
    """Wait until the run folder is visible on this node. Raises ``FileNotFoundError`` if it does not come."""
    wait_for_file(path / "run.json", VISIBLE_SECONDS)


def wait_for_file(path: Path, seconds: float) -> None:
    """Wait until a file is visible on this node. Raises ``FileNotFoundError`` if it does not come."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{path} is not visible on {socket.gethostname()}: a run needs a shared folder"
            )
        time.sleep(0.5)


def find_address(node: str) -> tuple[str, str]:
    """Return this node's address on the cluster's network, and the interface that has it.

    Slurm's address of the node is tried first: host names do not resolve everywhere. Raises ``OSError`` if
    none of its names resolves to an address of this machine.
    """
    interfaces = list_addresses()
    names = [*_read_slurm_names(node), socket.gethostname()]
    for name in names:
        try:
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError:
            continue
        for address in found:
            if address in interfaces:
                return address, interfaces[address]
    raise OSError(f"node {node}: none of {', '.join(names)} is an address of this machine's interfaces")


def list_addresses() -> dict[str, str]:
    """Return the IP addresses of this machine, each with the network interface that has it."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def _read_slurm_names(node: str) -> list[str]:
    try:
        records = parse_records(run_command("scontrol", "show", "node", "--oneliner", node))
    except SlurmError:
        return [node]
    return [record[key] for record in records for key in ("NodeAddr", "NodeHostName") if key in record] or [
        node
    ]
