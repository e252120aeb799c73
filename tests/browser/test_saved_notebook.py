"""What a saved notebook shows where no kernel has its widgets: sentence, chart and table of the end."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from opened_notebook import (
    KERNEL_IS_IDLE,
    SHOWN,
    STUDIO_CELLS,
    menu,
    open_notebook,
    run_all_cells,
    write_notebook,
)
from playwright.sync_api import expect
from served import Lab
from studio_page import screenshot, use_theme
from tests.needs import thorough

NOTEBOOK = "saved.ipynb"
MODEL_NOT_FOUND = ("model not found", "Error displaying widget", "Loading widget")
CELLS = (
    *STUDIO_CELLS,
    "from dataclasses import replace\nstudio.apply(replace(studio.plan, layout=ss.Layout.ddp()))",
    "memory = MemoryView(studio.plan)\nmemory",
)
VISIBLE_BARS = """() => [...document.querySelectorAll('svg[role=img] rect')]
    .filter(each => each.checkVisibility() && each.getBoundingClientRect().width > 1).length"""


def the_picture_is_seen(page: Any, root: str) -> None:
    """Sentence, bars and table of the last plan, and no word about widgets."""
    page.wait_for_function(f"() => ({VISIBLE_BARS})() >= 5")
    text = page.locator(root).inner_text()
    assert "Llama 3.1 8B on 8 × H100 80 GB with DDP" in text, "the last plan, not the first"
    assert "Does not fit: needs" in text
    row = page.locator("tr", has_text="optimizer").locator("visible=true").first
    assert re.search(r"\d", row.inner_text())
    assert not [words for words in MODEL_NOT_FOUND if words in text]


@thorough()
def test_fault_47_exported_notebook_shows_the_last_plan(browser: Any, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3", store_widget_state=False).execute()
    html, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
    (tmp_path / "out.html").write_text(html)
    page = browser.new_page()
    try:
        page.goto((tmp_path / "out.html").as_uri())
        the_picture_is_seen(page, "body")
        page.emulate_media(color_scheme="dark")
        the_picture_is_seen(page, "body")
    finally:
        page.close()


@thorough()
def test_fault_47_notebook_without_its_kernel_shows_the_last_plan(lab: Lab, browser: Any) -> None:
    write_notebook(lab, NOTEBOOK, *CELLS)
    page = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1400, "height": 2400})
    run_all_cells(page, len(CELLS))
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=SHOWN)
    assert page.evaluate(VISIBLE_BARS) == 0, "beside the living view its picture is not seen"
    menu(page, "File", "Save Notebook")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    page.wait_for_timeout(1000)
    page.close()
    end_kernels(lab)
    reader = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1400, "height": 2400})
    reader.wait_for_function(KERNEL_IS_IDLE)
    reader.wait_for_timeout(3000)  # The widgets' manager looks for its models until then.
    the_picture_is_seen(reader, ".jp-Notebook")
    screenshot(reader, "saved_without_kernel_light")
    use_theme(reader, "JupyterLab Dark", light="false")
    screenshot(reader, "saved_without_kernel_dark")
    use_theme(reader, "JupyterLab Light", light="true")
    # And where the cells are run again, the view is alive in its place.
    run_all_cells(reader, len(CELLS))
    reader.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=SHOWN)
    reader.wait_for_function(f"() => ({VISIBLE_BARS})() === 0")
    reader.close()


def end_kernels(lab: Lab) -> None:
    """Shut every kernel down, as a server that was restarted has."""
    for kernel in lab.kernels():
        request = urllib.request.Request(
            f"{lab.url}/api/kernels/{kernel}",
            method="DELETE",
            headers={"Authorization": f"token {lab.token}"},
        )
        urllib.request.urlopen(request, timeout=60).close()


@thorough()
def test_fault_47_untrusted_notebook_shows_the_last_plan(lab: Lab, browser: Any) -> None:
    """One that this server has not signed: JupyterLab cleans its HTML, and shows no widget at all."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3", store_widget_state=False).execute()
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    saved = json.loads(nbformat.writes(notebook))
    saved["metadata"]["kernelspec"] = spec
    (lab.folder / "mailed.ipynb").write_text(json.dumps(saved))
    page = open_notebook(lab, browser, "mailed.ipynb", viewport={"width": 1400, "height": 2400})
    page.wait_for_function("() => document.querySelectorAll('.jp-Notebook img[alt=chart]').length === 2")
    page.wait_for_function(
        "() => [...document.querySelectorAll('img[alt=chart]')].every(each => each.naturalWidth > 300)"
    )
    screenshot(page, "saved_untrusted")
    text = page.locator(".jp-Notebook").inner_text()
    assert "with DDP" in text and "Does not fit: needs" in text
    assert not [words for words in MODEL_NOT_FOUND if words in text]
    expect(page.locator("tr", has_text="optimizer").first).to_be_visible()
    page.close()


@thorough()
def test_fault_47_static_output_follows_a_moved_cell_and_a_reload(lab: Lab, browser: Any) -> None:
    """JupyterLab updates no output of such a cell by itself."""
    name = "followed.ipynb"
    change = "from dataclasses import replace\nstudio.apply(replace(studio.plan, layout=ss.Layout.{}))"
    write_notebook(lab, name, *STUDIO_CELLS, change.format("ddp()"), change.format("zero(2)"))
    page = open_notebook(lab, browser, name)
    cells = page.locator(".jp-Notebook .jp-Cell")
    cells.nth(0).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=SHOWN)
    cells.nth(0).locator(".jp-InputPrompt").click()
    page.keyboard.press("Control+Shift+ArrowDown")
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached")
    run_and_save(page, "ddp()")
    assert "with <b>DDP</b>" in picture_in(lab.folder / name)
    page.reload()
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=SHOWN)
    page.wait_for_function(KERNEL_IS_IDLE)
    run_and_save(page, "zero(2)")
    assert "with <b>DDP</b>" not in picture_in(lab.folder / name)
    assert "ZeRO" in picture_in(lab.folder / name)
    page.close()


def run_and_save(page: Any, words: str) -> None:
    page.locator(".jp-Notebook .jp-Cell", has_text=words).last.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_timeout(3000)
    menu(page, "File", "Save Notebook")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    page.wait_for_timeout(1000)


def picture_in(path: Path) -> str:
    """The HTML that the notebook's file keeps of its views."""
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", []) if "data" in output]
    return "".join(output.data.get("text/html", "") for output in outputs)
