"""``ss.launch``: the start of a supervised run. It returns immediately and imports no torch in the kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import check_flag, check_integer, warn_user
from shardscope.records.folder import check_working_directory, checked_path, explain_write_error
from shardscope.runs.backends.backend import LaunchError
from shardscope.runs.backends.ray.backend import RayBackend
from shardscope.runs.backends.ray.submission import RayError
from shardscope.runs.backends.ray.target import Ray
from shardscope.runs.backends.slurm import Slurm, check_target
from shardscope.runs.backends.slurm_backend import SlurmBackend
from shardscope.runs.backends.slurm_job import SlurmError
from shardscope.runs.backends.this_machine import ThisMachine, check_machine
from shardscope.runs.launch.launch_checks import check_name, check_request
from shardscope.runs.launch.packing import pack, write_task
from shardscope.runs.launch.pending_run import PendingRun, delay_interrupt
from shardscope.runs.launch.run_description import describe_run
from shardscope.runs.run import Run
from shardscope.training.tasks.resumed_checkpoint import DEFAULT_FOLDER

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.backends.backend import Backend
    from shardscope.runs.launch.context import Context

MAX_RETRIES = 100


def launch(
    plan: Plan,
    task: Callable[[Context], object],
    *,
    on: Slurm | Ray | None = None,
    name: str | None = None,
    outlive_kernel: bool | None = None,
    folder: str | os.PathLike[str] | None = None,
    force: bool = False,
    retries: int = 0,
) -> Run:
    """Start ``task(ctx)`` on every rank of ``plan`` and return at once.

    ``on`` is None for this machine, an ``ss.Slurm`` that submits one job with a process per node, or an
    ``ss.Ray`` that starts an actor on each node. The run folder is ``folder/name``; ``folder`` defaults to
    ``./runs`` and ``name`` to the current time. If an ended run has that name, a number is appended. A run of
    this machine ends with this process unless ``outlive_kernel``; one on a cluster outlives it, unless
    ``outlive_kernel=False``. After a failed rank or a lost node the run is started again up to
    ``retries`` times, from its last checkpoint: ``run.attempts``. On Ray this needs a ``folder`` that all
    nodes see. A task may have a method ``check(plan)`` or ``check_launch(plan, folder, name)`` that raises
    ``ValueError`` for a plan or folder it does not support. A function whose source uses ``ctx.engine``
    raises ``ValueError`` if no engine trains the plan.

    Raises ``ValueError`` for an invalid argument, a plan that this machine or the partition cannot run, a
    task that cannot be pickled (the message names the object), or the name of a live run;
    ``TooLittleFreeError`` (a ``ValueError``) if a GPU has less free memory than the predicted peak, unless
    ``force``; ``ImportError`` without the extra "train" (on a cluster also "slurm" or "ray"); ``OSError`` if
    the folder cannot be written or the scheduler does not answer. The memory of the user's own function is
    unknown, so too little free memory is only a ``RuntimeWarning`` there. On a cluster it is not compared,
    and ``force`` skips the check that the nodes see the folder (Slurm) or have this Shardscope (Ray).
    """
    return start_run(
        plan,
        task,
        name=name,
        outlive_kernel=outlive_kernel,
        folder=folder,
        force=force,
        on=on,
        retries=retries,
    )


def start_run(
    plan: Plan,
    task: Callable[[Context], object],
    *,
    name: str | None,
    outlive_kernel: bool | None,
    folder: str | os.PathLike[str] | None,
    force: bool,
    on: Slurm | Ray | None = None,
    retries: int = 0,
    gpu_positions: Sequence[int] | None = None,
) -> Run:
    """Do what :func:`launch` does, on the GPUs at ``gpu_positions`` in CUDA's order; None: the first ones."""
    # 1. Check the arguments, so that a wrong call fails before anything is created.
    check_working_directory()
    target = check_target(on)
    outlives = target is not None
    if outlive_kernel is not None:
        outlives = check_flag("launch.outlive_kernel", outlive_kernel)
    check_flag("launch.force", force)
    check_integer("launch.retries", retries, low=0, high=MAX_RETRIES)
    parent = checked_path("launch.folder", DEFAULT_FOLDER if folder is None else folder)
    if name is not None:
        check_name("launch.name", name)
    check_request(plan, task, parent, name)
    # 2. Pickle the task: one that cannot be pickled leaves no folder.
    payload = pack(task, plan)
    # 3. Check the machines.
    backend = _create_backend(target, outlives, force, gpu_positions)
    try:
        warning = backend.check(plan, task, parent)
        if warning:
            warn_user(warning)
        description = describe_run(plan, task, outlive_kernel=outlives, retries=retries)
        description |= backend.describe(plan, description["created"]) | {"asked_name": name}
    except BaseException:
        backend.close()
        raise
    # 4. Create the folder under a hidden name and rename it when it is complete: no list shows half a run.
    # Then start the run.
    pending = PendingRun(parent, name)
    try:
        with delay_interrupt():
            pending.create(*backend.subfolders)
            write_task(pending.folder, payload)
            pending.folder.set_status(*backend.describe_first_status())
            pending.publish(description)
            backend.start(pending.folder, plan, description)
            backend.close()
            if target is not None and outlive_kernel is None:
                _print_once_that_it_outlives(type(target).__name__)
            # Nothing may follow: after this block Ctrl-C would leave a run without a handle.
            return Run(pending.folder)
    except BaseException as error:
        # 5. End what was started and delete everything, so that the name can be used again.
        with delay_interrupt():
            backend.undo()
            backend.close()
            pending.delete()
        if isinstance(error, OSError) and not isinstance(error, LaunchError | SlurmError | RayError):
            raise explain_write_error(pending.wanted, error) from error
        raise


def _create_backend(
    target: Slurm | Ray | None, outlives: bool, force: bool, gpu_positions: Sequence[int] | None
) -> Backend:
    if isinstance(target, Ray):
        return RayBackend(target, outlives=outlives, force=force)
    if isinstance(target, Slurm):
        return SlurmBackend(target, outlives=outlives, force=force)
    return ThisMachine(outlives=outlives, force=force, gpu_positions=gpu_positions)


@functools.cache
def _print_once_that_it_outlives(scheduler: str) -> None:
    print(
        f"A {scheduler} run goes on when this kernel ends: ss.Run.attach(run.folder) opens it again, and "
        "run.stop() ends it. outlive_kernel=False ends it with the kernel."
    )


def check_launch(plan: Plan, task: object, parent: Path, name: str | None) -> None:
    """Check all that is known before a launch on this machine, except free memory and pickling of the task.

    Raises ``ValueError`` or ``ImportError`` as :func:`launch` does.
    """
    check_request(plan, task, parent, name)
    check_machine(plan)
