"""Test of the Trace tab's sentences and tables in a real JupyterLab, on a stored trace of a run."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opened_notebook import open_notebook, run_all_cells, write_notebook
from playwright.sync_api import TimeoutError, expect
from served import Lab
from studio_page import save_screenshot, use_theme
from tests.requirements import thorough

import shardscope as ss

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from written_runs import write_run

UNIT_TESTS = Path(__file__).parents[1] / "unit"

# The main job opens a trace as well.
pytestmark = thorough()

NOTEBOOK = "trace_analysis.ipynb"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "traces_of_runs" / "fsdp2"
# A calibration of its own: the machine's, or none, would be the same for all tests.
CELL = f"""
import os, sys, tempfile
os.environ["SHARDSCOPE_DATA_HOME"] = tempfile.mkdtemp()
sys.path.append({str(UNIT_TESTS)!r})
from calibrations import make_calibration
from shardscope.timing.calibration.store import store_calibration
store_calibration(make_calibration("2xcpu"))
from shardscope_widgets import Studio
studio = Studio()
studio
"""
VIEWPORT = (
    "(() => { const { t0, t1 } = document.querySelector('.ss-trace canvas').dataset; return [t0, t1]; })()"
)
# What leaves the page of the Studio on the right, except what scrolls or is cut on purpose.
OVERFLOWING = """() => {
    const panel = document.querySelector('.ss-panel');
    const edge = panel.getBoundingClientRect().right + 1;
    return [...panel.querySelectorAll('*')]
        .filter(each => each.checkVisibility())
        .filter(each => !each.closest('.ss-scroll, svg, .ss-off-screen, .ss-cut, .ss-trace, .ss-tabs'))
        .filter(each => { const box = each.getBoundingClientRect(); return box.width && box.right > edge; })
        .map(each => each.className || each.tagName);
}"""
TABLE_SCROLLS = (
    "() => [...document.querySelectorAll('.ss-analysis .ss-scroll')]"
    ".some(each => each.scrollWidth > each.clientWidth + 1)"
)


@pytest.fixture
def page(lab: Lab, browser: Any, offline: Any) -> Any:
    plan = ss.Plan.from_json(json.dumps(json.loads((FIXTURE / "run.json").read_text())["plan"]))
    folder = write_run("traced", parent=lab.folder / "runs", plan=plan)
    shutil.copytree(FIXTURE / "traces", folder / "traces", dirs_exist_ok=True)
    other = write_run("another", parent=lab.folder / "runs", plan=plan)
    shutil.copytree(FIXTURE.parent / "ddp" / "traces", other / "traces", dirs_exist_ok=True)
    write_notebook(lab, NOTEBOOK, CELL)
    page = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1280, "height": 800})
    offline(page)
    page.keyboard.press("Control+b")
    run_all_cells(page, 1)
    yield page
    page.close()


TEXT = "document.querySelector('.ss-analysis-body .widget-html-content').innerHTML"
BODY = "document.querySelector('.ss-analysis-body').innerText"
TAB_BOXES = """() => {
    const row = document.querySelector('.ss-analysis-tabs');
    const { left, top } = row.getBoundingClientRect();
    return [...row.querySelectorAll('button')].map(each => {
        const box = each.getBoundingClientRect();
        return [each.dataset.name, box.left - left + row.scrollLeft, box.top - top, box.width, box.height];
    });
}"""


CHOSEN_TAB = """() => {
    const row = document.querySelector('.ss-analysis-tabs').getBoundingClientRect();
    const tab = document.querySelector('.ss-analysis-tabs [aria-selected=true]').getBoundingClientRect();
    return [tab.left - row.left, row.right - tab.right];
}"""


LEFT_AND_RIGHT_ENDS = """() => ['.ss-findings-of-trace', '.ss-trace-bar', '.ss-analysis-tabs']
    .map(selector => document.querySelector(selector).getBoundingClientRect())
    .map(box => [Math.round(box.left), Math.round(box.right)])"""
ARROW_IN_ROW = """() => {
    const row = document.querySelector('.ss-analysis-tabs').getBoundingClientRect();
    const arrow = document.querySelector('.ss-analysis-tabs .ss-tabs-after.ss-on');
    return Boolean(arrow) && arrow.getBoundingClientRect().right <= row.right;
}"""


def choose_analysis(page: Any, name: str) -> Any:
    """Choose another tab of the analysis, wait until it is computed, and return its body."""
    before = page.evaluate(TEXT)
    page.locator(".ss-analysis-tabs button", has_text=name).click()
    # A slow kernel shows the tab before for some time. The table comes after the text.
    page.wait_for_function(
        f"before => {TEXT} !== before && !{TEXT}.includes('Computing') && {BODY}.length > 40", arg=before
    )
    return page.locator(".ss-analysis-body")


def test_trace_tab_answers_why_a_step_is_slow(page: Any) -> None:
    page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text="Runs").click()
    page.get_by_role("button", name="Open the trace of traced").first.click()
    page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text="Trace").wait_for()
    page.wait_for_selector(".ss-trace canvas[data-t0]")
    expect(page.locator(".ss-findings-of-trace li")).to_have_count(3)
    page.wait_for_function("+document.querySelector('.ss-trace canvas').dataset.slices > 100")
    save_screenshot(page, "trace_analysis_light")

    # Sentences, view and tables have the same edges, and the arrow to the last tabs is inside of them.
    ends = page.evaluate(LEFT_AND_RIGHT_ENDS)
    assert ends[0] == ends[1] == ends[2], ends
    page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for_function(ARROW_IN_ROW)
    page.set_viewport_size({"width": 1280, "height": 800})

    # A sentence moves the view, and so does a row of a table, which the view is scrolled back for.
    before = page.evaluate(VIEWPORT)
    page.locator(".ss-findings-of-trace").get_by_role("button", name="Show in the trace").first.click()
    page.wait_for_function(f"before => {VIEWPORT}[0] !== before[0]", arg=before)
    before = page.evaluate(VIEWPORT)
    body = choose_analysis(page, "Kernels")
    body.locator("tbody tr").first.click()
    page.wait_for_function(f"before => {VIEWPORT}[0] !== before[0]", arg=before)
    expect(page.locator(".ss-trace canvas")).to_be_in_viewport(ratio=0.5)

    tab_boxes: dict[int, Any] = {}
    for name in page.locator(".ss-analysis-tabs button").all_text_contents():
        choose_analysis(page, name)
        for width in (1280, 1000):
            page.set_viewport_size({"width": width, "height": 800})
            # The charts are drawn again for the new width.
            with suppress(TimeoutError):
                page.wait_for_function(f"!({OVERFLOWING})().length && !({TABLE_SCROLLS})()")
            assert page.evaluate(OVERFLOWING) == [], (name, width)
            assert not page.evaluate(TABLE_SCROLLS), (name, width)
            # Tabs stand still: the name of the chosen one is bold, which is wider.
            boxes = page.evaluate(TAB_BOXES)
            assert boxes == tab_boxes.setdefault(width, boxes), name
            assert len({top for _, _, top, *_ in boxes}) == 1, "one line, which scrolls"
            left, right = page.evaluate(CHOSEN_TAB)
            assert left >= 0 and right >= 0, f"{name} is scrolled into the row"
    page.set_viewport_size({"width": 1280, "height": 800})

    body = choose_analysis(page, "Critical path")
    body.get_by_role("button", name="Draw it in the view").click()
    expect(body.get_by_role("button", name="Remove it from the view")).to_be_visible()

    body = choose_analysis(page, "Another run")
    body.locator("select").select_option(label="another · tiny on 2 CPU ranks, FSDP2")
    expect(body.locator("th", has_text="difference")).to_be_visible()
    expect(body.locator("tbody tr")).not_to_have_count(0)
    body.scroll_into_view_if_needed()
    save_screenshot(page, "trace_another_run_light")

    # The measured rates move the prediction, and can be taken back.
    body = choose_analysis(page, "Plan against trace")
    step = body.locator("tbody tr", has_text="step").last
    predicted = step.locator("td").nth(1).inner_text()
    body.get_by_role("button", name="Use the measured rates").click()
    expect(body).to_contain_text("move the prediction from")
    expect(body.locator("th", has_text="before")).to_have_count(1)
    expect(step.locator("td").nth(1)).to_have_text(predicted)
    expect(step.locator("td").nth(2)).not_to_have_text(predicted)
    body.scroll_into_view_if_needed()
    save_screenshot(page, "trace_plan_light")
    use_theme(page, "JupyterLab Dark", light="false")
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    save_screenshot(page, "trace_plan_dark")
    body.get_by_role("button", name="Predict without them").click()
    expect(body).not_to_contain_text("move the prediction from")
    expect(step.locator("td").nth(1)).to_have_text(predicted)
    use_theme(page, "JupyterLab Light", light="true")
