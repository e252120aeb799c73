"""Test of the row of the Run tab that records a live run's next steps, and of the trace that it opens."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect
from served import Lab
from studio_page import TIMEOUT_MS, choose_tab, fill_input, open_fold, open_studio, save_screenshot, use_theme
from tests.requirements import thorough

RUN_TIMEOUT_MS = 240_000


@thorough()
def test_next_steps_of_a_live_run_are_recorded_and_opened(lab: Lab, browser: Any, offline: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(TIMEOUT_MS)
    offline(page)
    open_studio(page, lab)
    fill_input(page, "Steps", "100000")
    page.get_by_label("Record a trace").uncheck()
    page.wait_for_function("() => !document.querySelector('.ss-head .ss-main-button').disabled")
    page.locator(".ss-head .ss-main-button").click()
    page.wait_for_selector(".ss-status[data-status=running]", timeout=RUN_TIMEOUT_MS)
    # The plan is written in full, also beside the buttons of a live run.
    plan_line = page.locator(".ss-run-plan").first
    assert plan_line.evaluate("line => line.scrollWidth <= line.clientWidth")
    fold = open_fold(page, "Profile the next steps")
    fold.scroll_into_view_if_needed()
    button = fold.get_by_role("button", name="Profile the next 3 steps")
    expect(button).to_be_enabled(timeout=RUN_TIMEOUT_MS)
    fold.get_by_label("modules").check()
    save_screenshot(page, "profile_row_light")
    button.click()
    expect(fold).to_contain_text("Recording 1, 3 steps: written by 2 ranks", timeout=RUN_TIMEOUT_MS)
    use_theme(page, "JupyterLab Dark", light="false")
    fold.scroll_into_view_if_needed()
    save_screenshot(page, "profile_row_dark")
    fold.get_by_role("button", name="Open trace").click()
    page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text="Trace").wait_for()
    expect(page.locator(".ss-studio canvas").first).to_be_visible()
    save_screenshot(page, "profile_row_trace")
    # The run has trained on all the while.
    choose_tab(page, "Runs")
    expect(page.locator(".ss-status").first).to_have_attribute("data-status", "running")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for_selector(".ss-status[data-status=stopped]")
    page.close()
