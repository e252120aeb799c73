"""Nodes of a cluster, of Slurm or Ray, against a plan: their GPUs, the run folder that they share."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardscope.catalog import gpus
from shardscope.core.errors import OverridableError, Value, check_flag, find_nearest, refuse
from shardscope.core.number_format import format_count
from shardscope.runs.backends.node_process import list_addresses

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan

LOCAL_FILE_SYSTEMS = frozenset({
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat", "ntfs", "overlay", "tmpfs", "ramfs"),
    "devtmpfs",
})  # fmt: skip
"""File systems of one machine; all others (nfs4, lustre, gpfs, beegfs, cephfs, ...) may be shared."""


MIG_PROFILE = re.compile(r"\d+g\.\d+gb")
"""NVIDIA's names of slices of a GPU (MIG), such as ``1g.10gb`` or, in Slurm, ``a100_1g.5gb``."""


def is_same_gpu(kind: str, gpu_name: str) -> bool:
    """Return whether a cluster's GPU type ``kind`` (empty: none) can be the catalogue's ``gpu_name``."""
    slice_of_gpu = MIG_PROFILE.search(kind.lower())
    if slice_of_gpu is not None and slice_of_gpu[0] not in gpu_name.lower():
        return False
    # Slurm's type names are free text: a100, nvidia_a100-sxm4-80gb; Ray has A100. Only the parts that also
    # occur in the catalogue's names are compared; a name without such a part fits any GPU.
    parts = {part for name in gpus for part in name.split("-")} & set(re.split(r"[-_]", kind.lower()))
    return parts <= set(gpu_name.lower().split("-"))


class Node(NamedTuple):
    """One node of a cluster."""

    name: str
    address: str
    host: str
    num_cpus: int
    gpus: tuple[tuple[str, int], ...]
    """GPU types, as Slurm's administrator or Ray named them (empty: no name), and their counts."""
    memory_bytes: int = 0
    """Host memory that jobs can get; 0: not known."""
    is_idle: bool | None = None
    """Whether the whole node is free for a job; None: not known."""
    takes_jobs: bool = True
    """Whether the node can start jobs, now or when others have ended: it is neither down nor drained."""

    def count_gpus(self, gpu_name: str) -> int:
        """Return how many GPUs are of the catalogue's type ``gpu_name``, or of no named type."""
        return sum(count for kind, count in self.gpus if is_same_gpu(kind, gpu_name))


class NodeGroup(NamedTuple):
    """The most frequent kind of nodes of a pool: a plan needs equal nodes."""

    nodes: tuple[Node, ...]
    kind: str
    """The cluster's name of the GPU type; empty if it has none."""
    gpus_per_node: int
    """0: nodes without GPUs, which are counted only if no node of the pool has any."""

    @property
    def gpu_candidates(self) -> list[str]:
        """The catalogue's GPU types that the cluster's name may mean; none for nodes without GPUs."""
        return _find_candidates(self.kind) if self.gpus_per_node else []


class NodePool(NamedTuple):
    """Nodes among which a run's are chosen: those of a partition, or of a Ray cluster."""

    title: str
    """Display name, as in "partition a100"."""
    nodes: tuple[Node, ...]

    def describe(self) -> str:
        """Return its nodes as text, such as ``partition a100: 16 nodes with 8 a100 GPUs``."""
        kinds = {
            ", ".join(f"{count} {kind} GPU{'s' * (count != 1)}" for kind, count in node.gpus)
            for node in self.nodes
        }
        described = " or ".join(kind or "no GPUs" for kind in sorted(kinds))
        num_nodes = len(self.nodes)
        return f"{self.title}: {num_nodes} node{'s' * (num_nodes != 1)} with {described}"

    def describe_idle(self) -> str:
        """Return its largest group and what of it is idle, such as ``2 nodes × 1 A100, 1 idle, 1 down``."""
        usable = self.select_usable()
        group = (usable if usable.nodes else self).find_largest_group()
        # Slurm's administrators write a100, its maker A100.
        name = group.kind.upper() if re.fullmatch(r"[a-z]{1,2}\d+[a-z]?", group.kind) else group.kind
        count = group.gpus_per_node
        each = f" × {count} {name or 'GPU' + 's' * (count > 1)}" if count else " without GPUs"
        parts = [f"{format_count(len(group.nodes), 'node')}{each}"]
        known = [node.is_idle for node in group.nodes if node.is_idle is not None]
        if known:
            parts.append(f"{sum(known)} idle" if any(known) else "none idle")
        others = len(usable.nodes) - len(group.nodes)
        if others > 0:
            parts.append(format_count(others, "other node"))
        if down := len(self.nodes) - len(usable.nodes):
            parts.append(f"{down} down")
        return ", ".join(parts)

    def select_usable(self) -> NodePool:
        """Return its nodes that are neither down nor drained."""
        return NodePool(self.title, tuple(node for node in self.nodes if node.takes_jobs))

    def find_largest_group(self) -> NodeGroup:
        """Return the most frequent kind of nodes with GPUs; all nodes if none has GPUs."""
        # Whole GPUs, if a node has any beside slices of others.
        groups = Counter(
            max(node.gpus, key=lambda group: (MIG_PROFILE.search(group[0].lower()) is None, group[1]))
            for node in self.nodes
            if node.gpus
        )
        if not groups:
            return NodeGroup(self.nodes, "", 0)
        kind, count = groups.most_common(1)[0][0]
        return NodeGroup(tuple(node for node in self.nodes if (kind, count) in node.gpus), kind, count)


def check_nodes(plan: Plan, pool: NodePool) -> None:
    """Raise ``ValueError`` unless the cluster has the nodes and GPUs of the plan."""
    cluster = plan.cluster
    if cluster.num_nodes > len(pool.nodes):
        fix = Value(len(pool.nodes)) if pool.nodes else "another cluster"
        refuse("plan.cluster.num_nodes", cluster.num_nodes, f"nodes of {pool.describe()}", fix)
    if cluster.gpu.name == "cpu":
        # As on one machine: ranks may share cores, but many more would never finish.
        most = max(16, 4 * sorted(node.num_cpus for node in pool.nodes)[-cluster.num_nodes])
        if cluster.gpus_per_node > most:
            allowed = f"1 to {most} CPU ranks on a node of {pool.title}"
            refuse("plan.cluster.gpus_per_node", cluster.gpus_per_node, allowed, Value(most))
        return
    counts = sorted((node.count_gpus(cluster.gpu.name) for node in pool.nodes), reverse=True)
    most = counts[cluster.num_nodes - 1]
    if most == 0:
        fix = "a plan for these GPUs, or another cluster"
        refuse("plan.cluster.gpu", cluster.gpu.name, f"GPUs of {pool.describe()}", fix)
    if cluster.gpus_per_node > most:
        nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)}"
        counts_allowed = f"1 to {most}" if most > 1 else "1"
        allowed = f"{counts_allowed} on {nodes} of {pool.describe()}"
        refuse("plan.cluster.gpus_per_node", cluster.gpus_per_node, allowed, Value(most))


def check_folder(parent: Path, pool: NodePool) -> None:
    """Raise ``ValueError`` if other machines cannot see the run folder: its file system is a local one."""
    here = set(list_addresses()) | {socket.gethostname()}
    others = [node.name for node in pool.nodes if not {node.address, node.host} & here]
    kind = find_file_system(parent)
    if others and kind in LOCAL_FILE_SYSTEMS:
        # A local file system can be exported to the nodes, which is not visible here.
        raise OverridableError(
            "launch.folder",
            str(parent.absolute()),
            f"a folder on a file system that the nodes of {pool.title} share; this one is "
            f"on {kind}, which belongs to this machine",
            "folder= on your cluster's shared file system; force=True if this one is exported to the nodes",
        )


def find_file_system(path: Path) -> str:
    """Return the type of the file system that ``path`` is or will be on, as mount(8) names it."""
    import psutil

    real = Path(os.path.realpath(path))
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (real, *real.parents) if folder in mounts), "")


def build_inventory(pool: NodePool, gpu_name: str | None, field: str, *, only_idle: bool) -> Cluster:
    """Return the nodes that take jobs, or with ``only_idle`` those that are wholly free now, as a cluster.

    Of these, :func:`build_cluster` chooses. Raises ``ValueError`` that names ``field``, such as
    ``Slurm.inventory``, if there are none.
    """
    check_flag(f"{field} only_idle", only_idle)
    usable = pool.select_usable()
    if not usable.nodes:
        refuse(
            f"{field} partition", pool.title, "nodes that are neither down nor drained", "another partition"
        )
    if only_idle:
        # First the kind of nodes, then which of them are idle: not a rare kind that happens to be free.
        group = usable.find_largest_group()
        idle = tuple(node for node in group.nodes if node.is_idle)
        if not idle:
            allowed = (
                f"False: none of the {format_count(len(group.nodes), 'node')} of {pool.title} is idle now"
            )
            refuse(f"{field} only_idle", True, allowed, Value(False))
        usable = NodePool(pool.title, idle)
    return build_cluster(usable, gpu_name, f"{field} gpu")


def build_cluster(pool: NodePool, gpu_name: str | None, field: str) -> Cluster:
    """Return the nodes that have the most frequent kind of GPUs; without GPUs, two CPU ranks on each node.

    ``gpu_name`` is the catalogue's name of the GPUs, needed where the cluster's name of them is ambiguous.
    Raises ``ValueError`` that names ``field`` if the type is unclear or not there.
    """
    # Imported lazily: it would slow down the start of the node process.
    from shardscope.core.cluster import Cluster

    group = pool.find_largest_group()
    num_nodes = len(group.nodes)
    if group.gpus_per_node:
        cluster = Cluster.of(gpus[_choose_gpu(group.kind, gpu_name, field)], group.gpus_per_node, num_nodes)
    else:
        if gpu_name is not None:
            refuse(field, gpu_name, f"None: {pool.describe()}", Value(None))
        cpus = min(node.num_cpus for node in pool.nodes)
        cluster = Cluster.of(gpus["cpu"], max(1, min(2, cpus)), num_nodes)
    memory = min(node.memory_bytes for node in group.nodes)
    return dataclasses.replace(cluster, host_memory_bytes=memory or cluster.host_memory_bytes)


def _find_candidates(kind: str) -> list[str]:
    return [name for name in gpus if name != "cpu" and is_same_gpu(kind, name)]


def _choose_gpu(kind: str, wanted: str | None, field: str) -> str:
    """Return the catalogue's name of the GPU type ``kind``. Raises ``ValueError`` if it is ambiguous."""
    candidates = _find_candidates(kind)
    if MIG_PROFILE.search(kind.lower()):
        allowed = f"whole GPUs: the cluster's type {kind!r} is a slice of one (MIG)"
        refuse(field, wanted, allowed, "Cluster.of(Gpu(...), gpus_per_node) of the slice's figures")
    if wanted is not None:
        if wanted not in candidates:
            options = candidates or list(gpus)
            refuse(field, wanted, ", ".join(options), Value(find_nearest(wanted, options)))
        return wanted
    if len(candidates) != 1:
        named = f"the cluster's type is {kind!r}" if kind else "the cluster has no type for its GPUs"
        allowed = f"one of {', '.join(candidates or gpus)}: {named}"
        refuse(field, None, allowed, Value((candidates or list(gpus))[0]))
    return candidates[0]
