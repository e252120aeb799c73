"""Every notebook runs from top to bottom in a real kernel, and opens without a question."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_all_cells_run(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    views = [
        output for output in outputs if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert views, "no widget was shown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_stored_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # Without a kernelspec JupyterLab asks which kernel to use before anything is shown.
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)


def test_the_first_cell_of_the_studio_ends_in_the_studio() -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert notebook.cells[0].source.splitlines()[-1] == "Studio()"
