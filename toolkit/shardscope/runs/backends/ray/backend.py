"""Launch on Ray: a coordinator for the run, which starts a supervisor on each node."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.records.folder import NODES, RAY, RunFolder, Status
from shardscope.runs.backends.cluster_run import describe_cluster_run, refuse_nsys
from shardscope.runs.backends.kernel_watch import KernelWatch
from shardscope.runs.backends.next_attempt import get_retries
from shardscope.runs.backends.ray.submission import (
    RayConnection,
    RayError,
    cancel_on_ray,
    check_ray_submission,
    submit_to_ray,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.backends.ray.target import Ray


class RayBackend:
    """One launch on Ray, as a :class:`~shardscope.runs.backends.backend.Backend`."""

    subfolders: tuple[str, ...] = (NODES, RAY)

    def __init__(self, target: Ray, *, outlives: bool, force: bool) -> None:
        self._target, self._outlives, self._force = target, outlives, force
        self._connection: RayConnection | None = None
        self._watch: KernelWatch | None = None
        self._submitted: RunFolder | None = None

    def check(self, plan: Plan, task: object, parent: Path) -> str:
        """Connect, and check that the cluster has what the plan needs. Return which versions differ."""
        refuse_nsys(task, "Ray")
        self._connection = RayConnection(self._target, inspects=True)
        return check_ray_submission(self._connection, plan, force=self._force)

    def describe(self, plan: Plan, created: object) -> dict[str, object]:
        """Return the scheduler and the address of the cluster."""
        assert self._connection is not None
        fields = describe_cluster_run(plan, self._target, "ray", created)
        # Another Python has its packages elsewhere, and a runtime environment sets its own import path.
        if self._target.changes_imports or self._connection.python.get("prefix") != sys.prefix:
            fields |= {"sys_path": None, "pythonpath": None}
        return fields

    def describe_first_status(self) -> tuple[Status, str]:
        """Return "queued", with the cluster."""
        assert self._connection is not None
        return "queued", f"being submitted to {self._connection.title}"

    def start(self, folder: RunFolder, plan: Plan, description: Mapping[str, object]) -> None:
        """Start the coordinator. Raises ``RayError``, ``ValueError`` if Ray refuses it."""
        assert self._connection is not None
        # Before the coordinator: a run that must end with this kernel is not started without its watch.
        if not self._outlives:
            self._watch = KernelWatch(folder)
        self._submitted = folder
        try:
            submit_to_ray(self._connection, folder, plan, get_retries(description))
        except ValueError:  # Ray has refused it, and nothing was started.
            self._submitted = None
            raise

    def undo(self) -> None:
        """End the coordinator, which gives its nodes back."""
        if self._watch is not None:
            self._watch.stop()
        if self._submitted is not None:
            # Over a new connection: that of the launch may be closed, or may be what has failed.
            with (
                contextlib.suppress(RayError, ValueError),
                RayConnection(self._target, inspects=False) as connection,
            ):
                cancel_on_ray(connection, self._submitted)

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
