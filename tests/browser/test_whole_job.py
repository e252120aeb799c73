"""The whole job in one Studio, by mouse and by keyboard: plan 405B, make it fit, fine-tune, open a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Lab
from studio_page import SCREENSHOTS, fill, open_fold, open_studio
from tests.weights_folders import write_folder

RUN_ENDS = 240_000
STEPS = 12
MAX_TABS = 60


@pytest.fixture(scope="module")
def folder(lab: Lab) -> Path:
    """A small Hugging Face checkpoint beside the notebook."""
    return write_folder(lab.folder / "tiny-llama")


@pytest.fixture
def page(lab: Lab, browser: Any, offline: Callable[[object], None]) -> Iterator[Any]:
    """The Studio in a window of 1440 by 900, as on a laptop."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    offline(page)
    open_studio(page, lab)
    page.locator(".ss-studio").scroll_into_view_if_needed()
    yield page
    page.close()


def test_the_whole_job_by_mouse(page: Any, lab: Lab, folder: Path) -> None:
    plan_405b(page)
    page.get_by_role("button", name="Make it fit").first.click()
    wait_until_it_fits(page)
    picture(page, "whole_job_fits")

    choose_the_folder(page)
    button = page.locator(".ss-head .ss-main-button")
    page.wait_for_function(
        "() => document.querySelector('.ss-head .ss-main-button').innerText.startsWith('Fine-tune')"
    )
    assert "tiny-llama" in button.inner_text(), "the button names the folder whose weights are trained"
    fill(page, "Steps", str(STEPS))
    page.wait_for_function("() => !document.querySelector('.ss-head .ss-main-button').disabled")
    button.click()
    page.wait_for_selector(".ss-status[data-status=finished]", timeout=RUN_ENDS)
    picture(page, "whole_job_run")
    run = max((lab.folder / "runs").iterdir(), key=lambda each: each.stat().st_mtime)
    described = json.loads((run / "run.json").read_text())
    assert described["task"].endswith("Finetune"), described["task"]
    assert str(folder) in json.dumps(described["asked"]), "the run begins with the folder's weights"


def test_yesterdays_run_by_keyboard(page: Any, lab: Lab, folder: Path) -> None:
    """With the run of the test before in ./runs, and a Studio that never launched anything."""
    plan_405b(page)
    tab_to(page, "button:has-text('Make it fit')", start=".ss-tabs button[aria-selected=true]", back=True)
    page.keyboard.press("Enter")
    wait_until_it_fits(page)

    page.locator(".ss-tabs button[aria-selected=true]").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.locator(".ss-tabs [aria-selected=true]", has_text="Runs").wait_for()
    tab_to(page, "button[data-act^='open:']")
    page.keyboard.press("Enter")
    page.wait_for_selector(".ss-runs-view .ss-status[data-status=finished]")
    tab_to(page, "button[data-act^='trace:']", start=".ss-tabs button[aria-selected=true]")
    page.keyboard.press("Enter")
    page.locator(".ss-tabs [aria-selected=true]", has_text="Trace").wait_for()
    page.wait_for_function(
        "() => Number(document.querySelector('.ss-trace canvas[data-slices]')?.dataset.slices) > 20"
    )
    picture(page, "whole_job_trace")


def plan_405b(page: Any) -> None:
    fill(page, "Model", "llama-3.1-405b")
    fold = open_fold(page, "GPUs")
    boxes = fold.locator(".ss-row", has=page.get_by_text("Count")).first.locator("input")
    boxes.nth(1).fill("8")
    boxes.nth(1).press("Enter")
    page.wait_for_function("() => document.querySelector('.ss-what').title.includes('8 nodes of 8')")
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")


def wait_until_it_fits(page: Any) -> None:
    page.wait_for_function(
        "() => ['fits', 'tight'].includes(document.querySelector('.ss-verdict').dataset.state)",
        timeout=120_000,
    )


def choose_the_folder(page: Any) -> None:
    fill(page, "Model", "tiny-llama")
    fill(page, "Sequence", "32")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.ss-fold-line')].some(line => /Fine-tune/.test(line.innerText))"
    )


def tab_to(page: Any, selector: str, *, start: str | None = None, back: bool = False) -> None:
    """Press Tab until the element has the keyboard; fail if it is too far or cannot be reached."""
    if start:
        page.locator(start).first.focus()
    for _ in range(MAX_TABS):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate(
            "words => document.activeElement?.matches(words)",
            selector.replace(":has-text('Make it fit')", ""),
        ) and (
            "has-text" not in selector
            or page.evaluate("() => document.activeElement.innerText.includes('Make it fit')")
        ):
            return
    raise AssertionError(f"{selector} is not reached by {MAX_TABS} Tabs")


def picture(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name}.png"))
