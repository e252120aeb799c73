"""What mends a finding as a comment above its line: for what a person has to write, and must not forget."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardscope.own_code.edits import Edit, line_above, lines_of, mended, unless_too_deep
from shardscope.own_code.script import Script
from shardscope.planner.preflight.finding import Finding


@unless_too_deep
def noted(source: str, finding: Finding) -> str | None:
    """``source`` with ``# TODO:`` and what mends ``finding`` above the line that it is about.

    None where that stands there already, where the finding is of no line, and where the text is no Python or
    has no place for a comment there, as inside a string.
    """
    script = Script(source=source)
    if script.tree is None or finding.line is None or finding.line > len(lines_of(script)):
        return None
    note = f"# TODO: {finding.change} (shardscope: {finding.name})"
    meaning = ast.dump(script.tree)
    for line in _places(script, finding.line):
        edit = line_above(script, line, note)
        if _is_there(script, edit):
            return None
        after = mended(script, edit)
        if after is not None and ast.dump(ast.parse(after)) == meaning:
            return after
    return None


def _places(script: Script, line: int) -> Iterator[int]:
    """That line, and where the statement begins that it is in the middle of."""
    yield line
    around = [
        one.lineno  # type: ignore[attr-defined]
        for one in script.walk(ast.stmt)
        if one.lineno <= line <= one.end_lineno  # type: ignore[attr-defined]
    ]
    yield from sorted(set(around) - {line}, reverse=True)


def _is_there(script: Script, edit: Edit) -> bool:
    """Whether the comments that stand right above have that one."""
    for line in reversed(script.text.encode()[: edit.start].decode().splitlines()):
        if not line.strip().startswith("#"):
            return False
        if line.strip() == edit.text.strip():
            return True
    return False
