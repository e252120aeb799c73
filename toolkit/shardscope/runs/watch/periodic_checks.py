"""The supervisor's periodic checks: hang detection, host and GPU samples, TensorBoard events, log redaction.

They run once a second. An error disables only the check that raised it, never the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import SampledLines, read_json
from shardscope.records.metrics_table import write_csv_in_pieces
from shardscope.records.redaction import LogCleaner, known_secrets
from shardscope.records.regular_files import size_of
from shardscope.runs.tensorboard import ScalarFile
from shardscope.runs.watch.gpu_monitor import GpuSampler
from shardscope.runs.watch.hang import HangDetector
from shardscope.runs.watch.host_monitor import HostMemoryMonitor
from shardscope.runs.watch.node_hangs import NodeHangs
from shardscope.runs.watch.standstill import StandstillDetector
from shardscope.training.tasks.final_export import NOT_SAVED, WAITS

Result = TypeVar("Result")

CHECK_SECONDS = 1.0
TENSORBOARD = "TensorBoard events"
"""Name of that check."""
BYTES_PER_CHECK = 2**25
"""Maximum bytes of logs redacted in one call, so that the supervisor obeys a stop soon."""
METRIC_BYTES_PER_CHECK = 2**19
"""Maximum bytes of metrics read in one call, about 5,000 lines: a tenth of a second, TensorBoard included."""
MAX_BEHIND_BYTES = 2**24
"""Maximum backlog of metrics, all ranks together; beyond it only the latest lines are read."""


class PeriodicChecks:
    """The periodic checks of one run.

    ``log`` writes a line to the supervisor's log; ``secrets`` returns the secrets known at the time.
    """

    def __init__(
        self,
        folder: RunFolder,
        world_size: int,
        log: Callable[[str], None],
        secrets: Callable[[], list[str]] = known_secrets,
        *,
        writes_tensorboard: bool = True,
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.host = HostMemoryMonitor(folder, world_size)
        self._gpus = GpuSampler(folder)
        self._log = log
        self._disabled: set[str] = set() if writes_tensorboard else {TENSORBOARD}
        self._hang = HangDetector(folder, world_size)
        self._standstill = StandstillDetector(folder, world_size)
        self._node_hangs = None
        if isinstance(folder, NodeFolder) and folder.num_nodes > 1:
            self._node_hangs = NodeHangs(folder, world_size)
        # Each node watches its own ranks.
        self.ranks = folder.select_ranks(world_size)
        self._events = {
            rank: SampledLines(
                folder.events(rank),
                piece_bytes=METRIC_BYTES_PER_CHECK // len(self.ranks),
                max_behind_bytes=MAX_BEHIND_BYTES // len(self.ranks),
                # Earlier attempts have written their metrics to TensorBoard.
                start=size_of(folder.events(rank)) if folder.attempt > 1 else 0,
            )
            for rank in self.ranks
        }
        self._is_sampling = False
        self._export_waits = ""
        self._not_saved = ""
        """Why the trained weights are not exported yet; empty if that is not reported."""
        self._scalars = {rank: ScalarFile(folder.tensorboard / f"rank-{rank}") for rank in self.ranks}
        logs = [folder.launcher_log, folder.supervisor_log, *map(folder.log, self.ranks)]
        self._logs = [LogCleaner(path, secrets) for path in logs]

    @property
    def hangs(self) -> bool:
        """Return whether this node's ranks were found to hang and have not recovered."""
        return self._hang.hangs or self._standstill.hangs

    @property
    def run_hangs(self) -> bool:
        """Return whether the run was reported to hang, on any node, or to wait for space on its disk."""
        hangs = self.hangs if self._node_hangs is None else self._node_hangs.hangs
        return hangs or bool(self._export_waits)

    def check(self, seconds: float, *, is_running: bool) -> str | None:
        """Run all checks once. Return a new message about the running run, or None.

        ``seconds`` have passed since the last call. Hangs are only checked while ``is_running``.
        """
        # The metrics are read once, for TensorBoard and for both hang detections.
        new = {rank: lines.read() for rank, lines in self._events.items()}
        self._try_check(TENSORBOARD, lambda: self._write_scalars(new))
        self._try_check("secrets in logs", lambda: self._redact_logs(BYTES_PER_CHECK // len(self._logs)))
        self._try_check("the host's memory", self.host.sample)
        self._try_check("the GPUs", self._gpus.request_sample)
        if not is_running:
            return None
        before = self._export_waits
        self._export_waits = self._try_check("the export", lambda: self._read_note(WAITS, before)) or ""
        if self._export_waits != before:
            return self._export_waits or "the trained weights are written"
        if self._export_waits:  # The ranks do nothing else meanwhile.
            return None
        hang = self._try_check("a hang", lambda: self._hang.check(new, seconds))
        standstill = self._try_check(
            "a standstill", lambda: self._standstill.check(new, seconds, has_steps=self._hang.has_steps)
        )
        message = hang or standstill
        if (nodes := self._node_hangs) is not None:
            report = self._hang.report or self._standstill.report
            message = self._try_check("hangs of all nodes", lambda: nodes.check(report, message, seconds))
        # The reason of a run that hangs stays that of the hang.
        if message is None and not self.run_hangs:
            message = self._try_check("checkpoints", self._report_checkpoints) or self._report_sampling()
        return message

    def _report_checkpoints(self) -> str | None:
        """Return a new sentence about checkpoints that the disk did not take, else None."""
        before = self._not_saved
        self._not_saved = self._read_note(NOT_SAVED, before)
        if self._not_saved == before:
            return None
        return self._not_saved or "checkpoints are saved again"

    def _read_note(self, key: str, before: str) -> str:
        """Return what rank 0 has noted for the supervisor, such as why it waits; empty if nothing."""
        record = read_json(self.folder.rank(0))
        if record is None:  # It is being written, on a full disk in place.
            return before
        note = record.get(key)
        return note if isinstance(note, str) else ""

    def _report_sampling(self) -> str | None:
        """Return a sentence when lines of metrics were skipped for the first time, else None."""
        ranks = [str(rank) for rank, lines in self._events.items() if lines.num_skipped_bytes]
        if self._is_sampling or not ranks:
            return None
        self._is_sampling = True
        return (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} log{'s' * (len(ranks) == 1)} more lines of "
            "metrics than can be read: all of them are in the run folder, TensorBoard gets a sample. Nearest "
            "fix: call ctx.log once per step"
        )

    def finish(self) -> Iterator[None]:
        """Do the last check and the final writes, one piece of work per iteration.

        The caller can do other work between the pieces, however large the logs are. Redaction comes first.
        """
        self._gpus.finish()
        # Smallest first: a log of gigabytes must not delay the redaction of the others.
        for log in sorted(self._logs, key=LogCleaner.num_left):
            yield from self._try_each("secrets in logs", log.finish())
        # The metrics that were logged since the last check, a piece at a time.
        while True:
            new = {rank: lines.read() for rank, lines in self._events.items()}
            self._try_check(TENSORBOARD, functools.partial(self._write_scalars, new))
            yield
            if not any(lines.is_behind for lines in self._events.values()):
                break
        if self.folder.is_lead:  # Of all nodes' ranks.
            yield from self._try_each(
                "metrics.csv", write_csv_in_pieces(self.folder, self.world_size, self._log)
            )

    def _write_scalars(self, new: dict[int, list[dict[str, object]]]) -> None:
        for rank, records in new.items():
            self._scalars[rank].append(records)

    def _redact_logs(self, max_bytes: int) -> None:
        for log in self._logs:
            log.clean(max_bytes)

    def _try_each(self, name: str, pieces: Iterable[object]) -> Iterator[None]:
        left = iter(pieces)
        while self._try_check(name, lambda: next(left, left) is not left):
            yield

    def _try_check(self, name: str, check: Callable[[], Result]) -> Result | None:
        # Without its folder the run ends (supervisor.py), and every check would fail.
        if name in self._disabled or not self.folder.path.is_dir():
            return None
        try:
            return check()
        except Exception as error:
            self._disabled.add(name)
            self._log(f"gave up {name}: {type(error).__name__}: {error}")
            return None
