"""Launch on Slurm: the checks before a job is submitted, and its submission."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardscope.catalog import gpus
from shardscope.core.errors import Value, find_nearest, refuse
from shardscope.records.folder import SUBMISSION, RunFolder
from shardscope.records.json_files import write_json
from shardscope.runs.backends.node_process import list_addresses
from shardscope.runs.backends.slurm import Slurm, parse_minutes
from shardscope.runs.backends.slurm_job import clean_environment, parse_records, run_command
from shardscope.runs.launch.environment import STALE, add_toolkit_to_path

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

SUBMIT_SECONDS = 120.0
LOCAL_FILE_SYSTEMS = frozenset({
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat", "ntfs", "overlay", "tmpfs", "ramfs"),
    "devtmpfs",
})  # fmt: skip
"""File systems of one machine; all others (nfs4, lustre, gpfs, beegfs, cephfs, ...) may be shared."""
GRES_GPU = re.compile(r"gpu(?::([A-Za-z][^:(,]*))?:(\d+)")
"""GPUs of a node in Slurm's spelling: ``gpu:a100:8(S:0-1)`` or ``gpu:8``."""


def is_same_gpu(kind: str, gpu_name: str) -> bool:
    """Return whether Slurm's GPU type ``kind`` (empty: none) can be the catalogue's type ``gpu_name``."""
    # Slurm has free names: a100, h100, nvidia_a100-sxm4-80gb. Of their parts those count that occur in
    # the catalogue's names; without any, the type says nothing.
    parts = {part for name in gpus for part in name.split("-")} & set(re.split(r"[-_]", kind.lower()))
    return parts <= set(gpu_name.lower().split("-"))


class Node(NamedTuple):
    """One node of a partition."""

    name: str
    address: str
    host: str
    num_cpus: int
    gpus: tuple[tuple[str, int], ...]
    """GPU types, as the cluster's administrator named them (empty: no name), and their counts."""
    memory_bytes: int = 0
    """Host memory that Slurm gives to jobs; 0: not known."""

    def count_gpus(self, gpu_name: str) -> int:
        """Return how many GPUs are of the catalogue's type ``gpu_name``, or of no named type."""
        return sum(count for kind, count in self.gpus if is_same_gpu(kind, gpu_name))


class Partition(NamedTuple):
    """A partition of the cluster."""

    name: str
    default_minutes: int
    """Minutes that a job without a time limit gets; 0: no limit."""
    nodes: tuple[Node, ...]

    def describe(self) -> str:
        """Return its nodes as text, such as ``partition a100: 16 nodes with 8 a100 GPUs``."""
        kinds = {
            ", ".join(f"{count} {kind} GPU{'s' * (count != 1)}" for kind, count in node.gpus)
            for node in self.nodes
        }
        described = " or ".join(kind or "no GPUs" for kind in sorted(kinds))
        num_nodes = len(self.nodes)
        return f"partition {self.name}: {num_nodes} node{'s' * (num_nodes != 1)} with {described}"


def check_submission(plan: Plan, target: Slurm, parent: Path, *, force: bool) -> Partition:
    """Check all that is known before a job is submitted. Return the partition.

    Raises ``ImportError`` without submitit, ``ValueError`` if the partition does not exist, has not what the
    plan needs, or its nodes cannot see ``parent`` (not with ``force``), and ``SlurmError`` if Slurm cannot
    be asked.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ImportError('Launching on Slurm needs submitit: pip install "shardscope[slurm]".')
    for command in ("sbatch", "scontrol", "scancel"):
        if shutil.which(command) is None:
            refuse(
                "launch.on",
                "ss.Slurm(...)",
                f"None (this machine): {command} is not on PATH, so no job can be submitted from here",
                "start the notebook on a login node of the cluster",
            )
    partition = read_partition(target.partition)
    _check_nodes(plan, partition)
    if not force:
        _check_folder(parent, partition)
    return partition


def read_partition(name: str | None) -> Partition:
    """Return the partition ``name``, or the default one. Raises ``ValueError`` if it does not exist."""
    records = parse_records(run_command("scontrol", "show", "partition", "--oneliner"))
    names = [record["PartitionName"] for record in records]
    if name is None:
        chosen = next((record for record in records if record.get("Default") == "YES"), None)
        if chosen is None:
            fix = Value(names[0]) if names else "ask the cluster's administrator"
            refuse("Slurm.partition", None, f"{', '.join(names)}: the cluster has no default partition", fix)
    else:
        if name not in names:
            refuse("Slurm.partition", name, ", ".join(names), Value(find_nearest(name, names)))
        chosen = records[names.index(name)]
    limits = (chosen.get(key, "") for key in ("DefaultTime", "MaxTime"))
    minutes = next((parse_minutes(limit) for limit in limits if limit[:1].isdigit()), 0)
    nodes = []
    for record in parse_records(run_command("scontrol", "show", "node", "--oneliner")):
        if chosen["PartitionName"] in record.get("Partitions", "").split(","):
            node_gpus = tuple((kind, int(count)) for kind, count in GRES_GPU.findall(record.get("Gres", "")))
            host = record.get("NodeHostName", "")
            cpus = int(record.get("CPUTot", "1"))
            memory = int(record.get("RealMemory", "0")) << 20  # scontrol(1): MiB.
            address = record.get("NodeAddr", host)
            nodes.append(Node(record["NodeName"], address, host, cpus, node_gpus, memory))
    return Partition(chosen["PartitionName"], minutes, tuple(nodes))


def _check_nodes(plan: Plan, partition: Partition) -> None:
    """Raise ``ValueError`` unless the partition has the nodes and GPUs of the plan."""
    cluster = plan.cluster
    if cluster.num_nodes > len(partition.nodes):
        fix = Value(len(partition.nodes)) if partition.nodes else "another partition"
        refuse("plan.cluster.num_nodes", cluster.num_nodes, f"nodes of {partition.describe()}", fix)
    if cluster.gpu.name == "cpu":
        # As on one machine: ranks may share cores, but many more would never finish.
        most = max(16, 4 * sorted(node.num_cpus for node in partition.nodes)[-cluster.num_nodes])
        if cluster.gpus_per_node > most:
            allowed = f"1 to {most} CPU ranks on a node of partition {partition.name}"
            refuse("plan.cluster.gpus_per_node", cluster.gpus_per_node, allowed, Value(most))
        return
    counts = sorted((node.count_gpus(cluster.gpu.name) for node in partition.nodes), reverse=True)
    most = counts[cluster.num_nodes - 1]
    if most == 0:
        fix = "a plan for the GPUs of this partition, or another partition"
        refuse("plan.cluster.gpu", cluster.gpu.name, f"GPUs of {partition.describe()}", fix)
    if cluster.gpus_per_node > most:
        nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)}"
        allowed = f"1 to {most} on {nodes} of {partition.describe()}"
        refuse("plan.cluster.gpus_per_node", cluster.gpus_per_node, allowed, Value(most))


def _check_folder(parent: Path, partition: Partition) -> None:
    """Raise ``ValueError`` if other machines cannot see the run folder: its file system is a local one."""
    here = set(list_addresses()) | {socket.gethostname()}
    others = [node.name for node in partition.nodes if not {node.address, node.host} & here]
    kind = find_file_system(parent)
    if others and kind in LOCAL_FILE_SYSTEMS:
        refuse(
            "launch.folder",
            str(parent.absolute()),
            f"a folder on a file system that the nodes of partition {partition.name} share; this one is "
            f"on {kind}, which belongs to this machine",
            "folder= on your cluster's shared file system; force=True if this one is exported to the nodes",
        )


def find_file_system(path: Path) -> str:
    """Return the type of the file system that ``path`` is or will be on, as mount(8) names it."""
    import psutil

    real = Path(os.path.realpath(path))
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (real, *real.parents) if folder in mounts), "")


def submit(folder: RunFolder, plan: Plan, target: Slurm, partition: Partition) -> str:
    """Submit the job of a run and write its id. Return the id. Raises ``ValueError`` if Slurm refuses it."""
    submission = folder.path / SUBMISSION
    submission.mkdir(mode=0o700)
    environment = {name: value for name, value in clean_environment(os.environ).items() if name not in STALE}
    with_toolkit = add_toolkit_to_path(environment)
    # Another Python has packages of its own, which this one's must not hide.
    nodes_environment = environment if target.python is not None else with_toolkit
    request = {
        "pythonpath": nodes_environment.get("PYTHONPATH"),
        "folder": str(submission),
        "run": str(folder.path),
        "python": target.python,
        "parameters": build_parameters(folder, plan, target, partition),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shardscope.runs.backends.submission_process"],
        check=False,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=SUBMIT_SECONDS,
        env=with_toolkit,
    )
    lines = done.stdout.split()
    if done.returncode or not lines or not lines[-1].isdecimal():
        message = _find_message(done.stderr)
        refuse(
            "launch.on",
            f"partition {partition.name}",
            f"what Slurm accepts; it says: {message}",
            "ss.Slurm(...)",
        )
    job_id = lines[-1]
    try:
        write_json(folder.job, {"scheduler": "slurm", "job_id": job_id, "partition": partition.name})
    except OSError:
        # Without its id nobody could find the job again.
        run_command("scancel", job_id)
        raise
    return job_id


def build_parameters(folder: RunFolder, plan: Plan, target: Slurm, partition: Partition) -> dict[str, object]:
    """Return the parameters of submitit's ``SlurmExecutor`` for a run."""
    cluster = plan.cluster
    minutes = partition.default_minutes if target.time is None else parse_minutes(target.time)
    # sbatch(1): a limit of 0 requests no limit.
    parameters: dict[str, object] = {
        "job_name": "shardscope-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.path.name),
        "partition": partition.name,
        "time": minutes,
        "nodes": cluster.num_nodes,
        "ntasks_per_node": 1,
        "setup": list(target.setup),
        **{
            name: value
            for name in ("account", "qos", "constraint")
            if (value := getattr(target, name)) is not None
        },
    }
    # A node that fails ends the job: a second start of the same run folder would not be this run.
    additional: dict[str, object] = {"no-requeue": True}
    cores = min(node.num_cpus for node in partition.nodes)
    if cluster.gpu.name == "cpu":
        num_cpus = min(cores, cluster.gpus_per_node)
    else:
        kinds = {
            kind for node in partition.nodes for kind, _ in node.gpus if is_same_gpu(kind, cluster.gpu.name)
        }
        kind = f"{kinds.pop()}:" if len(kinds) == 1 and all(kinds) else ""
        additional["gres"] = f"gpu:{kind}{cluster.gpus_per_node}"
        # A share of the node's cores, as large as the share of its GPUs.
        most = max(node.count_gpus(cluster.gpu.name) for node in partition.nodes)
        num_cpus = max(1, cores * cluster.gpus_per_node // most)
    additional["cpus-per-task"] = num_cpus
    extra = {name.replace("_", "-"): value for name, value in target.extra.items()}
    parameters["additional_parameters"] = {**additional, **extra}
    # Since Slurm 22.05 srun does not inherit it from sbatch.
    parameters["srun_args"] = [f"--cpus-per-task={extra.get('cpus-per-task', num_cpus)}"]
    return parameters


def _find_message(output: str) -> str:
    """Return the line of sbatch's or Python's output that names the cause."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "sbatch: error:" in line]
    return (named or lines or ["nothing"])[-1].rpartition("sbatch: error: ")[2][-500:]
