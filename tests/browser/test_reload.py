"""Test of a page that is reloaded and opened twice during a run, for `make test-faults`."""

from __future__ import annotations

from typing import Any

import pytest
from served import Lab
from studio_page import LAST_STEP, NOTEBOOK, TIMEOUT_MS
from test_main_job import STEP_TIMEOUT_MS, run_all_cells, start_run, wait_for_no_processes, wait_for_step
from tests.faults import slow_test
from tests.requirements import thorough

pytestmark = thorough()


@slow_test
@pytest.mark.alone
def test_fault_26_page_is_reloaded_and_opened_twice_during_a_run(
    lab: Lab, browser: Any, offline: Any
) -> None:
    page = browser.new_page(viewport={"width": 1500, "height": 1200})
    page.set_default_timeout(TIMEOUT_MS)
    offline(page)
    run_all_cells(page, lab)
    start_run(page, steps=4000)
    wait_for_step(page)
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.get_by_text("Save Notebook", exact=True).click()
    page.wait_for_timeout(1500)
    page.reload()
    wait_for_chart(page)
    second = browser.new_page(viewport={"width": 1500, "height": 1200})
    second.set_default_timeout(TIMEOUT_MS)
    offline(second)
    second.goto(lab.notebook_url(NOTEBOOK))
    wait_for_chart(second)
    before = page.evaluate(LAST_STEP)
    grown = f"before => {LAST_STEP} > before"
    for each in (page, second):
        each.wait_for_function(grown, arg=before, timeout=STEP_TIMEOUT_MS)
    page.close()
    before = second.evaluate(LAST_STEP)
    second.wait_for_function(grown, arg=before, timeout=STEP_TIMEOUT_MS)
    second.get_by_role("button", name="Stop", exact=True).click()
    second.wait_for_selector(".ss-status[data-status=stopped]")
    assert wait_for_no_processes(lab.folder / "runs"), "a stopped run left processes behind"
    second.close()


def wait_for_chart(page: Any) -> None:
    """Wait until the chart is drawn, then as :func:`wait_for_step`."""
    page.wait_for_selector(".ss-run .js-plotly-plot", state="attached")
    wait_for_step(page)
