"""Recordings of some steps of a run with torch.profiler: their requests, and the recorder on each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from shardscope.core.errors import Value, check_flag, check_integer, refuse
from shardscope.training.ranges import Ranges

if TYPE_CHECKING:
    from torch.nn import Module

    from shardscope.training.engine import StepProfile, TrainingContext

PROFILED_STEPS = 3
MAX_PROFILED_STEPS = 1000
"""Maximum number of profiled steps: a longer trace would be gigabytes in the rank's memory."""
MAX_RECORDINGS = 100_000
ENTRY = "recording"
"""Entry of a rank's engine report with the state of its latest recording."""
IS_WRITING = "is_writing"
"""In that entry: the recorded steps are over, and the trace is being written."""
FINISHED = frozenset({"written", "failed", "ignored"})
"""States of a recording that is not in progress any more."""


@dataclass(frozen=True, kw_only=True)
class RecordingRequest:
    """Request of a recording: the steps, the ranks, and the details of each operator."""

    num_steps: int = PROFILED_STEPS
    ranks: tuple[int, ...] | None = None
    """Ranks that record; None: all of them."""
    number: int = 0
    """Number of the recording in the run; 0 is that of ``profile=True``, of which a run has one."""
    shapes: bool = False
    """Whether to record the shapes of the operators' inputs."""
    stacks: bool = False
    """Whether to record Python stacks."""
    memory: bool = False
    """Whether to record each allocation and free."""
    modules: bool = False
    """Whether to record a range for each layer's forward."""

    def build_command(self) -> dict[str, object]:
        """Return the fields of the command in ``control.jsonl``, which :func:`read_request` reads."""
        flags = {name: getattr(self, name) for name in ("shapes", "stacks", "memory", "modules")}
        ranks = None if self.ranks is None else list(self.ranks)
        return {"steps": self.num_steps, "ranks": ranks, "recording": self.number, **flags}

    @property
    def profiler_options(self) -> dict[str, bool]:
        """The arguments of ``torch.profiler.profile``."""
        # torch's own with_modules records nothing of eager modules (torch 2.13, profiler/profiler.py).
        return {"record_shapes": self.shapes, "with_stack": self.stacks, "profile_memory": self.memory}


def read_request(command: Mapping[str, object]) -> RecordingRequest:
    """Return the request of a "profile" command. Raises ``ValueError``: any program may write commands."""
    number = check_integer("profile recording", command.get("recording", 0), low=0, high=MAX_RECORDINGS)
    return RecordingRequest(
        num_steps=check_integer(
            "profile steps", command.get("steps", PROFILED_STEPS), low=1, high=MAX_PROFILED_STEPS
        ),
        ranks=read_ranks("profile ranks", command.get("ranks")),
        number=number,
        # A command without a number, by run.send(), records what profile=True does.
        shapes=check_flag("profile shapes", command.get("shapes", number == 0)),
        stacks=check_flag("profile stacks", command.get("stacks", False)),
        memory=check_flag("profile memory", command.get("memory", False)),
        modules=check_flag("profile modules", command.get("modules", False)),
    )


def read_ranks(field: str, ranks: object, high: int = 2**31 - 1) -> tuple[int, ...] | None:
    """Return ``ranks`` in order, each once; None stays None. Raises ``ValueError`` for others than 0 to high.

    A single number is a list of one.
    """
    if ranks is None:
        return None
    numbers = ranks if isinstance(ranks, Sequence) and not isinstance(ranks, str) else [ranks]
    if not numbers:
        refuse(field, ranks, "at least one rank, or None for all", Value(None))
    return tuple(sorted({check_integer(field, number, low=0, high=high) for number in numbers}))


def plan_recording(num_left: int | None, num_steps: int, skip: int) -> tuple[int, int, int]:
    """Return the numbers of steps to skip, to warm up and to record, of the ``num_left`` remaining ones.

    If there are too few, fewer steps are skipped, then fewer recorded. The warmup stays, because the first
    recorded step would otherwise include the profiler's start; only a single step is recorded without it.
    None: the number of remaining steps is unknown.
    """
    if num_left is None:
        return skip, 1, num_steps
    warmup = 1 if num_left > 1 else 0
    recorded = min(num_steps, num_left - warmup)
    return min(skip, num_left - warmup - recorded), warmup, recorded


class Recorder:
    """Recorder of at most one recording at a time; as a context manager it ends the current one.

    While it records, SIGTERM first writes the trace: the launcher sends it to the other ranks when one dies.
    """

    def __init__(self, ctx: TrainingContext, list_layers: Callable[[], Mapping[str, Module]]) -> None:
        self._ctx, self._list_layers = ctx, list_layers
        self._profile: StepProfile | None = None
        self._request = RecordingRequest()
        self._ranges = Ranges()
        self._num_left = 0
        self._is_writing = self._must_end = False
        self._handler_before: object = None

    @property
    def is_recording(self) -> bool:
        """Return whether a recording is in progress, its skipped steps included."""
        return self._num_left > 0

    def obey(self, request: RecordingRequest, *, num_left: int | None) -> None:
        """Start a requested recording, and report it in the log; ignore it if one is in progress."""
        if self.is_recording:
            print("ignored a command: profile, while a recording is in progress", flush=True)
            self._note(request, "ignored")
            return
        recorded = plan_recording(num_left, request.num_steps, 0)[2]
        print(f"recording {recorded:,} step{'s' * (recorded > 1)}", flush=True)
        self.start(request, num_left=num_left)

    def start(self, request: RecordingRequest, *, num_left: int | None, skip: int = 0) -> None:
        """Start to record the next of the ``num_left`` remaining steps, as many as there are; None: unknown.

        A rank that is not among the requested ones only counts the steps.
        """
        if num_left is not None and num_left < 1:
            return
        skip, warmup, recorded = plan_recording(num_left, request.num_steps, skip)
        self._request = request
        self._num_left = skip + warmup + recorded
        if request.ranks is not None and self._ctx.rank not in request.ranks:
            return
        self._note(request, "recording")
        self._profile = self._ctx.record_steps(
            recorded, warmup=warmup, skip=skip, recording=request.number, options=request.profiler_options
        )
        self._handle_termination()
        self._ranges.begin(self._ctx.device, self._list_layers() if request.modules else {})
        # Entered by hand: a recording begins and ends between two steps, not with a block of the loop.
        self._profile.__enter__()

    def count_step(self) -> None:
        """Mark the end of a training step."""
        if not self.is_recording:
            return
        self._num_left -= 1
        if self._profile is not None:
            if not self.is_recording:  # After the last step, torch writes the trace at once.
                self._note(self._request, "recording", is_writing=True)
            with self._writing():
                self._profile.step()
        if not self.is_recording:
            self.end()

    def end(self) -> None:
        """End the recording in progress between two steps, and write the trace of those recorded so far."""
        self._stop(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stop(kind, error, where)

    def _stop(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        # Forget the profile first: if writing its trace fails, __exit__ must not write it a second time.
        profile, self._profile = self._profile, None
        self._num_left = 0
        if profile is None:
            return
        self._note(self._request, "recording", is_writing=True)
        with self._writing(profile):
            profile.__exit__(kind, error, where)
        self._ranges.end()
        # A recording that ended in its warmup has no trace.
        self._note(self._request, "written" if profile.written else "failed")
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)  # type: ignore[arg-type]
            self._handler_before = None

    @contextlib.contextmanager
    def _writing(self, profile: StepProfile | None = None) -> Iterator[None]:
        """Postpone SIGTERM, and report a trace that cannot be written: it does not end the training."""
        self._is_writing = True
        try:
            yield
        except OSError as error:
            print(f"shardscope: the trace was not written: {error}", flush=True)
        finally:
            self._is_writing = False
        if self._must_end:
            self._end_process()

    def _note(self, request: RecordingRequest, state: str, *, is_writing: bool = False) -> None:
        """Record the state for ``run.profile`` and ``run.trace``, which wait for all ranks' traces."""
        with contextlib.suppress(OSError):  # A full disk: the next request waits for the end of the run.
            entry: dict[str, object] = {"number": request.number, "state": state}
            self._ctx.record(ENTRY, entry | ({IS_WRITING: True} if is_writing else {}))

    # ---- SIGTERM while a recording is in progress

    def _handle_termination(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Others cannot set handlers.
            self._handler_before = signal.signal(signal.SIGTERM, self._on_termination)

    def _on_termination(self, number: int, frame: FrameType | None) -> None:
        if self._is_writing:
            self._must_end = True
            return
        self._must_end = True
        self.end()
        self._end_process()

    @staticmethod
    def _end_process() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
