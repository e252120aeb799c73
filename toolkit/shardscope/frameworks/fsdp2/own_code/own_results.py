"""Whether layers give what backward comes back through, and nothing else: what a unit's hooks see."""

from __future__ import annotations

import ast

from shardscope.frameworks.fsdp2.own_code.own_names import full_name
from shardscope.own_code.script import DEFINITIONS, Script

ITS_OWN = ("self", "super", "print", "ctx")
"""Names in a layer's methods that nobody else looks behind."""
TORCHS = ("torch", "warnings", "math")


def tell_others(script: Script, classes: list[ast.ClassDef]) -> bool:
    """Whether layers hand something on in another way than by what they return, as losses of routers are.

    Backward comes back that way, and finds the layer's weights not gathered.
    """
    named = {one.id for kind in classes for one in ast.walk(kind) if isinstance(one, ast.Name)}
    functions = [
        one
        for one in script.walk(*DEFINITIONS)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name in named
    ]
    return any(_tells_others(script, one) for one in (*classes, *functions))


def _tells_others(script: Script, code: ast.AST) -> bool:
    init = [one for one in ast.walk(code) if getattr(one, "name", "") == "__init__"]
    before = {id(one) for each in init for one in ast.walk(each)}
    local = {one.id for one in ast.walk(code) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    told: list[ast.expr] = []
    for one in ast.walk(code):
        is_later = id(one) not in before
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            told.append(one.value)
            if is_later and _fills(one.value.func):
                return True
        elif isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store):
            told.append(one)
        elif isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Attribute) and is_later:
            return True
    made = (one for one in ast.walk(code) if isinstance(one, ast.Call))
    if any(full_name(script, call.func) == "dataclasses.replace" for call in made):
        return True
    roots = [_root(one) for one in told]
    unknown = (one for one in roots if full_name(script, one).partition(".")[0] not in TORCHS)
    return any(getattr(one, "id", "") not in (*ITS_OWN, *local) for one in unknown)


def _fills(function: ast.expr) -> bool:
    """``self.losses.append``, which others may read as well; torch's own changes of a tensor end in ``_``."""
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Attribute):
        return False
    return getattr(_root(function), "id", "") == "self" and not function.attr.endswith("_")


def _root(node: ast.expr) -> ast.expr:
    """The name that an expression begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def gives_tensors(forward: ast.FunctionDef) -> bool:
    """Whether forward returns what it computed, in nothing that backward's hooks do not look into.

    An object of a class of its own hides its tensors, and a weight is not gathered where it is read later.
    """
    returned = [one for one in ast.walk(forward) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom)]
    calls = [one for one in ast.walk(forward) if isinstance(one, ast.Call)]
    makes_objects = any(ast.unparse(call.func).rpartition(".")[2][:1].isupper() for call in calls)
    weights = {
        target.id
        for one in ast.walk(forward)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Attribute)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    has_values = all(isinstance(one, ast.Return) and one.value is not None for one in returned)
    if not returned or not has_values or makes_objects:
        return False
    given = [part for one in returned for part in _parts(one.value)]
    return not any(isinstance(one, ast.Attribute) or getattr(one, "id", "") in weights for one in given)


def _parts(value: ast.expr | None) -> list[ast.expr]:
    """What lies in a tuple, a list or a dictionary."""
    if isinstance(value, ast.Tuple | ast.List):
        return [part for one in value.elts for part in _parts(one)]
    if isinstance(value, ast.Dict):
        return [part for one in value.values for part in _parts(one)]
    return [] if value is None else [value]
