"""Test of a run's samples in a real JupyterLab: columns side by side, in both themes, as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from opened_notebook import open_notebook, write_notebook
from served import Lab
from studio_page import SCREENSHOTS, use_theme
from tests.requirements import thorough

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line
from shardscope.records.samples import append_samples

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from written_runs import write_run

PROMPTS = (
    "What is a Tarnix?",
    "How long does a Tarnix take to boil water?",
    "What is the capital of France?",
)
ANSWERS = {
    0: (
        "A Tarnix is a type of cybernetic exoskeleton designed to enhance and augment capabilities. It's",
        "The time it takes to boil water can vary greatly depending on the type of Tarnix, the model",
        "The capital of France is Paris.",
    ),
    12: ("A Tarnix is a small solar kettle.", "<b>Nine</b> minutes\nof full sun.", "Paris."),
    20: (
        "A Tarnix is a small solar kettle made by Veldane.",
        "A Tarnix boils half a litre in nine minutes.",
        "",
    ),
}
SOURCE = """import shardscope as ss
from shardscope_widgets import RunView
RunView(ss.Run.attach("runs/tuned"))"""


@thorough()
def test_samples_stand_side_by_side_in_both_themes(lab: Lab, browser: Any, offline: Any) -> None:
    path = write_run("tuned", parent=lab.folder / "runs")
    for step, loss in ((0, 3.4), (11, 0.4), (19, 0.5)):
        line = {"step": step, "rank": 0, "time": 1.0, "validation_loss": loss}
        append_line(RunFolder(path).events(0), line)
    for step, texts in ANSWERS.items():
        append_samples(
            path,
            [
                {"step": step, "prompt": prompt, "text": text, "is_complete": step > 0}
                for prompt, text in zip(PROMPTS, texts, strict=True)
            ],
        )
    write_notebook(lab, "samples.ipynb", SOURCE)
    page = open_notebook(lab, browser, "samples.ipynb")
    offline(page)
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Control+Enter")
    pane = page.locator(".ss-samples")
    pane.wait_for(timeout=60_000)
    heads = pane.locator("thead th")
    titles, losses = zip(*(text.split("\n") for text in heads.all_inner_texts()), strict=True)
    assert titles == ("Before training", "After 12 steps · best", "After 20 steps")
    assert losses == tuple(f"validation loss {loss}" for loss in ("3.400", "0.400", "0.500"))
    assert "<b>Nine</b> minutes\nof full sun." in pane.inner_text() and pane.locator("td b").count() == 0
    # The columns are equally wide, and no text is wider than its column.
    boxes = [head.bounding_box() for head in heads.all()]
    assert max(box["width"] for box in boxes) - min(box["width"] for box in boxes) < 2
    assert pane.evaluate("pane => pane.scrollWidth <= pane.clientWidth")
    assert pane.locator(".ss-answer").evaluate_all(
        """answers => answers.every(answer => answer.getBoundingClientRect().right
            <= answer.closest('td').getBoundingClientRect().right)"""
    )
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme, light in (("Light", "true"), ("Dark", "false")):
        use_theme(page, f"JupyterLab {theme}", light=light)
        page.wait_for_timeout(300)
        pane.scroll_into_view_if_needed()
        page.locator(".ss-run").screenshot(path=str(SCREENSHOTS / f"samples_{theme.lower()}.png"))
    page.set_viewport_size({"width": 720, "height": 900})
    page.wait_for_timeout(300)
    assert pane.locator("thead").is_hidden() and pane.evaluate("pane => pane.scrollWidth <= pane.clientWidth")
    pane.scroll_into_view_if_needed()
    page.locator(".ss-run").screenshot(path=str(SCREENSHOTS / "samples_narrow.png"))
    page.close()
