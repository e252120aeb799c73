"""Test of a run folder with hostile text in every field, shown in a real browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from served import Lab
from test_runs_tab import go_back, run_cell
from tests.requirements import thorough

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from hostile_runs import plant_text_everywhere, write_full_run
from written_runs import write_run

HOSTILE_HTML = "<img src=x onerror='window.wasRun = 1'>\"><svg onload=window.wasRun=2>"
CELL = """
import shardscope as ss
from IPython.display import display
from shardscope_widgets.run.runs_view import RunsView
found = ss.runs()
display(found, found[0], found.compare(found[0], found[1]), found[0].memory(), found[0].trace())
view = RunsView()
view
"""


@thorough()
def test_fault_49_html_in_a_run_folder_is_not_executed(lab: Lab, browser: Any, offline: Any) -> None:
    runs = lab.folder / "runs"
    hostile_run = write_full_run("<img src=x onerror='window.wasRun = 4'>", "failed", parent=runs)
    plant_text_everywhere(hostile_run, HOSTILE_HTML)
    write_run("whole", parent=runs, number=1)
    status = write_run("status", HOSTILE_HTML, parent=runs, number=2)
    (status / "supervisor.json").unlink()
    page = run_cell(lab, browser, CELL)
    offline(page)
    page.wait_for_selector(".ss-runs tbody tr")
    assert page.locator(".ss-runs tr", has_text="onerror").count() >= 1
    page.locator(".ss-runs button.ss-open", has_text="onerror").first.click()
    page.wait_for_selector(".ss-run .ss-status[data-status=failed]")
    page.wait_for_selector(".ss-run .js-plotly-plot")
    for whose in ("rank 0", "launcher", "supervisor"):
        page.locator(".ss-run-log select").select_option(label=whose)
        page.wait_for_function("() => document.querySelector('.ss-run-log')?.innerText.includes('onerror')")
    go_back(page)
    for box in page.locator(".ss-runs .ss-pick").all()[:2]:
        box.click()
    page.locator(".ss-runs-bar button", has_text="Compare").click()
    page.wait_for_selector(".ss-compared")
    go_back(page)
    page.locator(".ss-act", has_text="Open trace").first.click()
    page.wait_for_selector("text=Trace of")
    page.wait_for_timeout(1000)  # Images that do not load fire their error handlers a moment later.
    assert page.evaluate("() => window.wasRun") is None
    assert page.evaluate("() => document.querySelectorAll('img[src=x], [onload], [onerror]').length") == 0
    page.close()
