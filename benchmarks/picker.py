"""From a change of a picker to the redrawn chart, in a real JupyterLab, in milliseconds."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))

CHANGES = 40
BUDGET_MS = 150

# Time starts when the person leaves the input with Enter, and ends when plotly has drawn.
LISTEN = """() => {
    const chart = document.querySelector('.ss-memory .js-plotly-plot');
    const input = document.querySelector('.ss-side input[list]');
    window.shardscopeTimes = [];
    let started = null;
    input.addEventListener('keydown', event => {
        if (event.key === 'Enter') started = performance.now();
    }, true);
    chart.on('plotly_afterplot', () => {
        if (started !== null) window.shardscopeTimes.push(performance.now() - started);
        started = null;
    });
}"""


def measure() -> dict[str, float] | None:
    """Median and p90 over :data:`CHANGES` changes of the model; None without a browser."""
    from served import CHROMIUM, running_chromium, running_lab

    if CHROMIUM is None:
        return None
    with (
        running_chromium() as browser,
        tempfile.TemporaryDirectory() as home,
        running_lab(Path(home)) as lab,
    ):
        page = browser.new_page(viewport={"width": 1500, "height": 1200})
        open_studio(page, lab)
        page.evaluate(LISTEN)
        times = [change(page, model, number) for number, model in enumerate(list_models())]
    return {
        "picker_to_redrawn_chart_median_ms": statistics.median(times),
        "picker_to_redrawn_chart_p90_ms": statistics.quantiles(times, n=10)[-1],
    }


def open_studio(page: Any, lab: Any) -> None:
    """Run the notebook's first cell."""
    page.set_default_timeout(90_000)
    page.goto(lab.notebook_url("00_studio.ipynb"))
    page.wait_for_function("() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)")
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".ss-memory .barlayer path", state="attached")
    page.wait_for_timeout(2000)


def list_models() -> list[str]:
    """List models in turn, so that each one is a change."""
    names = ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b"]
    return [names[number % len(names)] for number in range(CHANGES)]


def change(page: Any, model: str, number: int) -> float:
    """Type a model, press Enter, and wait for the chart; milliseconds between the two."""
    box = page.locator(".ss-side input[list]").first
    box.fill(model)
    box.press("Enter")
    page.wait_for_function("count => window.shardscopeTimes.length > count", arg=number)
    return float(page.evaluate("() => window.shardscopeTimes.at(-1)"))
