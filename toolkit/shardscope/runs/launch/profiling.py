"""Profiling of a rank with ``torch.profiler`` into the run's traces, entirely or by a schedule of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict

from shardscope.core.errors import check_integer
from shardscope.records.folder import RunFolder

if TYPE_CHECKING:
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

MAX_STEPS = 1_000_000


class ProfileOptions(TypedDict, total=False):
    """Arguments of ``torch.profiler.profile`` (torch 2.13)."""

    activities: Iterable[ProfilerActivity]
    schedule: Callable[[int], ProfilerAction]
    on_trace_ready: Callable[[profile], object]
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    acc_events: bool


class Profile:
    """Profiler context manager. With a schedule, call ``.step()`` after each training step.

    torch writes rank and world size into the trace itself, because the process group is initialized.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        *,
        steps: int | None,
        warmup: int,
        skip: int,
        options: ProfileOptions,
        recording: int = 0,
    ) -> None:
        self._path = folder.trace(rank, recording)
        self._partial = folder.temporary / f"{os.getpid()}-{self._path.name}"
        self._steps = None if steps is None else check_integer("steps", steps, low=1, high=MAX_STEPS)
        self._warmup = check_integer("warmup", warmup, low=0, high=MAX_STEPS)
        self._skip = check_integer("skip", skip, low=0, high=MAX_STEPS)
        self._options = options
        self._profiler: profile | None = None
        self.written = False
        """Whether the trace is on disk."""

    def __enter__(self) -> Self:
        import torch
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        options: ProfileOptions = {"activities": activities, "record_shapes": True, **self._options}
        if self._steps is not None:
            schedule = profiler.schedule(
                wait=0, warmup=self._warmup, active=self._steps, repeat=1, skip_first=self._skip
            )
            options |= {"schedule": schedule, "on_trace_ready": self._write_trace}
        self._profiler = profiler.profile(**options)
        self._profiler.__enter__()
        return self

    def step(self) -> None:
        """Mark the end of a training step: advances the schedule and adds a mark to the trace."""
        assert self._profiler is not None, "the profile is entered"
        self._profiler.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        assert self._profiler is not None, "the profile is entered"
        # With a schedule torch calls _write itself, even if the block ends within the recorded steps.
        self._profiler.__exit__(kind, error, where)
        if self._steps is None:
            self._write_trace(self._profiler)

    def _write_trace(self, profiler: profile) -> None:
        self._partial.parent.mkdir(mode=0o700, exist_ok=True)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Write beside the final name and rename: a reader never sees half a trace.
        profiler.export_chrome_trace(str(self._partial))
        self._partial.chmod(0o600)  # torch creates it with the user's umask.
        self._partial.replace(self._path)
        self.written = True
