"""The page goes and comes while a run is under way: `make test-faults` runs it."""

from __future__ import annotations

from typing import Any

import pytest
from served import Lab
from studio_page import NOTEBOOK, SHOWN
from test_main_job import STEPS_ARRIVE, nothing_left_of, run_all_cells, start_a_run, wait_for_step
from tests.faults import long_one
from tests.needs import thorough

pytestmark = thorough()


@long_one
@pytest.mark.alone
def test_fault_26_page_is_reloaded_and_opened_twice_during_a_run(
    lab: Lab, browser: Any, offline: Any
) -> None:
    page = browser.new_page(viewport={"width": 1500, "height": 1200})
    page.set_default_timeout(SHOWN)
    offline(page)
    run_all_cells(page, lab)
    start_a_run(page, steps=4000)
    wait_for_step(page)
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.get_by_text("Save Notebook", exact=True).click()
    page.wait_for_timeout(1500)
    page.reload()
    wait_for_chart(page)
    second = browser.new_page(viewport={"width": 1500, "height": 1200})
    second.set_default_timeout(SHOWN)
    offline(second)
    second.goto(lab.notebook_url(NOTEBOOK))
    wait_for_chart(second)
    before = steps(page)
    grown = "before => document.querySelector('.ss-run .js-plotly-plot').data[0]?.x.at(-1) > before"
    for each in (page, second):
        each.wait_for_function(grown, arg=before, timeout=STEPS_ARRIVE)
    page.close()
    before = steps(second)
    second.wait_for_function(grown, arg=before, timeout=STEPS_ARRIVE)
    second.get_by_role("button", name="Stop", exact=True).click()
    second.wait_for_selector(".ss-status[data-status=stopped]")
    assert nothing_left_of(lab.folder / "runs"), "a stopped run left processes behind"
    second.close()


def wait_for_chart(page: Any) -> None:
    """As :func:`wait_for_step`, of a page that has still to draw its chart."""
    page.wait_for_selector(".ss-run .js-plotly-plot", state="attached")
    wait_for_step(page)


def steps(page: Any) -> float:
    """The last step that the chart shows."""
    return float(page.evaluate("document.querySelector('.ss-run .js-plotly-plot').data[0]?.x.at(-1)"))
