"""What expressions of a script name: something that it imports, a part of a module, the parameters of one."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict

from shardscope.own_code.bindings import OTHERS
from shardscope.own_code.script import DEFINITIONS, Script

Path = tuple[str, ...]
"""Names on the way from ``self`` to one of its parts."""
BINDING = (ast.Name, ast.arg, *DEFINITIONS, *OTHERS)
"""What may give a name anything, beside imports."""
COUNTS = ("numel", "nelement")


def full_name(script: Script, expression: ast.expr) -> str:
    """``torch.nn.Module``, whatever it was imported as; "" of what may be something else."""
    attributes: list[str] = []
    while isinstance(expression, ast.Attribute):
        attributes.insert(0, expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name) or script.tree is None:
        return ""
    homes = _homes(script.tree).get(expression.id, set())
    return ".".join([*homes, *attributes]) if len(homes) == 1 and "" not in homes else ""


@functools.lru_cache(maxsize=1)
def _homes(tree: ast.Module) -> dict[str, set[str]]:
    """Name -> what it is imported as, wherever it is given anything; "" for all that is no import."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                root = one.name.partition(".")[0]
                found[one.asname or root].add(one.name if one.asname else root)
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                found[one.asname or one.name].add("." * node.level + f"{node.module or ''}.{one.name}")
        elif isinstance(node, BINDING) and not isinstance(getattr(node, "ctx", None), ast.Load):
            for field in ("id", "arg", "name", "rest"):
                found[getattr(node, field, None) or ""].add("")
    return found


def parts(expression: ast.expr) -> Path:
    """``("transformer", "h")`` of ``self.transformer.h`` or ``self.transformer["h"]``; () of others."""
    found: list[str] = []
    while isinstance(expression, ast.Attribute | ast.Subscript):
        name = _step(expression)
        if name is None:
            return ()
        found.insert(0, name)
        expression = expression.value
    return tuple(found) if isinstance(expression, ast.Name) and expression.id == "self" else ()


def _step(expression: ast.AST) -> str | None:
    """The name that one attribute or key adds."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    key = expression.slice if isinstance(expression, ast.Subscript) else None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def longest(parents: dict[ast.AST, ast.AST], name: ast.Name, within: Path) -> tuple[Path, ast.AST]:
    """Path and node of the part that begins with ``name``, up to ``within`` or off the way there."""
    path: Path = ()
    node: ast.AST = name
    while path != within and path == within[: len(path)]:
        above = parents[node]
        step = _step(above) if getattr(above, "value", None) is node else None
        if step is None:
            break
        path, node = (*path, step), above
    return path, node


def parents_in(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    """Each node's own parent."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def counted(node: ast.AST) -> ast.expr | None:
    """``model`` in ``(p.numel() for p in model.parameters())``: a shard says there what its whole would."""
    if not isinstance(node, ast.GeneratorExp | ast.ListComp) or len(node.generators) != 1:
        return None
    (each,), number = node.generators, node.elt
    is_count = isinstance(number, ast.Call) and isinstance(number.func, ast.Attribute)
    if not is_count or ast.unparse(number) not in [f"{ast.unparse(each.target)}.{name}()" for name in COUNTS]:
        return None
    tests = [ast.unparse(test) for test in each.ifs]
    asked = each.iter
    is_method = isinstance(asked, ast.Call) and isinstance(asked.func, ast.Attribute) and not asked.args
    if not is_method or any(test != f"{ast.unparse(each.target)}.requires_grad" for test in tests):
        return None
    return asked.func.value if asked.func.attr == "parameters" else None  # type: ignore[attr-defined]
