"""Test of a whole workflow in one Studio: plan 405B, make it fit, fine-tune, open yesterday's run and trace.

Once by mouse and once by keyboard. Every control must be visible: the test never scrolls.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Lab
from studio_page import open_studio, save_screenshot
from tests.requirements import thorough
from tests.weights_folders import write_folder

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from written_runs import write_run

pytestmark = thorough()

RUN_TIMEOUT_MS = 240_000
FIT_TIMEOUT_MS = 120_000
STEPS = 12
MAX_TAB_PRESSES = 60
ONE_DAY = 86_400.0
MODEL, YESTERDAY = "tiny-llama", "yesterday"

# Whether a click on the middle of the element would reach it, as the page is scrolled now.
IS_CLICKABLE = """element => {
    const box = element.getBoundingClientRect();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    const hit = x >= 0 && y >= 0 && x < innerWidth && y < innerHeight && document.elementFromPoint(x, y);
    return Boolean(hit) && (element.contains(hit) || hit.contains(element));
}"""
HAS_FOCUS = "element => element === document.activeElement"
IS_BEHIND_FOCUS = """element => Boolean(
    document.activeElement.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING)"""


class InputDevice(ABC):
    """An input device, with which a user operates the page."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def press(self, button: Any) -> None:
        """Press a button, which must be visible."""
        self._assert_visible(button)
        self.press_visible(button)

    def type(self, box: Any, text: str) -> None:
        """Replace the text of an input, which must be visible."""
        self._assert_visible(box)
        self.go_to(box)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def _assert_visible(self, target: Any) -> None:
        target.wait_for()
        if not target.evaluate(IS_CLICKABLE):
            self.page.wait_for_timeout(1000)  # It may be redrawn at this moment.
        assert target.evaluate(IS_CLICKABLE), f"{target} is not visible without scrolling"

    @abstractmethod
    def press_visible(self, button: Any) -> None:
        """Press ``button``."""

    @abstractmethod
    def go_to(self, box: Any) -> None:
        """Focus ``box``."""

    @abstractmethod
    def choose_tab(self, name: str) -> None:
        """Choose the tab ``name``."""


class Mouse(InputDevice):
    """A mouse, which clicks where the element is; playwright's own click would scroll to it."""

    def press_visible(self, button: Any) -> None:
        box = button.bounding_box()
        self.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    go_to = press_visible

    def choose_tab(self, name: str) -> None:
        self.press(self.page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text=name))


class Keyboard(InputDevice):
    """A keyboard: Tab, Shift+Tab, arrows and Enter, starting from the element that has the focus."""

    def go_to(self, target: Any) -> None:
        key = "Tab" if target.evaluate(IS_BEHIND_FOCUS) else "Shift+Tab"
        for _ in range(MAX_TAB_PRESSES):
            if target.evaluate(HAS_FOCUS):
                return
            self.page.keyboard.press(key)
        pytest.fail(f"{target} is not reached by {MAX_TAB_PRESSES} times {key}")

    def press_visible(self, button: Any) -> None:
        self.go_to(button)
        self.page.keyboard.press("Enter")

    def choose_tab(self, name: str) -> None:
        self.go_to(self.page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]"))
        chosen = self.page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text=name)
        for _ in range(6):
            if chosen.count():
                return
            self.page.keyboard.press("ArrowRight")
            self.page.wait_for_timeout(200)
        chosen.wait_for()


@pytest.fixture(scope="module")
def folder(lab: Lab) -> Path:
    """A small Hugging Face checkpoint beside the notebook, and a run of the day before."""
    write_run(
        YESTERDAY, parent=lab.folder / "runs", num_done=40, has_trace=True, created=time.time() - ONE_DAY
    )
    return write_folder(lab.folder / MODEL)


@pytest.fixture
def page(lab: Lab, browser: Any, offline: Callable[[object], None]) -> Iterator[Any]:
    """The Studio in a window of 1440 by 900, as on a laptop."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    offline(page)
    open_studio(page, lab)
    page.locator(".ss-studio").scroll_into_view_if_needed()
    # Select the Studio's cell in command mode: Shift+Enter has selected the cell below.
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    yield page
    page.close()


@pytest.mark.parametrize("kind", [Mouse, Keyboard])
def test_whole_workflow_by_mouse_and_by_keyboard(
    kind: type[InputDevice], page: Any, lab: Lab, folder: Path
) -> None:
    device, device_name = kind(page), kind.__name__.lower()
    scrolled = "() => [...document.querySelectorAll('.jp-WindowedPanel-outer')].map(one => one.scrollTop)"
    before = page.evaluate(scrolled)

    plan_405b(device)
    device.press(page.get_by_role("button", name="Make it fit").first)
    page.wait_for_selector(".ss-verdict:is([data-state=fits], [data-state=tight])", timeout=FIT_TIMEOUT_MS)
    save_screenshot(page, f"whole_job_{device_name}_1_fits")

    newest = fine_tune_the_folder(device, lab)
    description = json.loads((newest / "run.json").read_text())
    assert description["task"].endswith("Finetune") and description["num_steps"] == STEPS
    assert str(folder) in json.dumps(description["asked"]), "the run starts from the folder's weights"
    save_screenshot(page, f"whole_job_{device_name}_2_fine_tuned")

    open_yesterdays_run(device)
    save_screenshot(page, f"whole_job_{device_name}_3_yesterday")
    device.press(page.locator("button[data-act^='trace:'] >> visible=true").first)
    page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text="Trace").wait_for()
    page.wait_for_function(
        "() => Number(document.querySelector('.ss-trace canvas[data-slices]')?.dataset.slices) >= 4"
    )
    save_screenshot(page, f"whole_job_{device_name}_4_trace")
    assert page.evaluate(scrolled) == before, "the notebook was scrolled"


def plan_405b(device: InputDevice) -> None:
    page = device.page
    device.type(find_inputs(page, "Model").first, "llama-3.1-405b")
    open_fold(device, "GPUs")
    device.type(page.locator("input[title='Number of nodes']").first, "8")
    page.wait_for_function("() => document.querySelector('.ss-what').title.includes('8 nodes of 8')")
    page.wait_for_selector(".ss-verdict[data-state='does not fit']")


def fine_tune_the_folder(device: InputDevice, lab: Lab) -> Path:
    """Return the folder of the run."""
    page, runs = device.page, lab.folder / "runs"
    earlier = set(runs.iterdir())
    open_fold(device, "Model")
    device.type(find_inputs(page, "Model").first, MODEL)
    open_fold(device, "Training")
    device.type(find_inputs(page, "Sequence").first, "32")
    button = page.locator(".ss-head .ss-main-button")
    page.wait_for_function(
        "name => { const button = document.querySelector('.ss-head .ss-main-button');"
        " return !button.disabled && button.innerText.startsWith('Fine-tune ' + name); }",
        arg=MODEL,
    )
    open_fold(device, "Run")
    device.type(find_inputs(page, "Steps").first, str(STEPS))
    device.press(button)
    page.wait_for_selector(".ss-status[data-status=finished]", timeout=RUN_TIMEOUT_MS)
    (new,) = set(runs.iterdir()) - earlier
    return new


def open_yesterdays_run(device: InputDevice) -> None:
    page = device.page
    device.choose_tab("Memory")
    device.choose_tab("Runs")
    device.press(page.get_by_role("button", name="Back to all runs"))
    device.press(page.get_by_role("button", name=YESTERDAY, exact=True))
    page.locator(".ss-run-name", has_text=YESTERDAY).wait_for()
    page.wait_for_selector(".ss-runs-view .ss-status[data-status=finished]")


def open_fold(device: InputDevice, name: str) -> None:
    """Open the fold ``name`` if it is closed."""
    line = device.page.locator(
        ".ss-fold-line", has=device.page.locator(".ss-fold-title").get_by_text(name, exact=True)
    )
    if line.get_attribute("aria-expanded") == "false":
        device.press(line)


def find_inputs(page: Any, label: str) -> Any:
    """Return the inputs of the row that ``label`` names."""
    return page.locator(".ss-side .ss-row", has=page.get_by_text(label)).first.locator("input")
