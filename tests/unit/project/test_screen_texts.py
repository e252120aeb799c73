"""Tests of texts in the user interface: no project jargon, and labels that users rely on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope_widgets
from shardscope_widgets import Studio
from shardscope_widgets.plans import ranking_figure

FOLDER = Path(shardscope_widgets.__file__).parent
JARGON = re.compile(
    r"\b(mend\w*|told|beneath|nobody|somebody|a person|people|in words|the card|cards|few bits)\b",
    re.IGNORECASE,
)


def list_strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module except docstrings."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_widget_strings_contain_no_project_jargon(path: Path) -> None:
    assert not [text for text in list_strings(path) if JARGON.search(text)]


@pytest.mark.parametrize(
    "name",
    [
        *("explain/out_of_memory_fixes", "explain/oom_kills", "explain/measured", "launch/free_memory"),
        *("watch/gpu_monitor", "verdict"),
    ],
)
def test_reasons_of_runs_contain_no_project_jargon(name: str) -> None:
    """The Runs tab displays the reasons: "GiB of the card", "somebody sent it"."""
    path = FOLDER.parent.parent / "toolkit" / "shardscope" / "runs" / f"{name}.py"
    assert not [text for text in list_strings(path) if " " in text and JARGON.search(text)]


def test_percentages_have_a_space_before_the_sign() -> None:
    """Screens and messages write "10 %"; Python's ``.0%`` writes "10%"."""
    toolkit = FOLDER.parent.parent / "toolkit" / "shardscope"
    unspaced = {
        f"{path.name}: {ast.unparse(node)}"
        for path in (*FOLDER.rglob("*.py"), *toolkit.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FormattedValue)
        and node.format_spec is not None
        and ast.unparse(node.format_spec).endswith("%'")
    }
    assert not unspaced
    assert not [text for path in toolkit.rglob("*.py") for text in list_strings(path) if ".0%}" in text]


def test_search_chart_describes_the_number_of_points() -> None:
    ranking: Any = SimpleNamespace(num_evaluated=12_032, num_feasible=3_204, seconds=0.41)
    description = ranking_figure.describe_counts(ranking, 912)
    assert all(fact in description for fact in ("12,032 plans", "0.41 s", "3,204 fit", "912 points shown"))
    assert "shown" not in ranking_figure.describe_counts(ranking, 12_032)


def walk_widgets(box: Any) -> Iterator[Any]:
    """Yield the widget and all widgets inside of it."""
    yield box
    for child in getattr(box, "children", ()):
        yield from walk_widgets(child)


def test_buttons_and_labels_have_the_agreed_texts() -> None:
    studio = Studio()
    studio.tabs.value = "Plans"
    texts = [
        str(getattr(widget, name, "")) for widget in walk_widgets(studio) for name in ("description", "value")
    ]
    for label in (
        "Check memory without GPUs",
        "Pin for comparison",
        "Frameworks your team knows",
        "Keep running if the kernel stops",
        "Steps, learning rate",
    ):
        assert any(label in text for text in texts), label
    assert not any("ehearse on" in text for text in texts)
    studio.close()
