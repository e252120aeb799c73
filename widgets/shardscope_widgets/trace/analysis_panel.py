"""The panel below the trace: tabs of tables and charts, each computed in the background when first shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

import ipywidgets as widgets
import plotly.graph_objects as go

from shardscope.runs.explain.measured import MeasuredMemory
from shardscope.runs.run import Run
from shardscope.trace import Trace
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import LatestRequest
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.trace.analyses import (
    describe_collectives,
    describe_critical_path,
    describe_idle,
    describe_modules,
    describe_steps,
    describe_stragglers,
)
from shardscope_widgets.trace.analysis_page import AnalysisPage, Interval
from shardscope_widgets.trace.breakdown_figure import describe_breakdown
from shardscope_widgets.trace.comparison_figure import PlanAgainstTrace
from shardscope_widgets.trace.difference import OtherRuns
from shardscope_widgets.trace.kernels_page import describe_kernels
from shardscope_widgets.trace.memory_figure import describe_memory

CRITICAL_PATH, PLAN, OTHER_RUN = "Critical path", "Plan against trace", "Another run"
COMPUTING = "Computing …"
NOT_COMPUTED = '"{}" was not computed when the notebook was saved: run the cell again.'
"""Text of a saved notebook in place of :data:`COMPUTING`."""
USE_RATES, REMOVE_RATES = "Use the measured rates", "Predict without them"
DRAW_PATH, REMOVE_PATH = "Draw it in the view", "Remove it from the view"

PathListener = Callable[[Sequence[Mapping[str, object]] | None], None]
"""Called with the parts of a path to draw, or None to draw none."""


class AnalysisPanel(widgets.VBox):
    """Tables and charts of one trace. ``on_show`` receives the interval of a row that was pressed.

    ``on_path`` receives the parts of the critical path to draw over the slices, or None. ``on_rates`` is
    called when predictions have begun or ceased to use the measured rates. ``measured`` is the run's memory,
    whose snapshot has a chart. ``run`` is the traced run, with whose neighbours the trace can be compared.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        on_show: Callable[[Interval], None],
        on_path: PathListener,
        on_rates: Callable[[], None] = lambda: None,
        measured: MeasuredMemory | None = None,
        run: Run | None = None,
    ) -> None:
        self._on_show, self._on_path, self._on_rates = on_show, on_path, on_rates
        self._plan = PlanAgainstTrace(trace)
        self._others = OtherRuns(trace, run)
        self._describe: dict[str, Callable[[], AnalysisPage]] = {
            "Time by rank": lambda: describe_breakdown(trace),
            "Steps": lambda: describe_steps(trace),
            "Kernels": lambda: describe_kernels(trace),
            "Collectives": lambda: describe_collectives(trace),
            "Idle": lambda: describe_idle(trace),
            "Stragglers": lambda: describe_stragglers(trace),
            CRITICAL_PATH: lambda: describe_critical_path(trace),
            "Memory": lambda: describe_memory(trace, measured),
            "Modules": lambda: describe_modules(trace),
            PLAN: self._plan.describe,
            OTHER_RUN: self._others.describe,
        }
        self._requests: LatestRequest[tuple[str, int], AnalysisPage] = LatestRequest(
            lambda question: self._describe[question[0]](), "shardscope-analysis"
        )
        self._rate_requests: LatestRequest[int, None] = LatestRequest(
            lambda _: self._change_rates(), "shardscope-rates"
        )
        self._num_requests = 0
        """Number of requests so far, which identifies the latest request of a page that may change."""
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
        self.rates_button = controls.create_button(
            USE_RATES, "ss-ghost", "ss-small", layout=widgets.Layout(display="none")
        )
        self.rates_button.on_click(lambda _: self._request_rates())
        self.other_run = controls.create_dropdown(
            options=[("choose a run", None)],
            tooltip="The run to compare this trace with",
            layout=widgets.Layout(display="none", width="min(100%, 640px)"),
        )
        self.other_run.observe(self._choose_other, "value")
        self._buttons = (self.path_button, self.rates_button, self.other_run)
        self.text = controls.create_html()
        self.table = Clickable(self._handle_action)
        self._body = widgets.VBox([self.text, *self._buttons, self.table], layout=controls.share_layout())
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

    def _choose_other(self, change: object = None) -> None:
        if self.other_run.value != self._others.name:
            self._others.name = self.other_run.value
            self._show_tab()

    def _offer_others(self) -> None:
        """Offer the runs that have a trace by now; the chosen one stays chosen."""
        runs = self._others.list_options()
        options = [("choose a run", None), *runs]
        if tuple(self.other_run.options) != tuple(options):
            self.other_run.options = options
            is_there = any(name == self._others.name for _, name in runs)
            self.other_run.value = self._others.name if is_there else None
        self.other_run.layout.display = "" if runs else "none"

    def _show_tab(self, change: object = None) -> None:
        name = self.tabs.value
        if name in self._pages and not self._pages[name].may_change:
            self._show_page(name)
            return
        self._pages.pop(name, None)
        saved = escape(NOT_COMPUTED.format(name), quote=True)
        self._set_body(f"<p class='ss-hint' data-saved='{saved}'>{COMPUTING}</p>")
        self._num_requests += 1
        self._requests.request((name, self._num_requests), lambda result: self._receive_page(name, result))

    def _receive_page(self, name: str, result: AnalysisPage | Exception) -> None:
        if isinstance(result, Exception):
            # Not stored: the next click tries again.
            if name == self.tabs.value:
                self._set_body(_render_error(result))
            return
        self._pages[name] = result
        if name == self.tabs.value:
            self._show_page(name)

    def _show_page(self, name: str) -> None:
        page = self._pages[name]
        charts = self._charts.setdefault(name, [])
        for chart, figure in zip(charts, page.figures, strict=False):
            _redraw_chart(chart, figure)
        charts += [_create_chart(figure, name) for figure in page.figures[len(charts) :]]
        self._set_body(page.text, charts[: len(page.figures)], "".join(page.tables))
        self.path_button.layout.display = "" if page.path else "none"
        self.rates_button.layout.display = "" if page.has_rates else "none"
        if name == OTHER_RUN:
            self._offer_others()
        self.rates_button.disabled = False
        self.rates_button.description = REMOVE_RATES if page.has_rates and page.uses_rates else USE_RATES

    def _set_body(self, text: str, charts: Sequence[Chart] = (), table: str = "") -> None:
        for button in self._buttons:
            button.layout.display = "none"
        children = (self.text, *self._buttons, *charts, self.table)
        if self._body.children != children:
            self._body.children = children
        self.text.value, self.table.value = text, table

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

    def _request_rates(self) -> None:
        # In the background: the trace's collectives may have to be found first.
        self.rates_button.disabled = True
        self._num_requests += 1
        self._rate_requests.request(self._num_requests, self._receive_rates)

    def _change_rates(self) -> None:
        if self._plan.is_using_rates:
            self._plan.remove_measured_rates()
        else:
            self._plan.use_measured_rates()

    def _receive_rates(self, result: Exception | None) -> None:
        if isinstance(result, Exception):
            self.rates_button.disabled = False
            self.text.value = _render_error(result)
            return
        self._on_rates()
        if self.tabs.value == PLAN:
            self._show_tab()

    def close(self) -> None:
        """Close the charts of tabs that are not shown as well."""
        for charts in self._charts.values():
            for chart in charts:
                chart.close()
        super().close()


def _render_error(error: Exception) -> str:
    is_known = isinstance(error, ValueError | OSError)
    text = str(error) if is_known else f"{type(error).__name__}: {error}"
    return f"<p class='ss-error' role='alert'>{escape(text[:400])}</p>"


def _redraw_chart(chart: Chart, figure: go.Figure) -> None:
    """Draw ``figure`` in a chart that drew one with the same traces."""
    with chart.batch_update():
        for old, new in zip(chart.data, figure.data, strict=True):
            old.update(new.to_plotly_json(), overwrite=True)
        chart.layout.update(figure.layout.to_plotly_json(), overwrite=True)


def _create_chart(figure: go.Figure, name: str) -> Chart:
    chart = Chart(figure)
    chart.label = f"{name}. The text and the tables beside the chart have the numbers."
    chart._config = {"displayModeBar": False, "responsive": True}
    return chart
