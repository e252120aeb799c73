"""Tests of the course's notebooks: every exercise is answered wrongly and rightly, in a real
kernel."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.notebooks.test_notebooks import CELL_SECONDS, ROOT
from tests.requirements import few, needs_installed, skip_without

from shardscope.teach.exercises import EXERCISES

COURSE = [
    *sorted((ROOT / "notebooks").glob("0[1-9]_*.ipynb")),
    *sorted((ROOT / "notebooks").glob("30_*.ipynb")),
]
"""The course, and the code exercises."""
SOLUTIONS = ROOT / "notebooks" / "solutions"
NBGRADER_FIELDS = {"grade", "grade_id", "locked", "points", "schema_version", "solution", "task"}
"""Fields of nbgrader's cell metadata, schema 3."""


def read_notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def list_exercise_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]


def read_solutions(path: Path) -> dict[str, str]:
    """Return the solution of each exercise of a notebook, by the exercise's name."""
    text = (SOLUTIONS / f"{path.stem}.py").read_text(encoding="utf-8")
    parts = re.split(r"^# %% (\S+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def put_in(cell: nbformat.NotebookNode, code: str) -> str:
    """Return an exercise's cell with ``code`` in place of what the learner replaces."""
    lines = cell.source.splitlines()
    head = [line for line in lines if line.startswith(("from shardscope import teach", "teach.needs("))]
    return "\n".join([*head, code.strip(), lines[-1]])


@pytest.mark.parametrize(
    "path",
    few(COURSE, [path for path in COURSE if path.name.startswith("01")]),
    ids=lambda path: path.name,
)
def test_every_exercise_is_answered_wrongly_and_rightly(path: Path, tmp_path: Path) -> None:
    for package in ("torch", "transformers", "deepspeed", "megatron"):
        skip_without(package)
    notebook, solutions = read_notebook(path), read_solutions(path)
    cells = []
    for cell in notebook.cells:
        if "exercise" not in cell.metadata.get("tags", []):
            cells.append(cell)
            continue
        name = cell.metadata["nbgrader"]["grade_id"]
        variable = cell.source.splitlines()[-1].rpartition(", ")[2].rstrip(")")
        # As it comes, with an answer of a wrong type, and with the solution.
        wrong = nbformat.v4.new_code_cell(put_in(cell, f"{variable} = ['no', 'answer']"))
        right = nbformat.v4.new_code_cell(put_in(cell, solutions[name]))
        for one, kind in ((cell, "open"), (wrong, "wrong"), (right, "right")):
            one.metadata["checked"] = (kind, name)
            cells.append(one)
    notebook.cells = cells
    shutil.copytree(ROOT / "notebooks" / "data", tmp_path / "data")
    NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    begins = {"open": "Write your answer", "wrong": "Not yet.", "right": "Right."}
    for cell in notebook.cells:
        if "checked" in cell.metadata:
            kind, name = cell.metadata["checked"]
            shown = cell.outputs[-1]["data"]["text/plain"]
            assert shown.startswith(begins[kind]), (name, shown)
            assert "text/html" in cell.outputs[-1]["data"]
    (stored,) = (tmp_path / "answers").glob("*.jsonl")
    assert len(stored.read_text().splitlines()) == 2 * len(solutions)


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.name)
def test_exercise_cells_carry_tags_and_nbgrader_metadata(path: Path) -> None:
    cells = list_exercise_cells(read_notebook(path))
    names = [cell.metadata["nbgrader"]["grade_id"] for cell in cells]
    assert len(names) >= 3 and names == list(read_solutions(path)) == list(dict.fromkeys(names))
    for cell, name in zip(cells, names, strict=True):
        assert set(cell.metadata["nbgrader"]) == NBGRADER_FIELDS
        assert name in EXERCISES and name.startswith(path.name[:2])
        assert cell.source.startswith("from shardscope import teach\n")
        assert cell.source.splitlines()[-1].startswith(f'teach.check("{name}", ')


def test_every_exercise_is_in_a_notebook() -> None:
    names = [
        cell.metadata["nbgrader"]["grade_id"]
        for path in COURSE
        for cell in list_exercise_cells(read_notebook(path))
    ]
    assert names == list(EXERCISES)


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.name)
def test_needed_cells_exist_and_make_what_is_needed(path: Path) -> None:
    """``teach.needs(plan="Cell 1")`` names an earlier cell that begins so and makes ``plan``."""
    made: dict[str, set[str]] = {}
    needed = 0
    for cell in read_notebook(path).cells:
        if cell.cell_type != "code":
            continue
        nodes = list(ast.walk(ast.parse(cell.source)))
        for call in nodes:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "teach.needs":
                needed += 1
                for keyword in call.keywords:
                    assert isinstance(keyword.value, ast.Constant)
                    assert keyword.arg in made[keyword.value.value], ast.unparse(call)
                # After a restart the cell may be the first one to run.
                assert "from shardscope import teach" in cell.source.partition("teach.needs")[0], cell.source
        names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
        if match := re.match(r"# (Cell \d+)\n", cell.source):
            assert match[1] not in made
            made[match[1]] = names
    assert needed


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.name)
def test_what_a_comment_suggests_can_be_called(path: Path) -> None:
    """Cells like ``answer = ...  # replace(plan, ...)``: learners write what the comment shows."""
    for cell in read_notebook(path).cells:
        if cell.cell_type == "code" and re.search(r"# .*\breplace\(", cell.source):
            assert "import replace" in cell.source or 'replace="Cell' in cell.source, cell.source


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.name)
def test_learners_notebooks_do_not_touch_the_solutions(path: Path) -> None:
    assert "solutions" not in path.read_text(encoding="utf-8")


@needs_installed("jupyter_client")
def test_a_cell_run_too_early_names_the_cell_to_run_without_a_traceback(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "from shardscope import teach\nteach.needs(plan='Cell 1', run='Cell 3')"
            )
        ]
    )
    client = NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": tmp_path}}, allow_errors=True
    )
    client.execute()
    (output,) = notebook.cells[0].outputs
    shown = "\n".join(output.traceback)
    assert 'run the cell that begins with "# Cell 1", which makes plan' in shown and '"# Cell 3"' in shown
    assert "Traceback" not in shown and "line" not in shown


@pytest.mark.parametrize("micro_batch_size", (1, 2, 4, 8))
def test_the_peak_does_not_grow_with_the_global_batch_for_any_micro_batch(
    micro_batch_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notebook 02 invites to change the micro-batch in cell 1; cell 5 prints what its text says."""
    notebook = read_notebook(ROOT / "notebooks" / "02_batch_sequence_recomputation.ipynb")
    cells = {cell.source.partition("\n")[0]: cell.source for cell in notebook.cells}
    values: dict[str, object] = {}
    first = cells["# Cell 1"].replace("micro_batch_size=4", f"micro_batch_size={micro_batch_size}")
    exec(first.replace("MemoryView(plan)", ""), values)
    exec("\n".join(line for line in cells["# Cell 5"].splitlines() if "teach" not in line), values)
    peaks = re.findall(r"peak ([\d.]+) of", capsys.readouterr().out)
    assert len(peaks) == 2 and peaks[0] == peaks[1]
