"""The rank process around the task: log redirection, process group, and the error record if it fails."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from shardscope.machine.processes import die_with_parent, move_past_standard_streams, read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, write_json, write_json_on_full_disk
from shardscope.runs.explain.exceptions import make_exception_record
from shardscope.runs.launch.best_effort_output import flush_output, redirect_streams, restore_output
from shardscope.runs.launch.rendezvous.loopback import ADDRESS
from shardscope.runs.watch.stacks import install_stack_handler
from shardscope.training.tasks.lazy_functions import check_was_run
from shardscope.training.tasks.text_task import TextTask

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.launch.context import Context
    from shardscope.runs.launch.rendezvous.local_store import Rendezvous

EXIT_GRACE_SECONDS = 10.0
"""Time that a failed rank gets to exit: a broken process group can hang in its destructor."""


def run_rank(
    path: str,
    attempt: int | None,
    launcher: int,
    task: Callable[[Context], object],
    plan: Plan,
    device_type: str,
    port: int,
    files: Rendezvous,
) -> None:
    """Run ``task(ctx)`` in this process. Return if the task returned, else exit with a nonzero code."""
    is_forked = os.getpid() != launcher
    if is_forked:
        die_with_parent(launcher)
    folder = RunFolder(path, attempt)
    _set_signals(is_forked=is_forked, on_nodes=folder.has_nodes)
    tempfile.tempdir = None  # The launcher's setting; a task uses the system's folder.
    rank = _complete_environment(port)
    _write_marker(folder, rank)
    log = _redirect_output(folder, rank)
    try:
        context = _make_context(folder, plan, device_type, files)
        _write_marker(folder, rank, ready=time.time())
        # Only a return counts as finished: sys.exit(0) may come in the middle of a task that others wait in.
        # A recording in progress ends with the task, also with one that fails.
        with context.recorder:
            check_was_run(task(context))
        restore_output(log)
        context.close()
        # Leave the group before the marker: an error in its shutdown is a failure of this rank.
        _leave_process_group()
        _write_marker(folder, rank, exit="finished", ended=time.time())
    except BaseException as error:
        restore_output(log)
        _record_failure(folder, rank, error, can_resume=isinstance(task, TextTask))
        _exit_within_grace(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    finally:
        flush_output()


def _set_signals(*, is_forked: bool, on_nodes: bool) -> None:
    """Let the supervisor end this rank by SIGTERM, on the nodes of a scheduler by SIGHUP.

    Slurm sends SIGTERM to every process of a job that it is about to end, and the ranks still have to save.
    """
    if is_forked:  # Reset torch elastic's signal handlers, inherited by the fork.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not on_nodes:
        return
    # A handler, and not SIG_IGN or the mask of the node process: those would pass on to programs that the
    # task starts and ends by SIGTERM.
    signal.signal(signal.SIGTERM, _ignore_signal)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR2))
    os.register_at_fork(after_in_child=_end_on_sigterm)


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM by doing nothing."""


def _end_on_sigterm() -> None:
    """Restore the default of SIGTERM in a process that a rank has forked, such as a worker of a pool."""
    if signal.getsignal(signal.SIGTERM) is _ignore_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _complete_environment(port: int) -> int:
    """Set the variables that notebook_launcher leaves out for a single rank. Return this process's rank."""
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        os.environ.setdefault(name, str(value))
    if os.environ["WORLD_SIZE"] == "1":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = ADDRESS, str(port)
    return int(os.environ["RANK"])


def _redirect_output(folder: RunFolder, rank: int) -> int:
    """Redirect descriptors 1 and 2 to the rank's log, so that native libraries write there as well.

    Return a third descriptor of the log for the last output: a task may close the first two.
    """
    flush_output()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    log = move_past_standard_streams(os.open(folder.log(rank), flags, 0o600))
    os.dup2(log, 1)
    os.dup2(log, 2)
    redirect_streams()
    faulthandler.enable(file=log)
    with contextlib.suppress(OSError):  # A full disk: the hang detection then skips this rank.
        install_stack_handler(folder.stacks(rank))
    return log


def _make_context(folder: RunFolder, plan: Plan, device_type: str, files: Rendezvous) -> Context:
    """Initialize the process group and return the task's ``Context``."""
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.utils.store import barrier

    from shardscope.runs.launch.context import Context
    from shardscope.runs.launch.rendezvous.gloo import use_one_thread
    from shardscope.runs.launch.rendezvous.local_store import TIMEOUT_SECONDS, use_for_env_rendezvous

    # Before the group exists: it changes the class of gloo groups that torch creates.
    use_one_thread()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device_type == "cuda":
        check_cuda_build()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo as well: checkpoints gather CPU tensors.
    else:
        device, backend = torch.device("cpu"), "gloo"
    use_for_env_rendezvous(files)
    store = files.connect()
    if not dist.is_initialized():
        group_store = dist.PrefixStore("shardscope/group", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size)
        # A rank with a short task must not exit while another is still joining: gloo there may see the
        # connection only after it was closed, and raises "Connection closed by peer".
        barrier(store, world_size, "shardscope/joined", TIMEOUT_SECONDS)
    return Context(
        rank=rank,
        world_size=world_size,
        device=device,
        plan=plan,
        folder=folder,
        polls=files.open_poll_table() if world_size > 1 else None,
    )


def check_cuda_build() -> None:
    """Raise ``RuntimeError`` if this torch can use no GPU, as one that was installed on a login node without.

    ``set_device`` would raise ``AttributeError`` about ``_cuda_setDevice``.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise RuntimeError(
            f"the plan is for GPUs, and torch {torch.__version__} of {sys.executable} was built without "
            "CUDA. Fix: install a torch with CUDA there, or start another Python (ss.Slurm(python=..., "
            "setup=[...]), ss.Ray(runtime_env=...))"
        )


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # The task may have destroyed it already.
        dist.destroy_process_group()


def _write_marker(folder: RunFolder, rank: int, **more: object) -> None:
    # The first call writes the process id; later ones add to it.
    marker = read_json(folder.rank(rank)) if more else None
    pid = os.getpid()
    try:
        first = {"pid": pid, "started": read_start_time(pid), "port": os.environ.get("MASTER_PORT")}
        write_json_on_full_disk(folder.rank(rank), {**(marker or first), **more})
    except OSError as error:
        print(f"shardscope: could not write {folder.rank(rank)}: {error}", file=sys.stderr)


def _record_failure(folder: RunFolder, rank: int, error: BaseException, *, can_resume: bool) -> None:
    """Write the error record, before anything that might hang or end the process."""
    record = make_exception_record(error, can_resume=can_resume)
    if isinstance(error, SystemExit):
        record["summary"] += " before its task returned"
    try:
        more: dict[str, object] = {"exit": "failed", "ended": record["time"]}
        full_disk = folder.measure_full_disk()
        if full_disk is not None:  # What fits into the block that the record has already.
            more |= {"full_disk": full_disk}
            more |= {name: record[name] for name in ("summary", "monotonic", "peer_lost")}
        with contextlib.suppress(OSError):
            write_json(folder.error(rank), {"rank": rank, **record})
        _write_marker(folder, rank, **more)
    finally:
        print(record["traceback"], file=sys.stderr, flush=True)


def _exit_within_grace(code: int) -> None:
    """Exit with ``code`` (never 0), with ``os._exit`` if a normal exit takes over ``EXIT_GRACE_SECONDS``."""
    code = code % 256 or 1
    timer = threading.Timer(EXIT_GRACE_SECONDS, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    raise SystemExit(code)
