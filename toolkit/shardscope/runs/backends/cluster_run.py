"""Runs on a cluster, whatever its scheduler: their part of ``run.json``, and what they cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.runs.backends.target_record import record_target

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.backends.ray.target import Ray
    from shardscope.runs.backends.slurm import Slurm


def refuse_nsys(task: object, scheduler: str) -> None:
    """Raise ``ValueError`` for a task under nsys, which would write one report on every node."""
    if getattr(task, "profile", None) == "nsys":
        refuse("task.profile", "nsys", f"False or True on {scheduler}", Value(True))


def describe_cluster_run(
    plan: Plan, target: Slurm | Ray, scheduler: str, created: object
) -> dict[str, object]:
    """Return the fields of ``run.json`` that every run on a cluster has."""
    return {
        # The processes of the run are on other machines, whose GPUs are not known yet.
        "gpus": [],
        "machine": "",
        "scheduler": scheduler,
        "num_nodes": plan.cluster.num_nodes,
        "on": record_target(target, created),
    }
