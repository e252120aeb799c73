"""A checkpoint that one rank gathers and writes, as one of which each rank writes its part."""

from __future__ import annotations

import ast
import re

from shardscope.own_code.bindings import sees
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
    """``torch.save(state, path)``, if that alone reads what ``made`` gives a name."""
    target = made.targets[0]
    if not isinstance(target, ast.Name):
        return None
    uses = [one for one in script.walk(ast.Name) if getattr(one, "id", "") == target.id]
    for call in script.calls("save"):
        state = call.args[0] if call.args else None
        inside = [one for one in uses if state is not None and one in ast.walk(state)]
        is_torchs = ast.unparse(call.func) == "torch.save" and sees(script, "torch", call)
        is_plain = len(call.args) == 2 and not call.keywords and isinstance(state, ast.Name | ast.Dict)
        if len(uses) == 2 and len(inside) == 1 and is_torchs and is_plain:
            return call
    return None


def _written(script: Script, made: ast.Assign, saved: ast.Call, text: str) -> list[Edit] | None:
    """``text`` where all ranks come: beside ``made``, or in the place of what rank 0 does alone there."""
    line = next((one for one in script.walk(ast.Expr) if getattr(one, "value", None) is saved), None)
    if not isinstance(line, ast.Expr) or has_comment(script, line):
        return None
    for body in _bodies(script, made):
        if line in body:
            return [replaced(script, line, text)]
        for one in body:
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
    is_first = FIRST.fullmatch(ast.unparse(condition.test)) and not condition.orelse
    if not is_first or not all(isinstance(one, ast.Expr) for one in condition.body):
        return None
    if len(condition.body) == 1:
        return None if has_comment(script, condition) else [replaced(script, condition, text)]
    gone = without(script, line)
    return None if gone is None else [line_before(script, condition, text), gone]
