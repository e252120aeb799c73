"""The interface of a backend: where the processes of a run are started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.records.folder import RunFolder, Status


class LaunchError(OSError):
    """A failed launch whose message already names the cause."""


class Backend(Protocol):
    """This machine, a Slurm cluster or a Ray cluster, for one launch.

    The launch (``launch/launch.py``) calls the methods in the order below; :meth:`undo` only after a failure,
    which may come after :meth:`close`.
    """

    subfolders: tuple[str, ...]
    """Folders of the run folder besides those of every run."""

    def check(self, plan: Plan, task: object, parent: Path) -> str:
        """Check that the plan can run there, with run folders in ``parent``. Return a warning, or "".

        Raises ``ValueError`` for a plan or a task that cannot, ``ImportError`` without an extra, ``OSError``
        if a scheduler does not answer. Nothing is created yet.
        """

    def describe(self, plan: Plan, created: object) -> dict[str, object]:
        """Return its fields of ``run.json``; ``created`` is the time of the launch."""

    def describe_first_status(self) -> tuple[Status, str]:
        """Return the run's first status and its reason."""

    def start(self, folder: RunFolder, plan: Plan, description: Mapping[str, object]) -> None:
        """Start the run of a complete folder with ``description`` as its ``run.json``.

        Raises ``OSError``, or ``ValueError`` if a scheduler refuses the run.
        """

    def close(self) -> None:
        """Close what :meth:`check` has opened; what runs goes on. No effect the second time."""

    def undo(self) -> None:
        """End everything that :meth:`start` has started, also after it has raised. The folder goes next."""
