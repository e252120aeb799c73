"""What a click changes in a person's own text: a keyword, a line, an import; all else stays as it is."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple, ParamSpec

from shardscope.own_code.bindings import bound
from shardscope.own_code.script import Script, keywords

P = ParamSpec("P")


def unless_too_deep(mend: Callable[P, str | None]) -> Callable[P, str | None]:
    """``mend``, and None where the text nests deeper than Python follows: generated lists and chains do."""

    @functools.wraps(mend)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> str | None:
        try:
            return mend(*args, **kwargs)
        except RecursionError:
            return None

    return guarded


class Edit(NamedTuple):
    """One place of a text and what stands there afterwards."""

    start: int
    """In bytes of UTF-8, as ``ast`` counts columns."""
    end: int
    text: str


def mended(script: Script, *edits: Edit) -> str | None:
    """The script's text after ``edits``; None where they overlap, or that is no Python any more."""
    found = script.text.encode()
    newline = "\r\n" if "\r\n" in script.text else "\n"
    placed = sorted(edits, key=lambda edit: edit[:2])
    if any(one.end > other.start for one, other in pairwise(placed)):
        return None
    for edit in reversed(placed):
        found = found[: edit.start] + edit.text.replace("\n", newline).encode() + found[edit.end :]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A keyword that is given twice is found by the compiler alone.
            compile(
                text := found.decode(), "script", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def replaced(script: Script, node: ast.expr | ast.keyword | ast.stmt, text: str) -> Edit:
    """``text`` in the place of ``node``."""
    return Edit(_start(script, node), _end(script, node), text)


def renamed(script: Script, attribute: ast.Attribute, name: str) -> Edit:
    """Another attribute of the same thing."""
    end = _end(script, attribute)
    return Edit(end - len(attribute.attr.encode()), end, name)


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


def first_argument(script: Script, call: ast.Call, text: str) -> Edit:
    """``text`` before all other arguments of ``call``, of which there is one at least."""
    at = script.text.encode().index(b"(", _end(script, call.func)) + 1
    return Edit(at, at, f"{text}, ")


def behind(script: Script, node: ast.expr | ast.stmt, text: str) -> Edit:
    """``text`` right behind ``node``."""
    return Edit(_end(script, node), _end(script, node), text)


def line_before(script: Script, statement: ast.stmt, text: str) -> Edit:
    """``text`` on a line of its own before ``statement``, as far from the margin."""
    at = _start(script, statement)
    return Edit(at, at, f"{text}\n{' ' * statement.col_offset}")


def without(script: Script, statement: ast.stmt) -> Edit | None:
    """The lines of ``statement`` gone; None where they have anything else in them."""
    start, end = _start(script, statement), _end(script, statement)
    text = script.text.encode()
    line = _offset(script, statement.lineno, 0)
    rest = re.compile(rb"[ \t]*(\r\n|\n|\r)").match(text, end)
    return None if rest is None or text[line:start].strip() else Edit(line, rest.end(), "")


def unwrapped(script: Script, block: ast.With, before: str = "", after: str = "") -> list[Edit] | None:
    """The lines of ``block`` without its ``with``, between ``before`` and ``after`` where those say anything.

    None where a text over several lines is among them, which would change, where all is on one line, where
    the first has a decorator, and where a comment would be lost.
    """
    inside = block.body[0]
    head = script.text.encode()[_start(script, block) : _start(script, inside)]
    texts = [one for one in ast.walk(block) if isinstance(one, ast.Constant | ast.JoinedStr)]
    is_longer = any(one.lineno != one.end_lineno for one in texts)
    is_decorated = bool(getattr(inside, "decorator_list", ()))
    if inside.lineno == block.lineno or is_longer or is_decorated or b"#" in head:
        return None
    margin = " " * block.col_offset
    extra = inside.col_offset - block.col_offset
    first = f"{before}\n{margin}" if before else ""
    end = _end_of_line(script, _end(script, block))
    tail = [Edit(end, end, f"\n{margin}{after}")] if after else []
    lines = lines_of(script)
    return [
        Edit(_start(script, block), _start(script, inside), first),
        *(
            Edit(start := _offset(script, number, 0), start + _indented(lines[number - 1], extra), "")
            for number in range(inside.lineno + 1, (block.end_lineno or 0) + 1)
        ),
        *tail,
    ]


def _indented(line: bytes, most: int) -> int:
    return min(most, len(line) - len(line.lstrip(b" \t")))


def line_above(script: Script, number: int, text: str) -> Edit:
    """``text`` on a line of its own above that line, as far from the margin."""
    at = _offset(script, number, 0)
    margin = re.compile(rb"[ \t]*").match(script.text.encode(), at)
    assert margin is not None
    return Edit(at, at, f"{margin.group().decode()}{text}\n")


def imported(
    script: Script, user: ast.expr | ast.stmt, module: str, *names: str
) -> tuple[dict[str, str], tuple[Edit, ...]]:
    """What ``names`` are called where ``user`` is, and the import of those that the module has not.

    One that the script uses for something else is imported as ``torch_...``, after its package.
    """
    assert script.tree is not None
    package = module.partition(".")[0]
    heads = [
        one
        for one in script.tree.body
        if isinstance(one, ast.Import | ast.ImportFrom) and one.lineno <= user.lineno
    ]
    had = {
        alias.name: alias.asname or alias.name
        for one in heads
        for alias in one.names
        if alias.name in names and _is_from(one, module)
    }
    had = {name: local for name, local in had.items() if not _means_another(script, local, name, module)}
    local = {name: had.get(name) or _free_name(script, name, module) for name in names}
    missing = sorted(set(names) - set(had))
    if not missing:
        return local, ()
    text = f"from {module} import "
    text += ", ".join(name if local[name] == name else f"{name} as {local[name]}" for name in missing)
    if any(_imports(one, package) for one in heads):
        end = _end_of_line(script, _end(script, heads[-1]))
        return local, (Edit(end, end, f"\n{text}"),)
    # What the script sets up before it imports that package has to come first.
    return local, (line_before(script, statement_of(script, user), text),)


def _imports(statement: ast.Import | ast.ImportFrom, package: str) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return not statement.level and (statement.module or "").partition(".")[0] == package
    return package in [one.name.partition(".")[0] for one in statement.names]


def _is_from(statement: ast.stmt, module: str) -> bool:
    """Whether it imports from that module, or from one around or inside of it, which has the same."""
    if not isinstance(statement, ast.ImportFrom) or statement.level:
        return False
    inner, outer = f"{module}.", f"{statement.module}."
    return inner.startswith(outer) or outer.startswith(inner)


def _free_name(script: Script, name: str, module: str) -> str:
    """``name``, or with its package before it so often that the script has no other use for that."""
    local = name
    while _means_another(script, local, name, module):
        local = f"{module.partition('.')[0]}_{local}"
    return local


def statement_of(script: Script, node: ast.expr | ast.stmt) -> ast.stmt:
    """The innermost statement around ``node``."""
    around = [one for one in script.walk(ast.stmt) if isinstance(one, ast.stmt) and node in ast.walk(one)]
    return max(around, key=lambda one: (one.lineno, one.col_offset))


def _means_another(script: Script, local: str, name: str, module: str) -> bool:
    """Whether ``local`` may be anything but what ``module`` has under ``name``, anywhere in the script.

    An import inside a function hides the module's there, and one under a condition may not be done: only one
    of the module's own lines is surely the same. What ``*`` brings in is not known.
    """
    assert script.tree is not None
    its_own = [
        alias
        for one in script.tree.body
        if isinstance(one, ast.ImportFrom) and _is_from(one, module)
        for alias in one.names
        if alias.name == name
    ]
    has_unknown = bool(bound(script, "*")) and local == name
    return has_unknown or any(node not in its_own for node in bound(script, local))


def has_comment(script: Script, node: ast.expr | ast.stmt) -> bool:
    """Whether a comment is in the lines of ``node``, but for one behind it."""
    if script.comment_lines is None:
        return True
    last = node.end_lineno or node.lineno
    return any(node.lineno <= line < last for line in script.comment_lines)


def _end_of_line(script: Script, end: int) -> int:
    """Behind the comment that may follow; where a statement follows, ``end`` itself."""
    rest = re.compile(rb"[ \t]*(#[^\r\n]*)?(?=[\r\n]|$)").match(script.text.encode(), end)
    return end if rest is None else rest.end()


def _start(script: Script, node: ast.expr | ast.keyword | ast.stmt) -> int:
    return _offset(script, node.lineno, node.col_offset)


def _end(script: Script, node: ast.expr | ast.keyword | ast.stmt) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _offset(script, node.end_lineno, node.end_col_offset)


def _offset(script: Script, line: int, column: int) -> int:
    return list(accumulate(map(len, lines_of(script)), initial=0))[line - 1] + column


def lines_of(script: Script) -> list[bytes]:
    """By Python's own line ends, a lone carriage return among them; other lists of lines have more."""
    return [one for one in re.split(rb"(?<=\n)|(?<=\r)(?!\n)", script.text.encode()) if one]
