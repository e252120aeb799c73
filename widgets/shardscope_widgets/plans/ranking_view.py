"""The results of a search: every plan in one chart and the best in a table; both can apply plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.plans.ranking_figure import (
    create_ranking_figure,
    describe_counts,
    draw_ranking,
    mark_current_plan,
    on_plan_click,
    render_legend,
)
from shardscope_widgets.plans.ranking_rows import ASCENDING, CurrentPlan, Indices, sort_rows
from shardscope_widgets.plans.ranking_table import ROWS_ON_A_PAGE, render_misses, render_page, render_refusals

if TYPE_CHECKING:
    from shardscope.planner.search.ranking import Ranking


class RankingView(View):
    """The plans of a search. Clicking a row or mark passes it to ``on_apply`` and sets :attr:`plan`.

    :meth:`search` runs in the background, with a progress bar and a way to cancel; ``RankingView(ranking)``
    shows a result of ``ss.search``.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")

    def __init__(
        self,
        ranking: Ranking | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        work: WorkPanel | None = None,
    ) -> None:
        """Create the view. ``work`` is the progress panel; by default one above the chart."""
        self.ranking: Ranking | None = None
        self._on_apply = on_apply
        self._current: CurrentPlan | None = None
        # A search ends in its own thread, while the user may sort the rows.
        self._lock = threading.RLock()
        self._column: str | None = None
        """None: ranking order."""
        self._ascending, self._first = True, 0
        self._order: Indices | None = None
        self.figure: Chart | None = None
        self.work = work or WorkPanel("Search again", "Repeat the same search")
        own_panel = [] if work else [self.work, self.work.words]
        if own_panel:
            self.work.show_button(False)  # Hidden until a search is requested.
        # The chart is created with the first result: a reloaded page has less to load.
        self._place = widgets.VBox(layout=controls.share_layout())
        self.key, self.caption = controls.create_html(), controls.create_html("", "ss-hint")
        spare = 100 - TIGHT_PERCENT
        self.room = controls.create_segments([(f"{spare} % free", spare), ("All that fit", 0)], "Memory")
        self.room.observe(self._sort_rows, "value")
        # Hidden until a search has ended.
        self._bar = widgets.HBox([self.room, self.caption], layout=widgets.Layout(display="none"))
        self._bar.add_class("ss-toolbar")
        self.table = Clickable(self._handle_action)
        super().__init__([Sheet("plans"), *own_panel, self.key, self._place, self._bar, self.table])
        controls.add_classes(self, "ss-root", "ss-view", "ss-ranking")
        if ranking is not None:
            self.show(ranking)

    def search(
        self,
        arch: ss.Architecture,
        cluster: ss.Cluster,
        recipe: ss.Recipe,
        frameworks: Sequence[str] | None = None,
        *,
        on_found: Callable[[], None] | None = None,
    ) -> None:
        """Call ``ss.search`` in the background, show its ranking, then call ``on_found``.

        Return immediately; do nothing while a search is running. An error of ``ss.search`` is shown next to
        the button.
        """

        def run_search(progress: Progress) -> Ranking:
            return ss.search(arch, cluster, recipe, frameworks=frameworks, progress=progress)

        def show_ranking(ranking: Ranking) -> None:
            self.show(ranking)
            if on_found is not None:
                on_found()

        self.work.show_button(True)
        self.work.start(run_search, show_ranking, lambda _, seconds: "")

    def show(self, ranking: Ranking) -> None:
        """Draw a ranking, best plans first."""
        from shardscope.planner.search.ranking import Ranking  # late, since a Studio opens without it

        self._check_shown(ranking, Ranking)
        with self._lock:
            self.ranking = ranking
            # From its first page: the new ranking may have fewer.
            self._column, self._ascending, self._first = None, True, 0
            self._order = self._select_rows(ranking)
            if self.figure is None:
                self.figure = create_ranking_figure()
                on_plan_click(self.figure, lambda index: self.table.press_button(f"apply:{index}"))
            num_marks = draw_ranking(self.figure, ranking)
            self.caption.value = describe_counts(ranking, num_marks)
            self._mark_again()
            # Once it is drawn: an empty chart would be seen for a moment.
            if not self._place.children:
                self._place.children = [self.figure]
                self._bar.layout.display = ""

    def freeze(self, frozen: bool) -> None:
        """Disable everything while the ranking does not match the current plan."""
        self.table.frozen = self.room.disabled = frozen
        controls.set_class(self, "ss-old", frozen)

    def mark(self, plan: ss.Plan | None) -> None:
        """Mark the row and the chart position of the current plan. None removes the marks."""
        with self._lock:
            # plan.memory() is computed once, not for every redraw of the table.
            before = self._current and self._current.plan
            if plan != before:
                self._current = None if plan is None else CurrentPlan.create(plan)
                self._mark_again()

    def _mark_again(self) -> None:
        if self.figure is not None and self.ranking is not None:
            current = self._find_current_point()
            mark_current_plan(self.figure, current)
            self.key.value = render_legend(self.ranking, has_current=current is not None)
            self._draw_table()

    def _find_current_point(self) -> tuple[float, float] | None:
        """Return peak bytes and tokens per second per GPU of the current plan; None without a time."""
        if self._current is None:
            return None
        try:
            return self._current.peak_bytes, self._current.plan.step().tokens_per_second_per_gpu
        except ValueError:
            return None

    def _draw_table(self) -> None:
        ranking, order = self.ranking, self._order
        if ranking is None or order is None:
            return
        if not len(order):
            self.table.value = render_misses(ranking) + render_refusals(ranking)
            return
        page = render_page(ranking, order, self._first, self._column, self._ascending, self._current)
        self.table.value = page + render_refusals(ranking)

    def _sort_rows(self, change: object = None) -> None:
        with self._lock:
            if self.ranking is not None:
                self._first = 0
                self._order = self._select_rows(self.ranking)
                self._draw_table()

    def _select_rows(self, ranking: Ranking) -> Indices:
        """Return the rows that leave enough free memory, or all rows that fit if none does."""
        least = ranking.cluster.usable_bytes_per_gpu * self.room.value // 100
        rows = sort_rows(ranking, self._column, self._ascending)
        roomy = rows[ranking.headroom_bytes[rows] >= least]
        return roomy if len(roomy) else rows

    def _handle_action(self, act: str) -> None:
        kind, _, what = act.partition(":")
        with self._lock:
            ranking, order = self.ranking, self._order
            if ranking is None or order is None:
                raise IgnoredError(act)
            if kind == "sort" and what in ASCENDING:
                self._ascending = not self._ascending if what == self._column else ASCENDING[what]
                self._column = what
                self._sort_rows()
                return
            if kind == "page" and what in ("1", "-1"):
                first = self._first + int(what) * ROWS_ON_A_PAGE
                self._first = first if 0 <= first < len(order) else self._first
                self._draw_table()
                return
            # Use the plan's own number: the table may have been sorted since the click was sent.
            plan = self._plan_of(kind, what, ranking)
        if plan is None:
            raise IgnoredError(act)
        self.plan = plan
        self.mark(plan)
        if self._on_apply is not None:
            self._on_apply(plan)

    @staticmethod
    def _plan_of(kind: str, what: str, ranking: Ranking) -> ss.Plan | None:
        if kind == "alternative" and ranking.alternative is not None and ranking.alternative.num_feasible:
            return ranking.alternative.best
        # The text comes from the page, and a new ranking may have fewer rows than the one that was clicked.
        is_row = kind == "apply" and what.isdigit() and int(what) < ranking.num_evaluated
        return ranking.plan(int(what)) if is_row else None
