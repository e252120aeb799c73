"""Tests of the Studio on one screen: verdict, inputs and main button are visible together at every size."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect
from served import Lab
from studio_page import SCREENSHOTS, choose_tab, fill_input, open_fold, open_studio, use_theme
from tests.requirements import few, thorough

import shardscope as ss

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from written_runs import write_run

pytestmark = thorough()

MAX_HEIGHT = 640
SIZES = {
    "1440x900": (1440, 900, 1),
    "1024x768": (1024, 768, 1),
    "390x844": (390, 844, 1),
    "zoom_200": (720, 450, 2),
}


@pytest.fixture
def open_page(lab: Lab, browser: Any, offline: Callable[[object], None]) -> Iterator[Callable[..., Any]]:
    """Open the Studio's notebook in a window of some size, in JupyterLab's light theme or its dark one."""
    pages = []

    def open_one(width: int, height: int, scale: int = 1, theme: str = "Light", **options: Any) -> Any:
        page = browser.new_page(viewport={"width": 1440, "height": 900}, device_scale_factor=scale, **options)
        pages.append(page)
        page.set_default_timeout(60_000)
        offline(page)
        open_studio(page, lab)
        use_theme(page, f"JupyterLab {theme}", light="true" if theme == "Light" else "false")
        if width < 1200:  # Beside the file browser a notebook would have no room.
            page.keyboard.press("Escape")
            page.keyboard.press("Control+b")
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_timeout(1500)
        return page

    yield open_one
    for page in pages:
        page.close()


def is_clickable(page: Any, selector: str) -> bool:
    """Return whether a click on the middle of the element hits it, within ten seconds."""
    try:
        page.wait_for_function(
            """selector => {
                const element = document.querySelector(selector);
                const box = element.getBoundingClientRect();
                const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
                const isInside = x >= 0 && y >= 0 && x < innerWidth && y < innerHeight;
                const hit = isInside && document.elementFromPoint(x, y);
                return Boolean(hit) && (element.contains(hit) || hit.contains(element));
            }""",
            arg=selector,
            timeout=10_000,
        )
    except TimeoutError:
        page.screenshot(path=str(screenshot_path("out_of_sight")))
        return False
    return True


def scroll_to_studio(page: Any) -> None:
    """Scroll the Studio to the middle of the window, as a user does."""
    page.locator(".ss-studio").evaluate("studio => studio.scrollIntoView({ block: 'center' })")


def test_verdict_framework_and_launch_button_are_visible_together(open_page: Callable[..., Any]) -> None:
    page = open_page(1440, 900)
    scroll_to_studio(page)
    assert page.locator(".ss-studio").bounding_box()["height"] <= MAX_HEIGHT
    for selector in (".ss-verdict", ".ss-head button.ss-main-button", ".ss-memory .js-plotly-plot"):
        assert is_clickable(page, selector), f"{selector} is out of sight"
    framework = find_fold_line(page, "Framework")
    box = framework.bounding_box()
    assert box["y"] + box["height"] < 900 and "FSDP2" in framework.inner_text()


def test_head_keeps_its_height_and_position(open_page: Callable[..., Any]) -> None:
    page = open_page(1440, 900)
    head, rates = page.locator(".ss-head"), page.locator(".ss-rates")
    expect(rates).to_be_visible()
    before = head.bounding_box()
    open_fold(page, "Model")
    fill_input(page, "Model", "llama-3.1-405b")
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")
    # A plan that cannot run has no rate and no price. These change after the verdict.
    expect(rates).to_be_hidden()
    assert head.bounding_box() == before, "nothing below the head may move when the verdict changes"
    page.locator(".ss-panel").evaluate("panel => panel.scrollTo(0, 10000)")
    page.locator(".ss-side").evaluate("side => side.scrollTo(0, 10000)")
    assert is_clickable(page, ".ss-verdict") and is_clickable(page, ".ss-head button.ss-main-button")
    # It has a fix beside the verdict.
    expect(page.get_by_role("button", name="Make it fit").first).to_be_visible()


def test_message_and_fix_of_an_input_are_not_cut(open_page: Callable[..., Any]) -> None:
    page = open_page(1440, 900)
    fill_input(page, "Batch", "3")
    fill_input(page, "Global batch", "20")
    side = page.locator(".ss-side")
    fix = side.get_by_role("button", name="global batch size")
    expect(fix).to_be_visible()
    column = side.bounding_box()
    for shown in (fix, side.locator(".ss-error [role=alert]").first):
        box = shown.bounding_box()
        assert box["x"] + box["width"] <= column["x"] + column["width"]
    fix.click()
    expect(fix).to_be_hidden()


def test_full_window_opens_and_closes(open_page: Callable[..., Any]) -> None:
    page = open_page(1024, 768)
    scroll_to_studio(page)
    page.get_by_role("button", name="Full window").click()
    assert page.locator(".ss-studio").bounding_box() == {"x": 0, "y": 0, "width": 1024, "height": 768}
    for tab in ("Time", "Memory"):
        page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text=tab).click()
    # Charts take the new width.
    page.wait_for_function(
        "() => document.querySelector('.ss-memory .main-svg').getBoundingClientRect().width > 600"
    )
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Full window").wait_for()
    assert page.locator(".ss-studio").bounding_box()["height"] <= MAX_HEIGHT


@pytest.mark.parametrize("size", [(1440, 900), (720, 450)])
def test_a_run_uses_the_height_of_its_tab(
    open_page: Callable[..., Any], lab: Lab, size: tuple[int, int]
) -> None:
    shutil.rmtree(lab.folder / "runs", ignore_errors=True)
    write_run(
        "long-run",
        parent=lab.folder / "runs",
        num_done=12_345,
        num_steps=100_000,
        task=ss.Pretrain(num_steps=100_000),
    )
    page = open_page(*size)
    choose_tab(page, "Runs")
    page.get_by_role("button", name="long-run", exact=True).click()
    page.wait_for_selector(".ss-run-body .main-svg", state="attached")
    panel = page.locator(".ss-panel")
    panel.evaluate("panel => panel.scrollTo(0, 10000)")
    body, edge = page.locator(".ss-run-body").bounding_box(), panel.bounding_box()
    assert 0 <= edge["y"] + edge["height"] - body["y"] - body["height"] < 20
    if size[0] > 900:
        assert is_clickable(page, ".ss-run-name") and is_clickable(page, ".ss-run-body")
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)"
        assert page.locator(".ss-facts b").evaluate_all(cut) == []
        fill_input(page, "Steps", "100000")
        steps = (
            open_fold(page, "Run").locator(".ss-row", has=page.get_by_text("Steps")).locator("input").first
        )
        assert steps.evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("size", few(SIZES, ["390x844"]))
def test_head_is_visible_and_nothing_overflows_at_every_size(
    open_page: Callable[..., Any], size: str
) -> None:
    for theme in ("Light", "Dark"):
        page = open_page(*SIZES[size], theme=theme)
        scroll_to_studio(page)
        page.locator(".ss-studio").screenshot(path=str(screenshot_path(f"studio_{size}_{theme.lower()}")))
        assert find_overflowing(page) == []
        expect(page.locator(".ss-verdict")).to_be_visible()
        assert is_clickable(page, ".ss-head button.ss-main-button")


def find_fold_line(page: Any, name: str) -> Any:
    """Return the line of the fold ``name``."""
    return page.locator(".ss-fold-line", has=page.locator(".ss-fold-title", has_text=name)).first


def screenshot_path(name: str) -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS / f"{name}.png"


def find_overflowing(page: Any) -> list[str]:
    """Return the elements that overflow the Studio on the right, except in boxes that scroll."""
    return page.evaluate(
        """() => {
            const studio = document.querySelector('.ss-studio');
            const edge = studio.getBoundingClientRect().right + 1;
            const scrolls = '.ss-scroll, .ss-tabs, svg, .ss-off-screen, .ss-what, .ss-verdict, .ss-clipped';
            const isOutside = box => box.width && box.right > edge;
            return [...studio.querySelectorAll('*')]
                .filter(each => !each.closest(scrolls) && each.checkVisibility())
                .filter(each => isOutside(each.getBoundingClientRect()))
                .map(each => each.className || each.tagName);
        }"""
    )
