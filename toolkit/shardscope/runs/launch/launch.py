"""``ss.launch``: the start of a supervised run. It returns immediately and imports no torch in the kernel."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import Value, check_flag, check_integer, refuse
from shardscope.frameworks.registry import check_trained
from shardscope.machine.detection import read_gpu_states, select_visible_devices
from shardscope.machine.host import count_cores
from shardscope.machine.processes import explain_missing_linux, identify_machine, read_start_time
from shardscope.records.folder import (
    FINAL,
    NODES,
    RAY,
    TEMPORARY,
    RunFolder,
    checked_path,
    explain_write_error,
)
from shardscope.records.json_files import write_json
from shardscope.records.regular_files import open_to_append
from shardscope.runs.backends.kernel_watch import start_kernel_watch
from shardscope.runs.backends.next_attempt import may_start_again
from shardscope.runs.backends.node_checks import read_versions
from shardscope.runs.backends.ray.submission import (
    RayConnection,
    RayError,
    check_ray_submission,
    submit_to_ray,
)
from shardscope.runs.backends.ray.target import Ray
from shardscope.runs.backends.slurm import Slurm, check_target
from shardscope.runs.backends.slurm_job import SlurmError, cancel
from shardscope.runs.backends.slurm_submission import check_submission, submit
from shardscope.runs.backends.target_record import record_target
from shardscope.runs.explain.measured_step import predict_step
from shardscope.runs.launch.environment import add_toolkit_to_path
from shardscope.runs.launch.free_memory import check_free_host, check_free_memory, describe_runs_on_gpus
from shardscope.runs.launch.lease import hold_lease, open_lease, release_lease, stop_supervisor
from shardscope.runs.launch.packing import describe_task, pack, write_task
from shardscope.runs.run import Run, runs
from shardscope.runs.task_fields import record_task_fields
from shardscope.runs.task_source import check_task, uses_engine
from shardscope.training.tasks.text_task import DEFAULT_FOLDER, TextTask

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.machine.detection import GpuState
    from shardscope.runs.launch.context import Context

NEEDED = ("torch", "accelerate", "cloudpickle")
MAX_NAME_LENGTH = 100
MAX_RUNS_OF_A_NAME = 10_000
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
    ``force``; ``ImportError`` without the extra "train" (on Slurm also "slurm"); ``OSError`` if the folder
    cannot be written or Slurm does not answer. The memory of the user's own function is unknown, so too
    little free memory is only a ``RuntimeWarning`` there. On Slurm it is not compared, and ``force`` skips
    the check that the nodes see the folder.
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
        stacklevel=3,
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
    stacklevel: int = 2,
) -> Run:
    """Do what :func:`launch` does, on the GPUs at ``gpu_positions`` in CUDA's order; None: the first ones.

    ``stacklevel`` is that of the warning about too little free memory.
    """
    # Cheap argument checks come first, so that a wrong call fails before anything is created.
    target = check_target(on)
    outlives = target is not None
    if outlive_kernel is not None:
        outlives = check_flag("launch.outlive_kernel", outlive_kernel)
    check_flag("launch.force", force)
    check_integer("launch.retries", retries, low=0, high=MAX_RETRIES)
    parent = checked_path("launch.folder", DEFAULT_FOLDER if folder is None else folder)
    if name is not None:
        check_name("launch.name", name)
    if target is not None:
        options = _ClusterOptions(outlives=outlives, force=force, retries=retries)
        if isinstance(target, Ray):
            run = _launch_on_ray(plan, task, target, parent, name, options, stacklevel=stacklevel)
        else:
            run = _launch_on_slurm(plan, task, target, parent, name, options)
        if outlive_kernel is None:
            _say_once_that_it_outlives(type(target).__name__)
        return run
    device = check_launch(plan, task, parent, name)
    # Compare the free memory with the predicted peak: other processes may hold the GPU.
    gpus: list[GpuState] = []
    if device == "cuda":
        positions = range(plan.world_size) if gpu_positions is None else gpu_positions
        states = read_gpu_states()
        gpus = [states[position] for position in positions if position < len(states)]
    needs_peak = trains_the_plan(task) and not force
    if device == "cpu":
        memory_warnings = [check_free_host(plan, needs_peak=needs_peak)]
    else:
        memory_warnings = _check_gpu_memory(plan, gpus, parent, needs_peak=needs_peak)
    memory_warning = "; ".join(filter(None, memory_warnings))
    if memory_warning:
        warnings.warn(memory_warning, RuntimeWarning, stacklevel=stacklevel)
    # Pickle before anything is created: a task that cannot be pickled leaves no folder.
    payload = pack(task, plan)
    description = _describe_run(plan, task, device, outlives, retries)
    description |= {"asked_name": name, "gpus": [gpu.index for gpu in gpus]}
    # Create the folder under a hidden name and rename it when it is complete: no list shows half a run.
    pending = _PendingLaunch(parent, name)
    try:
        with _delay_interrupt():
            pending.create(TEMPORARY)
            write_task(pending.folder, payload)
            reason = "; ".join(filter(None, ("the supervisor is starting", memory_warning)))
            pending.folder.set_status("starting", reason)
            pending.publish(description)
            pending.supervisor = _start_supervisor(pending.folder, outlives, gpu_positions)
            return Run(pending.folder)
    except BaseException as error:
        _undo_launch(pending, error)
        raise


def _undo_launch(pending: _PendingLaunch, error: BaseException) -> None:
    """Delete everything, so that the name can be used again. Raises ``OSError`` if a write had failed."""
    with _delay_interrupt():
        pending.undo()
    if isinstance(error, OSError) and not isinstance(error, _NoRunError | SlurmError | RayError):
        raise explain_write_error(pending.wanted, error) from error


def _launch_on_slurm(
    plan: Plan,
    task: Callable[[Context], object],
    target: Slurm,
    parent: Path,
    name: str | None,
    options: _ClusterOptions,
) -> Run:
    """Submit the run as one job of Slurm. Raises as :func:`launch` does."""
    check_plan(plan)
    check_task("launch.task", task)
    _check_extra()
    _check_task_and_plan(plan, task, parent, name)
    if getattr(task, "profile", None) == "nsys":  # It would write one report on every node.
        refuse("task.profile", "nsys", "False or True on Slurm", Value(True))
    partition = check_submission(plan, target, parent, force=options.force)
    payload = pack(task, plan)
    device = "cpu" if plan.cluster.gpu.name == "cpu" else "cuda"
    description = _describe_run(plan, task, device, options.outlives, options.retries)
    # The processes of the run are on other machines, whose GPUs are not known yet.
    description |= {"asked_name": name, "gpus": [], "machine": "", "scheduler": "slurm"}
    description |= {"num_nodes": plan.cluster.num_nodes, "on": record_target(target, description["created"])}
    if target.python is not None:  # Another Python has its packages elsewhere.
        description["sys_path"] = None
    pending = _PendingLaunch(parent, name)
    try:
        with _delay_interrupt():
            pending.create(NODES)
            write_task(pending.folder, payload)
            pending.folder.set_status("queued", f"being submitted to partition {partition.name}")
            pending.publish(description)
            job_id = submit(
                pending.folder, plan, target, partition, starts_again=may_start_again(description)
            )
            pending.cancel_job = functools.partial(cancel, job_id)
            if not options.outlives:
                start_kernel_watch(pending.folder)
            return Run(pending.folder)
    except BaseException as error:
        _undo_launch(pending, error)
        raise


def _launch_on_ray(
    plan: Plan,
    task: Callable[[Context], object],
    target: Ray,
    parent: Path,
    name: str | None,
    options: _ClusterOptions,
    *,
    stacklevel: int,
) -> Run:
    """Start the run on a Ray cluster. Raises as :func:`launch` does."""
    check_plan(plan)
    check_task("launch.task", task)
    _check_extra()
    _check_task_and_plan(plan, task, parent, name)
    if getattr(task, "profile", None) == "nsys":  # It would write one report on every node.
        refuse("task.profile", "nsys", "False or True on Ray", Value(True))
    payload = pack(task, plan)
    device = "cpu" if plan.cluster.gpu.name == "cpu" else "cuda"
    with RayConnection(target, inspects=True) as connection:
        difference = check_ray_submission(connection, plan, force=options.force)
        if difference:
            warnings.warn(difference, RuntimeWarning, stacklevel=stacklevel + 1)
        description = _describe_run(plan, task, device, options.outlives, options.retries)
        # The processes of the run are on other machines, whose GPUs are not known yet.
        description |= {"asked_name": name, "gpus": [], "machine": "", "scheduler": "ray"}
        description |= {
            "num_nodes": plan.cluster.num_nodes,
            "on": record_target(target, description["created"]),
        }
        # Another Python has its packages elsewhere, and a runtime environment sets its own import path.
        if target.changes_imports or connection.python.get("prefix") != sys.prefix:
            description |= {"sys_path": None, "pythonpath": None}
        pending = _PendingLaunch(parent, name)
        try:
            with _delay_interrupt():
                pending.create(NODES, RAY)
                write_task(pending.folder, payload)
                pending.folder.set_status("queued", f"being submitted to {connection.title}")
                pending.publish(description)
                submit_to_ray(connection, pending.folder, plan, options.retries)
                if not options.outlives:
                    start_kernel_watch(pending.folder)
                return Run(pending.folder)
        except BaseException as error:
            _undo_launch(pending, error)
            raise


class _ClusterOptions(NamedTuple):
    """Arguments of :func:`launch` that concern a run on a cluster."""

    outlives: bool
    """Whether the run goes on when the kernel ends."""
    force: bool
    retries: int


@functools.cache
def _say_once_that_it_outlives(scheduler: str) -> None:
    print(
        f"A {scheduler} run goes on when this kernel ends: ss.Run.attach(run.folder) opens it again, and "
        "run.stop() ends it. outlive_kernel=False ends it with the kernel."
    )


def check_launch(plan: Plan, task: object, parent: Path, name: str | None) -> str:
    """Check all that is known before a launch, except free memory and whether the task can be pickled.

    Return the ranks' device type, "cuda" or "cpu". Raises ``ValueError`` or ``ImportError`` as
    :func:`launch` does.
    """
    check_plan(plan)
    check_task("launch.task", task)
    _check_extra()
    device = _check_machine(plan)
    _check_task_and_plan(plan, task, parent, name)
    return device


class _NoRunError(OSError):
    """A failed launch whose message already names the cause."""


class _PendingLaunch:
    """A launch in progress: its folder, which gets its final name once complete, and its supervisor."""

    def __init__(self, parent: Path, name: str | None) -> None:
        self.parent, self.name = parent, name
        stem = name if name is not None else time.strftime("%Y-%m-%d_%H-%M-%S")
        self.wanted = (parent / stem).absolute()
        # Run names cannot start with a dot, and run lists skip hidden folders.
        self.folder = RunFolder(parent / f".launch-{os.getpid()}-{secrets.token_hex(4)}")
        self.further: tuple[str, ...] = ()
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.cancel_job: Callable[[], None] | None = None
        self._new_parents = [path for path in (parent, *parent.parents) if not path.exists()]

    def create(self, *further: str) -> None:
        """Create the folder, with ``further`` subfolders. Raises ``OSError``."""
        self.further = further
        try:
            self.folder.create(*further)
        except FileExistsError as error:  # The parent is a file; the random name itself cannot exist.
            message = f"folder is {self.parent}, which is a file; runs need a folder."
            raise _NoRunError(errno.ENOTDIR, message) from error

    def publish(self, description: dict[str, object]) -> None:
        """Rename the folder to its name, with a number appended if an ended run has that name.

        rename(2) fails if the target is a folder that is not empty, so of several simultaneous launches with
        the same name, on any machine, exactly one gets it. Raises ``ValueError`` if a live run has the name.
        """
        # Without a lock: a loser of the race for one number tries the next.
        for number in range(1, MAX_RUNS_OF_A_NAME):
            suffix = "" if number == 1 else f"-{number}"
            candidate = RunFolder(self.wanted.with_name(f"{self.wanted.name}{suffix}"))
            if not os.path.lexists(candidate.path):
                # run.json contains the name, so it is written again for each candidate.
                record = {**description, "name": candidate.path.name}
                write_json(self.folder.run_json, record, as_is=("sys_path", "pythonpath", "machine", "base"))
                try:
                    self.folder.path.rename(candidate.path)
                except OSError as error:
                    # rename(2): EEXIST or ENOTEMPTY for a folder with files, ENOTDIR for a file of that name.
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                else:
                    self.folder = candidate
                    return
            # A name that the user chose stands for one live run. Times, the default names, are only numbered.
            if self.name is not None and _is_alive(candidate):
                raise ValueError(
                    f"launch.name is {self.name!r}, which a run still has in {candidate.path}; allowed: "
                    f"another name, or none. Nearest fix: run.stop() of that run, which "
                    f"ss.Run.attach({str(candidate.path)!r}) gives."
                )
        raise _NoRunError(
            errno.EEXIST, f"{self.parent} holds {number:,} runs named {self.wanted.name}; give another name."
        )

    def undo(self) -> None:
        """Stop the supervisor and delete the folder and the parents that were created for it."""
        # The supervisor first: it would still write into the folder.
        if self.supervisor is not None:
            stop_supervisor(self.supervisor)
        if self.cancel_job is not None:
            with contextlib.suppress(SlurmError):
                self.cancel_job()
        shutil.rmtree(self.folder.path, ignore_errors=True)
        self._delete_without_descriptors()
        # Innermost first. rmdir fails, as it should, for a parent that another launch uses by now.
        for path in self._new_parents:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _delete_without_descriptors(self) -> None:
        """Delete the files of a run that never started, one by one.

        ``shutil.rmtree`` opens folders and so fails when the process has no free file descriptor.
        """
        folder = self.folder
        with contextlib.suppress(OSError):
            for file in (folder.task, folder.status, folder.run_json, folder.supervisor_log):
                file.unlink(missing_ok=True)
            for name in (*folder.SUBFOLDERS, *self.further):
                (folder.path / name).rmdir()
            folder.path.rmdir()


@contextlib.contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of this block.

    An interrupt inside it would leave a run without a handle. Only the main thread gets interrupts.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if frames:
            before(signal.SIGINT, frames[0])


def check_plan(plan: object) -> None:
    """Raise ``ValueError`` unless ``plan`` is a plan."""
    from shardscope.core.plan import Plan  # Imported lazily: ``import shardscope`` must take milliseconds.

    if not isinstance(plan, Plan):
        refuse("launch.plan", plan, "a Plan", "ss.Plan(architecture, cluster, recipe, layout)")


def _check_task_and_plan(plan: Plan, task: object, parent: Path, name: str | None) -> None:
    """Raise ``ValueError`` if the task cannot run the plan: here, instead of seconds later on the ranks."""
    check = getattr(task, "check", None)
    if callable(check):
        check(plan)
    elif uses_engine(task):  # The user's own function: ctx.engine would raise on every rank.
        check_trained(plan)
    if callable(check_launch := getattr(task, "check_launch", None)):
        check_launch(plan, parent, name)


def _check_gpu_memory(plan: Plan, gpus: Sequence[GpuState], parent: Path, *, needs_peak: bool) -> list[str]:
    """Return warnings about too little free GPU memory and the runs that hold it.

    Raises ``TooLittleFreeError`` if ``needs_peak`` and the predicted peak does not fit.
    """
    other_runs = describe_runs_on_gpus(runs(parent), gpus) if gpus else ""
    warning = check_free_memory(plan, gpus, needs_peak=needs_peak, other_runs=other_runs)
    return [text for text in (warning, other_runs) if text]


def trains_the_plan(task: object) -> bool:
    """Return whether ``task`` trains the plan's model, so that the predicted memory holds for it."""
    return getattr(task, "trains_the_plan", False) is True


def _read_num_steps(task: object) -> int | None:
    """Return the number of steps of a built-in task, else None."""
    num_steps = getattr(task, "planned_steps", None) if trains_the_plan(task) else None
    return num_steps if isinstance(num_steps, int) and not isinstance(num_steps, bool) else None


def _check_extra() -> None:
    reason = explain_missing_linux("Launching")
    if reason is not None:
        raise ValueError(reason)
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f'Launching needs {", ".join(missing)}: pip install "shardscope[train]". Planning works without.'
        )


def _check_machine(plan: Plan) -> str:
    """Return the ranks' device type, "cuda" or "cpu". Raises ``ValueError`` if the plan does not fit here."""
    world_size, cluster = plan.world_size, plan.cluster
    if cluster.num_nodes > 1:  # A supervisor starts ranks only on its own machine.
        refuse(
            "plan.cluster.num_nodes",
            cluster.num_nodes,
            "1 (without on=, launch uses this machine only)",
            "on=ss.Slurm(...), or a plan for one node",
        )
    # CPU ranks run on every machine, also on one with GPUs, as a rehearsal.
    if cluster.gpu.name == "cpu":
        max_ranks = max_cpu_ranks()
        if world_size > max_ranks:
            refuse(
                "plan.world_size",
                world_size,
                f"1 to {max_ranks} CPU ranks on {count_cores()} cores here",
                Value(max_ranks),
            )
        return "cpu"
    from shardscope.core.cluster import Cluster

    # The prediction is for one GPU type, so another type is an error, even if it has more memory.
    machine = Cluster.detect()
    description = f"{machine.gpus_per_node}x{machine.gpu.name}"
    if machine.gpu.name != cluster.gpu.name:
        if machine.gpu.name == "cpu":
            max_ranks, allowed = max_cpu_ranks(), "this machine: no GPU, only CPU ranks"
        else:
            max_ranks, allowed = machine.gpus_per_node, f"this machine: {description}"
        # The largest plan of the user's size that this machine can run.
        fix = f'cluster=Cluster.parse("{min(world_size, max_ranks)}x{machine.gpu.name}")'
        refuse("plan.cluster.gpu", cluster.gpu.name, allowed, fix)
    if world_size > machine.gpus_per_node:
        refuse(
            "plan.world_size",
            world_size,
            f"1 to {machine.gpus_per_node} (this machine is {description})",
            Value(machine.gpus_per_node),
        )
    return "cuda"


def max_cpu_ranks() -> int:
    """Return the maximum number of CPU ranks: ranks may share cores, but many more would never finish."""
    return max(16, 4 * count_cores())


def check_name(field: str, name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return ``name``. Raises ``ValueError`` naming ``field`` unless it can be a folder's name."""
    fits = isinstance(name, str) and 0 < len(name) <= max_length and not name.startswith(".")
    if not fits or any(not character.isprintable() or character in "/\\" for character in name):
        allowed = f"1 to {max_length} printable characters without slashes, not starting with a dot"
        refuse(field, name, allowed, Value("my-run"))
    return name


def _is_alive(folder: RunFolder) -> bool:
    if not folder.status.exists():
        return False
    try:
        return Run(folder).status not in FINAL
    except ValueError:  # Damaged: leave that folder alone, the new run gets a number.
        return False


def _describe_run(
    plan: Plan, task: object, device: str, outlive_kernel: bool, retries: int
) -> dict[str, object]:
    """Return the content of ``run.json``, without the run's name.

    It holds no environment variables and no free text of the task: both may contain secrets.
    """
    return {
        "shardscope_run": 1,
        "created": time.time(),
        "machine": identify_machine(),
        "plan": json.loads(plan.to_json()),
        "predicted": predict_step(plan),
        "task": describe_task(task),
        "asked": record_task_fields(task),
        "base": task.frozen_base() if isinstance(task, TextTask) else None,
        "trains_the_plan": trains_the_plan(task),
        "saves_when_asked": getattr(task, "saves_when_asked", True) is not False,
        "num_steps": _read_num_steps(task),
        "world_size": plan.world_size,
        "device": device,
        "outlive_kernel": outlive_kernel,
        "retries": retries,
        "versions": read_versions(),
        "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        "pythonpath": os.environ.get("PYTHONPATH"),
    }


def _start_supervisor(
    folder: RunFolder, outlive_kernel: bool, gpu_positions: Sequence[int] | None
) -> subprocess.Popen[bytes]:
    """Start the supervisor in its own session, so that Ctrl-C in the kernel does not reach it.

    Raises ``OSError``; no supervisor process is left behind then.
    """
    if not sys.executable:
        raise _NoRunError(errno.ENOENT, "This Python does not know its own executable (sys.executable).")
    # A run that outlives its kernel has no lease.
    read_end, write_end = (None, None) if outlive_kernel else open_lease()
    inherited = () if read_end is None else (read_end,)
    environment = add_toolkit_to_path(dict(os.environ))
    if gpu_positions is not None:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = select_visible_devices(visible, gpu_positions)
    try:
        with open_to_append(folder.supervisor_log) as log:
            supervisor = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # A signal.py in the notebook's folder must not shadow the standard library's.
                    "-m",
                    "shardscope.runs.launch.supervisor",
                    str(folder.path),
                    *map(str, inherited),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
    except BaseException as error:
        # No supervisor runs, so nothing else closes the lease.
        if write_end is not None:
            release_lease(write_end)
        # subprocess sets `filename` to the program that it could not execute.
        if isinstance(error, OSError) and error.filename == sys.executable:
            raise _NoRunError(
                error.errno,
                f"Python cannot be started from {sys.executable}: {error.strerror}. Its environment was "
                "moved, deleted or replaced; restart the kernel from one that exists.",
            ) from error
        raise
    finally:
        # The supervisor has inherited a copy of its own.
        if read_end is not None:
            os.close(read_end)
    hold_lease(supervisor, write_end, folder)
    # Write the supervisor's record in its place: a handle must see its process even if it dies at once.
    try:
        if not folder.supervisor.exists():
            started = read_start_time(supervisor.pid)
            record = {"pid": supervisor.pid, "started": started, "machine": identify_machine()}
            write_json(folder.supervisor, record, as_is=("machine",))
    except BaseException:
        stop_supervisor(supervisor)
        raise
    return supervisor
