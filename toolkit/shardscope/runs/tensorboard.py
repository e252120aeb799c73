"""TensorBoard event files of a run: one per rank, written by the supervisor from the logged metrics."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.records.json_files import RESERVED, finite_or_special

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event

MAX_STEP = 2**63 - 1
"""``Event.step`` is an int64 (tensorboard/compat/proto/event.proto)."""


class ScalarFile:
    """The event file of one rank. It is created with the first line of metrics that has a number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: EventsWriter | None = None

    def append(self, records: list[dict[str, object]]) -> None:
        """Write one event for each line of metrics that has a step and a number. Raises ``OSError``."""
        # Import lazily, at the first number: it would delay the start of every run, and most tasks of a
        # notebook end within seconds.
        events = [event for record in records if (event := make_scalar_event(record)) is not None]
        if not events:
            return
        if self._writer is None:
            with _hide_torch():
                from tensorboardX.event_file_writer import EventsWriter
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # The synchronous writer: SummaryWriter's thread would swallow a full disk's OSError.
            self._writer = EventsWriter(str(self.folder / "events"), ".shardscope")
            for path in self.folder.iterdir():
                path.chmod(0o600)  # Like all files of a run folder; tensorboardX uses the user's umask.
        for event in events:
            self._writer.write_event(event)
        self._writer.flush()


def make_scalar_event(record: Mapping[str, object]) -> Event | None:
    """Return one line of metrics as a TensorBoard event, or None if it has no step or no number."""
    step, when = record.get("step"), record.get("time")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        return None
    numbers = list(find_numbers(record))
    if not numbers:
        return None
    with _hide_torch():
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
    # TensorBoard's horizontal axis may be wall time; a damaged record without one goes to the epoch.
    wall_time = float(when) if isinstance(when, int | float) else 0.0
    return Event(wall_time=wall_time, step=step, summary=Summary(value=values))


@contextlib.contextmanager
def _hide_torch() -> Iterator[None]:
    """Prevent tensorboardX from importing torch, which it does if it can (2.6.5, x2num.py, writer.py).

    torch would add 300 MiB and seconds to the start of the supervisor.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def find_numbers(record: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number in one line of metrics."""
    for name, value in record.items():
        number = finite_or_special(value)
        if name in RESERVED or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        # JSON integers may exceed the range of a float; ``float`` would raise OverflowError.
        is_too_large = isinstance(number, int) and abs(number) > 1e308
        yield str(name), math.copysign(math.inf, number > 0 or -1) if is_too_large else float(number)
