"""How a model that a script defines works with its layers: calls, in forward, of whole layers and no more."""

from __future__ import annotations

import ast

from shardscope.frameworks.fsdp2.own_code.own_names import Path, counted, full_name, longest, parents_in
from shardscope.own_code.script import Script

Parents = dict[ast.AST, ast.AST]
EVERYTHING = {
    *("parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "apply"),
    *("state_dict", "load_state_dict", "get_submodule", "get_parameter"),
    *("values", "items", "keys", "named_buffers", "buffers", "requires_grad_"),
}
"""Methods by which a module gets at what is in it."""
REPLACED = ("forward", "compile")
"""What a model may be given another of, or calls itself by once more."""
CERTAIN = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.With),
    *(ast.Call, ast.BinOp, ast.Tuple, ast.Subscript, ast.keyword),
)
"""What has all of its parts done, whatever their values are."""
HARMLESS = {
    *("parameters", "named_parameters", "items", "values", "numel", "nelement", "dim", "signature"),
    *("sum", "len", "print", "dict", "list", "sorted", "append", "endswith", "startswith", "any", "filter"),
}
"""What may be called where an optimizer is made: none of it reads a weight's values."""


def sites(script: Script, model: ast.ClassDef, path: Path, made: list[ast.Call]) -> list[ast.Call] | None:
    """Calls in forward of the layers that lie at ``path``, each one surely done; ``made`` makes them.

    None where they are used any other way, by a method that the script names.
    """
    found: list[ast.Call] = []
    stored = 0
    for method in model.body:
        if not isinstance(method, ast.FunctionDef) or not may_run(script, method):
            continue
        parents = parents_in(method)
        counts = [counted(one) for one in ast.walk(method)]
        is_optimizers = asks_for_optimizer(script, method)
        for use in (one for one in ast.walk(method) if isinstance(one, ast.Name) and one.id == "self"):
            reached, node = longest(parents, use, path)
            if reached and reached == path[: len(reached)] and not _is_read(node):
                stored += 1
            elif reached == path:
                if (calls := _calls(method, parents, node, made)) is None:
                    return None
                found += calls
            elif (
                use not in counts
                and not is_optimizers
                and not _is_beside(method, parents, reached, node, path)
            ):
                return None
    return found if stored == 1 else None


def _is_read(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def may_run(script: Script, method: ast.FunctionDef) -> bool:
    """Whether the script names a method of its model anywhere."""
    named = (one.attr for one in script.walk(ast.Attribute) if isinstance(one, ast.Attribute))
    return method.name in ("__init__", "forward", *named)


def _is_beside(method: ast.FunctionDef, parents: Parents, reached: Path, node: ast.AST, path: Path) -> bool:
    """Whether a use of ``self`` has nothing to do with layers, or only before they are sharded."""
    above = parents[node]
    if not reached:
        return isinstance(above, ast.Call) and ast.unparse(above.func) == "super"
    if reached == path[: len(reached)] or reached[0] in REPLACED:
        return False
    is_before = method.name == "__init__" and len(reached) == 1
    return is_before or reached[-1] not in EVERYTHING


def _calls(
    method: ast.FunctionDef, parents: Parents, layers: ast.AST, made: list[ast.Call]
) -> list[ast.Call] | None:
    """Calls of what ``layers`` names, or of each of it, in one use; none where they are made or counted."""
    above = parents[layers]
    if isinstance(above, ast.Call) and ast.unparse(above.func) == "len":
        return []
    if method.name == "__init__":
        around = parents[above]
        added = around.args if isinstance(around, ast.Call) else [getattr(around, "value", None)]
        return [] if added and added[0] in made else None
    if method.name != "forward":
        return None
    if isinstance(above, ast.Call) and above.func is layers:
        return [above] if _is_certain(parents, above, method) else None
    return _called_in_turn(method, parents, layers)


def _called_in_turn(method: ast.FunctionDef, parents: Parents, layers: ast.AST) -> list[ast.Call] | None:
    """The one call in ``for layer in layers`` that its layer is there for."""
    given, place = layers, 0
    above = parents[given]
    if isinstance(above, ast.Attribute) and above.attr in ("values", "items"):
        given, place = parents[above], int(above.attr == "items")
        above = parents[given]
    elif isinstance(above, ast.Call) and ast.unparse(above.func) == "enumerate" and len(above.args) == 1:
        given, place = above, 1
        above = parents[given]
    if not isinstance(above, ast.For) or above.orelse:
        return None
    target = above.target
    is_pair = isinstance(target, ast.Tuple) and place == 1 and len(target.elts) == 2
    name = target.elts[1] if is_pair else target if place == 0 else None  # type: ignore[attr-defined]
    if not isinstance(name, ast.Name):
        return None
    uses = [one for one in ast.walk(method) if isinstance(one, ast.Name) and one.id == name.id]
    calls = [call for call in ast.walk(above) if isinstance(call, ast.Call) and call.func in uses]
    leaves = any(isinstance(one, ast.Break | ast.Continue | ast.Return) for one in ast.walk(above))
    if len(calls) != 1 or {*uses} != {name, calls[0].func} or leaves:
        return None
    is_certain = _is_certain(parents, calls[0], above) and _is_certain(parents, above, method)
    return calls if is_certain else None


def _is_certain(parents: Parents, node: ast.AST, within: ast.AST) -> bool:
    """Whether ``node`` is done once where ``within`` is, and nothing returns before."""
    earlier = (one for one in ast.walk(within) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom))
    if any(one.lineno < node.lineno for one in earlier):  # type: ignore[attr-defined]
        return False
    while (node := parents[node]) is not within:
        if not isinstance(node, CERTAIN):
            return False
    return True


def asks_for_optimizer(script: Script, method: ast.FunctionDef) -> bool:
    """Whether a method gives an optimizer of the model's parameters at most, and reads no value of one."""
    parents = parents_in(method)
    makes = [
        call
        for call in ast.walk(method)
        if isinstance(call, ast.Call) and full_name(script, call.func).startswith("torch.optim.")
    ]
    for one in ast.walk(method):
        if isinstance(one, ast.Call) and one not in makes and script.called(one) not in HARMLESS:
            return False
        if isinstance(one, ast.Call) and script.called(one) == "sum" and not _sums_numbers(one):
            return False
        if isinstance(one, ast.BinOp | ast.AugAssign | ast.Yield | ast.YieldFrom | ast.Await | ast.Delete):
            return False
        if isinstance(one, ast.Attribute | ast.Subscript) and not isinstance(one.ctx, ast.Load):
            return False
        if isinstance(one, ast.Name) and one.id == "self":
            reached, node = longest(parents, one, ("parameters",))
            is_asked = reached in (("parameters",), ("named_parameters",))
            if not is_asked or getattr(parents[node], "func", None) is not node:
                return False
    made = {
        target.id
        for one in ast.walk(method)
        if isinstance(one, ast.Assign) and one.value in makes
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    returned = [one.value for one in ast.walk(method) if isinstance(one, ast.Return)]
    return all(one in makes or (isinstance(one, ast.Name) and one.id in made) for one in returned)


def _sums_numbers(call: ast.Call) -> bool:
    """``sum(p.numel() for p in parameters)``, and not of the parameters themselves."""
    given = call.args[0] if call.args else None
    return isinstance(given, ast.GeneratorExp | ast.ListComp) and isinstance(given.elt, ast.Call)
