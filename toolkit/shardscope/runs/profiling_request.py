"""Requests to record the next steps of a live run, their progress, and the recordings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, check_flag, check_integer, refuse
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import read_json, read_lines
from shardscope.runs.stop_request import marks_steps
from shardscope.runs.task_fields import why_no_trace
from shardscope.training.recording import (
    ENTRY,
    FINISHED,
    MAX_PROFILED_STEPS,
    RecordingRequest,
    read_ranks,
    read_request,
)

if TYPE_CHECKING:
    from shardscope.runs.run import Run

LIVE = frozenset({"queued", "starting", "running"})
"""Statuses of a run that obeys a request: ranks that start later read it before their first step."""
COSTS = {
    "plain": 1.10,
    "shapes": 1.09,
    "stacks": 1.10,
    "memory": 1.07,
    "modules": 1.15,
}
"""Processor time of a recorded step over that of one that is not, without options and with one alone: DDP, 2M
parameters, 64 tokens, torch 2.13, November 2026, `python -m benchmarks.profiling_costs`. Single measurements
differed by 0.07."""
COSTS_SOURCE = "Measured with a tiny model on 2 CPU ranks."


@dataclass(frozen=True, kw_only=True)
class RecordingState:
    """Progress of a run's latest recording."""

    request: RecordingRequest
    states: tuple[str, ...]
    """State on each requested rank: "requested", "recording", "written", "failed" or "ignored"."""

    @property
    def is_finished(self) -> bool:
        """Return whether no rank records any more."""
        return all(state in FINISHED for state in self.states)

    @property
    def num_written(self) -> int:
        """Number of ranks whose trace is on disk."""
        return self.states.count("written")


def request_recording(
    run: Run,
    num_steps: int,
    ranks: int | Sequence[int] | None,
    *,
    shapes: bool,
    stacks: bool,
    memory: bool,
    modules: bool,
) -> int:
    """Request a recording of the next steps; see :meth:`Run.profile`. Raises ``ValueError``, ``OSError``."""
    folder = RunFolder(run.folder)
    flags = {"shapes": shapes, "stacks": stacks, "memory": memory, "modules": modules}
    request = RecordingRequest(
        num_steps=check_integer("run.profile num_steps", num_steps, low=1, high=MAX_PROFILED_STEPS),
        ranks=read_ranks("run.profile ranks", ranks, run.world_size - 1),
        number=1 + max((known.number for known in _read_requests(folder)), default=0),
        **{name: check_flag(f"run.profile {name}", flag) for name, flag in flags.items()},
    )
    check_can_record(run)
    run.send("profile", **request.build_command())
    return request.number


def check_can_record(run: Run) -> None:
    """Raise ``ValueError`` unless a recording of the run's next steps can begin now."""
    status = run.status
    if status not in LIVE:
        refuse(
            "run.profile",
            f"a request to a run that is {status}",
            "a run that is queued, starting or running",
            "ss.launch(run.plan, task) again, and run.profile() right after it, or while it trains",
        )
    if not run.trains_the_plan and not marks_steps(RunFolder(run.folder), run.world_size):
        refuse(
            "run.profile",
            "a request to a task without step boundaries",
            "a Pretrain or Finetune, or a function that has read ctx.should_stop on every rank: a recording "
            "begins and ends there",
            "read ctx.should_stop once per step on every rank, or use `with ctx.profile():` in the task",
        )
    state = read_recording_state(run)
    if state is not None and not state.is_finished:
        refuse(
            "run.profile",
            "a second request",
            f"one recording at a time; {state.num_written} of {len(state.states)} ranks have written "
            f"recording {state.request.number}",
            "call it again when run.trace() opens that one",
        )


def read_recording_state(run: Run) -> RecordingState | None:
    """Return the progress of the latest recording; None if none was requested, or begun by the task."""
    folder = RunFolder(run.folder)
    entries = [read_entry(folder, rank) for rank in range(run.world_size)]
    request = max(_read_requests(folder), key=lambda known: known.number, default=None)
    own = [rank for rank, entry in enumerate(entries) if entry is not None and entry[0] == 0]
    # The recording of profile=True may still be in progress, and the request is ignored then.
    if request is None or any(entries[rank] == (0, "recording") for rank in own):
        if not own:
            return None
        request = RecordingRequest(ranks=tuple(own))
    ranks = range(run.world_size) if request.ranks is None else request.ranks
    states = []
    for rank in ranks:
        entry = entries[rank] if rank < len(entries) else None
        states.append(entry[1] if entry is not None and entry[0] == request.number else "requested")
    return RecordingState(request=request, states=tuple(states))


def is_recording(run: Run) -> bool:
    """Return whether a rank is recording, or writing what it has recorded."""
    state = read_recording_state(run)
    return state is not None and "recording" in state.states


def read_entry(folder: RunFolder, rank: int) -> tuple[int, str] | None:
    """Return number and state of the rank's latest recording; None before its first."""
    entry = (read_json(folder.engine_report(rank)) or {}).get(ENTRY)
    if not isinstance(entry, dict) or not isinstance(entry.get("number"), int):
        return None
    return entry["number"], str(entry.get("state"))


def find_recording(run: Run, number: int | None) -> Path:
    """Return the folder of a recording's traces, by default the newest. Raises ``ValueError``."""
    folder = RunFolder(run.folder)
    recorded = folder.list_recordings()
    state = read_recording_state(run) if run.status in LIVE else None
    if number is not None:
        number = check_integer("run.trace recording", number, low=0, high=max([0, *recorded]) + 1)
    if state is not None and not state.is_finished and number in (None, state.request.number):
        raise ValueError(
            f"Recording {state.request.number} of the run {run.name} is in progress: {state.num_written} of "
            f"{len(state.states)} ranks have written their trace. Nearest fix: wait for "
            f"{state.request.num_steps + 1} steps and call run.trace() again"
            + (f", or run.trace({recorded[-1]}) for the one before." if recorded else ".")
        )
    if number is None and recorded:
        return folder.recording(recorded[-1])
    if not recorded:
        if run.status in FINAL and is_recording(run):
            raise ValueError(
                f"The run {run.name} has no trace: it ended while it recorded, before a rank had "
                "written one. Nearest fix: wait until it is written before a second stop, or record fewer "
                "steps."
            )
        raise ValueError(why_no_trace(run.name, run.status, run.task_fields))
    if number not in recorded:
        names = ", ".join(map(str, recorded))
        refuse("run.trace recording", number, f"recordings of this run: {names}", Value(recorded[-1]))
    return folder.recording(number)


def _read_requests(folder: RunFolder) -> list[RecordingRequest]:
    requests = []
    for command in read_lines(folder.control):
        if command.get("command") == "profile" and "recording" in command:
            try:
                requests.append(read_request(command))
            except ValueError:  # Other programs may write commands too.
                continue
    return requests
