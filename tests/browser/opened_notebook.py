"""Helpers that write a notebook with given cells, open it in a real JupyterLab, and run it."""

from __future__ import annotations

import json
from typing import Any

from served import Lab

TIMEOUT_MS = 120_000
"""Time for anything to appear on a busy machine."""
KERNEL_IS_IDLE = "() => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText)"
CELLS_HAVE_RUN = """count => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
    .filter(prompt => /\\d/.test(prompt.textContent)).length >= count"""
STUDIO_CELLS = (
    "import shardscope as ss\nfrom shardscope_widgets import MemoryView, Studio\nstudio = Studio()\nstudio",
)


def write_notebook(lab: Lab, name: str, *sources: str) -> None:
    """Write ``name`` with these code cells into the lab's folder."""
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": source,
        }
        for number, source in enumerate(sources)
    ]
    # Without a kernelspec a dialog asks for one.
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
    (lab.folder / name).write_text(json.dumps(notebook))


def open_notebook(lab: Lab, browser: Any, name: str, **page_options: Any) -> Any:
    """Open the notebook and return its page once the kernel is idle."""
    page = browser.new_page(**{"viewport": {"width": 1500, "height": 1400}, **page_options})
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(lab.notebook_url(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function(KERNEL_IS_IDLE)
    return page


def run_all_cells(page: Any, count: int) -> None:
    """Run all cells and wait until ``count`` of them have run."""
    choose_menu_item(page, "Run", "Run All Cells")
    page.wait_for_function(CELLS_HAVE_RUN, arg=count)
    page.wait_for_function(KERNEL_IS_IDLE)


def choose_menu_item(page: Any, name: str, item: str) -> None:
    """Choose ``item`` in the menu bar's ``name``."""
    page.get_by_role("menuitem", name=name, exact=True).click()
    page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()
