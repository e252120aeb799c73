"""Blocks in which FSDP1 is told what FSDP2 does by itself or by a call: states in parts, sums left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.own_code.bindings import root_of, scope_of
from shardscope.own_code.edits import Edit, has_comment, unwrapped, without
from shardscope.own_code.script import Script

KIND, CONFIG = "StateDictType.SHARDED_STATE_DICT", "ShardedStateDictConfig()"
STATES = ("state_dict", "load_state_dict")
LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Raise, ast.Try)
"""What leaves a block before its last line."""


class Block(NamedTuple):
    """A ``with`` or a line that goes."""

    statement: ast.With | ast.Expr
    understood: list[ast.AST]
    """What FSDP2's model does as well once the block is gone."""
    before: str = ""
    after: str = ""
    """Lines around what was in it."""


def blocks(script: Script, old_class: str, made: ast.Assign) -> list[Block]:
    """Those of the model that is given its name in ``made``, as far as the text settles them."""
    model = ast.unparse(made.targets[0])
    return [*_withs(script, old_class, model, made), *_lines(script, old_class, model)]


def without_blocks(script: Script, found: list[Block]) -> list[Edit] | None:
    """Each as its lines alone; None where a comment or a text over several lines would change."""
    edits: list[Edit] = []
    for one in found:
        if isinstance(one.statement, ast.With):
            mends = unwrapped(script, one.statement, one.before, one.after)
        else:
            gone = None if has_comment(script, one.statement) else without(script, one.statement)
            mends = None if gone is None else [gone]
        if mends is None:
            return None
        edits += mends
    return edits


def _withs(script: Script, old_class: str, model: str, made: ast.Assign) -> Iterator[Block]:
    for block in script.walk(ast.With):
        assert isinstance(block, ast.With)
        if len(block.items) > 1 or block.items[0].optional_vars is not None:
            continue
        told = block.items[0].context_expr
        if _is_sharded(script, told, "state_dict_type", old_class, model):
            yield Block(block, [*ast.walk(told), *_states(block, model)])
        elif (syncs := _syncs(told, model)) and _is_surely(script, block, made):
            of = f"{model}.set_requires_gradient_sync"
            yield Block(block, list(ast.walk(told)), f"{of}({syncs})", f"{of}(True)")


def _is_surely(script: Script, block: ast.With, made: ast.Assign) -> bool:
    """Whether the block is the wrapped model's whatever way the script goes, and is left at its end alone.

    DDP's models have such a block as well, and what raises in it would leave gradients apart for good.
    """
    scope = scope_of(script, made)
    around = [one for one in script.walk(ast.If, ast.Try) if made in ast.walk(one) or block in ast.walk(one)]
    is_certain = all(isinstance(one, ast.If) and made not in ast.walk(one) for one in around)
    is_after = scope_of(script, block) is scope and block.lineno > made.lineno
    root = root_of(made.targets[0])
    again = [
        one for one in script.walk(ast.Name) if getattr(one, "id", "") == root and _is_given_after(one, made)
    ]
    return (
        is_certain and is_after and not again and not any(isinstance(one, LEAVING) for one in ast.walk(block))
    )


def _is_given_after(name: ast.AST, made: ast.Assign) -> bool:
    is_given = not isinstance(getattr(name, "ctx", None), ast.Load)
    return is_given and name not in ast.walk(made) and getattr(name, "lineno", 0) > made.lineno


def _lines(script: Script, old_class: str, model: str) -> Iterator[Block]:
    """States are whole before FSDP1 is told that they are sharded."""
    for line in script.walk(ast.Expr):
        assert isinstance(line, ast.Expr)
        if _is_sharded(script, line.value, "set_state_dict_type", old_class, model):
            asked = [one for one in script.walk(ast.Attribute) if isinstance(one, ast.Attribute)]
            states = [one for one in asked if one.attr in STATES and ast.unparse(one.value) == model]
            scope = scope_of(script, line)
            is_certain = line in getattr(scope or script.tree, "body", ())
            if is_certain and all(
                one.lineno > line.lineno and scope_of(script, one) is scope for one in states
            ):
                yield Block(line, [*ast.walk(line), *states])


def _is_sharded(script: Script, call: ast.expr, method: str, old_class: str, model: str) -> bool:
    """``FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)``."""
    if not isinstance(call, ast.Call) or call.keywords or script.called(call) != method:
        return False
    given = [ast.unparse(one) for one in call.args]
    own = root_of(call.func)
    is_class = own is not None and script.aliases.get(own) == old_class
    return is_class and given in ([model, KIND], [model, KIND, CONFIG])


def _states(block: ast.With, model: str) -> list[ast.AST]:
    attributes = [one for one in ast.walk(block) if isinstance(one, ast.Attribute)]
    return [one for one in attributes if one.attr in STATES and ast.unparse(one.value) == model]


def _syncs(told: ast.expr, model: str) -> str:
    """Whether gradients are reduced inside ``with model.no_sync()``, as code; "" for another block."""
    kept, nothing = f"{model}.no_sync()", "nullcontext()"
    if ast.unparse(told) == kept:
        return "False"
    if not isinstance(told, ast.IfExp):
        return ""
    ways = [ast.unparse(one).removeprefix("contextlib.") for one in (told.body, told.orelse)]
    if ways == [kept, nothing]:
        return ast.unparse(ast.UnaryOp(ast.Not(), told.test))
    return f"bool({ast.unparse(told.test)})" if ways == [nothing, kept] else ""
