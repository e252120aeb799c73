"""What a script does with its model when all training is over."""

from __future__ import annotations

import ast

from shardscope.own_code.bindings import scope_of
from shardscope.own_code.script import Script

TRAINS = ("backward", "step")


def comes_after_training(script: Script, node: ast.AST) -> bool:
    """Whether ``node`` is behind all backward passes and steps of the script, and nothing leads back there.

    Only where all of it is in one body, the module's or that of a function which the module calls once: what
    another function trains may be called again.
    """
    scope = scope_of(script, node)
    training = [
        one
        for one in script.walk(ast.Name, ast.Attribute)
        if (getattr(one, "attr", None) or getattr(one, "id", None)) in TRAINS
    ]
    own = getattr(script.tree if scope is None else scope, "body", [])
    statement = next((one for one in own if node in ast.walk(one)), None)
    if statement is None or not training or not _runs_once(script, scope):
        return False
    return all(scope_of(script, one) is scope and _is_before(one, statement) for one in training)


def _runs_once(script: Script, scope: ast.AST | None) -> bool:
    if scope is None:
        return True
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or scope.decorator_list:
        return False
    calls = script.calls(scope.name)
    is_the_modules = scope_of(script, scope) is None and [scope_of(script, one) for one in calls] == [None]
    return is_the_modules and not script.is_used_often(scope.name)


def _is_before(node: ast.AST, statement: ast.stmt) -> bool:
    return (node.lineno, node.col_offset) < (statement.lineno, statement.col_offset)  # type: ignore[attr-defined]
