"""Actions of the browser tests on a Studio in a real JupyterLab: open, type, choose tabs and themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from served import Lab

SCREENSHOTS = Path(__file__).parents[2] / "artifacts" / "screenshots"
NOTEBOOK = "00_studio.ipynb"
TIMEOUT_MS = 60_000
# Of all traces: ranks with equal values share one line, and a hidden trace has no points.
LAST_STEP = """Math.max(-1, ...(document.querySelector('.ss-run .js-plotly-plot')?.data ?? [])
    .map(trace => trace.x?.at(-1) ?? -1))"""
"""Expression in the page: the last step in the run's charts; -1 before the first."""


def open_studio(page: Any, lab: Lab, notebook: str = NOTEBOOK) -> None:
    """Open the notebook, run its first cell, and wait until the memory chart is drawn."""
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(lab.notebook_url(notebook))
    page.wait_for_function("() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)")
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".ss-studio .ss-verdict")
    page.wait_for_selector(".ss-memory .barlayer path", state="attached")


def open_fold(page: Any, name: str) -> Any:
    """Open the fold ``name`` if it is closed, and return it."""
    fold = page.locator(".ss-fold", has=page.locator(".ss-fold-title", has_text=name)).first
    line = fold.locator(".ss-fold-line").first
    if line.get_attribute("aria-expanded") == "false":
        line.click()
        fold.locator(".ss-fold-body").wait_for()
    return fold


FOLD_OF = {
    "Model": "Model",
    "Type": "GPUs",
    "Sequence": "Training",
    "Batch": "Training",
    "Global batch": "Training",
    "Steps": "Run",
}
"""Label of an input -> title of the fold that it belongs to."""


def fill_input(page: Any, label: str, text: str) -> None:
    """Type into the first input of the row that ``label`` names, and leave it."""
    fold = open_fold(page, FOLD_OF.get(label, label))
    row = fold.locator(".ss-row", has=page.get_by_text(label)).first
    box = row.locator("input").first
    box.fill(text)
    box.press("Enter")
    box.press("Tab")


def choose(page: Any, label: str, option: str) -> None:
    """Choose ``option`` in the menu of the row that ``label`` names."""
    fold = open_fold(page, FOLD_OF.get(label, label))
    fold.locator(".ss-row", has=page.get_by_text(label)).first.locator("select").select_option(option)


def choose_tab(page: Any, tab: str) -> None:
    """Choose a tab."""
    page.locator(".ss-tabs:not(.ss-analysis-tabs) button", has_text=tab).click()
    page.locator(".ss-tabs:not(.ss-analysis-tabs) [aria-selected=true]", has_text=tab).wait_for()


def wait_for_verdict(page: Any, state: str) -> None:
    """Wait until the verdict is ``fits``, ``tight``, ``unknown`` or ``does not fit``."""
    page.wait_for_selector(f".ss-verdict[data-state='{state}']")


def read_chart(page: Any, view: str = ".ss-memory") -> dict[str, list[float]]:
    """Return component -> GiB of each bar, as plotly holds them in the browser."""
    return page.evaluate(
        """view => Object.fromEntries(
            document.querySelector(`${view} .js-plotly-plot`).data
                .filter(trace => trace.type === 'bar' && trace.visible !== false)
                .map(trace => [trace.name, [...trace.x]]))""",
        view,
    )


def save_screenshot(page: Any, name: str) -> None:
    """Save a screenshot of the page as ``artifacts/screenshots/<name>.png``."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SCREENSHOTS / f"{name.lower()}.png"))


def use_theme(page: Any, name: str, light: str) -> None:
    """Switch JupyterLab's theme as a user does; the widgets follow without being created again."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text="Theme").first.hover()
    page.locator(".lm-Menu-itemLabel").get_by_text(name, exact=True).click()
    page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
