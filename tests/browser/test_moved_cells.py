"""Tests of a view whose cell is moved, deleted and restored, shown twice, collapsed, reloaded or re-themed.

Once the view is a single chart, once the whole Studio.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opened_notebook import KERNEL_IS_IDLE, TIMEOUT_MS, choose_menu_item, open_notebook, write_notebook
from served import Lab
from studio_page import open_fold, use_theme
from tests.requirements import few, thorough

import shardscope as ss

NOTEBOOK = "moved.ipynb"
VIEW_CELL = "#the-view"
NEXT_PLAN_CELL = "#the-next-plan"
VIEW_SOURCE = f"""{VIEW_CELL}
import itertools
import shardscope as ss
from shardscope_widgets import MemoryView
plans = itertools.cycle(
    ss.Plan(ss.models[name], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
    for name in ("llama-3.1-8b", "llama-3.2-1b", "llama-3.1-70b", "qwen3-8b")
)
view = MemoryView(next(plans))
def show_click(trace, point, customdata):
    view.caption.value = f"clicked {{trace}} {{point}}"
view.figure.on_click(show_click)
view"""
MODELS = ("llama-3.1-8b", "llama-3.2-1b", "llama-3.1-70b", "qwen3-8b")

# The length of the first bar of every visible chart, as plotly has laid it out, in GiB.
BAR_TOTALS = """() => [...document.querySelectorAll('.js-plotly-plot')]
    .filter(each => each.checkVisibility())
    .map(each => each.calcdata.filter(marks => marks[0].trace.type === 'bar')
        .reduce((sum, marks) => sum + (marks[0].s || 0), 0))"""
ALL_SHOW_TOTAL = f"([count, total]) => {{ const all = ({BAR_TOTALS})(); window.seenTotals = all; " + (
    "return all.length === count && all.every(each => Math.abs(each / total - 1) < 1e-6); }"
)

FRAMEWORKS = ("FSDP2", "DeepSpeed ZeRO", "Megatron-core", "DDP")
STUDIO_NOTEBOOK = "moved_studio.ipynb"
STUDIO_SOURCE = f"""{VIEW_CELL}
from shardscope_widgets import Studio
studio = Studio()
studio"""
NEXT_FRAMEWORK_SOURCE = f"""{NEXT_PLAN_CELL}
menu = studio.layout_picker.framework
names = {FRAMEWORKS}
values = dict(menu.options)
now = names.index(next(name for name in names if values[name] == menu.value))
menu.value = values[names[(now + 1) % len(names)]]"""

# Each visible Studio: its verdict, the bars and labels that plotly drew, and its table.
STUDIO_STATES = """() => [...document.querySelectorAll('.ss-studio')].filter(each => each.checkVisibility())
    .map(studio => {
        const chart = studio.querySelector('.ss-memory .js-plotly-plot');
        const bars = (chart?.calcdata ?? [])
            .filter(marks => marks[0].trace.type === 'bar' && marks[0].trace.visible === true && marks[0].s)
            .map(marks => [marks[0].trace.name, marks[0].s]);
        const rows = [...studio.querySelectorAll('.ss-memory [data-opens]')]
            .map(row => [row.querySelector('th').innerText.trim(), row.querySelector('td').innerText.trim()]);
        return {
            what: studio.querySelector('.ss-what').title,
            verdict: studio.querySelector('.ss-verdict').innerText,
            labels: [...(chart?.querySelectorAll('text') ?? [])].map(each => each.textContent),
            bars: Object.fromEntries(bars),
            rows: Object.fromEntries(rows),
        };
    })"""


class NotebookPage:
    """The page of a notebook, and the plan that its view should show."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._shown = 0

    def cell(self, mark: str) -> Any:
        """Return the cell whose code begins with ``mark``."""
        return self.page.locator(".jp-Notebook .jp-Cell", has_text=mark).first

    def select(self, mark: str) -> None:
        """Select a cell in command mode."""
        self.cell(mark).locator(".jp-InputPrompt").click()

    def change_plan_by_cell(self) -> None:
        """Run the cell that gives the view the next plan."""
        self._shown += 1
        self.cell(NEXT_PLAN_CELL).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def check_next_plan(self, count: int = 1) -> None:
        """Change the plan, and check that the bar in each of ``count`` views is its peak."""
        self.change_plan_by_cell()
        self.check_plan(count)

    def check_plan(self, count: int = 1) -> None:
        """Check that the bar in each of ``count`` views is the peak of the plan that was shown last."""
        name = MODELS[self._shown % len(MODELS)]
        cluster = ss.Cluster.parse("8xh100-sxm-80gb")
        plan = ss.Plan(ss.models[name], cluster, ss.Recipe(), ss.Layout.fsdp2())
        total = plan.memory().peak_bytes / 2**30
        try:
            self.page.wait_for_function(ALL_SHOW_TOTAL, arg=[count, total], timeout=20_000)
        except Exception:
            drawn = self.page.evaluate("() => window.seenTotals")
            pytest.fail(f"{name} needs {total:.3f} GiB; the charts show {drawn}")


class StudioPage(NotebookPage):
    """The page of a notebook with a whole Studio, whose framework is changed in its menu."""

    @property
    def framework(self) -> str:
        """The framework that was chosen last."""
        return FRAMEWORKS[self._shown % len(FRAMEWORKS)]

    def check_next_plan(self, count: int = 1) -> None:
        """Choose the next framework in the first view, and check every view."""
        self._shown += 1
        fold = open_fold(self.page, "Framework")
        fold.locator("select >> visible=true").first.select_option(label=self.framework)
        self.check_plan(count)

    def check_plan(self, count: int = 1) -> None:
        """Check that verdict, chart and table of each of ``count`` Studios show the chosen framework."""
        deadline = time.monotonic() + 30
        while True:
            studios = self.page.evaluate(STUDIO_STATES)
            faults = [fault for studio in studios for fault in find_differences(studio, self.framework)]
            if len(studios) == count and not faults:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"{len(studios)} of {count} Studios are in sight; {faults}")
            self.page.wait_for_timeout(200)


def find_differences(studio: dict[str, Any], framework: str) -> list[str]:
    """Return the differences between a Studio's verdict, chart and table."""
    differences = []
    if f"with {framework}" not in studio["what"]:
        differences.append(f"the sentence is about {studio['what']!r}, not {framework}")
    rows, bars, total = studio["rows"], studio["bars"], studio["rows"].get("total")
    if total is None or not re.search(rf"\b{re.escape(total)} (of|GiB)", studio["verdict"]):
        differences.append(f"the sentence says {studio['verdict']!r}, the table {total}")
    if f"{total} GiB" not in studio["labels"]:
        differences.append(f"the chart says {studio['labels']}, the table {total}")
    if not bars or abs(sum(bars.values()) / parse_number(total or "0") - 1) > 0.005:
        differences.append(f"the bars are {sum(bars.values())} GiB, the table {total}")
    for name, gib in bars.items():
        # The table has three significant digits, and two places below one GiB.
        if name not in rows or abs(parse_number(rows[name]) - gib) > max(0.005 * gib, 0.0051):
            differences.append(f"{name}: the bar is {gib} GiB, the table {rows.get(name)}")
    return differences


def parse_number(cell: str) -> float:
    return float(cell.replace(",", ""))


def move_cell(notebook_page: NotebookPage) -> None:
    notebook_page.select(VIEW_CELL)
    notebook_page.page.keyboard.press("Control+Shift+ArrowDown")
    notebook_page.page.wait_for_function(
        "mark => document.querySelectorAll('.jp-Notebook .jp-Cell')[1].innerText.includes(mark)",
        arg=VIEW_CELL,
    )


def delete_and_undo(notebook_page: NotebookPage) -> None:
    notebook_page.select(VIEW_CELL)
    notebook_page.page.keyboard.press("d")
    notebook_page.page.keyboard.press("d")
    notebook_page.page.wait_for_function(
        "() => document.querySelectorAll('.jp-Notebook .jp-Cell').length === 1"
    )
    notebook_page.page.keyboard.press("z")
    notebook_page.page.wait_for_function(
        "() => document.querySelectorAll('.jp-Notebook .jp-Cell').length === 2"
    )


def show_twice(notebook_page: NotebookPage) -> int:
    notebook_page.cell(VIEW_CELL).locator(".jp-OutputArea-promptOverlay").first.click(button="right")
    notebook_page.page.locator(".lm-Menu-itemLabel").get_by_text("Create New View for Cell Output").click()
    notebook_page.page.wait_for_selector(".jp-LinkedOutputView .js-plotly-plot")
    return 2


def collapse_and_expand(notebook_page: NotebookPage) -> None:
    notebook_page.select(VIEW_CELL)
    choose_menu_item(notebook_page.page, "View", "Collapse Selected Outputs")
    notebook_page.page.locator(".ss-memory").wait_for(state="hidden")
    # While it is hidden: a view that only draws live updates would keep the previous plan.
    notebook_page.change_plan_by_cell()
    notebook_page.page.wait_for_function(KERNEL_IS_IDLE)
    notebook_page.select(VIEW_CELL)
    choose_menu_item(notebook_page.page, "View", "Expand Selected Outputs")
    notebook_page.check_plan()


def reload(notebook_page: NotebookPage) -> None:
    choose_menu_item(notebook_page.page, "File", "Save Notebook")
    notebook_page.page.wait_for_timeout(1500)
    notebook_page.page.reload()
    notebook_page.page.wait_for_selector(".js-plotly-plot .barlayer path", state="attached")
    notebook_page.page.wait_for_function(KERNEL_IS_IDLE)
    notebook_page.check_plan()


def change_theme(notebook_page: NotebookPage) -> None:
    use_theme(notebook_page.page, "JupyterLab Dark", light="false")
    notebook_page.check_plan()


PAGE_ACTIONS: dict[str, Callable[[NotebookPage], int | None]] = {
    "moved": move_cell,
    "deleted and undone": delete_and_undo,
    "collapsed and expanded": collapse_and_expand,
    "in another theme": change_theme,
    "reloaded with a live kernel": reload,
    "shown twice": show_twice,
}


@pytest.fixture(scope="module")
def notebook_page(lab: Lab, browser: Any) -> Iterator[NotebookPage]:
    """A memory view in one cell, and a cell that gives it the next plan."""
    write_notebook(lab, NOTEBOOK, VIEW_SOURCE, f"{NEXT_PLAN_CELL}\nview.show(next(plans))")
    page = open_notebook(lab, browser, NOTEBOOK)
    notebook_page = NotebookPage(page)
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".js-plotly-plot .barlayer path", state="attached", timeout=TIMEOUT_MS)
    notebook_page.check_plan()
    notebook_page.check_next_plan()
    yield notebook_page
    page.close()


@thorough()
@pytest.mark.parametrize("action", few(PAGE_ACTIONS, ["moved"]))
def test_fault_63_64_every_view_shows_the_current_plan(action: str, notebook_page: NotebookPage) -> None:
    """The actions run one after another on the same page."""
    count = PAGE_ACTIONS[action](notebook_page) or 1
    for _ in range(2):
        notebook_page.check_next_plan(count)


@pytest.fixture(scope="module")
def opened_studio_page(lab: Lab, browser: Any) -> Iterator[StudioPage]:
    """A Studio in one cell, and a cell that chooses the next framework."""
    write_notebook(lab, STUDIO_NOTEBOOK, STUDIO_SOURCE, NEXT_FRAMEWORK_SOURCE)
    page = open_notebook(lab, browser, STUDIO_NOTEBOOK)
    notebook_page = StudioPage(page)
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".ss-memory .barlayer path", state="attached", timeout=TIMEOUT_MS)
    notebook_page.check_plan()
    notebook_page.check_next_plan()
    yield notebook_page
    page.close()


@thorough()
@pytest.mark.parametrize("action", few(PAGE_ACTIONS, ["moved"]))
def test_fault_63_studio_verdict_chart_and_table_agree(action: str, opened_studio_page: StudioPage) -> None:
    """The actions run one after another on the same page."""
    count = PAGE_ACTIONS[action](opened_studio_page) or 1
    for _ in range(2):
        opened_studio_page.check_next_plan(count)


@thorough()
def test_click_on_a_bar_is_reported_from_every_view(notebook_page: NotebookPage) -> None:
    """Click in the first view and in the second one, which is open by now."""
    page = notebook_page.page
    for number in range(page.locator(".js-plotly-plot >> visible=true").count()):
        notebook_page.check_next_plan(2)
        chart = page.locator(".js-plotly-plot >> visible=true").nth(number)
        bar = chart.locator(".barlayer .trace").nth(3).locator("path").first
        box = bar.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.locator(".ss-chart.ss-at-mark").wait_for()
        page.mouse.down()
        page.mouse.up()
        page.locator(".ss-memory", has_text="clicked 3 0").first.wait_for()
