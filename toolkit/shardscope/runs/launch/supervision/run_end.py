"""The end of a run: kill what the ranks left behind, decide the final status and explain a failure.

The supervisor uses it once the launcher has exited. ``runs/verdict.py`` has the rules for the status; this
module reads the facts for them from the run folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardscope.core.number_format import format_count, format_gib
from shardscope.machine import processes
from shardscope.records.clock_offsets import read_clock_offsets
from shardscope.records.folder import NodeFolder, RunFolder, Status
from shardscope.records.json_files import (
    append_line,
    delete_partial_files,
    read_json,
    read_json_if_present,
    write_json,
)
from shardscope.records.json_values import is_int
from shardscope.records.regular_files import open_new
from shardscope.runs.backends.job_log import describe_failed_setup, find_job_log
from shardscope.runs.explain.failure import Failure, find_failures, quote_log_end
from shardscope.runs.explain.failure_report import FailureReport, explain_failures
from shardscope.runs.trackers import TrackerProcess
from shardscope.runs.verdict import Evidence, Verdict, decide_status
from shardscope.runs.watch.periodic_checks import PeriodicChecks
from shardscope.training.checkpoints.folders import (
    CHECKPOINTS,
    OWN_FOLDER,
    delete_unfinished,
    list_resumable,
)
from shardscope.training.tasks.final_export import NOT_SAVED, WORSE

FINISH_SECONDS = 1.0
"""Time that the final status waits for the last writes of the periodic checks; the rest follows it."""
MARKER_PATIENCE_SECONDS = 10.0
"""Time that the final status waits for rank records that exist and cannot be read."""
MARKER_RETRY_SECONDS = 0.05
RESERVED_BYTES = 2**18
"""Space for the records of a node's end."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The supervisor's own knowledge of how a run ended."""

    launcher_code: int | None
    """The launcher's exit code; None if it was not started."""
    stop_reason: str | None
    """Why the run was stopped; None if no stop came before the task had returned on every rank."""
    stop_time: float
    """When: monotonic seconds, on nodes seconds since the epoch by their own clock; 0 without a stop."""
    stopped_by_signal: bool
    """Whether the stop came as a signal: from the scheduler, say, and not from the user."""
    sent_signals: bool
    """Whether the supervisor sent signals to the ranks for the stop."""
    a_rank_died: bool
    """Whether a rank died before those signals."""
    ended_leftovers: str
    """The processes that outlived every task and were killed for it; empty if there were none."""
    lost_node: str
    """Which other node is lost; empty if none is."""
    lost_numbers: Sequence[int] = ()
    """The numbers of the lost nodes."""


class FinalStatus(NamedTuple):
    """A final status, its reason and the further fields of its line in ``status.jsonl``."""

    status: Status
    reason: str
    details: dict[str, object]


class RunEnd:
    """The work at the end of one run, in the order of the methods.

    ``log`` writes a line to the supervisor's log. ``description`` is ``run.json``.
    """

    def __init__(
        self,
        folder: RunFolder,
        description: Mapping[str, object],
        world_size: int,
        checks: PeriodicChecks,
        trackers: TrackerProcess,
        log: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.description = description
        self.world_size = world_size
        self.ranks = folder.select_ranks(world_size)
        """The ranks of this node."""
        self.checks = checks
        self.trackers = trackers
        self.log = log
        self._last_checks = self._iterate_last_checks()

    def kill_processes(self) -> None:
        """Kill everything that the ranks started: nothing may change their records any more."""
        if not processes.kill_descendants(except_for=self.trackers.pid):
            left = processes.list_descendants(self.trackers.pid)
            self.log(f"these processes could not be killed: {left}")

    def delete_temporary_files(self) -> None:
        """Delete the temporary files of launcher and ranks, and the space reserved for records."""
        shutil.rmtree(self.folder.temporary, ignore_errors=True)
        if isinstance(self.folder, NodeFolder):
            with contextlib.suppress(OSError):
                self.folder.reserve.unlink(missing_ok=True)
            if os.environ.get(OWN_FOLDER) == "1":
                delete_unfinished(self.folder.path)

    def reserve_space(self, folder: NodeFolder) -> None:
        """Reserve space for the records of this node's end, on a disk that fills up during the run."""
        with contextlib.suppress(OSError), open_new(folder.reserve) as file:
            file.write(bytes(RESERVED_BYTES))

    def record_node_end(self, folder: NodeFolder, outcome: Outcome) -> Verdict:
        """Write how the ranks of this node ended, for node 0, and return it."""
        # A launcher that is the only rank of its node has no launcher above that records its exit code.
        if len(self.ranks) == 1 and outcome.launcher_code:
            record: dict[str, object] = {
                "time": time.time(),
                "rank": self.ranks[0],
                "code": outcome.launcher_code,
            }
            # A rank that waited in a collective for one of another node: no failure of its own.
            if outcome.sent_signals and outcome.launcher_code == -signal.SIGKILL:
                record["was_ended"] = True
            with contextlib.suppress(OSError):
                append_line(folder.exits, record)
        markers = [read_json(folder.rank(rank)) or {} for rank in self.ranks]
        failures = [
            failure for failure in self._find_failures(outcome) if failure.rank in (None, *self.ranks)
        ]
        verdict = self._decide_status(outcome, failures, markers)
        try:
            ended = {"time": time.time(), "status": verdict.status, "reason": verdict.reason}
            write_json(folder.ended, ended)
        except OSError as error:
            self.log(f"could not write {folder.ended}: {error}")
        return verdict

    def decide_final_status(self, outcome: Outcome) -> FinalStatus:
        """Return the final status of the run, with the report of a failure.

        The card of an exported model is written before: the status says that the model is complete.
        """
        with contextlib.suppress(OSError):
            delete_partial_files(self.folder.path)
        # The last GPU samples and the redaction of logs get a second before the status, the rest after it.
        until = time.monotonic() + FINISH_SECONDS
        while next(self._last_checks, None) and time.monotonic() < until:
            pass
        failures = self._find_failures(outcome)
        failure = failures[0] if failures else None
        markers = read_markers(self.folder, self.world_size, self.log)
        status, reason = self._decide_status(outcome, failures, markers)
        # After a stop every rank dies by our signals; only a failure before it is worth reporting.
        is_reported = failure is not None and (status == "failed" or failure.time < self._find_stop(outcome))
        details: dict[str, object] = {}
        if failure is not None and is_reported:
            report = self._explain_failure(failures)
            details = {"error": report.text, "rank": failure.rank}
            if isinstance(self.folder, NodeFolder) and (setup := describe_failed_setup(self.folder)):
                details["error"] = f"{report.text}\n\nBefore, {setup}: see {find_job_log(self.folder)}."
            # The report's reason is the failure's, with numbers. A stop's reason stays.
            reason = report.reason if reason == failure.reason else reason
        elif status == "failed":  # The launcher left no record, and no rank did: it could not write any, say.
            is_crash = outcome.launcher_code is not None and outcome.launcher_code < 0
            log = quote_log_end(self.folder, self.folder.launcher_log, is_crash=is_crash)
            details = {"error": f"{reason}.\n{log}"}
        if status == "finished":
            reason += self._describe_untrained() + self._describe_worse()
        if status in ("finished", "stopped"):  # A stop may come while the export waits for its disk.
            self._write_model_card()
        not_saved = markers[0].get(NOT_SAVED) if markers else None
        if status in ("finished", "stopped") and isinstance(not_saved, str) and not_saved:
            reason += f"; {not_saved}"
        if status == "failed" and isinstance(self.folder, NodeFolder):
            reason += describe_full_disks(self.folder, markers)
        return FinalStatus(status, reason, details)

    def finish(self, status: Status) -> None:
        """Do what the final status does not wait for."""
        self.finish_checks()
        if status == "finished":
            self._store_measured_step()
        # A tracker may take a minute. Then what it has left behind.
        self.trackers.finish()
        processes.kill_descendants()

    def finish_checks(self) -> None:
        """Do the rest of the last checks, such as the redaction of logs, however long it takes."""
        for _ in self._last_checks:
            pass

    def _iterate_last_checks(self) -> Iterator[bool]:
        for _ in self.checks.finish():
            with contextlib.suppress(OSError):
                os.utime(self.folder.supervisor)  # Another machine sees only this heartbeat.
            yield True

    def _find_failures(self, outcome: Outcome) -> list[Failure]:
        """Return all failures, that of a lost node first: the others follow from it."""
        failures = find_failures(self.folder, self.world_size)
        if not outcome.lost_node:
            return failures
        lost = Failure(
            rank=None,
            time=0.0,
            reason=outcome.lost_node,
            text=f"{outcome.lost_node}.{describe_node_logs(self.folder, outcome.lost_numbers)}",
            raised="",
            is_consequence=False,
        )
        return [lost, *failures]

    def _find_stop(self, outcome: Outcome) -> float:
        """Return the time of the stop on the clock of the failures: on nodes, that of node 0."""
        if not isinstance(self.folder, NodeFolder):
            return outcome.stop_time
        return outcome.stop_time - read_clock_offsets(self.folder).of_node(self.folder.node)

    def _decide_status(
        self, outcome: Outcome, failures: list[Failure], markers: list[dict[str, object]]
    ) -> Verdict:
        stop_reason = outcome.stop_reason
        was_ended = outcome.sent_signals and not outcome.a_rank_died
        if isinstance(self.folder, NodeFolder):
            # A stop reaches the nodes one after another: ranks that only lost their peers were ended by it.
            stop = self._find_stop(outcome)
            was_ended = (outcome.sent_signals or bool(failures)) and all(
                failure.is_consequence or failure.time >= stop for failure in failures
            )
            if outcome.lost_node and outcome.stopped_by_signal:
                stop_reason = None
        return decide_status(
            Evidence(
                markers=markers,
                failures=failures,
                launcher_code=outcome.launcher_code,
                stop_reason=stop_reason,
                was_ended=was_ended,
                left_behind=outcome.ended_leftovers,
                is_disk_full=self.folder.is_on_full_disk,
                killer=self._describe_killer(outcome),
            )
        )

    def _describe_killer(self, outcome: Outcome) -> str:
        """Return the likely origin of the SIGKILL that ended the launcher; empty if it did not end so."""
        if outcome.launcher_code != -signal.SIGKILL:
            return ""
        return self.checks.host.describe_kill(self.ranks[0] if len(self.ranks) == 1 else None)

    def _explain_failure(self, failures: list[Failure]) -> FailureReport:
        try:
            return explain_failures(failures, self.description, self.checks.host)
        except Exception as error:  # Suggested fixes are optional; the failure itself is always reported.
            self.log(f"no fix is suggested: {type(error).__name__}: {error}")
            return FailureReport(failures[0].reason, failures[0].text)

    def _write_model_card(self) -> None:
        """Write README.md into the exported model, before the status says that the model is complete.

        Here and not on a rank, because the metrics and the measured memory of all ranks are known only now.
        An error here does not fail the run.
        """
        # Imported lazily: it would slow down the supervisor's start.
        from shardscope.runs.run import Run

        try:
            run = Run(self.folder)
            if run.model is not None and run.trains_the_plan:
                from shardscope.runs.trained.model_card import write_model_card

                write_model_card(run, run.model)
        except Exception as error:
            self.log(f"no model card was written: {type(error).__name__}: {error}")

    def _describe_untrained(self) -> str:
        """Return that a resumed run had no step left to train, as a clause; empty if it trained."""
        # A later attempt may only have exported what the one before has trained.
        if (self.folder.fixed_attempt or 1) > 1:
            return ""
        report = read_json(self.folder.engine_report(0)) or {}
        data, training = report.get("data"), report.get("training")
        first = data.get("first_step") if isinstance(data, dict) else None
        total = training.get("num_steps") if isinstance(training, dict) else None
        if not is_int(first) or not is_int(total) or first < total:
            return ""
        return (
            f"; nothing was trained: num_steps={total} is the total with the steps before, and the "
            f"checkpoint had {format_count(first, 'step')}"
        )

    def _describe_worse(self) -> str:
        """Return that the model became worse by the training, as a clause; empty if it did not."""
        entry = (read_json(self.folder.engine_report(0)) or {}).get(WORSE)
        why = entry.get("why") if isinstance(entry, dict) else None
        return f"; {why}" if isinstance(why, str) else ""

    def _store_measured_step(self) -> None:
        """Keep the measured step time for later predictions; an error here does not fail the run."""
        # Imported lazily: it would slow down the supervisor's start.
        from shardscope.runs.explain.measured_step import store_measured_step

        try:
            store_measured_step(self.folder, self.description)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.log(f"the measured step was not stored: {error}")


def describe_node_logs(folder: RunFolder, nodes: Sequence[int]) -> str:
    """Return where lost nodes may have written why, as a sentence; empty if there is no such file."""
    if not isinstance(folder, NodeFolder):
        return ""
    logs = [folder.create_peer(node).supervisor_log for node in nodes]
    # A node whose process did not start has no log: srun writes why into the job's.
    paths = [path.relative_to(folder.path) for path in logs if path.is_file()]
    if len(paths) < len(nodes) and (job_log := find_job_log(folder)) is not None:
        paths.append(job_log)
    if not paths:
        return ""
    return f" Logs in the run folder: {', '.join(map(str, paths))}."


def describe_full_disks(folder: NodeFolder, markers: Sequence[Mapping[str, object]]) -> str:
    """Return which nodes' disks were full when a rank failed there, and what was kept, as clauses."""
    clauses: dict[str, str] = {}
    for rank, marker in enumerate(markers):
        disk = marker.get("full_disk")
        free, total = (disk.get("free"), disk.get("total")) if isinstance(disk, dict) else (None, None)
        if isinstance(disk, dict) and is_int(free) and is_int(total):
            title = folder.create_peer(rank * folder.num_nodes // len(markers)).title
            room = f"{format_gib(free)} of {format_gib(total)} GiB free"
            clauses[title] = f"; the disk of {title} is full: {room} at {disk.get('folder')}"
    if not clauses:
        return ""
    kept = list_resumable(folder.path)
    what = f"kept: {CHECKPOINTS}/{kept[-1].name}" if kept else "no checkpoint was complete"
    return f"{''.join(clauses.values())}; {what}"


def read_markers(folder: RunFolder, world_size: int, log: Callable[[str], None]) -> list[dict[str, object]]:
    """Return each rank's record; empty where there is none.

    Retry for ``MARKER_PATIENCE_SECONDS`` while a file cannot be read: without it a finished run would
    count as failed.
    """
    # One deadline for all ranks: a file system that is gone must not cost ten seconds for each.
    markers: list[dict[str, object]] = []
    deadline = time.monotonic() + MARKER_PATIENCE_SECONDS
    while len(markers) < world_size:
        try:
            markers.append(read_json_if_present(folder.rank(len(markers))) or {})
        except OSError as error:
            if time.monotonic() > deadline:
                log(f"the record of rank {len(markers)} cannot be read: {error}")
                markers.append({})
            time.sleep(MARKER_RETRY_SECONDS)
    return markers
