"""Tests of the Memory and Time tabs in a real JupyterLab: height, bars that open rows, pins, layout."""

from __future__ import annotations

from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from playwright.sync_api import expect
from served import Lab
from tests.requirements import thorough

pytestmark = thorough()

CELLS = (
    """import shardscope as ss
from dataclasses import replace
from shardscope_widgets import MemoryView, StepView
plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
memory = MemoryView(plan)
memory""",
    "step = StepView(plan)\nstep",
)
OPENED = (
    "view => [...document.querySelectorAll(view + ' [data-why]:not([hidden])')].map(row => row.dataset.why)"
)
TEXT_BOXES = """view => [...document.querySelectorAll(view + ' .js-plotly-plot text')]
    .filter(text => text.textContent.trim() && text.checkVisibility())
    .map(text => [text.textContent, text.getBoundingClientRect().toJSON()])"""
# Set the width of a view, as in a narrow page.
SET_WIDTH = "([view, width]) => { document.querySelector(view).style.width = width + 'px'; }"


@pytest.fixture
def page(lab: Lab, browser: Any) -> Any:
    """Both views, each in its cell."""
    write_notebook(lab, "memory_and_time.ipynb", *CELLS)
    page = open_notebook(lab, browser, "memory_and_time.ipynb", viewport={"width": 1500, "height": 1900})
    run_all_cells(page, 2)
    for view in (".ss-memory", ".ss-step"):
        page.wait_for_selector(f"{view} .barlayer path", state="attached")
        page.wait_for_selector(f"{view} .ss-parts")
    yield page
    page.close()


def test_memory_tab_fits_one_screen_and_its_bars_open_rows(page: Any) -> None:
    check_memory_tab_height(page)
    check_bar_opens_its_row(page, ".ss-memory", 3, "activations", "layers")
    check_row_opens_by_keyboard(page)
    check_plan_is_pinned_and_unpinned(page)


def test_bar_of_the_time_chart_opens_its_row(page: Any) -> None:
    check_bar_opens_its_row(page, ".ss-step", 0, "matrices", "FLOPs")


def test_labels_do_not_overlap_in_a_narrow_chart(page: Any) -> None:
    check_labels_do_not_overlap(page)


def set_width(page: Any, view: str, width: int) -> None:
    page.evaluate(SET_WIDTH, [view, width])
    page.wait_for_function(
        "([view, width]) => Math.abs(document.querySelector(view + ' .js-plotly-plot .main-svg')"
        ".getBoundingClientRect().width - width) < 20",
        arg=[view, width],
    )


def check_memory_tab_height(page: Any) -> None:
    """Check that chart, components, total and suggested changes fit beside 640 pixels of inputs."""
    set_width(page, ".ss-memory", 740)
    expect(page.locator(".ss-memory .ss-opens")).to_have_count(10)
    assert page.locator(".ss-memory .ss-chip").count() >= 1
    assert page.locator(".ss-memory").bounding_box()["height"] <= 530
    for chip in page.locator(".ss-memory .ss-chip").all():
        assert chip.bounding_box()["height"] < 30, "the text of a chip is on one line"


def click_bar(page: Any, view: str, index: int) -> None:
    """Click on the first bar of trace ``index`` as a mouse does: it moves there first."""
    box = page.locator(f"{view} .barlayer .trace").nth(index).locator("path").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2 - 3, box["y"] + box["height"] / 2 + 2)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.locator(f"{view} .hoverlayer .hovertext").first.wait_for()
    page.mouse.down()
    page.mouse.up()


def check_bar_opens_its_row(page: Any, view: str, index: int, key: str, formula: str) -> None:
    """Click on a bar and check its row; traces are drawn in the order of the components and parts."""
    assert page.evaluate(OPENED, view) == []
    click_bar(page, view, index)
    row = page.locator(f"{view} [data-why='{key}']")
    row.wait_for()
    assert page.evaluate(OPENED, view) == [key] and formula in row.inner_text()
    assert page.evaluate("() => document.activeElement.closest('[data-opens]').dataset.opens") == key


def check_row_opens_by_keyboard(page: Any) -> None:
    name = page.locator(".ss-memory [data-opens='activations'] .ss-name")
    name.focus()
    page.keyboard.press("Enter")
    page.locator(".ss-memory [data-why='activations']").wait_for(state="hidden")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator(".ss-memory [data-why='optimizer']").wait_for()
    expect(name).to_have_attribute("aria-expanded", "false")


def check_plan_is_pinned_and_unpinned(page: Any) -> None:
    memory = page.locator(".ss-memory")
    memory.get_by_role("button", name="Pin for comparison").click()
    memory.locator(".ss-unpin").wait_for()
    assert page.evaluate(OPENED, ".ss-memory") == ["optimizer"], "a row that was opened stays open"
    memory.locator(".ss-parts .ss-unpin").click()
    memory.locator(".ss-unpin").wait_for(state="detached")
    memory.get_by_role("button", name="Pin for comparison").wait_for()


def check_labels_do_not_overlap(page: Any) -> None:
    for view in (".ss-memory", ".ss-step"):
        set_width(page, view, 390)
        left, right = page.locator(view).bounding_box()["x"], 0.0
        right = left + 390
        boxes = page.evaluate(TEXT_BOXES, view)
        assert len(boxes) >= 5
        for label, box in boxes:
            assert box["left"] >= left - 1 and box["right"] <= right + 1, f"{label!r} is cut off"
            assert box["height"] < 36, f"{label!r} wraps"
        for index, (label, box) in enumerate(boxes):
            for other_label, other in boxes[index + 1 :]:
                apart = (
                    box["right"] <= other["left"] + 1
                    or other["right"] <= box["left"] + 1
                    or box["bottom"] <= other["top"] + 3
                    or other["bottom"] <= box["top"] + 3
                )
                assert apart, f"{label!r} touches {other_label!r}"


def test_layout_is_stable_when_a_rehearsal_or_measurement_arrives(lab: Lab, browser: Any) -> None:
    updates = (
        'memory.add(plan, replace(plan.memory(), tier="rehearsed"))',
        'memory.add(plan, replace(plan.memory(), tier="measured"))',
        "from shardscope_widgets.time.rows import RunSteps\nstep.add(plan, RunSteps(20, 5.0))",
    )
    write_notebook(lab, "arrives.ipynb", *CELLS, "\n".join(updates))
    page = open_notebook(lab, browser, "arrives.ipynb", viewport={"width": 1500, "height": 1900})
    try:
        page.locator(".jp-Notebook .cm-content").first.click()
        for _ in range(2):
            page.keyboard.press("Shift+Enter")
        positions = """() => {
            const top = one => one.getBoundingClientRect().top;
            return ['.ss-memory .ss-parts', '.ss-memory .ss-repairs', '.ss-step .ss-parts']
                .map(name => document.querySelector(name))
                .map(each => top(each) - top(each.closest('.ss-root')));
        }"""
        page.wait_for_selector(".ss-step .ss-parts")
        page.wait_for_selector(".ss-step .barlayer path", state="attached")
        page.wait_for_selector(".ss-memory .ss-chip")
        before = page.evaluate(positions)
        page.keyboard.press("Shift+Enter")
        page.wait_for_function(
            "() => document.querySelectorAll('.ss-memory .ss-parts td.ss-empty').length === 0"
        )
        page.wait_for_function("() => !document.querySelector('.ss-step .ss-parts td.ss-empty')")
        assert page.evaluate(positions) == before
    finally:
        page.close()
