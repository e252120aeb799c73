"""``Context``, the argument of a task ``f(ctx)``: a rank with its process group, device and plan set up."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex, Unpack

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import RESERVED, encode, write_json
from shardscope.records.logged_steps import LoggedSteps
from shardscope.runs.launch.commands import CommandFeed, PollTable
from shardscope.runs.launch.profiling import Profile
from shardscope.runs.stop_request import READS_COMMANDS, READS_STOPS, SAW_STOP, record_reader
from shardscope.training.recording import Recorder, RecordingRequest, read_request

if TYPE_CHECKING:
    import torch

    from shardscope.core.plan import Plan
    from shardscope.runs.launch.profiling import ProfileOptions
    from shardscope.training.engine import Engine

MAX_PENDING = 1000
"""Maximum number of unread commands; the oldest ones are dropped."""


class Context:
    """One rank's view of its run."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        plan: Plan,
        folder: RunFolder,
        polls: PollTable | None = None,
    ) -> None:
        self.rank = rank
        """Rank, from 0 to ``world_size - 1``."""
        self.world_size = world_size
        """Number of ranks."""
        self.device = device
        """Device of this rank: ``cuda:<local rank>`` or ``cpu``."""
        self.plan = plan
        """The plan that was launched."""
        self._folder = folder
        self._feed = CommandFeed(folder, polls)
        self._pending: deque[dict[str, object]] = deque(maxlen=MAX_PENDING)
        self._recorded: dict[str, object] = {}
        self._stop_requested = False
        self.stops_without_checkpoint = False
        """Whether a stop without a checkpoint was requested, after which the supervisor ends the ranks."""
        self._step_reader = ""
        self._recorded_readers: set[str] = set()
        self._logged = LoggedSteps(folder, rank)
        self._last_step = self._logged.last_step
        self._events: int | None = None
        self._line_is_broken = self._logged.ends_within_line
        self._num_lost = 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    @cached_property
    def recorder(self) -> Recorder:
        """The recorder of a function's steps, for ``run.profile``; ``run_rank`` ends it with the task."""
        # Reading self.engine would build one for a task that has none.
        return Recorder(self, lambda: self.engine.list_layers() if "engine" in self.__dict__ else {})

    @cached_property
    def engine(self) -> Engine:
        """The training engine of the plan's framework, with ``setup``, ``step``, ``save`` and ``load``."""
        from shardscope.frameworks.engines import get_engine_class

        engine: Engine = get_engine_class(self.plan)(self)
        return engine

    def log(self, step: int | None = None, **metrics: object) -> None:
        """Append metrics of one step; ``step`` defaults to the one after the last logged (from 0).

        In a later attempt of a run, metrics of the same names and step as in an earlier one are not logged
        again.

        Values are numbers, one-element tensors, text, bools or None; ``run.metrics()`` returns NaN and
        infinities unchanged. Raises ``ValueError`` for a reserved name or a value of another kind.
        """
        for name in ("rank", "time"):
            if name in metrics:
                raise ValueError(f"ctx.log name is {name!r}; allowed: any but {', '.join(RESERVED)}.")
        number = self._last_step + 1 if step is None else int(step)
        plain = {name: _convert_value(name, value) for name, value in metrics.items()}
        self._last_step = number
        event: dict[str, object] = {"step": number, "rank": self.rank, "time": time.time(), **plain}
        if not self._logged.has(event):
            self._write_event(event)

    def log_memory(self, step: int | None = None) -> None:
        """Log ``memory_bytes`` and ``peak_memory_bytes`` of this rank, the input of ``run.memory()``."""
        self.log(step=step, **self.memory_metrics())

    def memory_metrics(self) -> dict[str, int]:
        """Return the current and the peak bytes: torch's allocated memory on a GPU, resident on a CPU."""
        if self.device.type == "cuda":
            import torch

            from shardscope.training.accounting.tensors import read_peak_allocated

            return {
                "memory_bytes": int(torch.cuda.memory_allocated(self.device)),
                "peak_memory_bytes": read_peak_allocated(self.device),
            }
        import resource

        import psutil

        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux.
        now = int(psutil.Process().memory_info().rss)
        return {
            "memory_bytes": now,
            "peak_memory_bytes": max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit),
        }

    def profile(
        self, steps: int | None = None, *, warmup: int = 1, skip: int = 0, **options: Unpack[ProfileOptions]
    ) -> Profile:
        """Return a context manager that profiles its body into the run's traces.

        Without ``steps`` the whole body is recorded. With ``steps``, call ``.step()`` on the object that
        ``with`` binds after each training step: the first ``skip`` steps run without the profiler, the next
        ``warmup`` run under it unrecorded, then ``steps`` are recorded. ``options`` are passed to
        ``torch.profiler.profile``. A later recording replaces an earlier one, but those of ``run.profile``.
        """
        return Profile(self._folder, self.rank, steps=steps, warmup=warmup, skip=skip, options=options)

    def record_steps(
        self, steps: int, *, warmup: int, skip: int, recording: int, options: Mapping[str, bool]
    ) -> Profile:
        """Return a profile like :meth:`profile`'s, for the recording of that number (0: the task's own)."""
        profiler_options: ProfileOptions = {**options}  # type: ignore[typeddict-item]
        return Profile(
            self._folder,
            self.rank,
            steps=steps,
            warmup=warmup,
            skip=skip,
            recording=recording,
            options=profiler_options,
        )

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested.

        Read it once per step on *every* rank: all get the same answer. A recording that ``run.profile``
        requests begins and ends here.
        """
        stop_requested = self._poll_for_stop()
        self._mark_step(READS_STOPS)
        return stop_requested

    def commands(self) -> list[dict[str, object]]:
        """Return the commands other than stop since the last call, such as ``{"command": "profile", ...}``.

        Like ``should_stop`` this polls the control file: every rank must make the same calls in the same
        order. At most the latest 1000 commands are kept. Requests of ``run.profile`` are obeyed here, and
        not returned.
        """
        self._poll_commands()
        self._note_reader(READS_COMMANDS)
        self._mark_step(READS_COMMANDS)
        return self._pop_pending()

    def poll(self) -> tuple[bool, list[dict[str, object]]]:
        """Return ``should_stop`` and all new commands with one poll: each poll takes a lock of all ranks.

        For a training loop that records its steps itself.
        """
        return self._poll_for_stop(), self._pop_pending()

    def record(self, name: str, mapping: Mapping[str, object]) -> None:
        """Write what an engine built (shards, stage, groups), for ``run.engine_reports()``."""
        self._recorded[name] = dict(mapping)
        try:
            write_json(self._folder.engine_report(self.rank), self._recorded)
        except OSError as error:
            # A full disk costs a record, not the training run; the next one has this one too.
            _print_notice(f"the record {name!r} was not written: {error}")

    def barrier(self) -> None:
        """Wait for every rank."""
        import torch.distributed as dist

        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def close(self) -> None:
        """Close the event file. ``run_rank`` calls it after the task."""
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def _poll_for_stop(self) -> bool:
        self._poll_commands()
        self._note_reader(READS_STOPS)
        return self._stop_requested

    def _note_reader(self, kind: str) -> None:
        if kind not in self._recorded_readers:
            self._recorded_readers.add(kind)
            with contextlib.suppress(OSError):  # A full disk: "Save and stop" is then not offered.
                record_reader(self._folder, self.rank, kind)

    def _mark_step(self, reader: str) -> None:
        """End a step of the recording in progress, and start a requested one.

        A task may read both ``should_stop`` and ``commands()`` in a step: the one that was read when the
        recording began counts.
        """
        if self.recorder.is_recording and self._step_reader == reader:
            self.recorder.count_step()
            if self._stop_requested:
                # The supervisor waits for the trace before it ends the ranks.
                self.recorder.end()
        for command in list(self._pending):
            if command["command"] == "profile" and "recording" in command:
                self._pending.remove(command)
                with contextlib.suppress(ValueError):  # Not of run.profile: nobody waits for it.
                    self._begin_recording(read_request(command), reader)

    def _begin_recording(self, request: RecordingRequest, reader: str) -> None:
        if not self.recorder.is_recording:
            self._step_reader = reader
        self.recorder.obey(request, num_left=None)

    def _pop_pending(self) -> list[dict[str, object]]:
        commands = list(self._pending)
        self._pending.clear()
        return commands

    def _poll_commands(self) -> None:
        # A stop is remembered, so that `commands()` does not lose it for `should_stop`, and the reverse.
        for command in self._feed.poll():
            if command["command"] == "stop":
                if self._stop_requested and command.get("kernel_ended") is True:
                    continue  # A checkpoint that is being saved is what the stop before it was for.
                self._stop_requested = True
                self.stops_without_checkpoint |= command.get("checkpoint") is not True
                self._note_reader(SAW_STOP)
            else:
                self._pending.append(command)

    def _write_event(self, event: dict[str, object]) -> None:
        line = encode(event)
        try:
            if self._events is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._events = os.open(self._folder.events(self.rank), flags, 0o600)
            # One unbuffered write per line: a rank that is killed loses none of its logged metrics. After a
            # write that was cut short the next line starts with a newline, so that only one line is lost.
            data = b"\n" + line if self._line_is_broken else line
            self._line_is_broken = os.write(self._events, data) != len(data)
        except OSError as error:
            # A full disk costs a metric, not the training run.
            self._line_is_broken = True
            if self._events is not None:
                # The time of the file needs no space: it tells the supervisor that this rank goes on.
                with contextlib.suppress(OSError):
                    os.utime(self._events)
            if not self._num_lost:
                _print_notice(f"metrics of step {event['step']} were not written: {error}")
            self._num_lost += 1
        else:
            if self._num_lost and not self._line_is_broken:
                # The log is on the same disk, so the first message may be lost as well.
                _print_notice(
                    f"{self._num_lost} lines of metrics before step {event['step']} were not written"
                )
                self._num_lost = 0


def _print_notice(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"shardscope: {text}", file=sys.stderr)


def _convert_value(name: str, value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    try:
        # `item` of a tensor or numpy array with several elements raises, which becomes the error below.
        if hasattr(value, "item"):
            number: int | float | bool = value.item()
            return number
        if isinstance(value, SupportsFloat | SupportsIndex):
            return float(value)
        raise TypeError("neither a number nor a tensor")
    except Exception as error:
        raise ValueError(
            f"ctx.log {name} is a {type(value).__name__}; allowed: one number, text, bool or None. "
            f"Nearest fix: {name}=float({name}.mean())."
        ) from error
