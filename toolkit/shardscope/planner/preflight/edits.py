"""What a click changes in a person's own text: a keyword, a line, an import; all else stays as it is."""

from __future__ import annotations

import ast
from itertools import accumulate, takewhile
from typing import NamedTuple

from shardscope.planner.preflight.script import DEFINITIONS, Script, keywords


class Edit(NamedTuple):
    """One place of a text and what stands there afterwards."""

    start: int
    """In bytes of UTF-8, as ``ast`` counts columns."""
    end: int
    text: str


def mended(script: Script, *edits: Edit) -> str | None:
    """The script's text after ``edits``, which do not overlap; None where that is no Python any more."""
    found = script.text.encode()
    newline = "\r\n" if "\r\n" in script.text else "\n"
    for edit in sorted(edits, reverse=True):
        found = found[: edit.start] + edit.text.replace("\n", newline).encode() + found[edit.end :]
    try:
        ast.parse(text := found.decode())
    except (SyntaxError, ValueError, RecursionError):
        return None  # A last argument in parentheses of its own, say: a person finds better words.
    return text


def replaced(script: Script, node: ast.expr | ast.keyword | ast.stmt, text: str) -> Edit:
    """``text`` in the place of ``node``."""
    return Edit(_start(script, node), _end(script, node), text)


def with_keyword(script: Script, call: ast.Call, name: str, value: str) -> Edit:
    """``name=value`` among the arguments of ``call``, whatever it was before."""
    before = keywords(call).get(name)
    if before is not None:
        return replaced(script, before, value)
    ends = [_end(script, given) for given in call.args] + [_end(script, given) for given in call.keywords]
    if ends:
        return Edit(max(ends), max(ends), f", {name}={value}")
    closing = _end(script, call) - 1
    return Edit(closing, closing, f"{name}={value}")


def line_before(script: Script, statement: ast.stmt, text: str) -> Edit:
    """``text`` on a line of its own before ``statement``, as far from the margin."""
    at = _start(script, statement)
    return Edit(at, at, f"{text}\n{' ' * statement.col_offset}")


def imported(script: Script, module: str, *names: str) -> tuple[dict[str, str], tuple[Edit, ...]]:
    """What ``names`` are called in the script, and the import of those that it has none of yet."""
    local = {name: name for name in names}
    had = {original: here for here, original in script.aliases.items() if original in local}
    missing = sorted(set(names) - set(had))
    if not missing:
        return local | had, ()
    assert script.tree is not None
    text = f"from {module} import {', '.join(missing)}"
    head = list(takewhile(_is_head, script.tree.body))
    end = _end(script, head[-1]) if head else 0
    return local | had, (Edit(end, end, f"\n{text}" if head else f"{text}\n"),)


def _is_head(statement: ast.stmt) -> bool:
    """Imports, and the text that a module begins with."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def scope_of(script: Script, node: ast.AST) -> ast.AST | None:
    """The innermost function or class around ``node``; None: the module itself."""
    around = [found for found in script.walk(*DEFINITIONS) if node in ast.walk(found)]
    return max(around, key=lambda found: found.lineno, default=None)  # type: ignore[attr-defined]


def _start(script: Script, node: ast.expr | ast.keyword | ast.stmt) -> int:
    return _offset(script, node.lineno, node.col_offset)


def _end(script: Script, node: ast.expr | ast.keyword | ast.stmt) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _offset(script, node.end_lineno, node.end_col_offset)


def _offset(script: Script, line: int, column: int) -> int:
    lines = script.text.encode().split(b"\n")
    return list(accumulate((len(each) + 1 for each in lines), initial=0))[line - 1] + column
