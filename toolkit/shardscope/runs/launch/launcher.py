"""The launcher: the process that calls ``accelerate.notebook_launcher`` and from which the ranks fork.

It imports what the ranks need before the fork, never initializes CUDA, and records how each rank process
ended. The supervisor starts it as ``python -m shardscope.runs.launch.launcher <folder> <pid of the
supervisor> <pipe> <node> <attempt>``, with the pipe of ``new_secrets.py``. With a node it starts only that
node's ranks; node and attempt are empty for a run of this machine that is not started again.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import popen_fork
from pathlib import Path
from typing import TYPE_CHECKING, TypeVarTuple

from shardscope.core.errors import check_integer
from shardscope.frameworks.engines import before_fork
from shardscope.machine.processes import die_with_parent, find_free_port, keep_exit_codes
from shardscope.records.attempts import read_checkpoint
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.folder_checks import MAX_WORLD_SIZE, open_part
from shardscope.records.json_files import (
    append_line,
    read_json,
    read_lines,
    write_json,
    write_json_on_full_disk,
)
from shardscope.runs.explain.exceptions import make_exception_record
from shardscope.runs.explain.failure import EXIT
from shardscope.runs.launch.best_effort_output import flush_output
from shardscope.runs.launch.environment import restore_python_path
from shardscope.runs.launch.new_secrets import send_new_secrets
from shardscope.runs.launch.packing import resume_from, take_task, unpack
from shardscope.runs.launch.rendezvous.loopback import ADDRESS, check_loopback

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from shardscope.core.plan import Plan
    from shardscope.runs.launch.context import Context
    from shardscope.runs.launch.rendezvous.local_store import Rendezvous

Arguments = TypeVarTuple("Arguments")


def main(folder: RunFolder) -> int:
    """Run the task of ``folder`` on all ranks. Return the exit code of this process."""
    description = read_json(folder.run_json) or {}
    world_size = check_integer(
        "run.json world_size", description.get("world_size"), low=1, high=MAX_WORLD_SIZE
    )
    ranks = folder.select_ranks(world_size)
    device = str(description.get("device"))
    _restore_import_paths(description)
    # torch elastic creates a log folder (torch 2.13, elastic/multiprocessing/api.py, DefaultLogsSpecs) and
    # leaves it behind when it is killed; the supervisor deletes this one.
    tempfile.tempdir = str(folder.temporary)
    try:
        task, plan = _load_before_fork(folder, len(ranks), device)
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except BaseException as error:
        write_json(folder.launcher_error, {**make_exception_record(error)})
        raise
    from shardscope.runs.launch.rank import run_rank

    # The hook must be installed before the first fork.
    watch_ranks(folder, ranks)
    arguments = (str(folder.path), folder.fixed_attempt, os.getpid(), task, plan, device)
    try:
        if isinstance(folder, NodeFolder) and folder.num_nodes > 1:
            _call_on_nodes(folder, run_rank, arguments, ranks)
        else:
            _call_notebook_launcher(run_rank, arguments, world_size, find_free_port())
    except ChildFailedError as error:
        _record_missed_exits(folder, ranks, error.failures)
        return 1
    except SignalException as error:
        # The supervisor sent the signal, and torch elastic has ended the ranks. 128 + n is the shell's code.
        return 128 + int(error.sigval)
    except SystemExit:
        raise  # A single rank runs in this process, and has written its own error record.
    except BaseException as error:
        write_json(folder.launcher_error, {**make_exception_record(error)})
        raise
    return 0


def _restore_import_paths(description: Mapping[str, object]) -> None:
    """Set PYTHONPATH and ``sys.path`` as they were in the kernel.

    Pickled tasks may import modules from the notebook's folder.
    """
    python_path, sys_path = description.get("pythonpath"), description.get("sys_path")
    restore_python_path(python_path if isinstance(python_path, str) else None)
    if isinstance(sys_path, list):
        sys.path[:] = map(str, sys_path)


def _load_before_fork(
    folder: RunFolder, num_ranks: int, device: str
) -> tuple[Callable[[Context], object], Plan]:
    """Return task and plan, after importing what the ranks need: they share the pages of this process."""
    # Take the task first: its file must not stay on disk, whatever fails later.
    payload = take_task(folder)
    if not isinstance(folder, NodeFolder) or folder.num_nodes == 1:
        check_loopback()
    import torch

    use_plain_tracebacks()
    task, plan = unpack(payload)
    task = resume_from(task, read_checkpoint(folder))
    before_fork(plan, device)
    for module in getattr(task, "preload", ()):
        importlib.import_module(module)
    if num_ranks > 1:
        keep_exit_codes()  # A module of the task may have changed the SIGCHLD handler.
    # CUDA does not survive a fork: the ranks would raise (torch/cuda/__init__.py, _lazy_init). Raise here,
    # where the message can name the cause.
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "The task, or a module it imports, uses CUDA already when it is loaded; ranks could "
            "not use it after the fork. Create models and tensors inside f(ctx)."
        )
    return task, plan


def _record_missed_exits(folder: RunFolder, ranks: range, failures: Mapping[int, ProcessFailure]) -> None:
    """Write the exit codes in torch elastic's error that the watching threads did not get."""
    known = _read_exit_codes(folder, len(ranks))
    for local_rank, failure in failures.items():
        rank = ranks[local_rank]
        if known.get(rank) is None:
            _write_exit(folder, rank, failure.exitcode)


def use_plain_tracebacks() -> None:
    """Make torch.distributed's log handlers format tracebacks with the standard library's formatter.

    torch's own (``torch/_logging/_internal.py``, ``TorchLogsFormatter``) imports ``torch._dynamo``, which
    delays the end of a failed run by seconds.
    """
    formatter = logging.Formatter()

    def format_plainly(record: logging.LogRecord) -> bool:
        if record.exc_info and record.name.startswith("torch.distributed"):
            record.exc_text = formatter.formatException(record.exc_info)
            record.exc_info = None
        return True

    for name in ("torch", "torch.distributed"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(format_plainly)


def watch_ranks(folder: RunFolder, ranks: range) -> None:
    """Write to ``exits.jsonl`` how each forked rank ends, also the ranks that torch elastic does not report.

    The watching thread starts after the last fork, so that no rank is forked from a process with threads.
    """
    if len(ranks) == 1 or not hasattr(os, "waitid"):
        return
    launcher, forked = os.getpid(), 0

    def after_fork() -> None:
        nonlocal forked
        forked += 1
        # The hook is inherited: in a rank that forks (a data loader), the process id is another one.
        if forked == len(ranks) and os.getpid() == launcher:
            threading.Thread(target=_start_watching, args=(folder, ranks), daemon=True).start()

    os.register_at_fork(after_in_parent=after_fork)
    _record_reaped_codes()


REAPED: dict[int, int] = {}
"""Exit codes of the children that multiprocessing (and so torch elastic) has reaped, by process id."""
REAPED_SECONDS = 0.5
"""Maximum delay between the end of a process that another thread reaped and its entry in ``REAPED``."""


def _record_reaped_codes() -> None:
    # torch elastic asks multiprocessing for exit codes through this method (torch/multiprocessing/spawn.py).
    poll = popen_fork.Popen.poll

    def poll_and_record(process: popen_fork.Popen, *flag: int) -> int | None:
        code = poll(process, *flag)
        if code is not None:
            REAPED[process.pid] = code
        return code

    popen_fork.Popen.poll = poll_and_record  # type: ignore[assignment, method-assign]


def _start_watching(folder: RunFolder, ranks: range) -> None:
    # The process ids are known only to multiprocessing's objects inside torch elastic, so take them from the
    # ranks' own records.
    waiting = set(ranks)
    while waiting:
        for rank in sorted(waiting):
            record = read_json(folder.rank(rank))
            if record is not None and isinstance(record.get("pid"), int):
                waiting.discard(rank)
                threading.Thread(target=_watch_rank, args=(folder, rank, record["pid"]), daemon=True).start()
        time.sleep(0.02)


def _watch_rank(folder: RunFolder, rank: int, pid: int) -> None:
    try:
        # WNOWAIT leaves the exit code for torch elastic.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        # torch elastic, which waits as well, was faster. It reports the code only after the other ranks
        # have ended; with that time, this rank would seem to have died after the ranks that died with it.
        now = _read_clocks()
        _write_exit(folder, rank, _wait_for_reaped_code(pid), now)
        return
    # Python's convention, as in subprocess: the negative number of the signal that ended the process.
    if ended is not None:
        _write_exit(folder, rank, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


def _wait_for_reaped_code(pid: int) -> int | None:
    deadline = time.monotonic() + REAPED_SECONDS
    while pid not in REAPED and time.monotonic() < deadline:
        time.sleep(0.01)
    return REAPED.get(pid)


def _read_exit_codes(folder: RunFolder, num_ranks: int) -> dict[object, object]:
    """Return the exit codes in ``exits.jsonl`` by rank, once there is a record of every rank.

    torch elastic ends all ranks before it raises, but may raise before our threads have written: then a rank
    that only lost its peer would be missing. Wait at most twice ``REAPED_SECONDS``.
    """
    deadline = time.monotonic() + 2 * REAPED_SECONDS
    while True:
        known: dict[object, object] = {
            record.get("rank"): record.get("code") for record in read_lines(folder.exits)
        }
        if len(known) >= num_ranks or time.monotonic() > deadline:
            return known
        time.sleep(0.01)


def _read_clocks() -> dict[str, float]:
    return {"time": time.time(), "monotonic": time.monotonic()}


def _write_exit(folder: RunFolder, rank: int, code: int | None, when: dict[str, float] | None = None) -> None:
    record = {**(when or _read_clocks()), "rank": rank, "code": code}
    try:
        append_line(folder.exits, record)
    except OSError as error:
        # On a full disk the rank's own record, which it does not write any more, has room for a few bytes.
        own = read_json(folder.rank(rank)) or {}
        if isinstance(first := own.get(EXIT), dict):  # The first time counts, as of the lines.
            record = {**first, "code": code if first.get("code") is None else first["code"]}
        try:
            write_json_on_full_disk(folder.rank(rank), {**own, EXIT: record})
        except OSError:
            problem = f"rank {rank} ended with {code}, which could not be written: {error}"
            print(problem, file=sys.stderr, flush=True)


def _call_notebook_launcher(
    function: Callable[[*Arguments, int, Rendezvous], None],
    arguments: tuple[*Arguments],
    world_size: int,
    port: int,
) -> None:
    """Call ``function(*arguments, port, files)`` on every rank; ``files`` are the ranks' shared files.

    ``port`` is only the value of ``MASTER_PORT``; nothing listens there. Frameworks read it without using it
    if a process group exists already.
    """
    from accelerate import notebook_launcher

    from shardscope.runs.launch.rendezvous import local_store

    local_store.register_rendezvous()
    files = local_store.RendezvousFiles(Path(tempfile.gettempdir()))
    # notebook_launcher sets no MASTER_PORT for a single rank, so the port is also an argument.
    # mixed_precision keeps its default: it has no effect on several processes.
    notebook_launcher(
        function,
        (*arguments, port, files),
        num_processes=world_size,
        use_port=str(port),
        master_addr=ADDRESS,
        rdzv_backend=local_store.BACKEND,
        rdzv_endpoint=f"{ADDRESS}:{port}",
    )


def _call_on_nodes(
    folder: NodeFolder,
    function: Callable[[*Arguments, int, Rendezvous], None],
    arguments: tuple[*Arguments],
    ranks: range,
) -> None:
    """Call ``function(*arguments, port, rendezvous)`` on the ranks of this node, one of ``folder.num_nodes``.

    Return when the task has returned on these ranks; on node 0, on the ranks of all nodes.
    """
    from accelerate import notebook_launcher

    from shardscope.runs.launch.rendezvous import node_store

    node_store.register_rendezvous(folder.node)
    rendezvous = node_store.NodeRendezvous(folder, Path(tempfile.gettempdir()))
    address, port = rendezvous.endpoint
    if len(ranks) == 1:
        # notebook_launcher calls the function in this process then, and sets no variables.
        os.environ |= {
            "RANK": str(folder.node),
            "WORLD_SIZE": str(folder.num_nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    notebook_launcher(
        function,
        (*arguments, port, rendezvous),
        num_processes=len(ranks),
        num_nodes=folder.num_nodes,
        node_rank=folder.node,
        use_port=str(port),
        master_addr=address,
        rdzv_backend=node_store.BACKEND,
        rdzv_endpoint=f"{address}:{port}",
    )
    rendezvous.wait_for_nodes()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]) or os.getppid())  # 0: nsys is the parent.
    keep_exit_codes()
    send_new_secrets(int(sys.argv[3]))
    node, attempt = (int(text) if text else None for text in sys.argv[4:6])
    exit_code = main(open_part(sys.argv[1], node, attempt))
    if "WORLD_SIZE" in os.environ:  # A single rank ran here: let its libraries run their exit handlers.
        sys.exit(exit_code)
    flush_output()
    os._exit(exit_code)  # Interpreter shutdown with torch loaded takes up to a second.
