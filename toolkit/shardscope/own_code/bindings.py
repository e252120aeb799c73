"""What a name of a script stands for, where the text settles it."""

from __future__ import annotations

import ast

from shardscope.own_code.script import DEFINITIONS, Script

OTHERS = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping)
"""What gives a name something, and is neither a name, an import, a parameter nor a definition."""


def only_value(script: Script, name: str, seen_from: ast.AST) -> ast.expr | None:
    """What ``name`` is given, if that happens once in the whole script, whatever way the script goes.

    None for parameters, for names that are given under a condition or in a loop, and for those of functions
    that ``seen_from`` is not in.
    """
    places = bound(script, name)
    assigned = [
        one
        for one in script.walk(ast.Assign)
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and one.targets[0] in places
    ]
    if len(places) != 1 or len(assigned) != 1:
        return None
    scope = scope_of(script, assigned[0])
    body = script.tree if scope is None else scope
    is_certain = assigned[0] in getattr(body, "body", ())
    is_seen = scope is None or scope_of(script, seen_from) is scope
    return assigned[0].value if is_certain and is_seen else None


def means_the_same(script: Script, value: ast.expr, elsewhere: ast.AST) -> bool:
    """Whether all names in ``value`` stand for one thing in the whole script, also at ``elsewhere``."""
    named = [one for one in ast.walk(value) if isinstance(one, ast.Name)]
    looked_up = {one.attr for one in ast.walk(value) if isinstance(one, ast.Attribute)}
    is_set = any(
        isinstance(one, ast.Attribute) and one.attr in looked_up and not isinstance(one.ctx, ast.Load)
        for one in script.walk(ast.Attribute)
    )
    return not is_set and all(_is_settled(script, one, elsewhere) for one in named)


def _is_settled(script: Script, name: ast.Name, elsewhere: ast.AST) -> bool:
    places = bound(script, name.id)
    if len(places) != 1:
        return not places
    scope = scope_of(script, places[0])
    if scope is not None and not scope is scope_of(script, name) is scope_of(script, elsewhere):
        return False
    is_fixed = isinstance(places[0], (ast.alias, ast.arg, *DEFINITIONS))
    return is_fixed or only_value(script, name.id, elsewhere) is not None


def bound(script: Script, name: str) -> list[ast.AST]:
    """Where the script gives ``name`` something: imports, definitions, parameters, assignments."""
    return [
        node
        for node in script.walk(ast.Name, ast.arg, ast.alias, *DEFINITIONS, *OTHERS)
        if _binds(node, name) and not isinstance(getattr(node, "ctx", None), ast.Load)
    ]


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0]) == name
    return name in [getattr(node, field, None) for field in ("id", "arg", "name", "rest")]


def scope_of(script: Script, node: ast.AST) -> ast.AST | None:
    """The innermost function or class around ``node``; None: the module itself."""
    return script.scopes.get(id(node))


def sees(script: Script, module: str, place: ast.AST) -> bool:
    """Whether ``module`` is imported under its own name, and by nothing else, where ``place`` is."""
    places = bound(script, module)
    are_imports = all(isinstance(one, ast.alias) and one.asname is None for one in places)
    scopes = [scope_of(script, one) for one in places]
    return bool(places) and are_imports and all(one in (None, scope_of(script, place)) for one in scopes)


def root_of(node: ast.AST | None) -> str | None:
    """``model`` of ``model.layers[0].up``; None where it begins with something else."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_dotted_name(node: ast.AST | None) -> bool:
    """``model`` or ``self.model``: said twice, it is the same thing."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
