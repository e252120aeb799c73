"""The nodes and GPUs of a Slurm partition as a ``Cluster``."""

from __future__ import annotations

import dataclasses
from collections import Counter

from shardscope.catalog import gpus
from shardscope.core.cluster import Cluster
from shardscope.core.errors import Value, find_nearest, refuse
from shardscope.runs.backends.slurm_submission import is_same_gpu, read_partition

GPU_FIELD = "Slurm.inventory gpu"


def read_inventory(partition_name: str | None, gpu_name: str | None) -> Cluster:
    """Return what :meth:`Slurm.inventory` does. Raises as it does."""
    partition = read_partition(partition_name)
    groups = Counter(max(node.gpus, key=lambda group: group[1]) for node in partition.nodes if node.gpus)
    if not groups:
        if gpu_name is not None:
            refuse(GPU_FIELD, gpu_name, f"None: {partition.describe()}", Value(None))
        if not partition.nodes:
            refuse("Slurm.partition", partition.name, "a partition with nodes", "another partition")
        cpus = min(node.num_cpus for node in partition.nodes)
        cluster = Cluster.of(gpus["cpu"], min(2, cpus), len(partition.nodes))
        members = partition.nodes
    else:
        # A plan needs equal nodes: take the most frequent kind.
        (kind, count), num_nodes = groups.most_common(1)[0]
        members = tuple(node for node in partition.nodes if (kind, count) in node.gpus)
        cluster = Cluster.of(gpus[_choose_gpu(kind, gpu_name)], count, num_nodes)
    memory = min(node.memory_bytes for node in members)
    return dataclasses.replace(cluster, host_memory_bytes=memory or cluster.host_memory_bytes)


def _choose_gpu(kind: str, wanted: str | None) -> str:
    """Return the catalogue's name of Slurm's GPU type ``kind``. Raises ``ValueError`` if it is ambiguous."""
    candidates = [name for name in gpus if name != "cpu" and is_same_gpu(kind, name)]
    if wanted is not None:
        if wanted not in candidates:
            options = candidates or list(gpus)
            refuse(GPU_FIELD, wanted, ", ".join(options), Value(find_nearest(wanted, options)))
        return wanted
    if len(candidates) != 1:
        named = f"Slurm's type is {kind!r}" if kind else "Slurm has no type for its GPUs"
        allowed = f"one of {', '.join(candidates or gpus)}: {named}"
        refuse(GPU_FIELD, None, allowed, Value((candidates or list(gpus))[0]))
    return candidates[0]
