"""Tests of the list of runs in a real JupyterLab: mouse, keyboard, every width and stable layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect
from served import Lab
from studio_page import SCREENSHOTS, use_theme
from tests.requirements import needs, thorough

import shardscope as ss

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from written_runs import write_failure, write_run

pytestmark = thorough()

NOTEBOOK = "runs_tab.ipynb"
CELL = "from shardscope_widgets.run.runs_view import RunsView\nview = RunsView()\nview"
WIDTHS = (1040, 760, 390)
MAX_HEIGHT = 520
ERROR = (
    "Traceback (most recent call last):\n  File 'cell', line 3, in train\nValueError: the batch is empty\n"
)

# Elements that overflow the view on the right, except those that scroll or are clipped on purpose.
OVERFLOWING = """() => {
    const view = document.querySelector('.ss-runs-view');
    const edge = view.getBoundingClientRect().right + 1;
    return [...view.querySelectorAll('*')]
        .filter(each => each.checkVisibility())
        .filter(each => !each.closest('.ss-scroll, svg, .ss-off-screen, .ss-clipped'))
        .filter(each => { const box = each.getBoundingClientRect(); return box.width && box.right > edge; })
        .map(each => each.className || each.tagName);
}"""

# Lines of charts that leave the plot that they belong to, by a pixel or more.
LINES_OUTSIDE = """() => Object.values(document.querySelector('.ss-run .js-plotly-plot')._fullLayout._plots)
    .flatMap(({ plot, yaxis }) => [...plot.node().querySelectorAll('.js-line')]
        .map(line => line.getBBox())
        .filter(box => box.y < -1 || box.y + box.height > yaxis._length + 1)
        .map(box => `${yaxis._name}: from ${box.y} to ${box.y + box.height} of ${yaxis._length}`))
"""

# How much of its axis the first chart's lines take; they are outside of it where this is more than one.
SHARE_OF_AXIS = """() => {
    const { data, _fullLayout } = document.querySelector('.ss-run .js-plotly-plot');
    const [low, high] = _fullLayout.yaxis.range;
    const values = data.filter(line => line.yaxis === 'y' && line.visible !== false)
        .flatMap(line => [...line.y]);
    if (!values.length) return 0;
    const middle = (low + high) / 2;
    return Math.max(...values.map(value => Math.abs(value - middle))) / ((high - low) / 2);
}"""

# Pairs of texts of the charts that overlap.
OVERLAPPING = """() => {
    const charts = document.querySelector('.ss-run .js-plotly-plot');
    const boxes = [...charts.querySelectorAll('.annotation-text, .xtick, .ytick, .xtitle')]
        .filter(each => each.checkVisibility())
        .map(each => [each.textContent, each.getBoundingClientRect()]).filter(([, box]) => box.width);
    const found = [];
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
            found.push(`${one} | ${other}`);
    }));
    return found;
}"""


LAUNCH = """
import shardscope as ss
from shardscope_widgets.run.runs_view import RunsView
plan = ss.Plan(
    ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64, global_batch_size=2),
    ss.Layout.ddp(),
)
run = ss.launch(plan, ss.Pretrain(num_steps=600), name="to-resume")
view = RunsView()
view
"""


@pytest.fixture
def page(lab: Lab, browser: Any, offline: Any) -> Any:
    """A notebook whose cell shows the list of some runs."""
    runs = lab.folder / "runs"
    write_run("first", parent=runs, num_done=40, has_trace=True)
    write_run("second", parent=runs, number=1, task=ss.Pretrain(num_steps=40, learning_rate=3e-4))
    write_run("stopped", "stopped", parent=runs, number=2, num_done=25, checkpoint=25)
    write_failure(
        write_run("failed", "failed", parent=runs, number=3, num_done=6, is_own_task=True), 1, ERROR
    )
    write_run("evil", "<img src=x onerror='window.wasRun = 1'>", parent=runs, number=4, reason="<b>bold</b>")
    page = run_cell(lab, browser, CELL)
    offline(page)
    page.wait_for_selector(".ss-runs tbody tr")
    page.keyboard.press("Control+b")
    yield page
    page.close()


def run_cell(lab: Lab, browser: Any, source: str) -> Any:
    """Return a page of JupyterLab whose notebook has run its only cell."""
    cell = {
        "cell_type": "code",
        "id": "a",
        "metadata": {},
        "source": source,
        "outputs": [],
        "execution_count": None,
    }
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (lab.folder / NOTEBOOK).write_text(json.dumps(notebook))
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(60_000)
    page.goto(lab.notebook_url(NOTEBOOK))
    page.wait_for_function("() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)")
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    return page


@pytest.mark.alone
def test_saved_and_stopped_run_is_resumed_by_a_click(lab: Lab, browser: Any) -> None:
    needs("torch")
    needs("transformers")
    page = run_cell(lab, browser, LAUNCH)
    page.get_by_role("button", name="to-resume", exact=True).click()
    page.wait_for_function("() => parseInt(document.querySelector('.ss-facts b')?.innerText) > 5")
    page.get_by_role("button", name="Save and stop").click()
    page.wait_for_selector(".ss-run .ss-status[data-status=stopped]")
    page.locator(".ss-runs-bar button", has_text="Resume").click()
    page.wait_for_selector(".ss-run-name:has-text('to-resume-2')")
    page.wait_for_selector(".ss-run .ss-status[data-status=finished]", timeout=120_000)
    expect(page.locator(".ss-facts")).to_contain_text("600 of 600", use_inner_text=True)
    go_back(page)
    page.locator(".ss-runs tr", has_text="continues to-resume").wait_for()
    first, second = (ss.Run.attach(lab.folder / "runs" / name) for name in ("to-resume", "to-resume-2"))
    done = max(line["step"] for line in first.metrics())
    assert min(line["step"] for line in second.metrics()) == done + 1
    page.close()


def test_runs_are_opened_and_compared_at_every_width(page: Any) -> None:
    check_layout(page, "list")
    check_loss_axis_follows_the_run(page)
    heights = [open_run_by_click(page, "first", "finished")]
    check_charts_do_not_overlap(page)
    go_back(page)
    heights.append(check_failed_run_shows_error_and_log(page))
    go_back(page)
    assert len(set(heights)) == 1, f"the status line has different heights: {heights}"
    compare_two_runs(page)
    open_trace(page)
    check_keyboard(page)
    assert not page.evaluate("() => window.wasRun"), "text of a run folder became markup"
    use_theme(page, "JupyterLab Dark", light="false")
    page.locator(".ss-runs-view").screenshot(path=str(SCREENSHOTS / "runs_list_dark.png"))


def open_run_by_click(page: Any, name: str, status: str) -> float:
    # By name: the message of a damaged run may contain the word "failed".
    row = page.locator(".ss-runs tr", has=page.locator("button.ss-open", has_text=name)).first
    row.click(position={"x": 300, "y": 20})
    page.wait_for_selector(f".ss-run .ss-status[data-status={status}]")
    return float(page.evaluate("() => document.querySelector('.ss-run-top').getBoundingClientRect().height"))


def check_loss_axis_follows_the_run(page: Any) -> None:
    """The losses of the two runs do not overlap: on the previous run's axis the curve is invisible."""
    for name, status in (("failed", "failed"), ("first", "finished")):
        open_run_by_click(page, name, status)
        page.wait_for_selector(".ss-run .js-line", state="attached")
        try:
            page.wait_for_function(
                f"() => {{ const share = ({SHARE_OF_AXIS})(); return share > 0.5 && share <= 1; }}",
                timeout=10_000,
            )
        except TimeoutError:
            raise AssertionError(f"{name}: {page.evaluate(SHARE_OF_AXIS)} of the axis") from None
        go_back(page)


def check_charts_do_not_overlap(page: Any) -> None:
    page.wait_for_selector(".ss-run .js-line", state="attached")
    expect(page.locator(".ss-latest tfoot", has_text="predicted")).to_have_count(1)
    for width in WIDTHS:
        use_width(page, width)
        # The page reports its width once it is stable, and the kernel lays the charts out again.
        page.wait_for_timeout(800)
        for misplaced in (LINES_OUTSIDE, OVERLAPPING):
            try:
                page.wait_for_function(f"() => ({misplaced})().length === 0", timeout=10_000)
            except TimeoutError:
                page.screenshot(path=str(SCREENSHOTS / "runs_overlapping.png"))
                raise AssertionError(f"{width} pixels: {page.evaluate(misplaced)}") from None
        check_layout(page, "run", width)
    use_width(page, None)


def check_failed_run_shows_error_and_log(page: Any) -> float:
    height = open_run_by_click(page, "failed", "failed")
    page.locator(".ss-run [role=alert]", has_text="the batch is empty").wait_for()
    page.wait_for_function("() => document.querySelector('.ss-log-head select').selectedIndex === 1")
    error, log = (page.locator(f".ss-run-{name}").bounding_box() for name in ("error", "log"))
    body = page.locator(".ss-run-body").bounding_box()
    assert body["y"] <= error["y"] < log["y"] < body["y"] + body["height"], (
        "error and log are not visible without scrolling"
    )
    resume = page.locator(".ss-runs-bar button", has_text="Resume")
    assert resume.get_attribute("aria-disabled") == "true" and "your own code" in resume.get_attribute(
        "title"
    )
    page.locator(".ss-runs-view").screenshot(path=str(SCREENSHOTS / "runs_failed.png"))
    return height


def compare_two_runs(page: Any) -> None:
    for name in ("first", "second"):
        page.get_by_role("checkbox", name=f"Select {name} ").click()
        page.wait_for_selector(f".ss-pick[aria-checked=true][aria-label^='Select {name} ']")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_selector(".ss-compare .main-svg")
    expect(page.locator(".ss-compared")).to_contain_text("learning rate", use_inner_text=True)
    check_layout(page, "comparison")
    go_back(page)


def open_trace(page: Any) -> None:
    page.get_by_role("button", name="Open the trace of first").click()
    page.wait_for_selector(".ss-runs-view canvas")
    go_back(page)


def check_keyboard(page: Any) -> None:
    page.get_by_role("button", name="second", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".ss-run .ss-status[data-status=finished]")
    page.get_by_role("button", name="Back to all runs").focus()
    page.keyboard.press("Enter")
    page.get_by_role("checkbox", name="Select second ").focus()
    page.keyboard.press("Space")
    page.wait_for_selector(".ss-pick[aria-checked=false][aria-label^='Select second ']")
    focused = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert focused.startswith("Select second "), "a press must keep the focus"


def check_layout(page: Any, part: str, width: int | None = None) -> None:
    """Check that nothing overflows, and that the view is no higher than its tab."""
    for each in WIDTHS if width is None else (width,):
        use_width(page, each)
        assert page.evaluate(OVERFLOWING) == [], f"{part} at {each}"
        height = page.evaluate("() => document.querySelector('.ss-runs-view').getBoundingClientRect().height")
        assert height <= MAX_HEIGHT, f"{part} at {each} is {height} high"
    if width is None:
        use_width(page, None)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.locator(".ss-runs-view").screenshot(path=str(SCREENSHOTS / f"runs_{part}.png"))


def use_width(page: Any, width: int | None) -> None:
    style = "" if width is None else f"{width}px"
    page.evaluate(
        "width => { const view = document.querySelector('.ss-runs-view');"
        " view.style.width = view.style.maxWidth = width; }",
        style,
    )
    page.wait_for_timeout(100)


def go_back(page: Any) -> None:
    page.get_by_role("button", name="Back to all runs").click()
    page.wait_for_selector(".ss-runs tbody tr")
