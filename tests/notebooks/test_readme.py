"""The README's Python example runs as pasted, and what the README names exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.needs import needs

REPOSITORY = Path(__file__).parents[2]
MADE_LATER = ("config.json", "FILES.md", "tests/measured/own.jsonl", "artifacts/soak/report.md")
"""Files of other people, and of machines with a GPU."""
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_python_example_works_as_pasted(tmp_path: Path) -> None:
    needs("torch")
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) == 10, "ten lines"
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report, step, why, outcome, trace = done.stdout.splitlines()
    assert "fits" in report
    assert "tokens/s a GPU" in step
    assert why.startswith("Start with ")
    status, losses = outcome.split(" ", 1)
    assert status == "finished"
    values = [float(loss) for loss in losses.strip("[]").split(",")]
    assert len(values) == 20
    assert values[-1] < values[0] - 0.5, "the loss falls"
    assert "2 ranks" in trace
    (run,) = (tmp_path / "runs").iterdir()
    assert {"run.json", "status.jsonl", "events", "logs", "traces", "what_it_was"} <= {
        entry.name for entry in run.iterdir()
    }


def test_every_extra_has_its_line() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in project["optional-dependencies"]:
        assert f'pip install "shardscope[{extra}]"' in README


def test_every_variable_of_the_environment_is_explained() -> None:
    code = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "toolkit").rglob("*.py")]
    named = {name for text in code for name in re.findall(r"SHARDSCOPE_[A-Z_]+", text)}
    assert named and {name for name in named if f"| `{name}` |" not in README} == set()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_and_targets_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (REPOSITORY / target).exists(), f"{page} links to {target}"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page} names make {target}"


def test_contributing_lists_the_packages_in_their_own_words() -> None:
    """Lowest layer first, as import-linter has them; each row is the first paragraph of its docstring."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    toolkit = REPOSITORY / "toolkit" / "shardscope"
    rows = dict(re.findall(r"^\| `toolkit/shardscope/(\w+)/` \| (.*) \|$", text, re.MULTILINE))
    assert set(rows) == {file.parent.name for file in toolkit.glob("*/__init__.py")}
    for name, words in rows.items():
        docstring = ast.get_docstring(ast.parse((toolkit / name / "__init__.py").read_text("utf-8"))) or ""
        first = " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")
        assert words == first, name
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = "\n".join(reversed(contract["contracts"][0]["layers"]))
    lowest_first = re.findall(r"\bshardscope\.(\w+)(?=\s|$)", layers)
    whole = [name for name in rows if name != "frameworks"]  # Its modules are in several layers.
    assert whole == [name for name in lowest_first if name in whole]


def test_contributing_names_every_target() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for folder in {path.split("/")[0] for path in re.findall(r"\| `([\w/]+)/`", text)}:
        assert (REPOSITORY / folder).is_dir(), folder
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    for target in set(targets.split()) - {"browser"}:
        assert f"| `make {target}` |" in text, target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    """From the root or from the package's own folder, as the pages say them."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    places = [REPOSITORY, *(REPOSITORY / place for place in ("toolkit/shardscope", "tests", "tests/unit"))]
    for name in re.findall(r"`([\w./]+\.(?:py|toml|md|png|json|jsonl))`", text):
        found = any((place / name).exists() for place in places) or any(REPOSITORY.glob(f"[tw]*/**/{name}"))
        assert found or name in MADE_LATER, f"{page} names {name}"
