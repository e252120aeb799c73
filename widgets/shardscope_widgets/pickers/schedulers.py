"""Schedulers that run jobs on other machines, and their queues, for the GPU picker and the launch.

An engine joins by one more entry of :data:`SCHEDULERS`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import shardscope as ss
from shardscope.runs.backends.nodes import build_inventory
from shardscope.runs.backends.ray import submission as ray_submission
from shardscope.runs.backends.slurm_submission import INVENTORY_FIELD, Partition, list_partitions

RAY_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")


@dataclass(frozen=True, kw_only=True)
class JobOption:
    """An input of a job: a field of the target that ``launch(on=)`` takes."""

    field: str
    label: str
    tooltip: str
    placeholder: str = ""
    is_list: bool = False
    """Whether the field takes a list of lines."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Machines that take jobs, such as a Slurm partition."""

    scheduler: Scheduler
    name: str
    description: str
    """Nodes, GPUs and what is idle: ``2 nodes × 1 A100, 1 idle``."""
    gpu_candidates: Sequence[str]
    """The catalogue's GPU types that it may have: the user chooses one of several."""
    build_cluster: Callable[[str | None], ss.Cluster]
    """Returns its inventory for a GPU type. Raises ``ValueError`` for None if there are several."""

    @property
    def label(self) -> str:
        """The short name, which is also its key: ``Slurm: a100``, or ``Ray``, which has one queue."""
        return f"{self.scheduler.name}: {self.name}" if self.name else self.scheduler.name


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A scheduler that may be available here, such as Slurm or Ray."""

    name: str
    is_present: Callable[[], bool]
    """Returns at once whether it may be used from here."""
    list_queues: Callable[[Scheduler], list[Queue]]
    """May take seconds. Raises if the engine does not answer."""
    options: tuple[JobOption, ...]
    build_target: Callable[[str, Mapping[str, object]], object]
    """Returns the value of ``launch(on=)`` for a queue and options. Raises ``ValueError``."""


def find_queues() -> list[Queue]:
    """Return the queues of all schedulers; none of one that does not answer. This may take seconds."""
    queues = []
    for scheduler in SCHEDULERS:
        if scheduler.is_present():
            # Slurm's commands may be installed without a cluster.
            with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
                queues += scheduler.list_queues(scheduler)
    return queues


def _list_slurm_queues(scheduler: Scheduler) -> list[Queue]:
    return [_describe_partition(scheduler, *known) for known in list_partitions()]


def _describe_partition(scheduler: Scheduler, partition: Partition, state: str) -> Queue:
    pool = partition.pool
    return Queue(
        scheduler=scheduler,
        name=partition.name,
        description=pool.describe_idle() + ("" if state == "UP" else f", closed ({state})"),
        gpu_candidates=pool.find_largest_group().gpu_candidates,
        build_cluster=lambda gpu: build_inventory(pool, gpu, INVENTORY_FIELD, only_idle=False),
    )


def _has_ray_cluster() -> bool:
    # Where `ray start` writes the address that "auto" stands for (ray/_private/utils.py, ray 2.60).
    is_known = "RAY_ADDRESS" in os.environ or RAY_ADDRESS_FILE.exists()
    return is_known and importlib.util.find_spec("ray") is not None


def _describe_ray_cluster(scheduler: Scheduler) -> list[Queue]:
    with ray_submission.RayConnection(ss.Ray(), inspects=False) as connection:
        pool = ray_submission.select_nodes(connection.pool)
    return [
        Queue(
            scheduler=scheduler,
            name="",
            description=pool.describe_idle(),
            gpu_candidates=pool.find_largest_group().gpu_candidates,
            build_cluster=lambda gpu: build_inventory(
                pool, gpu, ray_submission.INVENTORY_FIELD, only_idle=False
            ),
        )
    ]


SCHEDULERS: tuple[Scheduler, ...] = (
    Scheduler(
        name="Slurm",
        is_present=lambda: shutil.which("scontrol") is not None,
        list_queues=_list_slurm_queues,
        options=(
            JobOption(
                field="time",
                label="Time limit",
                tooltip="Minutes, hours:minutes:seconds or days-hours; empty: the partition's default",
                placeholder="2:00:00",
            ),
            JobOption(field="account", label="Account", tooltip="Account that is charged"),
            JobOption(field="qos", label="QOS", tooltip="Quality of service"),
            JobOption(
                field="setup",
                label="Setup lines",
                tooltip="Lines of shell before Python starts on the nodes",
                placeholder="module load cuda",
                is_list=True,
            ),
        ),
        build_target=lambda partition, options: ss.Slurm(partition=partition, **options),  # type: ignore[arg-type]
    ),
    Scheduler(
        name="Ray",
        is_present=_has_ray_cluster,
        list_queues=_describe_ray_cluster,
        options=(),
        build_target=lambda name, options: ss.Ray(),
    ),
)
