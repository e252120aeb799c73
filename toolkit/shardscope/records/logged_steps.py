"""Metrics that an earlier attempt of a run has logged already.

An attempt resumes at a checkpoint, which may be some steps older than the last metrics of the attempt before.
It repeats these steps; their metrics are not logged again, so that every reader of the file sees each step
once.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import parse_lines, read_tail
from shardscope.records.json_values import is_int

TAIL_BYTES = 2**24
"""Bytes that are read of the metrics of earlier attempts: some ten thousand steps."""


class LoggedSteps:
    """What the metrics file of one rank contained when this attempt began."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        tail = read_tail(folder.events(rank), TAIL_BYTES) if folder.attempt > 1 else b""
        self.ends_within_line = bool(tail) and not tail.endswith(b"\n")
        """Whether the rank was killed while it wrote a line."""
        records = [record for record in parse_lines(tail).records if is_int(record.get("step"))]
        self._logged = {_identify(record) for record in records}
        self.last_step = max((_get_step(record) for record in records), default=-1)
        """Highest step; -1 if there is none."""

    def has(self, event: Mapping[str, object]) -> bool:
        """Return whether metrics of these names are logged for this step."""
        return bool(self._logged) and _get_step(event) <= self.last_step and _identify(event) in self._logged


def _get_step(record: Mapping[str, object]) -> int:
    step = record["step"]
    assert isinstance(step, int)
    return step


def _identify(record: Mapping[str, object]) -> tuple[int, frozenset[str]]:
    return _get_step(record), frozenset(record)
