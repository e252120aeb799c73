"""Launch on Slurm: one job for the run, with a supervisor on each node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.records.folder import NODES, RunFolder, Status
from shardscope.runs.backends.cluster_run import describe_cluster_run, refuse_nsys
from shardscope.runs.backends.kernel_watch import KernelWatch
from shardscope.runs.backends.next_attempt import may_start_again
from shardscope.runs.backends.slurm import Slurm, read_environment
from shardscope.runs.backends.slurm_job import SlurmError, cancel
from shardscope.runs.backends.slurm_submission import check_submission, check_time, submit
from shardscope.runs.launch.run_description import trains_the_plan

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.backends.slurm_submission import Partition


class SlurmBackend:
    """One launch on Slurm, as a :class:`~shardscope.runs.backends.backend.Backend`."""

    subfolders: tuple[str, ...] = (NODES,)

    def __init__(self, target: Slurm, *, outlives: bool, force: bool) -> None:
        self._target, self._outlives, self._force = target, outlives, force
        self._partition: Partition
        self._watch: KernelWatch | None = None
        self._job_id: str | None = None

    def check(self, plan: Plan, task: object, parent: Path) -> str:
        """Check that the partition has what the plan needs, and that its nodes see ``parent``."""
        refuse_nsys(task, "Slurm")
        # A resumed run has the same options in another environment.
        self._target = read_environment(self._target, os.environ)
        self._partition = check_submission(plan, self._target, parent, force=self._force)
        if trains_the_plan(task):
            check_time(self._target, self._partition)
        return ""

    def describe(self, plan: Plan, created: object) -> dict[str, object]:
        """Return the scheduler and the options of the job."""
        fields = describe_cluster_run(plan, self._target, "slurm", created)
        if self._target.python is not None:  # Another Python has its packages elsewhere.
            fields["sys_path"] = None
        return fields

    def describe_first_status(self) -> tuple[Status, str]:
        """Return "queued", with the partition."""
        return "queued", f"being submitted to partition {self._partition.name}"

    def start(self, folder: RunFolder, plan: Plan, description: Mapping[str, object]) -> None:
        """Submit the job. Raises ``SlurmError``, ``ValueError`` if Slurm refuses it."""
        # Before the job: a run that must end with this kernel is not submitted without its watch.
        if not self._outlives:
            self._watch = KernelWatch(folder)
        self._job_id = submit(
            folder, plan, self._target, self._partition, starts_again=may_start_again(description)
        )

    def undo(self) -> None:
        """Cancel the job."""
        if self._watch is not None:
            self._watch.stop()
        if self._job_id is not None:
            with contextlib.suppress(SlurmError):
                cancel(self._job_id)

    def close(self) -> None:
        """Nothing is open."""
