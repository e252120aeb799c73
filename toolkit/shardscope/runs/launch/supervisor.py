"""The supervisor: one light process per run that starts the launcher, obeys commands and writes statuses.

It runs no rank code and imports no torch, so it survives every crash of the ranks and can record it.
``launch.py`` starts it as ``python -m shardscope.runs.launch.supervisor <folder> [lease read end]``. On the
nodes of a scheduler ``runs/backends/node_process.py`` starts it, as ``... <folder> --node <number>
<attempt>``: each supervises the ranks of its node, and that of node 0 also writes the run's status, once all
nodes have ended. A run with ``retries`` on this machine has one supervisor for all of its attempts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

from shardscope.machine import processes
from shardscope.machine.os_errors import describe_shortage, is_absent
from shardscope.machine.python_process import build_module_command
from shardscope.records.folder import FINAL, NodeFolder, RunFolder, Status
from shardscope.records.folder_checks import open_part
from shardscope.records.json_files import LineTail, read_json, write_json
from shardscope.records.json_values import is_int
from shardscope.records.regular_files import open_to_append
from shardscope.runs.backends.job_log import describe_failed_setup
from shardscope.runs.backends.next_attempt import (
    AttemptEnding,
    begin_attempt,
    conclude_attempt,
    describe_beginning,
    get_retries,
    replace_lead,
)
from shardscope.runs.backends.node_checks import NodeError, check_node, read_versions
from shardscope.runs.backends.peers import LOST_SECONDS, SIGNALLED_LOST_SECONDS, Peers
from shardscope.runs.backends.ray.watch import describe_ray_end
from shardscope.runs.backends.slurm_job import describe_job_end
from shardscope.runs.explain.exceptions import make_exception_record
from shardscope.runs.explain.failure import has_rank_died
from shardscope.runs.launch.environment import build_launcher_environment
from shardscope.runs.launch.lease import clean_up_killed_run
from shardscope.runs.launch.new_secrets import SecretReceiver
from shardscope.runs.launch.supervision.leftover_processes import LeftoverDetector
from shardscope.runs.launch.supervision.run_end import Outcome, RunEnd
from shardscope.runs.launch.supervision.stop_sequence import StopSequence
from shardscope.runs.launch.supervision.supervisor_process import ReceivedSignals, lock_run
from shardscope.runs.stop_request import SAW_STOP
from shardscope.runs.trackers import TrackerProcess
from shardscope.runs.watch.periodic_checks import CHECK_SECONDS, PeriodicChecks

POLL_SECONDS = 0.05
HEARTBEAT_SECONDS = 2.0
NSYS_GRACE_SECONDS = 600.0
"""Time that Nsight Systems gets to write its report after the task has returned."""


class Supervisor:
    """The state machine that drives one run from its start to its final status."""

    def __init__(self, folder: RunFolder, lease: int | None, signals: ReceivedSignals) -> None:
        self.folder = folder
        self._open_folder = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
        """Descriptor of the folder, which follows it when it is moved; never closed."""
        self._identity = os.fstat(self._open_folder)
        self.lease = lease
        self.signals = signals
        self.exits = LineTail(folder.exits)
        self.launcher: subprocess.Popen[bytes] | None = None
        self.description: dict[str, object] = read_json(folder.run_json) or {}
        # run.json may be damaged: the supervisor must still end the run and write its status.
        world_size = self.description.get("world_size")
        self.world_size = world_size if is_int(world_size) else 1
        self.ranks = folder.select_ranks(self.world_size)
        """The ranks of this node."""
        self.peers = Peers(folder) if isinstance(folder, NodeFolder) else None
        """The other nodes that this one watches; None without a scheduler."""
        self.lost_node = ""
        """Which other node is lost; empty if none is."""
        self.ranks_are_up = False
        self.stop = StopSequence(folder, self.description, self)
        self.follows = False
        """Whether another attempt follows on this machine."""
        self.next_heartbeat = 0.0
        self.secrets = SecretReceiver()
        # A user's function and runs of older versions have TensorBoard's files.
        fields = self.description.get("asked")
        report_to = fields.get("report_to") if isinstance(fields, dict) else None
        report_to = report_to if isinstance(report_to, list) else ["tensorboard"]
        self.trackers = TrackerProcess(folder, report_to)
        self.checks = PeriodicChecks(
            folder,
            self.world_size,
            self.log,
            self.secrets.read_secrets,
            writes_tensorboard="tensorboard" in report_to,
        )
        self.leftovers = LeftoverDetector(folder, self.world_size)
        self.nsys = isinstance(fields, dict) and fields.get("profile") == "nsys"
        if self.nsys:
            # It writes its report after the ranks have returned.
            self.leftovers.grace_seconds = max(self.leftovers.grace_seconds, NSYS_GRACE_SECONDS)
        self.ended_leftovers = ""
        """Description of the leftover processes that were killed; empty if there were none."""
        self.last_check = time.monotonic()
        self.end = RunEnd(folder, self.description, self.world_size, self.checks, self.trackers, self.log)

    def run(self) -> None:
        """Start the launcher, watch it until it exits, clean up and write the final status."""
        processes.keep_exit_codes()
        # Orphans of the launcher and the ranks become children of this process, which ends them with the run.
        processes.adopt_orphans()
        pid = os.getpid()
        record: dict[str, object] = {
            "pid": pid,
            "started": processes.read_start_time(pid),
            "machine": processes.identify_machine(),
        }
        if isinstance(self.folder, NodeFolder):
            record["versions"] = read_versions()
        write_json(self.folder.supervisor, record, as_is=("machine",))
        if isinstance(self.folder, NodeFolder):
            self.end.reserve_space(self.folder)
            if self.folder.is_lead:
                began = describe_beginning(self.folder)
                started = f"job {self._read_node().get('job_id')} has started"
                self.set_status("starting", "; ".join(filter(None, (started, began))))
        self.stop.obey_commands()  # A stop requested before this point needs no launcher at all.
        if self.peers is None:  # Nor does a signal between two attempts. One of Slurm may be only a notice.
            self._obey_signal()
        if self.stop.reason is None:
            try:
                if isinstance(self.folder, NodeFolder):
                    check_node(self.folder, self.description, self._send_heartbeat)
                self._start_launcher()
            except (OSError, NodeError) as error:
                self._record_missing_launcher(error)
            if self.folder.is_lead:
                self._start_trackers()
        while self.launcher is not None and self.launcher.poll() is None:
            self._advance()
            self._sleep()
        if self.stop.reason is None and self.leftovers.has_every_rank_returned():
            # Ranks read the same control file and may have obeyed a stop that was not read here yet.
            self.stop.obey_commands()
        self._finish()

    def _start_launcher(self) -> None:
        with open_to_append(self.folder.launcher_log) as log:
            self.launcher = subprocess.Popen(
                [
                    *(build_nsys_command(self.folder) if self.nsys else ()),
                    *build_module_command(
                        "shardscope.runs.launch.launcher",
                        str(self.folder.path),
                        # Under nsys its parent is another process, whose id only the launcher knows.
                        "0" if self.nsys else str(os.getpid()),
                        str(self.secrets.for_launcher),
                        str(self.folder.node) if isinstance(self.folder, NodeFolder) else "",
                        "" if self.folder.fixed_attempt is None else str(self.folder.fixed_attempt),
                    ),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=build_launcher_environment(
                    dict(os.environ),
                    len(self.ranks),
                    str(self.description.get("device")),
                    self._read_interface(),
                ),
                # nsys knows nothing of this process: it is killed with it, and the launcher with nsys.
                preexec_fn=partial(processes.die_with_parent, os.getpid())  # noqa: PLW1509 - one thread
                if self.nsys
                else None,
                process_group=0,
                pass_fds=(self.secrets.for_launcher,),
            )
        self.secrets.close_write_end()

    def _read_interface(self) -> str:
        """Return the network interface of this node over which its ranks reach those of other nodes."""
        if not isinstance(self.folder, NodeFolder) or self.folder.num_nodes == 1:
            return "lo"
        return str(self._read_node().get("interface", "lo"))

    def _read_node(self) -> dict[str, object]:
        """Return name, address and interface of this node of a scheduler."""
        return (read_json(self.folder.node_json) or {}) if isinstance(self.folder, NodeFolder) else {}

    def _start_trackers(self) -> None:
        """Start the process that reports to trackio and wandb; an error does not fail the run."""
        try:
            with open_to_append(self.folder.supervisor_log) as log:
                self.trackers.start(log)
        except OSError as error:
            self.log(f"nothing is reported to trackers: {error}")
        self.leftovers.except_for = self.trackers.pid

    def _record_missing_launcher(self, error: OSError | NodeError) -> None:
        """Write why the launcher could not be started, in the format of the launcher's own error record."""
        record = make_exception_record(error)
        if isinstance(error, NodeError):
            cause = str(error)
        else:
            cause = describe_shortage(error) or f"{sys.executable}: {error.strerror}"
        record["summary"] = f"was not started: {cause}"
        write_json(self.folder.launcher_error, {**record})

    def _advance(self) -> None:
        now = time.monotonic()
        self._obey_signal()
        if now >= self.next_heartbeat:
            self.next_heartbeat = now + HEARTBEAT_SECONDS
            self._send_heartbeat()
            self._watch_peers()
        self.stop.obey_commands()
        if not self.ranks_are_up and self.stop.phase == "run":
            self._check_ranks_are_up()
        # No checks while the run ends: they take time, and `RunEnd` does the last one anyway.
        if not self.stop.ends_processes and now - self.last_check >= CHECK_SECONDS:
            self._run_checks(now)
        self._notice_dead_rank()
        self.stop.advance()

    def _obey_signal(self) -> None:
        number = self._read_signal()
        if number is not None and self.stop.obey_signal(number):
            self.signals.settle(number)

    def _read_signal(self) -> int | None:
        return self.signals.read(of_slurm=self.peers is not None)

    def _run_checks(self, now: float) -> None:
        seconds, self.last_check = now - self.last_check, now
        is_running = self.ranks_are_up and not self.stop.ends_processes and not self.stop.a_rank_died
        if not self.stop.ends_processes and self.launcher is not None:
            self._end_leftovers(seconds, self.launcher.pid)
        message = self.checks.check(seconds, is_running=is_running)
        if message is None:
            return
        self.log(message)
        if self.stop.phase == "run":
            self.set_status("running", message, hangs=self.checks.run_hangs)
        else:
            self.stop.update_checkpoint_deadline()
            self.set_status("stopping", f"{self.stop.reason}; {message}")

    def _watch_peers(self) -> None:
        """End this node's ranks if another node is lost, or its ranks have ended without a result."""
        if self.peers is None or self.stop.ends_processes:
            return
        self.peers.look()
        self.lost_node = self.peers.describe_lost()
        failed = self.peers.find_failed()
        if self.lost_node:
            self.log(self.lost_node)
            self.stop.kill()
        elif failed is not None:
            # Ranks that wait for the other node's get an error by themselves, which names it.
            self.log(f"node {failed.node} has ended: {failed.status}, {failed.reason}")
            self.stop.record_dead_rank()

    def _end_leftovers(self, seconds: float, launcher: int) -> None:
        left = self.leftovers.check(seconds, launcher)
        if left is None:
            return
        self.ended_leftovers = left
        self.log(f"the task returned on every rank, but threads or processes kept running; ended {left}")
        self.stop.kill_leftovers()

    def _notice_dead_rank(self) -> None:
        # exits.jsonl is written by the launcher; without a new line no rank has ended since the last look.
        if self.stop.a_rank_died or self.stop.ends_processes or not self.exits.read():
            return
        if has_rank_died(self.folder):
            self.stop.record_dead_rank()

    @property
    def seems_to_hang(self) -> bool:
        """Return whether the ranks seem to hang."""
        return self.checks.hangs

    def has_returned_unasked(self) -> bool:
        """Return whether the task has returned on every rank, and on none because of a stop request.

        A rank may read a stop request, and return, before it is read here. Times are not compared: the
        request may come from a machine with another clock.
        """
        if not self.leftovers.has_every_rank_returned():
            return False
        return not any(
            (read_json(self.folder.rank(rank)) or {}).get(SAW_STOP) for rank in range(self.world_size)
        )

    def signal_ranks(self, number: int) -> None:
        """Send a signal to the launcher and the ranks, if they were started."""
        if self.launcher is not None:
            processes.signal_group(self.launcher.pid, number)
            if number == signal.SIGKILL:
                processes.signal_process(self.launcher.pid, number)

    def _check_ranks_are_up(self) -> None:
        # All ranks' records, also on several nodes: none of them starts before all have met.
        records = [read_json(self.folder.rank(rank)) for rank in range(self.world_size)]
        if all(record is not None and "ready" in record for record in records):
            self.ranks_are_up = True
            failed_setup = "" if self.peers is None else describe_failed_setup(self.folder)
            at_work = f"{self.world_size} rank{'s' * (self.world_size > 1)} at work"
            self.set_status("running", "; ".join(filter(None, (at_work, failed_setup))))

    def _send_heartbeat(self) -> None:
        if self._check_path() == "this folder":
            with contextlib.suppress(OSError):
                os.utime(self.folder.supervisor)
            return
        # Without its folder the run could not be seen or stopped any more.
        if self._has_left_path():
            # Before SIGTERM, after which launcher and ranks would write how they ended to the old path, where
            # another run may be.
            self.signal_ranks(signal.SIGKILL)
        self.stop.terminate(self._describe_lost_folder(self._find_moved_folder()))

    def _check_path(self) -> Literal["this folder", "another folder", "nothing"]:
        """Return what the run folder's path leads to now; this folder if that cannot be determined."""
        try:
            is_same = os.path.samestat(self.folder.path.stat(), self._identity)
        except OSError as error:
            return "nothing" if is_absent(error) else "this folder"
        return "this folder" if is_same else "another folder"

    def _has_left_path(self) -> bool:
        """Return whether the run folder was moved or deleted, so that nothing may be written to its path."""
        content = self._check_path()
        # That of several nodes is on a file system that they share, and may only be invisible here.
        return content == "another folder" or (content == "nothing" and self.peers is None)

    def _find_moved_folder(self) -> RunFolder | None:
        """Return the run folder if it has another path now; None if it has not, or is deleted.

        None on nodes, whose descriptors may not follow a folder that another machine moves.
        """
        if self.peers is not None or not self._has_left_path():
            return None
        with contextlib.suppress(OSError):
            # Of a deleted folder the link names no existing path (proc(5)); other systems have no /proc.
            path = Path(f"/proc/self/fd/{self._open_folder}").readlink()
            return RunFolder(path) if path.is_dir() else None
        return None

    @staticmethod
    def _describe_lost_folder(moved: RunFolder | None) -> str:
        what = "is gone" if moved is None else f"was moved to {moved.path} while it ran"
        return f"the run folder {what}"

    def _sleep(self) -> None:
        if self.lease is None:
            time.sleep(POLL_SECONDS)
            return
        waiting = select.poll()  # Not select.select(): the descriptor may be above its limit of 1024.
        waiting.register(self.lease, select.POLLIN)
        if waiting.poll(POLL_SECONDS * 1000) and not os.read(self.lease, 1):
            self.lease = None
            self.stop.end_with_kernel()

    def _finish(self) -> None:
        """Clean up after the ranks and write the final status."""
        self.end.kill_processes()
        if self._has_left_path():
            self._finish_at_new_path()
            return
        self.end.delete_temporary_files()
        if isinstance(self.folder, NodeFolder):
            verdict = self.end.record_node_end(self.folder, self._describe_outcome())
            if self.folder.is_lead:
                self._wait_for_peers(self.folder)
            else:
                self.set_status(verdict.status, verdict.reason)
                self.end.finish_checks()
                if self.lost_node:
                    replace_lead(self.folder, self.description, self.log)
                return
        final = self.end.decide_final_status(self._describe_outcome())
        if self.folder.fixed_attempt is not None:
            ending = AttemptEnding(
                notice=self.stop.notice,
                stopped_by_user=self.stop.by_user,
                lost_nodes=() if self.peers is None else self.peers.list_lost_names(),
                control_bytes=self.stop.control.offset,
            )
            final = conclude_attempt(self.folder, self.description, final, ending, self.log)
            self.follows = final.status == "starting"
        if final.status in FINAL:
            self.folder.task.unlink(missing_ok=True)
        self.set_status(final.status, final.reason, **final.details)
        self.end.finish(final.status)

    def _finish_at_new_path(self) -> None:
        """Write the final status of a moved run folder, and clean up there; nothing if it is deleted.

        Its old path may already be the folder of another run.
        """
        processes.kill_descendants()  # Trackers too: they would report the other run's metrics.
        moved = self._find_moved_folder()
        self.set_status("stopped", self._describe_lost_folder(moved))
        if moved is not None:
            clean_up_killed_run(moved)

    def _describe_outcome(self) -> Outcome:
        """Return what this process knows of the run's end."""
        return Outcome(
            launcher_code=None if self.launcher is None else self.launcher.returncode,
            stop_reason=None if self.stop.returned_first else self.stop.reason,
            stop_time=self.stop.time,
            stopped_by_signal=self.stop.by_signal,
            sent_signals=self.stop.has_signalled,
            a_rank_died=self.stop.a_rank_died,
            ended_leftovers=self.ended_leftovers,
            lost_node=self.lost_node,
            lost_numbers=() if self.peers is None else self.peers.lost,
        )

    def _wait_for_peers(self, folder: NodeFolder) -> None:
        """Wait until each other node has ended or is lost, and find the stop that ended them."""
        assert self.peers is not None
        patience = SIGNALLED_LOST_SECONDS if self.stop.by_signal else LOST_SECONDS
        while True:
            if time.monotonic() >= self.next_heartbeat:
                self.next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
                self._send_heartbeat()
            self.peers.look()
            if self.peers.is_every_end_known(patience):
                break
            time.sleep(POLL_SECONDS)
        self.lost_node = self.lost_node or self.peers.describe_lost(patience)
        # A scheduler signals all processes of a job: the ranks may end before this process notices.
        number = self._read_signal()
        if number is not None:
            self.stop.record_late_signal(number)
        # Another node may have obeyed a stop that was not visible here yet.
        if self.stop.reason is None:
            self.stop.obey_commands()
        if self.stop.by_signal and (end := describe_job_end(folder) or describe_ray_end(folder)):
            self.stop.reason = end

    def set_status(self, status: Status, reason: str, **more: object) -> None:
        """Record a status of the run."""
        folder = self.folder
        if self.peers is None:
            # Through the descriptor, which follows the folder: it may be moved at any moment, and another run
            # may be at its old path.
            folder = RunFolder(f"/proc/self/fd/{self._open_folder}", self.folder.fixed_attempt)
        try:
            if self.peers is not None and self._has_left_path():
                raise FileNotFoundError(f"{self.folder.path} is gone")
            folder.set_status(status, reason, **more)
        except OSError as error:  # A full disk must not prevent us from ending the ranks.
            self.log(f"could not write status {status!r} ({reason}): {error}")

    @staticmethod
    def log(text: str) -> None:
        """Write a line to the supervisor's log."""
        with contextlib.suppress(OSError):  # A full disk must not end the supervisor before its ranks.
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def build_nsys_command(folder: RunFolder) -> list[str]:
    """Return the start of the command that runs the launcher under Nsight Systems.

    The ranks fork from the launcher and start no program of their own, so one report has all of them.
    """
    return [
        "nsys",
        "profile",
        f"--output={folder.traces / 'all-ranks'}",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,osrt",
        "--trace-fork-before-exec=true",
    ]


def main(arguments: list[str]) -> None:
    """Supervise the run in ``arguments[0]``.

    Other arguments: the lease's read end, or ``--node``, the number of this node and that of the attempt.
    """
    signals = ReceivedSignals()
    signals.install_handlers()
    is_node = arguments[1:2] == ["--node"]
    node = int(arguments[2]) if is_node else None
    attempt = int(arguments[3]) if is_node and len(arguments) > 3 else None
    folder = open_part(arguments[0], node, attempt)
    try:
        lock_run(folder)  # The descriptor is never closed.
    except ValueError as error:
        sys.exit(f"shardscope: {error}")
    lease = int(arguments[1]) if len(arguments) > 1 and not is_node else None
    if is_node or not get_retries(read_json(folder.run_json) or {}):
        Supervisor(folder, lease, signals).run()
        return
    for attempt in itertools.count(1):
        folder = folder.select_attempt(attempt)
        begin_attempt(folder)
        folder.temporary.mkdir(mode=0o700, exist_ok=True)
        supervisor = Supervisor(folder, lease, signals)
        supervisor.run()
        if not supervisor.follows:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
