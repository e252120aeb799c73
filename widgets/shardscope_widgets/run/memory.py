"""Measured memory of each rank by component next to the prediction, read again when it changes."""

from __future__ import annotations

from collections.abc import Mapping

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_values import is_int
from shardscope.records.regular_files import check_regular
from shardscope.runs.explain.measured import build_measured_memory
from shardscope.runs.explain.memory_by_rank import predict_rank_memory, read_rank_memory
from shardscope.runs.watch.logged_memory import LoggedPeak
from shardscope_widgets.kit import controls
from shardscope_widgets.run import run_html


class RunMemory:
    """The measured-memory table of a run, in ``html``."""

    def __init__(self) -> None:
        self.html = controls.create_html()
        self._seen: object = None
        self._engine: object = None

    def start_run(self, run: ss.Run) -> None:
        """Clear the previous run."""
        self._seen, self._engine = None, None
        self.html.value = ""

    def refresh(self, run: ss.Run, latest: Mapping[int, Mapping[str, object]]) -> object:
        """Show what the ranks have recorded so far. Return the engine record of rank 0."""
        folder = RunFolder(run.folder)
        # Files and logged peaks change rarely: comparing them is cheaper than reading the records.
        peaks = {rank: record.get("peak_memory_bytes") for rank, record in latest.items()}
        seen = ([_find_change_time(folder, rank) for rank in range(run.world_size)], peaks)
        if seen == self._seen:
            return self._engine
        self._seen = seen
        records = run.engine_reports()
        self._engine = records.get(0, {}).get("engine")
        logged: list[LoggedPeak] = [
            {"rank": rank, "peak_memory_bytes": peak, "memory_bytes": None, "step": None, "time": None}
            for rank, peak in sorted(peaks.items())
            if is_int(peak)
        ]
        known = [rank for rank, record in records.items() if "memory" in record]
        by_rank = read_rank_memory({rank: records[rank] for rank in known}, logged)
        # The table of latest values has totals without components; CPU ranks count other tensors in theirs.
        by_rank = {rank: memory for rank, memory in by_rank.items() if set(memory.components) != {"other"}}
        expected = run.predicted_metrics() if by_rank else None
        # A user's function has no prediction until its model is known.
        if expected is None:
            caption = "Measured in one of the first steps."
            self.html.value = run_html.render_memory_table(by_rank, None, caption)
            return self._engine
        plan = run.plan
        caption = build_measured_memory(plan, records, logged).sentence
        predicted = predict_rank_memory(plan.memory()).components
        self.html.value = run_html.render_memory_table(by_rank, predicted, caption)
        return self._engine


def _find_change_time(folder: RunFolder, rank: int) -> int:
    try:
        status = check_regular(folder.engine_report(rank))
    except OSError:
        return 0
    return 0 if status is None else status.st_mtime_ns
