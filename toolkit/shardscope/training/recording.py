"""Profiling of some of the remaining steps of a run with torch.profiler."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from shardscope.training.engine import StepProfile, TrainingContext


def plan_recording(num_left: int, num_steps: int, skip: int) -> tuple[int, int, int]:
    """Return the numbers of steps to skip, to warm up and to record, of the ``num_left`` remaining ones.

    If there are too few, fewer steps are skipped, then fewer recorded. The warmup stays, because the first
    recorded step would otherwise include the profiler's start; only a single step is recorded without it.
    """
    warmup = 1 if num_left > 1 else 0
    recorded = min(num_steps, num_left - warmup)
    return min(skip, num_left - warmup - recorded), warmup, recorded


class Recorder:
    """Recorder of at most one profile at a time; as a context manager it ends the current one."""

    def __init__(self, ctx: TrainingContext) -> None:
        self._ctx = ctx
        self._profile: StepProfile | None = None
        self._num_left = 0

    @property
    def is_recording(self) -> bool:
        """Return whether a recording is in progress, its skipped steps included."""
        return self._profile is not None

    def start(self, num_steps: int, *, num_left: int, skip: int = 0) -> None:
        """Start to record ``num_steps`` of the ``num_left`` remaining steps, or as many as there are."""
        if num_left < 1:
            return
        skip, warmup, recorded = plan_recording(num_left, num_steps, skip)
        self._profile = self._ctx.profile(steps=recorded, warmup=warmup, skip=skip)
        # Entered by hand: a recording begins and ends between two steps, not with a block of the loop.
        self._profile.__enter__()
        self._num_left = skip + warmup + recorded

    def count_step(self) -> None:
        """Mark the end of a training step."""
        if self._profile is None:
            return
        self._profile.step()
        self._num_left -= 1
        if self._num_left == 0:
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
        if profile is not None:
            profile.__exit__(kind, error, where)
