"""What mends a finding, as a comment in a script: the code means what it meant, and no note stands twice."""

from __future__ import annotations

import ast

import pytest
from tests.unit.test_preflight_scripts import OLD

from shardscope.planner.preflight import Finding, findings_in, noted

NOTE = "# TODO: mend it (shardscope: bad-line)"


def at(line: int | None) -> Finding:
    return Finding(name="bad-line", severity="hint", why="", number=None, change="mend it", line=line)


@pytest.mark.parametrize(
    ("source", "line", "after"),
    [
        ("a = 1\nb = 2\n", 2, "a = 1\n{}\nb = 2\n"),
        ("if a:\r\n\tb = 2", 2, "if a:\r\n\t{}\r\n\tb = 2"),
        ("f(\n    a,\n    b,\n)\n", 3, "f(\n    a,\n    {}\n    b,\n)\n"),
        # In the middle of a text, or of a line that goes on, above the whole statement.
        ("x = 0\ny = '''\n  b\n'''\n", 3, "x = 0\n{}\ny = '''\n  b\n'''\n"),
        ("if x:\n  y = 1 + \\\n    2\n", 3, "if x:\n  {}\n  y = 1 + \\\n    2\n"),
        ("é = 1; b = 2\n", 1, "{}\né = 1; b = 2\n"),
    ],
)
def test_a_note_stands_above_its_line(source: str, line: int, after: str) -> None:
    found = noted(source, at(line))
    assert found == after.format(NOTE)
    # Once it is there it is not written again, wherever its line is now.
    assert noted(found, at(line + 1)) is None


@pytest.mark.parametrize(
    ("source", "line"),
    [("a = 1\n", None), ("a = 1\n", 2), ("a = 1", 5), ("a: [\n", 1), ("%matplotlib inline\n", 1)],
)
def test_what_cannot_be_noted(source: str, line: int | None) -> None:
    assert noted(source, at(line)) is None


def test_every_finding_of_a_script_is_mended_or_noted() -> None:
    text = OLD
    for _ in range(40):
        open_ones = [one for one in findings_in(text) if one.source or noted(text, one)]
        if not open_ones:
            break
        text = open_ones[0].source or noted(text, open_ones[0]) or ""
    left = findings_in(text)
    assert left
    for finding in left:
        assert text.count(f"# TODO: {finding.change} (shardscope: {finding.name})") == 1
    # The policy's reduce_dtype was mended, all else is as it was.
    without = ast.dump(ast.parse(text.replace(", reduce_dtype=torch.float32", "")))
    assert without == ast.dump(ast.parse(OLD))
