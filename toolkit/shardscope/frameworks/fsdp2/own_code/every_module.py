"""A loop that makes a unit of every module: one for each layer and the model, as a click writes it."""

from __future__ import annotations

import ast

from shardscope.frameworks.fsdp2.own_code.units import SHARD, holds_for_layers, layers_of
from shardscope.own_code.edits import has_comment, mended, replaced, unless_too_deep
from shardscope.own_code.script import Script, keywords

GIVING = ("modules", "named_modules")
ORDERING = ("reversed", "list", "tuple")


def loop_over_everything(script: Script, call: ast.Call) -> ast.For | None:
    """The loop over all modules, without a condition, that ``call`` is in."""
    for loop in script.walk(ast.For):
        assert isinstance(loop, ast.For)
        is_inside = any(call is node for node in ast.walk(loop))
        is_free = not any(isinstance(node, ast.If) for node in ast.walk(loop))
        if is_inside and is_free and script.called(_modules(loop)) in GIVING:
            return loop
    return None


def is_inside_out(loop: ast.For) -> bool:
    """Whether what is in a module comes before it."""
    calls = (node for node in ast.walk(loop.iter) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) == "reversed" for call in calls)


def _modules(loop: ast.For) -> ast.expr:
    """``model.modules()``, in whatever order."""
    found = loop.iter
    while isinstance(found, ast.Call) and ast.unparse(found.func) in ORDERING and len(found.args) == 1:
        found = found.args[0]
    return found


@unless_too_deep
def layers_of_everything(script: Script, call: ast.Call, loop: ast.For) -> str | None:
    """The script whose loop leaves out what is no layer, and whose model is sharded after it.

    None where the text does not settle which modules are layers, or that units of them do what the script
    does; and where the loop does anything else.
    """
    asked, given = _modules(loop), keywords(call)
    model = (
        asked.func.value if isinstance(asked, ast.Call) and isinstance(asked.func, ast.Attribute) else None
    )
    name = _name_of_module(loop, asked)
    is_alone = [ast.unparse(one) for one in loop.body] == [ast.unparse(call)] and not loop.orelse
    if not isinstance(model, ast.Name) or not name or not is_alone or asked.args or asked.keywords:  # type: ignore[attr-defined]
        return None
    if [ast.unparse(one) for one in call.args] != [name] or not holds_for_layers(script, call):
        return None
    after = _sharded_after(script, loop, model.id)
    others = [one for one in script.calls(SHARD) if one is not call and one is not after]
    if (
        others
        or (after is not None and not holds_for_layers(script, after))
        or has_comment(script, loop.body[0])
    ):
        return None
    layers = layers_of(script, model, loop, given, model)
    if layers is None:
        return None
    passed = "".join(f", {name}={ast.unparse(value)}" for name, value in given.items())
    is_below = loop.body[0].lineno > loop.lineno
    outer = "\n" + " " * loop.col_offset
    inner = "\n" + " " * loop.body[0].col_offset if is_below else f"{outer}    "
    text = (
        "" if is_below else inner
    ) + f"if isinstance({name}, {layers.kind}):{inner}    {ast.unparse(call)}"
    text += "" if after else f"{outer}{ast.unparse(call.func)}({model.id}{passed})"
    return mended(script, replaced(script, loop.body[0], text), *layers.imports)


def _name_of_module(loop: ast.For, asked: ast.expr) -> str:
    """What the loop calls each module; "" where it takes it apart otherwise."""
    found: ast.expr | None = loop.target
    if isinstance(asked, ast.Call) and getattr(asked.func, "attr", "") == "named_modules":
        is_pair = isinstance(found, ast.Tuple) and len(found.elts) == 2
        found = found.elts[1] if is_pair else None  # type: ignore[union-attr]
    return found.id if isinstance(found, ast.Name) else ""


def _sharded_after(script: Script, loop: ast.For, model: str) -> ast.Call | None:
    """``fully_shard(model)`` as the statement behind the loop."""
    for node in script.walk(ast.stmt, ast.mod):
        body = getattr(node, "body", [])
        if isinstance(body, list) and loop in body[:-1]:
            behind = body[body.index(loop) + 1]
            call = behind.value if isinstance(behind, ast.Expr) else None
            if isinstance(call, ast.Call) and script.called(call) == SHARD:
                return call if [ast.unparse(one) for one in call.args] == [model] else None
    return None
