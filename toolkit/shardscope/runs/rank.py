"""What every rank does around the task: its own log, its process group, and its last words if it fails."""

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
from typing import Any

from shardscope.runs.exceptions import exception_record
from shardscope.runs.folder import RunFolder
from shardscope.runs.patient_output import print_patiently
from shardscope.runs.processes import die_with_parent, is_port_taken, start_of
from shardscope.runs.records import keep_json, read_json, write_json
from shardscope.runs.stacks import answer_with_stacks

EXIT_GRACE_SECONDS = 10.0
"""How long a failed rank may take to leave: a thread of a broken process group can hang in its destructor."""


def run_rank(
    path: str, launcher: int, task: Callable[..., Any], plan: Any, device_type: str, port: int
) -> None:
    """Run ``task(ctx)`` in this process. Returns if it returned; exits with a code otherwise."""
    if os.getpid() != launcher:
        die_with_parent(launcher)
        # torch elastic's handlers were forked with us; a rank simply ends on SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = RunFolder(path)
    tempfile.tempdir = None
    rank = _complete_environment(port)
    _write_marker(folder, rank)
    _redirect_output(folder, rank)
    try:
        context = _make_context(folder, plan, device_type)
        _write_marker(folder, rank, ready=time.time())
        try:
            task(context)
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise
        context.close()
        _leave_process_group()
        _write_marker(folder, rank, exit="finished", ended=time.time())
    except BaseException as error:
        if _is_lost_port(error):
            raise
        _record_failure(folder, rank, error)
        _exit_soon(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _complete_environment(port: int) -> int:
    """Fill in what notebook_launcher leaves out for a single rank. The rank of this process."""
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        os.environ.setdefault(name, str(value))
    if os.environ["WORLD_SIZE"] == "1":  # Assigned, not defaulted: a second attempt comes with another port.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    return int(os.environ["RANK"])


def _redirect_output(folder: RunFolder, rank: int) -> None:
    """Send descriptors 1 and 2 to the rank's log, so that native libraries' output lands there as well."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(folder.log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    print_patiently()
    faulthandler.enable(file=2)
    with contextlib.suppress(OSError):  # A full disk: this rank is then not asked.
        answer_with_stacks(folder.stacks(rank))


def _make_context(folder: RunFolder, plan: Any, device_type: str) -> Any:
    """Bring up the process group and wrap it for the task."""
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.utils.store import barrier

    from shardscope.runs.context import Context
    from shardscope.runs.gloo import use_one_thread
    from shardscope.runs.loopback import TIMEOUT_SECONDS, serve_store

    use_one_thread()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo beside NCCL: checkpoints gather CPU tensors.
    else:
        device, backend = torch.device("cpu"), "gloo"
    if world_size == 1:
        # Several ranks connect to the launcher's store; one has none.
        store: dist.Store = serve_store(int(os.environ["MASTER_PORT"]), world_size)
    else:
        store, _, _ = next(dist.rendezvous("env://"))
    if not dist.is_initialized():
        group_store = dist.PrefixStore("shardscope/group", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size)
        # A rank that has little to do must not leave while another is still joining: gloo, woken only after
        # the connection was made and closed again, raises "Connection closed by peer" there.
        barrier(store, world_size, "shardscope/joined", TIMEOUT_SECONDS)
    return Context(
        rank=rank,
        world_size=world_size,
        device=device,
        plan=plan,
        folder=folder,
        store=dist.PrefixStore("shardscope/commands", store),
    )


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # The task may have done it itself.
        dist.destroy_process_group()


def _write_marker(folder: RunFolder, rank: int, **more: Any) -> None:
    marker = read_json(folder.rank(rank)) if more else None
    pid = os.getpid()
    first = {"pid": pid, "started": start_of(pid), "port": os.environ.get("MASTER_PORT")}
    try:
        keep_json(folder.rank(rank), {**(marker or first), **more})
    except OSError as error:
        print(f"shardscope: could not write {folder.rank(rank)}: {error}", file=sys.stderr)


def _is_lost_port(error: BaseException) -> bool:
    return isinstance(error, Exception) and os.environ["WORLD_SIZE"] == "1" and is_port_taken(error)


def _record_failure(folder: RunFolder, rank: int, error: BaseException) -> None:
    """Write why, before anything that might hang or end the process."""
    record = exception_record(error)
    try:
        with contextlib.suppress(OSError):  # A full disk: its exit code is all that is left of it.
            write_json(folder.error(rank), {"rank": rank, **record})
        _write_marker(folder, rank, exit="failed", ended=record["time"])
    finally:
        print(record["traceback"], file=sys.stderr, flush=True)


def _exit_soon(code: int) -> None:
    """Exit with ``code``: properly if that is quick, else without ceremony."""
    code = code % 256 or 1
    timer = threading.Timer(EXIT_GRACE_SECONDS, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
    raise SystemExit(code)
