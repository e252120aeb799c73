"""A checkpoint that one rank gathers and writes, as one of which each rank writes its part."""

from __future__ import annotations

import ast
import re

from shardscope.own_code.bindings import bound, only_value, sees
from shardscope.own_code.edits import (
    Edit,
    has_comment,
    imported,
    line_before,
    mended,
    replaced,
    unless_too_deep,
    without,
)
from shardscope.own_code.script import Script, keywords

MODULE, WRITER = "torch.distributed", "checkpoint"
GET = ("get_model_state_dict", "get_optimizer_state_dict")
WHOLE = ({"full_state_dict": "True"}, {"full_state_dict": "True", "cpu_offload": "True"})
READERS = ("load", "load_file", "load_state_dict", "set_model_state_dict")
"""What may read the file again, which is a folder then."""
RANKED = re.compile(r"rank|time|date|now|tmp|temp|host|pid|uuid", re.IGNORECASE)
"""Names of what may be another on each rank."""
LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Yield, ast.YieldFrom)
FIRST = re.compile(r"(.*\.)?((global_)?rank|get_rank\(\)) == 0")
"""Not ``local_rank``, which is each node's."""


@unless_too_deep
def written_in_parts(script: Script) -> str | None:
    """The script with ``torch.distributed.checkpoint.save`` of what each rank has.

    None where anything but one ``torch.save`` reads a state that was gathered, where the text does not settle
    that every rank comes there, and where the script may read a file that would be a folder.
    """
    if any(script.calls(reader) for reader in READERS):
        return None
    edits: list[Edit] = []
    for options in script.calls("StateDictOptions"):
        mends = _of_one(script, options)
        if mends is None:
            return None
        edits += mends
    return mended(script, *dict.fromkeys(edits)) if edits else None


def _of_one(script: Script, options: ast.Call) -> list[Edit] | None:
    if options.args or {name: ast.unparse(one) for name, one in keywords(options).items()} not in WHOLE:
        return None
    made = next((one for one in script.walk(ast.Assign) if _asks(script, one, options)), None)
    if not isinstance(made, ast.Assign) or len(made.targets) != 1 or has_comment(script, made):
        return None
    saved = _saved(script, made)
    if saved is None or not isinstance(made.value, ast.Call):
        return None
    asked = f"{ast.unparse(made.value.func)}({', '.join(map(ast.unparse, made.value.args))})"
    local, imports = imported(script, made, MODULE, WRITER)
    state, place = (ast.get_source_segment(script.text, one) for one in saved.args)
    text = f"{local[WRITER]}.save({state}, checkpoint_id={place})"
    written = _written(script, made, saved, text)
    return None if written is None else [*imports, replaced(script, made.value, asked), *written]


def _asks(script: Script, one: ast.AST, options: ast.Call) -> bool:
    value = getattr(one, "value", None)
    is_asked = isinstance(value, ast.Call) and script.called(value) in GET
    return is_asked and list(keywords(value).values()) == [options]  # type: ignore[arg-type]


def _saved(script: Script, made: ast.Assign) -> ast.Call | None:
    """``torch.save(state, path)``, if that alone reads what ``made`` gives a name, and every rank knows all
    else that is in it."""
    target = made.targets[0]
    if not isinstance(target, ast.Name):
        return None
    uses = [one for one in script.walk(ast.Name) if getattr(one, "id", "") == target.id]
    for call in script.calls("save"):
        if len(call.args) != 2 or call.keywords or ast.unparse(call.func) != "torch.save":
            continue
        state, path = call.args
        inside = [one for one in uses if one in ast.walk(state)]
        others = state.values if isinstance(state, ast.Dict) else [state]
        is_known = all(_is_everywhere(script, one, target.id) for one in others)
        is_plain = isinstance(state, ast.Name | ast.Dict) and is_known and _is_one_place(script, path)
        if len(uses) == 2 and len(inside) == 1 and is_plain and sees(script, "torch", call):
            return call
    return None


def _is_everywhere(script: Script, value: ast.expr, state: str = "") -> bool:
    """Whether ``value`` is the same on every rank, as far as a text can say: a literal, a loop's variable, a
    parameter, or a literal's name, and nothing with ranks, clocks or conditions in it."""
    for one in ast.walk(value):
        if isinstance(one, ast.Call | ast.Await | ast.NamedExpr):
            return False
        if isinstance(one, ast.Attribute) and RANKED.search(one.attr):
            return False
        is_read = isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id != state
        if is_read and (RANKED.search(one.id) or not _is_given_alike(script, one)):  # type: ignore[attr-defined, arg-type]
            return False
    return True


def _is_given_alike(script: Script, name: ast.Name) -> bool:
    """Whether a name is a module, a parameter, a loop's variable, the command line, or made of such."""
    places = bound(script, name.id)
    if places and all(isinstance(one, ast.alias | ast.arg) or _is_counted(script, one) for one in places):
        return True
    found = only_value(script, name.id, name)
    return found is not None and (script.called(found) == "parse_args" or _is_everywhere(script, found))


def _is_counted(script: Script, place: ast.AST) -> bool:
    """Whether a loop gives it."""
    return any(place in ast.walk(loop.target) for loop in script.walk(ast.For))  # type: ignore[attr-defined]


def _is_one_place(script: Script, path: ast.expr) -> bool:
    """Whether a path is one for all ranks, and nothing else in the script takes it for a file's."""
    text = ast.unparse(path)
    same = [
        one
        for one in script.walk(type(path))
        if ast.unparse(one) == text and not isinstance(one, ast.expr_context)
    ]
    is_text = not isinstance(path, ast.Constant) or isinstance(path.value, str)
    # A name's own giving is no second use.
    reads = [one for one in same if isinstance(getattr(one, "ctx", ast.Load()), ast.Load)]
    return is_text and len(reads) == 1 and _is_everywhere(script, path)


def _written(script: Script, made: ast.Assign, saved: ast.Call, text: str) -> list[Edit] | None:
    """``text`` where all ranks come: beside ``made``, or in the place of what rank 0 does alone there."""
    line = next((one for one in script.walk(ast.Expr) if getattr(one, "value", None) is saved), None)
    if not isinstance(line, ast.Expr) or has_comment(script, line):
        return None
    for body in _bodies(script, made):
        for place, one in enumerate(body):
            between = body[:place]
            if any(isinstance(inner, LEAVING) for each in between for inner in ast.walk(each)):
                return None
            if one is line:
                return [replaced(script, line, text)]
            if isinstance(one, ast.If) and line in one.body:
                return _instead_of(script, one, line, text)
    return None


def _bodies(script: Script, made: ast.Assign) -> list[list[ast.stmt]]:
    """The lines after ``made`` that are as far from the margin."""
    return [
        body[body.index(made) + 1 :]
        for one in (script.tree, *script.walk(ast.stmt))
        for name in ("body", "orelse", "finalbody")
        if isinstance(body := getattr(one, name, None), list) and made in body
    ]


def _instead_of(script: Script, condition: ast.If, line: ast.Expr, text: str) -> list[Edit] | None:
    """Of what rank 0 does alone, the save first: what comes after it is told to people, and no more."""
    is_first = FIRST.fullmatch(ast.unparse(condition.test)) and not condition.orelse
    saved, *after = condition.body
    if not is_first or saved is not line or not all(_is_told(script, one) for one in after):
        return None
    if not after:
        return None if has_comment(script, condition) else [replaced(script, condition, text)]
    gone = without(script, line)
    return None if gone is None else [line_before(script, condition, text), gone]


def _is_told(script: Script, statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and script.called(statement.value) in ("print", "info", "log")
