"""Two runs compared per step: which kernels, collectives and gaps take longer in the other's trace."""

from __future__ import annotations

from collections.abc import Sequence

import shardscope as ss
from shardscope.core.number_format import Scale
from shardscope.runs.profiling_request import find_recording
from shardscope.trace import Trace
from shardscope_widgets.kit.part_table import add_sign
from shardscope_widgets.trace.analysis_page import AnalysisPage, Heading, Row, TableWriter
from shardscope_widgets.trace.run_names import describe_differences, name_run

NO_OTHER = (
    "No other run in this folder has a trace. Change the plan, launch a run with "
    '"Record a trace" checked, and choose it here. trace.diff(ss.Trace.load(path)) compares with a trace '
    "from elsewhere."
)
CHOOSE = "Choose the run to compare this trace with."


class OtherRuns:
    """The runs in a run's folder whose traces can be compared with its own, and the selected one."""

    def __init__(self, trace: Trace, run: ss.Run | None) -> None:
        self._trace, self._run = trace, run
        self.name: str | None = None
        """Name of the chosen run."""
        self._loaded: tuple[str, Trace] | None = None

    def list_options(self) -> Sequence[tuple[str, str]]:
        """Return title and name of the other runs in the folder that have a recording, the latest first."""
        if self._run is None:
            return ()
        return [
            (name_run(run), run.folder.name) for run in reversed(self._list_runs()) if _has_recording(run)
        ]

    def describe(self) -> AnalysisPage:
        """Return the differences from the chosen run.

        Raises ``ValueError`` or ``OSError`` for a damaged trace.
        """
        names = [name for _, name in self.list_options()]
        if not names:
            return AnalysisPage(sentences=[NO_OTHER], may_change=True)
        name = self.name
        if name is None or name not in names:
            return AnalysisPage(sentences=[CHOOSE], may_change=True)
        other = self._load(name)
        difference = self._trace.diff(other)
        scale = Scale.for_seconds(max((abs(row["difference_seconds"]) for row in difference), default=0.0))
        headings = (
            Heading("kernel, collective or gap"),
            Heading("class", is_text=True),
            Heading(f"this run, {scale.unit}", "of one step, mean over ranks and steps"),
            Heading("the other"),
            Heading("difference", "positive: the other run takes longer"),
        )
        rows = [
            Row(
                (
                    row["name"],
                    row["kind"].replace("_", "-"),
                    scale.format(row["seconds"]),
                    scale.format(row["other_seconds"]),
                    add_sign(row["difference_seconds"], scale.format(abs(row["difference_seconds"]))),
                )
            )
            for row in difference
        ]
        settings = describe_differences(self._trace, other)
        return AnalysisPage(
            sentences=[settings, difference.text] if settings else [difference.text],
            tables=[TableWriter().write(headings, rows)],
            may_change=True,
        )

    def _load(self, name: str) -> Trace:
        if self._loaded is None or self._loaded[0] != name:
            run = next(run for run in self._list_runs() if run.folder.name == name)
            self._loaded = name, Trace.load(find_recording(run, None))
        return self._loaded[1]

    def _list_runs(self) -> list[ss.Run]:
        assert self._run is not None
        own = self._run.folder
        return [run for run in ss.runs(own.parent) if run.folder.resolve() != own.resolve()]


def _has_recording(run: ss.Run) -> bool:
    try:
        find_recording(run, None)
    except (ValueError, OSError):
        return False
    return True
