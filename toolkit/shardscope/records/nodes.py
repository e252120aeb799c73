"""Nodes and job of a scheduler's run, read from its folder, which another user may have written."""

from __future__ import annotations

from typing import NamedTuple

from shardscope.records.clock_offsets import MAX_NODES, read_clock_offsets
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_json
from shardscope.records.terminal_text import plain_text

MAX_NAME = 64


class RunNode(NamedTuple):
    """One node of a run."""

    number: int
    name: str
    """Its host name; ``node 1`` before it has started."""
    ranks: range
    folder: NodeFolder
    clock_seconds: float = 0.0
    """Seconds by which its clock is ahead of node 0's; 0 if they agree within seconds, or before it began."""


def read_nodes(folder: RunFolder, num_nodes: object, world_size: int) -> list[RunNode]:
    """Return the nodes of a run's attempt in order, by default the latest; none for a run of this machine."""
    is_valid = isinstance(num_nodes, int) and not isinstance(num_nodes, bool) and 1 <= num_nodes <= MAX_NODES
    if not is_valid or not folder.has_nodes:
        return []
    nodes = []
    # One attempt for all nodes: the next one may begin while they are read.
    attempt = folder.attempt
    offsets = read_clock_offsets(folder.select_attempt(attempt) if attempt > 1 else folder)
    for number in range(int(num_nodes)):  # type: ignore[call-overload]
        part = NodeFolder(folder.path, number, int(num_nodes), attempt)  # type: ignore[call-overload]
        name = _shorten((read_json(part.node_json) or {}).get("name"))
        ranks, seconds = part.select_ranks(world_size), offsets.of_node(number)
        nodes.append(RunNode(number, name or f"node {number}", ranks, part, seconds))
    return nodes


def describe_job(folder: RunFolder) -> str:
    """Return where a run was submitted, such as ``Slurm: a100, job 4711``; empty for one of this machine."""
    record = read_json(folder.job)
    if record is None:
        return ""
    scheduler, queue = (_shorten(record.get(name)) for name in ("scheduler", "partition"))
    scheduler = scheduler[:1].upper() + scheduler[1:]
    place = f"{scheduler}: {queue}" if queue else scheduler
    job_id = _shorten(record.get("job_id"))
    place = f"{place}, job {job_id}" if job_id else place
    return f"{place}, records streamed from its nodes" if record.get("folder") == "streamed" else place


def _shorten(value: object) -> str:
    return plain_text(value).replace("\n", " ")[:MAX_NAME] if isinstance(value, str) else ""
