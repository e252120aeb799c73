"""Tests of the notebooks: each runs in a real kernel, opens without a dialog, and has no stored outputs."""

from __future__ import annotations

import ast
import builtins
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.requirements import few, sample, skip_without

from shardscope_widgets import RunView
from shardscope_widgets.run.progress_figures import KEEP_MODEL

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 1200
"""A cell may wait for a fine-tune of minutes."""
FIRST = [path for path in NOTEBOOKS if path.name == "00_studio.ipynb"]


@pytest.mark.parametrize("path", few(NOTEBOOKS, FIRST), ids=lambda path: path.name)
def test_all_cells_run(path: Path, tmp_path: Path) -> None:
    if path.name.startswith(("2", *(f"0{number}" for number in range(1, 10)))):
        for package in ("torch", "transformers", "accelerate", "peft", "gguf"):
            skip_without(package)
    if path.name.startswith(("07", "08")):
        for package in ("deepspeed", "megatron"):
            skip_without(package)
    notebook = nbformat.read(path, as_version=4)
    shutil.copytree(ROOT / "notebooks" / "data", tmp_path / "data")
    NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
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
def test_markdown_snippets_define_every_name_that_they_use(path: Path) -> None:
    """Users paste the snippets of the text one after another into an empty notebook."""
    notebook = nbformat.read(path, as_version=4)
    known = set(dir(builtins))
    for cell in notebook.cells:
        blocks = re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)
        for block in blocks if cell.cell_type == "markdown" else []:
            tree = ast.parse(block)
            nodes = list(ast.walk(tree))
            known |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
            known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            names = [node for node in nodes if isinstance(node, ast.Name)]
            known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            assert not {node.id for node in names} - known, block
        # The text between the snippets names objects as well: `TraceView(run)`.
        for call in re.findall(r"`([A-Z]\w+)\(", cell.source) if blocks else []:
            assert call in known, call


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # Without a kernelspec JupyterLab asks which kernel to use before anything is shown.
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)


def test_first_cell_of_the_studio_notebook_ends_with_studio() -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert notebook.cells[0].source.splitlines()[-1] == "Studio()"


def test_fine_tuning_notebook_names_every_button_that_ends_a_run() -> None:
    (path,) = (path for path in NOTEBOOKS if path.name.startswith("20_"))
    prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    view = RunView()
    # The notebook's run has no validation, and so no best step.
    for name in (KEEP_MODEL, view.save_button.description, view.stop_button.description):
        assert f"*{name}*" in prose
    view.close()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_cell_blocks_the_buttons_of_a_run_above(path: Path) -> None:
    """While a cell blocks, ipykernel 7 processes no button: Stop did nothing until the run had ended."""
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    shown = {name for source in sources for name in re.findall(r"RunView\((\w+)\)", source)}
    assert not [name for source in sources for name in shown if f"{name}.wait(" in source]


@sample(2)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_git_filter_ignores_the_outputs_of_a_used_notebook(path: Path, tmp_path: Path) -> None:
    """``make lab`` turns this filter on; the file on disk keeps its outputs."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / ".ci").mkdir()
    for name in (f"notebooks/{path.name}", ".ci/clean_notebook.py", ".gitattributes"):
        shutil.copy(ROOT / name, tmp_path / name)

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "--quiet")
    git("config", "filter.clean-notebook.clean", f"{sys.executable} .ci/clean_notebook.py")
    git("add", ".")
    git("commit", "--quiet", "--message", "as it is stored")
    assert git("show", f"HEAD:notebooks/{path.name}") == path.read_text()

    used = nbformat.read(path, as_version=4)
    for count, cell in enumerate((cell for cell in used.cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
        cell.outputs = [nbformat.v4.new_output("stream", text="a run")]
        cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01"}
    used.metadata.language_info["version"] = "3.13.1"
    copy = tmp_path / "notebooks" / path.name
    nbformat.write(used, copy)
    hook = "import clean_notebook, sys; clean_notebook.tell_git(os_path=sys.argv[1], model=None)"
    after_a_save = [sys.executable, "-c", hook, str(copy)]
    subprocess.run(after_a_save, env={**os.environ, "PYTHONPATH": str(ROOT / ".ci")}, check=True)
    assert not git("status", "--porcelain")
    assert "a run" in copy.read_text()

    used.cells[0].source += "\n# mine"
    nbformat.write(used, copy)
    subprocess.run(after_a_save, env={**os.environ, "PYTHONPATH": str(ROOT / ".ci")}, check=True)
    assert git("status", "--porcelain").startswith(" M"), "an edit by the user is a change that is not staged"
    assert '+    "# mine"' in git("diff") and "a run" not in git("diff")


def test_git_filter_passes_other_files_unchanged() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "clean_notebook.py")]
    for text in ("<<<<<<< HEAD\n{}\n", "{}", '{"cells": [1], "metadata": {}}'):
        assert subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout == text
