"""Whether layers of a model that a script defines have weights of their own, shared with nothing else."""

from __future__ import annotations

import ast

from shardscope.frameworks.fsdp2.own_code.own_calls import may_run
from shardscope.frameworks.fsdp2.own_code.own_names import Path, full_name, parts
from shardscope.frameworks.fsdp2.own_code.own_results import tell_others
from shardscope.own_code.bindings import bound
from shardscope.own_code.flow import Flow, key_of
from shardscope.own_code.script import Script

PLANTING = {
    *("setattr", "add_module", "register_module", "register_parameter", "_modules", "_parameters"),
    *("__dict__", "__class__", "functional_call", "globals"),
}
"""Ways by which weights get where the text does not show it."""
HOOK = ("register_", "_hook")
"""How methods begin and end that have a module call something else."""
WITHOUT_WEIGHTS = ("object", "NamedTuple", "Enum", "BaseModel", "TypedDict")
"""Bases of classes that are no modules, as those are whose names end in ``Config``."""
SAME = (
    "to",
    "cuda",
    "half",
    "float",
    "bfloat16",
    "requires_grad_",
    "train",
    "eval",
    "values",
    "items",
    "get",
)
"""Methods that give what they are called on, or what is in it; others give something that is computed."""
ASKING = ("parameters", "named_parameters", "modules", "named_modules", "children", "named_children")
SETTINGS = ("Config", "Args", "Arguments", "Params", "Namespace", "Options", "Parser")
"""How names of classes end whose objects have numbers and no weights."""
NUMBERS = ("int", "float", "bool", "str", "len", "min", "max", "round", "range")


def are_separate(
    script: Script, model: ast.ClassDef, layer: ast.ClassDef, calls: list[ast.Call], path: Path
) -> bool:
    """Whether ``calls``, which make the layers at ``path``, hand them no weights, and nothing else does."""
    if any(_plants(name) for name in script.names):
        return False
    weights = _with_weights(script) | _unknown(script)
    given = [value for call in calls for value in (*call.args, *(one.value for one in call.keywords))]
    if any(_has_weights(script, value, weights) or _calls(value) for value in given):
        return False
    classes = _classes_of(script, layer)
    if not all(_has_plain_body(kind) for kind in (model, *classes)):
        return False
    if any(_is_from_outside(script, one, kind, weights) for kind in classes for one in ast.walk(kind)):
        return False
    if tell_others(script, classes):
        return False
    unused = [one for one in model.body if isinstance(one, ast.FunctionDef) and not may_run(script, one)]
    return all(
        _ties_beside(one, model, path)
        or not (_has_weights(script, one.value, weights) or _is_unknown(script, one.value, weights))
        for one in script.walk(ast.Assign)
        if isinstance(one, ast.Assign)
        and any(_is_of_another(target) for target in one.targets)
        and not any(one in ast.walk(method) for method in unused)
    )


def _plants(name: str) -> bool:
    return name in PLANTING or (name.startswith(HOOK[0]) and name.endswith(HOOK[1]))


def _with_weights(script: Script) -> set[str]:
    """Keys (``flow.key_of``) of what may be a module, a weight, or have one in it."""
    return Flow(script=script).grown(
        lambda origin, found: isinstance(origin, ast.expr) and _has_weights(script, origin, found)
    )


def _has_weights(script: Script, value: ast.AST, found: set[str]) -> bool:
    if key_of(value) in found:
        return True
    if isinstance(value, ast.ListComp | ast.GeneratorExp):
        # Its names have what they go over.
        return _has_weights(script, value.elt, found)
    if not isinstance(value, ast.Call):
        return any(_has_weights(script, inner, found) for inner in ast.iter_child_nodes(value))
    if _makes_weights(script, value, found):
        return True
    inside: list[ast.AST] = [*value.args, *value.keywords]
    if isinstance(value.func, ast.Attribute) and value.func.attr in SAME:
        inside.append(value.func.value)
    return any(_has_weights(script, one, found) for one in inside)


def _makes_weights(script: Script, call: ast.Call, found: set[str]) -> bool:
    """Classes of torch's, those of the script that may be modules, and its functions that give any."""
    name = ast.unparse(call.func).rpartition(".")[2]
    is_class = full_name(script, call.func).startswith("torch.nn.") and name[:1].isupper()
    places = bound(script, name) if name in script.defined else []
    bases = [
        ast.unparse(base).rpartition(".")[2]
        for one in places
        if isinstance(one, ast.ClassDef)
        for base in one.bases
    ]
    is_module = any(base not in WITHOUT_WEIGHTS and not base.endswith("Config") for base in bases)
    gives_any = name in found and any(isinstance(one, ast.FunctionDef) for one in places)
    return is_class or is_module or gives_any or name in ASKING


def _unknown(script: Script) -> set[str]:
    """Keys of what is an object of a class of somebody else's, which may be a module.

    What is only made with one, a configuration with a tokenizer's number of words, is not.
    """
    return Flow(script=script).grown(lambda origin, found: _is_unknown(script, origin, found))


def _is_unknown(script: Script, value: ast.AST, found: set[str]) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Tuple | ast.keyword | ast.IfExp | ast.BoolOp):
        return any(_is_unknown(script, one, found) for one in ast.iter_child_nodes(value))
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.expr) and key_of(value) in found
    if ast.unparse(value.func) == "dict":
        return any(_is_unknown(script, one, found) for one in value.keywords)
    if isinstance(value.func, ast.Attribute) and value.func.attr in SAME:
        return _is_unknown(script, value.func.value, found)
    home, _, name = full_name(script, value.func).rpartition(".")
    return bool(home) and name[:1].isupper() and not name.endswith(SETTINGS)


def _calls(value: ast.expr) -> bool:
    calls = (one for one in ast.walk(value) if isinstance(one, ast.Call))
    return any(ast.unparse(call.func) not in NUMBERS for call in calls)


def _classes_of(script: Script, layer: ast.ClassDef) -> list[ast.ClassDef]:
    """A layer's class and those that it is made of, as far as the script defines them."""
    found = [layer]
    for kind in found:
        named = {one.id for one in ast.walk(kind) if isinstance(one, ast.Name)}
        found += [
            one
            for one in script.walk(ast.ClassDef)
            if isinstance(one, ast.ClassDef) and one.name in named and one not in found
        ]
    return found


def _has_plain_body(kind: ast.ClassDef) -> bool:
    """Whether all of its instances have in common is methods and constants."""
    return all(_is_plain(one) for one in kind.body)


def _is_plain(one: ast.stmt) -> bool:
    if isinstance(one, ast.FunctionDef):
        defaults = [*one.args.defaults, *filter(None, one.args.kw_defaults)]
        return not any(isinstance(node, ast.Call) for value in defaults for node in ast.walk(value))
    value = getattr(one, "value", None)
    is_constant = value is None or isinstance(value, ast.Constant)
    return isinstance(one, ast.Pass | ast.Expr | ast.Assign | ast.AnnAssign) and is_constant


def _is_from_outside(script: Script, node: ast.AST, kind: ast.ClassDef, weights: set[str]) -> bool:
    """Whether a class reads something that may have weights, and that none of its methods brings in."""
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or node.id not in weights:
        return False
    method = next((one for one in kind.body if node in ast.walk(one)), kind)
    return node.id != "self" and not any(place in ast.walk(method) for place in bound(script, node.id))


def _is_of_another(target: ast.expr) -> bool:
    """Whether an attribute is set of anything but ``self``."""
    return any(
        isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and not (isinstance(one.value, ast.Name) and one.value.id == "self")
        for one in ast.walk(target)
    )


def _ties_beside(one: ast.Assign, model: ast.ClassDef, path: Path) -> bool:
    """``self.head.weight = self.embedding.weight``, where neither is a layer's."""
    init = next(each for each in model.body if getattr(each, "name", "") == "__init__")
    ends = [parts(end) for end in (*one.targets, one.value)]
    return one in ast.walk(init) and all(end and end[: len(path)] != path for end in ends)
