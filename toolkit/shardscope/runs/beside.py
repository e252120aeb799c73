"""What the supervisor does beside supervising, once a second: it looks for a hang, keeps the host's numbers
and the cards', writes TensorBoard's events and overwrites secrets in logs.

Whatever goes wrong here costs what it was for, and never the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardscope.runs.card_watch import CardWatch
from shardscope.runs.folder import RunFolder
from shardscope.runs.hang import HangWatch
from shardscope.runs.host_watch import HostWatch
from shardscope.runs.metrics_table import csv_in_pieces
from shardscope.runs.quiet import QuietWatch
from shardscope.runs.records import LineTail
from shardscope.runs.redaction import LogCleaner
from shardscope.runs.tensorboard import ScalarFile

LOOK_SECONDS = 1.0
BYTES_PER_LOOK = 2**25
"""Of all logs: however much ranks print, a stop is obeyed soon. What is left is looked at next time."""


class Beside:
    """One run's; ``say`` takes a line for the supervisor's log."""

    def __init__(self, folder: RunFolder, world_size: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.world_size = world_size
        self.host = HostWatch(folder, world_size)
        self._cards = CardWatch(folder)
        self._say = say
        self._given_up: set[str] = set()
        self._hang = HangWatch(folder, world_size)
        self._quiet = QuietWatch(folder, world_size)
        self._events = [LineTail(folder.events(rank)) for rank in range(world_size)]
        self._scalars = [ScalarFile(folder.tensorboard / f"rank-{rank}") for rank in range(world_size)]
        logs = [folder.launcher_log, folder.supervisor_log, *map(folder.log, range(world_size))]
        self._logs = [LogCleaner(path) for path in logs]

    @property
    def hangs(self) -> bool:
        """Whether the run was said to hang, and still does."""
        return self._hang.hangs or self._quiet.hangs

    def look(self, seconds: float, *, is_running: bool) -> str | None:
        """``seconds`` since the last look. What there is to say of the run while it goes on, or None."""
        new = {rank: tail.read() for rank, tail in enumerate(self._events)}
        self._try("TensorBoard events", lambda: self._write_scalars(new))
        self._try("secrets in logs", lambda: self._clean(BYTES_PER_LOOK // len(self._logs)))
        self._try("the host's memory", self.host.look)
        self._try("the cards", self._cards.look)
        if not is_running:
            return None
        found: str | None = self._try("a hang", lambda: self._hang.look(new, seconds))
        still: str | None = self._try(
            "a standstill", lambda: self._quiet.look(new, seconds, has_steps=self._hang.has_steps)
        )
        return found or still

    def finish(self) -> Iterator[None]:
        """The last look, and what is written at the end: a piece of work for each time that it is asked.

        However much it is, whoever asks can do something else in between. Secrets come first.
        """
        self._cards.finish()
        # A log of gigabytes keeps the others' secrets waiting no longer than it must.
        for log in sorted(self._logs, key=LogCleaner.num_left):
            yield from self._pieces("secrets in logs", log.finish())
        new = {rank: tail.read() for rank, tail in enumerate(self._events)}
        self._try("TensorBoard events", lambda: self._write_scalars(new))
        yield
        yield from self._pieces("metrics.csv", csv_in_pieces(self.folder, self.world_size))

    def _write_scalars(self, new: dict[int, list[dict[str, Any]]]) -> None:
        for rank, records in new.items():
            self._scalars[rank].append(records)

    def _clean(self, max_bytes: int) -> None:
        for log in self._logs:
            log.clean(max_bytes)

    def _pieces(self, what: str, pieces: Iterable[object]) -> Iterator[None]:
        left = iter(pieces)
        while self._try(what, lambda: next(left, left) is not left):
            yield

    def _try(self, what: str, do: Callable[[], Any]) -> Any:
        if what in self._given_up or not self.folder.path.is_dir():
            return None
        try:
            return do()
        except Exception as error:
            self._given_up.add(what)
            self._say(f"gave up {what}: {type(error).__name__}: {error}")
            return None
