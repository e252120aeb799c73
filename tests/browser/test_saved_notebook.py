"""Tests of saved notebooks without their kernel: they show verdict, chart and table of the last plan."""

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
    STUDIO_CELLS,
    TIMEOUT_MS,
    choose_menu_item,
    open_notebook,
    run_all_cells,
    write_notebook,
)
from playwright.sync_api import expect
from served import Lab
from studio_page import save_screenshot, use_theme
from tests.requirements import thorough

NOTEBOOK = "saved.ipynb"
MODEL_NOT_FOUND = ("model not found", "Error displaying widget", "Loading widget")
CELLS = (
    *STUDIO_CELLS,
    "from dataclasses import replace\nstudio.apply(replace(studio.plan, layout=ss.Layout.ddp()))",
    "memory = MemoryView(studio.plan)\nmemory",
)
VISIBLE_BARS = """() => [...document.querySelectorAll('svg[role=img] rect')]
    .filter(each => each.checkVisibility() && each.getBoundingClientRect().width > 1).length"""


def check_static_output(page: Any, root: str) -> None:
    """Check verdict, bars and table of the last plan, and that no widget error is shown."""
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
        check_static_output(page, "body")
        page.emulate_media(color_scheme="dark")
        check_static_output(page, "body")
    finally:
        page.close()


@thorough()
def test_fault_47_notebook_without_its_kernel_shows_the_last_plan(lab: Lab, browser: Any) -> None:
    write_notebook(lab, NOTEBOOK, *CELLS)
    page = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1400, "height": 2400})
    run_all_cells(page, len(CELLS))
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=TIMEOUT_MS)
    assert page.evaluate(VISIBLE_BARS) == 0, "the static output is hidden beside the live view"
    choose_menu_item(page, "File", "Save Notebook")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    page.wait_for_timeout(1000)
    page.close()
    shut_down_kernels(lab)
    reader = open_notebook(lab, browser, NOTEBOOK, viewport={"width": 1400, "height": 2400})
    reader.wait_for_function(KERNEL_IS_IDLE)
    reader.wait_for_timeout(3000)  # Until then the widget manager looks for its models.
    check_static_output(reader, ".jp-Notebook")
    save_screenshot(reader, "saved_without_kernel_light")
    use_theme(reader, "JupyterLab Dark", light="false")
    save_screenshot(reader, "saved_without_kernel_dark")
    use_theme(reader, "JupyterLab Light", light="true")
    # When the cells run again, the live view replaces the static output.
    run_all_cells(reader, len(CELLS))
    reader.wait_for_selector(
        ".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=TIMEOUT_MS
    )
    reader.wait_for_function(f"() => ({VISIBLE_BARS})() === 0")
    reader.close()


def shut_down_kernels(lab: Lab) -> None:
    """Shut every kernel down, as after a restart of the server."""
    for kernel in lab.kernels():
        request = urllib.request.Request(
            f"{lab.url}/api/kernels/{kernel}",
            method="DELETE",
            headers={"Authorization": f"token {lab.token}"},
        )
        urllib.request.urlopen(request, timeout=60).close()


@thorough()
def test_fault_47_untrusted_notebook_shows_the_last_plan(lab: Lab, browser: Any) -> None:
    """JupyterLab sanitizes the HTML of a notebook that it has not signed, and shows no widgets."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3", store_widget_state=False).execute()
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    saved = json.loads(nbformat.writes(notebook))
    saved["metadata"]["kernelspec"] = spec
    (lab.folder / "mailed.ipynb").write_text(json.dumps(saved))
    page = open_notebook(lab, browser, "mailed.ipynb", viewport={"width": 1400, "height": 2400})
    charts = """[...document.querySelectorAll(".jp-Notebook img[src^='data:image/svg']")]"""
    page.wait_for_function(f"() => {charts}.length === 2")
    page.wait_for_function(f"() => {charts}.every(each => each.naturalWidth > 300 && each.alt)")
    save_screenshot(page, "saved_untrusted")
    text = page.locator(".jp-Notebook").inner_text()
    assert "with DDP" in text and "Does not fit: needs" in text
    assert not [words for words in MODEL_NOT_FOUND if words in text]
    expect(page.locator("tr", has_text="optimizer").first).to_be_visible()
    page.close()


@thorough()
def test_fault_47_static_output_follows_a_moved_cell_and_a_reload(lab: Lab, browser: Any) -> None:
    """JupyterLab does not update the outputs of such cells by itself."""
    name = "followed.ipynb"
    change = "from dataclasses import replace\nstudio.apply(replace(studio.plan, layout=ss.Layout.{}))"
    write_notebook(lab, name, *STUDIO_CELLS, change.format("ddp()"), change.format("zero(2)"))
    page = open_notebook(lab, browser, name)
    cells = page.locator(".jp-Notebook .jp-Cell")
    cells.nth(0).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=TIMEOUT_MS)
    cells.nth(0).locator(".jp-InputPrompt").click()
    page.keyboard.press("Control+Shift+ArrowDown")
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached")
    run_and_save(page, "ddp()")
    assert "with <b>DDP</b>" in read_static_html(lab.folder / name)
    page.reload()
    page.wait_for_selector(".ss-studio .js-plotly-plot .barlayer path", state="attached", timeout=TIMEOUT_MS)
    page.wait_for_function(KERNEL_IS_IDLE)
    run_and_save(page, "zero(2)")
    assert "with <b>DDP</b>" not in read_static_html(lab.folder / name)
    assert "ZeRO" in read_static_html(lab.folder / name)
    page.close()


def run_and_save(page: Any, words: str) -> None:
    page.locator(".jp-Notebook .jp-Cell", has_text=words).last.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_timeout(3000)
    choose_menu_item(page, "File", "Save Notebook")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    page.wait_for_timeout(1000)


def read_static_html(path: Path) -> str:
    """Return the static HTML of the views in the notebook's file."""
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", []) if "data" in output]
    return "".join(output.data.get("text/html", "") for output in outputs)
