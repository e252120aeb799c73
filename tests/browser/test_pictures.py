"""Screenshots of every tab at every size, in every theme and simulated vision, for review.

They are saved in ``artifacts/screenshots`` as ``screen_<size>_<look>_<tab>.png``. `make test-all` takes them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from served import Lab
from studio_page import SCREENSHOTS, choose_tab, open_studio, use_theme
from test_one_screen import SIZES, find_overflowing, is_clickable, scroll_to_studio
from tests.requirements import thorough

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from written_runs import write_failure, write_run

TABS = ("Memory", "Time", "Plans", "Checks", "Runs", "Trace")
VERDICT_SIGNS = {"fits": "✓", "does not fit": "✕"}
ERROR = "Traceback (most recent call last):\n  File 'train.py', line 3, in train\nValueError: no batch\n"
ADVICE_TIMEOUT_MS = 120_000


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Any) -> Iterator[Any]:
    """A Studio beside runs of two days, with every tab filled."""
    runs, now = lab.folder / "runs", time.time()
    for number, name in enumerate(("pictured", "pictured-2")):
        write_run(name, parent=runs, num_done=40, has_trace=True, created=now - 86_400 + 3_600 * number)
    write_failure(
        write_run("pictured-failed", "failed", parent=runs, num_done=6, created=now - 600), 1, ERROR
    )
    page = browser.new_page(viewport={"width": 1440, "height": 900}, device_scale_factor=2)
    open_studio(page, lab)
    choose_tab(page, "Plans")
    page.locator(".ss-advised").wait_for(timeout=ADVICE_TIMEOUT_MS)
    choose_tab(page, "Runs")
    page.get_by_role("button", name="Open the trace of pictured", exact=True).click()
    page.wait_for_selector(".ss-trace canvas[data-slices]")
    choose_tab(page, "Runs")
    page.get_by_role("button", name="pictured", exact=True).click()
    page.wait_for_selector(".ss-run .js-line", state="attached")
    yield page
    page.close()


@thorough()
@pytest.mark.parametrize("size", SIZES)
def test_screenshots_of_every_tab_in_both_themes(size: str, page: Any) -> None:
    width, height, _ = SIZES[size]
    is_wide = width >= 1200
    page.set_viewport_size({"width": 1440, "height": 900})
    show_file_browser(page, is_wide)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        page.set_viewport_size({"width": 1440, "height": 900})  # On a phone the menus are in another place.
        use_theme(page, f"JupyterLab {theme}", light=light)
        page.set_viewport_size({"width": width, "height": height})
        for tab in TABS:
            save_picture(page, f"{size}_{theme.lower()}", tab)
            assert find_overflowing(page) == [], (size, theme, tab)
            assert is_clickable(page, ".ss-head button.ss-main-button"), (size, theme, tab)


@thorough()
@pytest.mark.parametrize("look", ["high_contrast", "high_contrast_dark", "deuteranopia"])
def test_screenshots_of_every_tab_in_high_contrast_and_deuteranopia(look: str, page: Any) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    show_file_browser(page, True)
    is_dark = look.endswith("dark")
    use_theme(page, f"JupyterLab {'Dark' if is_dark else 'Light'}", light=str(not is_dark).lower())
    session = page.context.new_cdp_session(page)
    if look == "deuteranopia":
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": look})
    else:
        page.emulate_media(forced_colors="active", color_scheme="dark" if is_dark else "light")
    try:
        for tab in TABS:
            save_picture(page, f"1440x900_{look}", tab)
        # The verdict has a sign, not only a colour.
        sign = VERDICT_SIGNS[page.locator(".ss-verdict").get_attribute("data-state")]
        expect(page.locator(".ss-verdict i")).to_have_text(sign, use_inner_text=True)
    finally:
        page.emulate_media(forced_colors="none", color_scheme="light")
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": "none"})


def show_file_browser(page: Any, wanted: bool) -> None:
    """Show or hide the file browser: beside it a narrow window has no room for a notebook."""
    if page.locator("#jp-left-stack").is_visible() != wanted:
        page.keyboard.press("Escape")
        page.keyboard.press("Control+b")
        page.wait_for_timeout(500)


def save_picture(page: Any, look: str, tab: str) -> None:
    choose_tab(page, tab)
    scroll_to_studio(page)
    page.mouse.move(0, 0)
    page.wait_for_timeout(1000)  # Charts are resized, and scroll bars vanish.
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"screen_{look}_{tab.lower()}.png"))
