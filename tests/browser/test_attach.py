"""Test of a run that outlives its kernel and is stopped from another notebook, for `make test-faults`."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from playwright.sync_api import expect
from served import Lab
from studio_page import LAST_STEP, SCREENSHOTS, TIMEOUT_MS, open_fold, use_theme
from test_main_job import (
    RUN_TIMEOUT_MS,
    STEP_TIMEOUT_MS,
    run_all_cells,
    start_run,
    wait_for_no_processes,
    wait_for_step,
)
from test_studio_tabs import OVERFLOWING, WIDTHS
from tests.faults import slow_test

import shardscope as ss

OTHER_NOTEBOOK = "attach.ipynb"


@slow_test
@pytest.mark.alone
def test_fault_07_26_run_outlives_its_kernel_and_another_notebook_stops_it(
    lab: Lab, browser: Any, offline: Any
) -> None:
    page = browser.new_page(viewport={"width": 1500, "height": 1500})
    page.set_default_timeout(TIMEOUT_MS)
    offline(page)
    run_all_cells(page, lab)
    open_fold(page, "Run")
    page.get_by_text("Keep running if the kernel stops", exact=True).click()
    start_run(page, steps=4000)
    wait_for_step(page)
    (name,) = [folder.name for folder in (lab.folder / "runs").iterdir()]
    try:
        for kernel in lab.kernels():
            restart_kernel(lab, kernel)
        page.close()
        other = open_other_notebook(lab, browser, offline, f"RunView(ss.Run.attach('runs/{name}'))")
        before = other.evaluate(LAST_STEP)
        other.wait_for_function(f"before => {LAST_STEP} > before", arg=before, timeout=STEP_TIMEOUT_MS)
        check_view_is_complete(other)
        check_log_search(other)
        check_nothing_overflows(other)
        other.get_by_role("button", name="Stop", exact=True).click()
        other.wait_for_selector(".ss-status[data-status=stopped]", timeout=RUN_TIMEOUT_MS)
        expect(other.locator(".ss-run-top")).to_contain_text(
            f"Stop was pressed in {OTHER_NOTEBOOK}", use_inner_text=True
        )
        other.close()
    finally:
        ss.Run.attach(lab.folder / "runs" / name).stop()  # Also if the test fails.
    assert wait_for_no_processes(lab.folder / "runs"), "a stopped run left processes behind"


def open_other_notebook(lab: Lab, browser: Any, offline: Any, last_line: str) -> Any:
    """Open another notebook, and run its only cell."""
    write_notebook(lab, f"import shardscope as ss\nfrom shardscope_widgets import RunView\n{last_line}")
    page = browser.new_page(viewport={"width": 1300, "height": 3400})
    page.set_default_timeout(TIMEOUT_MS)
    offline(page)
    page.goto(lab.notebook_url(OTHER_NOTEBOOK))
    page.wait_for_function("() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)")
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    wait_for_step(page)
    return page


def check_view_is_complete(page: Any) -> None:
    """Check number of steps, note and predictions, all of which come from the folder."""
    bar = page.locator(".ss-run [role=progressbar]")
    assert bar.get_attribute("aria-valuemax") == "4000" and int(bar.get_attribute("aria-valuenow")) >= 3
    expect(page.locator(".ss-run .ss-note")).to_contain_text("Trial run", use_inner_text=True)
    expect(page.locator(".ss-facts")).to_contain_text("remaining", use_inner_text=True)
    page.locator(".ss-latest tfoot", has_text="predicted").wait_for()
    page.locator(".ss-parts tbody tr").nth(2).wait_for()
    expect(page.locator(".ss-run .js-plotly-plot")).to_have_count(1)
    titles = page.locator(".ss-run .annotation-text").all_text_contents()
    assert {"loss", "tokens/s per rank"} <= set(titles) and not any("GPU" in title for title in titles)


def check_log_search(page: Any) -> None:
    box = page.get_by_placeholder("Search this log")
    box.fill("training")
    page.locator(".ss-log-pane mark", has_text="training").first.wait_for()
    expect(page.locator(".ss-log-head")).to_contain_text("lines", use_inner_text=True)
    box.fill("")
    page.locator(".ss-log-pane mark").first.wait_for(state="detached")
    page.locator(".ss-log-head select").select_option(label="rank 1")
    page.wait_for_function(
        "() => document.querySelector('.ss-log-pane .ss-log').getAttribute('aria-label') === 'log of rank-1'"
    )


def check_nothing_overflows(page: Any) -> None:
    """Check each width in both themes, and save screenshots."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    view = page.locator(".ss-run")
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        for width in WIDTHS:
            page.evaluate("w => { document.querySelector('.ss-run').style.width = w + 'px'; }", width)
            page.wait_for_timeout(900)
            outside = page.evaluate(
                OVERFLOWING.replace(".ss-studio", ".ss-run").replace("svg,", "svg, .ss-clipped,")
            )
            assert outside == [], (theme, width)
            view.screenshot(path=str(SCREENSHOTS / f"attached_{width}_{theme.lower()}.png"))


def write_notebook(lab: Lab, source: str) -> None:
    cell = {
        "cell_type": "code",
        "id": "attach",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "source": source,
    }
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
    (lab.folder / OTHER_NOTEBOOK).write_text(json.dumps(notebook))


def restart_kernel(lab: Lab, kernel: str) -> None:
    """Restart a kernel, as JupyterLab's menu does."""
    request = urllib.request.Request(
        f"{lab.url}/api/kernels/{kernel}/restart",
        method="POST",
        headers={"Authorization": f"token {lab.token}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
