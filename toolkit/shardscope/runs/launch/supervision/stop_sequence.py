"""The stop of a run: its phases, what starts them, and when each one escalates to the next.

A stop starts with a command of ``control.jsonl``, a signal, a notice of Slurm, or an event that the
supervisor reports (the kernel has ended, a rank has died). With a checkpoint the ranks first get time to save
and return by themselves. SIGTERM and SIGKILL follow.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from shardscope.records.attempts import is_for_attempt
from shardscope.records.folder import NodeFolder, RunFolder, Status
from shardscope.records.json_files import LineTail, append_line, read_json
from shardscope.records.json_values import is_int
from shardscope.runs.backends.end_notice import EndNotice, read_end_notice
from shardscope.runs.backends.slurm_job import read_job_id
from shardscope.runs.stop_request import describe_stop_request
from shardscope.training.recording import ENTRY, IS_WRITING

TERMINATION_GRACE_SECONDS = 1.5
"""Time from SIGTERM to SIGKILL. Short, because metrics are flushed line by line."""
KILL_SECONDS = 1.0
"""Time after which SIGKILL is sent again."""
CHECKPOINT_GRACE_SECONDS = 600.0
"""Time after which ranks that save, or write the trace of a recording, are ended without it."""
RECORDED_STEP_SECONDS = 60.0
"""Time that a function which records gets to read a stop: it may have stopped reading commands."""
HANG_GRACE_SECONDS = 120.0
"""The same for ranks that seem to hang. Not zero: the detection may mistake a slow save for a hang."""
FAILURE_GRACE_SECONDS = 3.0
"""Time that torch elastic gets to end the other ranks after one died; by itself it takes 30 s."""


class SupervisedRun(Protocol):
    """The parts of a supervisor that its stop sequence uses."""

    @property
    def seems_to_hang(self) -> bool:
        """Return whether the ranks seem to hang."""

    def has_returned_unasked(self) -> bool:
        """Return whether the task has returned on every rank, and on none because of a stop request."""

    def signal_ranks(self, number: int) -> None:
        """Send a signal to the launcher and the ranks, if they were started."""

    def set_status(self, status: Status, reason: str) -> None:
        """Record a status of the run."""

    def log(self, text: str) -> None:
        """Write a line to the supervisor's log."""


class StopSequence:
    """The stop of the ranks of one supervisor. Call ``advance`` after each look at signals and commands.

    ``description`` is ``run.json``; ``read_clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        folder: RunFolder,
        description: Mapping[str, object],
        run: SupervisedRun,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.description = description
        self.control = LineTail(folder.control)
        # In this order, "checkpoint" and "record" optional; "leave" while leftovers of a finished task are
        # killed.
        self.phase: Literal["run", "checkpoint", "record", "leave", "terminate", "kill"] = "run"
        self.deadline = float("inf")
        """Monotonic time at which the phase escalates to the next one."""
        self.reason: str | None = None
        """Why the run was stopped; None without a stop."""
        self.time = 0.0
        """When the ranks were signalled: monotonic seconds, on nodes seconds since the epoch; 0 before."""
        self.returned_first = False
        """Whether the task had returned on every rank before the stop, which then had no effect."""
        self.a_rank_died = False
        """Whether a rank died before it was signalled."""
        self.by_user = False
        """Whether a user's command requested the stop, or the user's kernel has ended."""
        self.by_signal = False
        """Whether the stop came as a signal: from the scheduler, say, and not from the user."""
        self.notice: EndNotice | None = None
        """What Slurm announced, if it ends the job and another attempt may follow."""
        self._notice_deadline = float("inf")
        """Monotonic time until which the ranks can save a checkpoint after that."""
        self._save_requested_at = 0.0
        self._step_deadline = float("inf")
        """Monotonic time until which the ranks must have ended the step that they record."""
        self._run = run
        self._read_clock = read_clock

    @property
    def ends_processes(self) -> bool:
        """Return whether processes are being ended, so that no further request changes anything."""
        return self.phase in ("leave", "terminate", "kill")

    @property
    def has_signalled(self) -> bool:
        """Return whether the ranks were signalled for the stop."""
        return self.phase in ("terminate", "kill")

    def obey_signal(self, number: int) -> bool:
        """End the ranks after a signal; after one of Slurm's they save a checkpoint before, if they can.

        A task that cannot save keeps the time that Slurm leaves after SIGTERM, and is ended before SIGKILL.
        Return whether it is dealt with, as a notice of Slurm is; a signal that ends the run stays in force.
        """
        notice = self._read_notice(number)
        if notice is None:
            if number == signal.SIGUSR2:
                return True
            self.by_signal = self.by_signal or self.reason is None
            self.terminate(_describe_signal(number))
            return False
        self._run.log(f"{notice.reason}; {notice.seconds:.0f} s are left")
        self.notice, notice_deadline = notice, self._read_clock() + notice.seconds
        self._notice_deadline = min(self._notice_deadline, notice_deadline)
        if self.phase == "checkpoint":
            self.deadline = min(self.deadline, self._notice_deadline)
            return True
        # Unless they return before: the task may not save, or this node may not see the command in time.
        # After a warning the job goes on, and its time limit may still be extended.
        if number != signal.SIGUSR2:
            self.deadline = min(self.deadline, notice_deadline)
        if self.folder.is_lead:
            self._request_checkpoint(notice)
        return True

    def record_late_signal(self, number: int) -> None:
        """Record a signal as the reason of the end, if it was noticed only after the ranks had ended."""
        if number != signal.SIGUSR2 and self.reason is None:
            self.by_signal, self.time = True, time.time()
            self.reason = _describe_signal(number)

    def _read_notice(self, number: int) -> EndNotice | None:
        """Return what Slurm does to the job; None if it was cancelled, or without Slurm."""
        job_id = read_job_id(self.folder)
        if job_id is None or self.ends_processes:
            return None
        notice = read_end_notice(job_id, self.folder.attempt, is_warning=number == signal.SIGUSR2)
        return None if notice.kind == "cancelled" else notice

    def _request_checkpoint(self, notice: EndNotice) -> None:
        """Let the ranks of all nodes save a checkpoint and return, by a command that they read."""
        if self.description.get("saves_when_asked") is False:
            if notice.kind == "requeued":
                self.terminate(notice.reason)
            return
        command = {
            "command": "stop",
            "checkpoint": True,
            "time": time.time(),
            "attempt": self.folder.attempt,
            "scheduler": notice.reason,
        }
        try:
            append_line(self.folder.control, command)
        except OSError as error:
            self._run.log(f"no checkpoint could be requested: {error}")
        self.obey_commands()

    def obey_commands(self) -> None:
        """Obey the new commands of ``control.jsonl``."""
        malformed = self.control.num_malformed
        for command in self.control.read():
            if not is_for_attempt(command, self.folder):
                continue
            if command.get("command") == "stop" and command.get("kernel_ended") is True:
                self._begin_end_with_kernel()
            elif command.get("command") == "stop":
                checkpoint = command.get("checkpoint") is True
                self.by_user = self.by_user or "attempt" not in command
                self.begin(describe_stop_request(command), checkpoint=checkpoint)
            elif not isinstance(command.get("command"), str):
                self.control.num_malformed += 1
        if self.control.num_malformed > malformed:
            self._run.log(
                f"ignored {self.control.num_malformed - malformed} malformed lines of control.jsonl"
            )

    def end_with_kernel(self) -> None:
        """Stop the run because the kernel that launched it has ended, which no command says."""
        self._begin_end_with_kernel()
        if self.phase != "record":
            return
        # The ranks end their recording at the end of the step in which they read it.
        command = {"command": "stop", "time": time.time(), "kernel_ended": True}
        try:
            append_line(self.folder.control, {**command, "attempt": self.folder.attempt})
        except OSError as error:
            self._run.log(f"the end of the recording could not be requested: {error}")
            self.terminate(self.reason or "")

    def _begin_end_with_kernel(self) -> None:
        self.by_user = True  # No attempt follows, however the ranks end.
        # A checkpoint or trace that is being saved is what a stop before it was for.
        if self.phase not in ("checkpoint", "record"):
            self.begin(describe_stop_request({"kernel_ended": True}), checkpoint=False)

    def begin(self, request: str, *, checkpoint: bool) -> None:
        """Begin a stop for ``request``, which becomes its reason."""
        if not checkpoint:
            is_alive = not self.a_rank_died and not self._run.seems_to_hang
            if self.phase == "run" and is_alive and self._read_recordings():
                self._wait_for_recording(request)
            else:
                self.terminate(request)
        elif self.description.get("saves_when_asked") is False:
            # Run.stop() raises ValueError in this case, but other programs can write commands too.
            self._run.log("ignored a stop with a checkpoint: the task never reads ctx.should_stop")
        elif self.phase == "run" and self.reason is None:
            # The ranks read the same control file and agree on the step after which they leave.
            self.phase, self._save_requested_at = "checkpoint", self._read_clock()
            self.update_checkpoint_deadline()
            self.reason, self.returned_first = request, self._run.has_returned_unasked()
            trains = self.description.get("trains_the_plan") is True
            end = "finish their step and save" if trains else "end when their task reads ctx.should_stop"
            reason = f"{request}: the ranks {end}"
            if self._run.seems_to_hang:
                reason += f", if they can: they seem to hang, and have {HANG_GRACE_SECONDS:.0f} s"
            self._run.set_status("stopping", reason)

    def _wait_for_recording(self, request: str) -> None:
        """Let the ranks end their recording between two steps, which writes the trace, before they are ended.

        SIGTERM in the middle of a step would find them in a collective, and leave no time to write.
        """
        self.phase, self._save_requested_at = "record", self._read_clock()
        self.update_checkpoint_deadline()
        if self.description.get("trains_the_plan") is not True:
            self._step_deadline = self._save_requested_at + RECORDED_STEP_SECONDS
        self.reason, self.returned_first = request, False
        writing = "the ranks write the trace of the recorded steps; a second stop ends them without it"
        self._run.set_status("stopping", f"{request}: {writing}")

    def _read_recordings(self) -> list[dict[str, object]]:
        """Return the entries of the ranks whose recording is in progress."""
        world_size = self.description.get("world_size")
        entries = [
            (read_json(self.folder.engine_report(rank)) or {}).get(ENTRY)
            for rank in range(world_size if is_int(world_size) else 1)
        ]
        return [entry for entry in entries if isinstance(entry, dict) and entry.get("state") == "recording"]

    def update_checkpoint_deadline(self) -> None:
        """Set when the ranks are ended that save or write a trace: sooner if they seem to hang."""
        self.deadline = min(self._save_requested_at + CHECKPOINT_GRACE_SECONDS, self._notice_deadline)
        if self._run.seems_to_hang:
            self.deadline = min(self.deadline, self._read_clock() + HANG_GRACE_SECONDS)

    def record_dead_rank(self) -> None:
        """Give torch elastic a short time to end the other ranks after one has died."""
        self.a_rank_died = True
        self.deadline = min(self.deadline, self._read_clock() + FAILURE_GRACE_SECONDS)

    def advance(self) -> None:
        """Escalate to the next phase once the deadline has passed."""
        if self.phase == "record" and not self.a_rank_died:
            recordings = self._read_recordings()
            if not recordings:
                self.terminate(self.reason or "")
            elif self._read_clock() >= self._step_deadline and not any(e.get(IS_WRITING) for e in recordings):
                limit = f"{RECORDED_STEP_SECONDS:.0f} s"
                self.terminate(f"{self.reason}; the task, which records, did not read it within {limit}")
        if self._read_clock() < self.deadline:
            return
        if self.phase == "record" and not self.a_rank_died:
            self.terminate(f"{self.reason}; the ranks did not write the trace of the recorded steps in time")
        elif self.phase == "checkpoint" and not self.a_rank_died:
            waited = self._read_clock() - self._save_requested_at
            hangs = ", and seem to hang" if self._run.seems_to_hang else ""
            why = f"{self.notice.reason}: " if self.notice is not None else ""
            self.terminate(f"{why}the ranks did not save and stop within {waited:.0f} s{hangs}")
        elif self.phase == "run" and self.notice is not None and not self.a_rank_died:
            self.terminate(self.notice.reason)
        else:
            self.kill()

    def terminate(self, reason: str) -> None:
        """Send SIGTERM to the ranks for ``reason``; on the nodes of a scheduler SIGHUP (``rank.py``)."""
        if self.ends_processes:
            return
        if self.reason is None:
            self.returned_first = self._run.has_returned_unasked()
        # The clocks of failures: nodes have only the epoch in common.
        is_node = isinstance(self.folder, NodeFolder)
        self.time = time.time() if is_node else self._read_clock()
        self.reason = reason
        self._run.set_status("stopping", reason)
        self._run.signal_ranks(signal.SIGHUP if is_node else signal.SIGTERM)
        self.phase, self.deadline = "terminate", self._read_clock() + TERMINATION_GRACE_SECONDS

    def kill_leftovers(self) -> None:
        """Kill what a task has left running after it had returned on every rank."""
        self.phase, self.deadline = "leave", self._read_clock() + TERMINATION_GRACE_SECONDS
        self._run.signal_ranks(signal.SIGKILL)

    def kill(self) -> None:
        """Kill the ranks."""
        self.phase, self.deadline = "kill", self._read_clock() + KILL_SECONDS
        self._run.signal_ranks(signal.SIGKILL)


def _describe_signal(number: int) -> str:
    return f"the supervisor got {signal.Signals(number).name}"
