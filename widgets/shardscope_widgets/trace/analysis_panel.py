"""The panel below the trace: tabs of tables and charts, each computed in the background when first shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

import ipywidgets as widgets

from shardscope.runs.explain.measured import MeasuredMemory
from shardscope.trace import Trace
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.latest_request import LatestRequest
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.trace.analyses import (
    describe_collectives,
    describe_critical_path,
    describe_idle,
    describe_kernels,
    describe_modules,
    describe_steps,
    describe_stragglers,
)
from shardscope_widgets.trace.analysis_page import AnalysisPage, Interval
from shardscope_widgets.trace.breakdown_figure import describe_breakdown
from shardscope_widgets.trace.memory_figure import describe_memory

CRITICAL_PATH, MEMORY = "Critical path", "Memory"
COMPUTING = "Computing …"
DRAW_PATH, REMOVE_PATH = "Draw it in the view", "Remove it from the view"

PathListener = Callable[[Sequence[Mapping[str, object]] | None], None]
"""Called with the parts of a path to draw, or None to draw none."""


class AnalysisPanel(widgets.VBox):
    """Tables and charts of one trace. ``on_show`` receives the interval of a row that was pressed.

    ``on_path`` receives the parts of the critical path to draw over the slices, or None. ``measured`` is the
    run's memory, whose snapshot has a chart.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        on_show: Callable[[Interval], None],
        on_path: PathListener,
        measured: MeasuredMemory | None = None,
    ) -> None:
        self._on_show, self._on_path = on_show, on_path
        self._describe: dict[str, Callable[[], AnalysisPage]] = {
            "Time by rank": lambda: describe_breakdown(trace),
            "Steps": lambda: describe_steps(trace),
            "Kernels": lambda: describe_kernels(trace),
            "Collectives": lambda: describe_collectives(trace),
            "Idle": lambda: describe_idle(trace),
            "Stragglers": lambda: describe_stragglers(trace),
            CRITICAL_PATH: lambda: describe_critical_path(trace),
            MEMORY: lambda: describe_memory(trace, measured),
            "Modules": lambda: describe_modules(trace),
        }
        self._requests: LatestRequest[str, AnalysisPage] = LatestRequest(
            lambda name: self._describe[name](), "shardscope-analysis"
        )
        self._pages: dict[str, AnalysisPage] = {}
        self._charts: dict[str, list[Chart]] = {}
        self._is_path_drawn = False
        self.tabs = Tabs(tuple(self._describe))
        self.tabs.add_class("ss-analysis-tabs")
        self.tabs.observe(self._show_tab, "value")
        self.path_button = controls.create_button(
            DRAW_PATH, "ss-ghost", "ss-small", layout=widgets.Layout(display="none")
        )
        self.path_button.on_click(lambda _: self._toggle_path())
        self.table = Clickable(self._handle_action)
        self._body = widgets.VBox([self.path_button, self.table], layout=controls.share_layout())
        self._body.add_class("ss-analysis-body")
        super().__init__([self.tabs, self._body], layout=controls.share_layout())
        self.add_class("ss-view")
        self.add_class("ss-analysis")

    @property
    def page(self) -> AnalysisPage | None:
        """The page that is shown; None while it is computed."""
        return self._pages.get(self.tabs.value)

    def start(self) -> None:
        """Compute and show the chosen tab."""
        self._show_tab()

    def _show_tab(self, change: object = None) -> None:
        name = self.tabs.value
        if name in self._pages:
            self._show_page(name)
            return
        self._set_body([], f"<p class='ss-hint'>{COMPUTING}</p>")
        self._requests.request(name, lambda result: self._receive(name, result))

    def _receive(self, name: str, result: AnalysisPage | Exception) -> None:
        if isinstance(result, Exception):
            # Not stored: the next click tries again.
            if name == self.tabs.value:
                text = str(result) if isinstance(result, ValueError) else f"{type(result).__name__}: {result}"
                self._set_body([], f"<p class='ss-error' role='alert'>{escape(text[:400])}</p>")
            return
        self._pages[name] = result
        if name == self.tabs.value:
            self._show_page(name)

    def _show_page(self, name: str) -> None:
        page = self._pages[name]
        if name not in self._charts:
            self._charts[name] = [_create_chart(figure) for figure in page.figures]
        self._set_body(self._charts[name], page.html)
        self.path_button.layout.display = "" if page.path else "none"

    def _set_body(self, charts: Sequence[Chart], html: str) -> None:
        self.path_button.layout.display = "none"
        children = (self.path_button, *charts, self.table)
        if self._body.children != children:
            self._body.children = children
        self.table.value = html

    def _handle_action(self, act: str) -> None:
        interval = self.page.intervals.get(act) if self.page is not None else None
        if interval is None:
            raise IgnoredError(act)
        self._on_show(interval)

    def _toggle_path(self) -> None:
        page = self._pages.get(CRITICAL_PATH)
        if page is None:
            return
        self._is_path_drawn = not self._is_path_drawn
        self._on_path(page.path if self._is_path_drawn else None)
        self.path_button.description = REMOVE_PATH if self._is_path_drawn else DRAW_PATH

    def close(self) -> None:
        """Close the charts of tabs that are not shown as well."""
        for charts in self._charts.values():
            for chart in charts:
                chart.close()
        super().close()


def _create_chart(figure: object) -> Chart:
    chart = Chart(figure)
    chart._config = {"displayModeBar": False, "responsive": True}
    return chart
