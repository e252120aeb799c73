"""Tests of the keys of JupyterLab's command mode, pressed while a widget has the focus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opened_notebook import KERNEL_IS_IDLE, TIMEOUT_MS, open_notebook, write_notebook
from served import Lab
from tests.requirements import thorough

NOTEBOOK = "keys.ipynb"
# `make test` presses keys in the whole job.
pytestmark = thorough()

SOURCE = """import ipywidgets
import shardscope as ss
from shardscope_widgets import MemoryView, Studio
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.run.log_pane import LogPane
plan = ss.Plan(
    ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
)
alone = Clickable(lambda act: None)
alone.value = "<button class='ss-act' data-act='x'>alone</button>"
log = LogPane(value="a line")
for name, widget in (("clickable", alone), ("tabs", Tabs(["One", "Two"])), ("log", log)):
    widget.add_class(f"alone-{name}")
    display(widget)
chart = MemoryView(plan).figure
chart.add_class("alone-chart")
display(chart)
studio = Studio()
studio"""

STUDIO = ".ss-studio"
FOCUS_TARGETS = {
    "a select": f"{STUDIO} select >> visible=true",
    "a tab": f"{STUDIO} [role=tab] >> nth=0",
    "a button": f"{STUDIO} .ss-memory button.ss-ghost >> visible=true",
    "a text box": f"{STUDIO} input[type=text] >> visible=true",
    "a toggle": f"{STUDIO} .ss-seg button >> visible=true",
    "a row that opens": f"{STUDIO} .ss-parts .ss-name >> visible=true",
    "a chart": f"{STUDIO} .js-plotly-plot",
    "a table that stands alone": ".alone-clickable button",
    "tabs that stand alone": ".alone-tabs [role=tab]",
    "a log that stands alone": ".alone-log [role=region]",
    "a chart that stands alone": ".alone-chart .js-plotly-plot",
}
KEYS = (
    *"myr123456abxcvz",
    *("d d", "0 0", "i i"),
    *"lohjk",
    *("Shift+M", "Shift+L", "Control+a", "Control+Enter", "Shift+Enter", "Control+Shift+ArrowUp"),
    *("ArrowDown", "ArrowUp", "Space", "Enter"),
)

# Outputs are left out: a key may act on the widget itself.
NOTEBOOK_STATE = """() => ({
    cells: [...document.querySelectorAll('.jp-Notebook .jp-Cell')].map(cell => [
        cell.classList.contains('jp-CodeCell'),
        cell.querySelector('.jp-InputPrompt')?.innerText,
        cell.querySelector('.jp-Editor')?.innerText,
        cell.querySelector('.jp-OutputArea') !== null,
    ]),
    dialogs: document.querySelectorAll('.jp-Dialog').length,
})"""


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Any) -> Iterator[Any]:
    """A notebook with a Studio, standalone widgets, and a cell above and below."""
    write_notebook(lab, NOTEBOOK, "above = 1", SOURCE, "below = 1")
    page = open_notebook(lab, browser, NOTEBOOK)
    page.locator(".jp-Notebook .cm-content").nth(1).click()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(f"{STUDIO} .barlayer path", state="attached", timeout=TIMEOUT_MS)
    page.wait_for_selector(".alone-chart .barlayer path", state="attached", timeout=TIMEOUT_MS)
    page.wait_for_function(KERNEL_IS_IDLE)
    yield page
    page.close()


@pytest.mark.parametrize("focused", FOCUS_TARGETS)
def test_fault_62_keys_in_a_widget_do_not_change_the_notebook(focused: str, page: Any, lab: Lab) -> None:
    kernels, before = lab.kernels(), page.evaluate(NOTEBOOK_STATE)
    target = page.locator(FOCUS_TARGETS[focused]).first
    if "chart" in focused:
        target.evaluate("each => { each.tabIndex = 0; }")  # It takes the focus, as after a click into it.
    for key in KEYS:
        target.focus()
        for part in key.split(" "):
            page.keyboard.press(part)
    page.wait_for_timeout(300)  # A dialog would open, or a cell vanish, much sooner.
    after = page.evaluate(NOTEBOOK_STATE)
    page.keyboard.press("Escape")
    assert after == before
    assert lab.kernels() == kernels


def test_fault_62_escape_save_and_tab_reach_the_page(page: Any, lab: Lab) -> None:
    box = page.locator(FOCUS_TARGETS["a text box"]).first
    box.focus()
    page.evaluate("""() => {
        window.heard = [];
        document.addEventListener('keydown', event => window.heard.push(event.key));
    }""")
    for key in ("Escape", "Control+s", "F2", "q"):
        box.press(key)
    assert [key for key in page.evaluate("() => window.heard") if key != "Control"] == ["Escape", "s", "F2"]
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    assert "widget-view" in (lab.folder / NOTEBOOK).read_text(), "saved"
    # JupyterLab takes the focus for a moment while it saves; a Tab pressed just then moves from elsewhere.
    for _ in range(5):
        box.press("Tab")
        page.wait_for_timeout(500)
        if page.evaluate("() => document.activeElement.closest('.ss-studio') !== null"):
            return
    raise AssertionError("Tab leaves the Studio")


def test_fault_62_click_on_the_cell_takes_the_focus_from_the_studio(page: Any) -> None:
    """JupyterLab's keys then act on the selected cell, also if it is the cell of the Studio."""
    page.locator(FOCUS_TARGETS["a tab"]).first.focus()
    page.locator(".jp-Notebook .jp-Cell", has=page.locator(STUDIO)).locator(".jp-InputPrompt").click()
    page.wait_for_function("() => document.activeElement.matches('.jp-Cell:has(.ss-studio)')")


def test_few_tab_stops_from_the_first_input_to_the_tabs(page: Any) -> None:
    first = page.locator(f"{STUDIO} .ss-fold-line", has_text="Model").first
    first.focus()
    stops = 0
    while not page.evaluate("() => document.activeElement.matches('[role=tab]')") and stops < 60:
        page.keyboard.press("Tab")
        stops += 1
        group = page.evaluate("""() => {
            const group = document.activeElement.closest('.ss-seg, [data-roving]');
            return group && [...group.querySelectorAll('button')].filter(each => each.tabIndex === 0).length;
        }""")
        assert group in (None, 1), "one tab stop per group"
    assert stops <= 15


def test_arrow_keys_move_the_focus_in_a_group_without_pressing(page: Any) -> None:
    group = page.locator(".ss-memory .ss-seg").first
    buttons = group.locator("button")
    buttons.first.focus()
    page.keyboard.press("ArrowRight")
    assert buttons.nth(1).evaluate("each => each === document.activeElement && each.tabIndex === 0")
    assert "mod-active" in buttons.first.get_attribute("class")
    page.keyboard.press("Home")
    assert buttons.first.evaluate("each => each === document.activeElement")
    assert buttons.nth(1).evaluate("each => each.tabIndex") == -1
