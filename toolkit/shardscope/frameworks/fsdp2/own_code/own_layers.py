"""The layers of a model whose class the script defines itself, where its text settles which those are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.frameworks.fsdp2.own_code.own_calls import asks_for_optimizer, sites
from shardscope.frameworks.fsdp2.own_code.own_names import Path, full_name, parts
from shardscope.frameworks.fsdp2.own_code.own_results import gives_tensors
from shardscope.frameworks.fsdp2.own_code.own_weights import are_separate
from shardscope.own_code.bindings import bound
from shardscope.own_code.script import Script

MODULE, LIST, CHAIN, DICT = (
    f"torch.nn.{name}" for name in ("Module", "ModuleList", "Sequential", "ModuleDict")
)
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp)
OVERRIDDEN = {
    *(
        "train",
        "eval",
        "to",
        "cuda",
        "zero_grad",
        "parameters",
        "named_parameters",
        "modules",
        "named_modules",
    ),
    *("children", "named_children", "apply", "_apply", "state_dict", "load_state_dict", "_call_impl"),
    *("requires_grad_", "register_forward_hook", "register_forward_pre_hook", "config"),
    *("gradient_checkpointing_enable", "compile"),
}
"""Methods of torch's that work on units; a person's own of that name may do anything."""


CASTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as")


class OwnLayers(NamedTuple):
    """What a script's own model is made of."""

    kind: str
    """Class of its layers."""
    takes_one: bool
    """Whether a layer is given one thing, as it was computed, which a policy then casts to no other type."""
    methods: frozenset[str]
    """Methods of the model that make an optimizer of its parameters, and do nothing else with them."""


def own_layers(script: Script, maker: ast.expr) -> OwnLayers | None:
    """The layers of what ``maker`` makes, if a container of its own has them and its forward only calls them.

    None where they are of several classes, or made elsewhere as well; where they may share weights with
    others, or be reached into; and where a rank might leave one out, for the others would wait.
    """
    model = _module(script, maker)
    if model is None or bound(script, "*") or _compiles(script):
        return None
    made = list(_made_in_loops(script, _method(model, "__init__")))
    paths = {path for path, call in made if full_name(script, call.func).partition(".")[0] != "torch"}
    kinds = {ast.unparse(call.func) for path, call in made if path in paths}
    if len(paths) != 1 or len(kinds) != 1:
        return None
    (path,), calls = paths, [call for where, call in made if where in paths]
    layer = _module(script, calls[0].func)
    if (
        layer is None
        or not _is_made_there_only(script, layer, calls)
        or not gives_tensors(_method(layer, "forward"))
    ):
        return None
    if not are_separate(script, model, layer, calls, path):
        return None
    called = sites(script, model, path, calls)
    if called is None or len(called) != 1:
        return None
    methods = frozenset(one.name for one in _methods(model) if asks_for_optimizer(script, one))
    return OwnLayers(layer.name, _takes_one(_method(model, "forward"), called[0]), methods)


def _takes_one(forward: ast.FunctionDef, call: ast.Call) -> bool:
    """Whether layers are given one name's value, and that in the type in which it was computed."""
    given = [*call.args, *call.keywords]
    casts = [one for one in ast.walk(forward) if isinstance(one, ast.Attribute) and one.attr in CASTS]
    is_cast = any(one.lineno <= call.lineno for one in casts)
    return len(given) == 1 and isinstance(given[0], ast.Name) and not is_cast


def _compiles(script: Script) -> bool:
    """Whether anything is compiled, which may be what calls the model."""
    names = (one for one in script.walk(ast.Name, ast.Attribute) if isinstance(one, ast.Name | ast.Attribute))
    return any(full_name(script, one) == "torch.compile" for one in names)


def _module(script: Script, name: ast.expr) -> ast.ClassDef | None:
    """The class of that name, if it is one of torch's modules and as plain as those mostly are."""
    places = bound(script, name.id) if isinstance(name, ast.Name) else []
    found = places[0] if len(places) == 1 else None
    if not isinstance(found, ast.ClassDef) or script.tree is None:
        return None
    bases = [full_name(script, base) for base in found.bases]
    if found not in script.tree.body or bases != [MODULE] or found.keywords or found.decorator_list:
        return None
    names = [one.name for one in _methods(found)]
    is_plain = {"__init__", "forward"} <= set(names) and len(names) == len(set(names))
    own = [one for one in names if one in OVERRIDDEN or (one.startswith("__") and one != "__init__")]
    main = [one for one in _methods(found) if one.name in ("__init__", "forward")]
    return found if is_plain and not own and not any(one.decorator_list for one in main) else None


def _methods(model: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in model.body if isinstance(one, ast.FunctionDef)]


def _method(model: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(one for one in _methods(model) if one.name == name)


def _made_in_loops(script: Script, init: ast.FunctionDef) -> Iterator[tuple[Path, ast.Call]]:
    """Where in the model something is made again and again, and the call that makes it."""
    containers: set[Path] = set()
    for one in init.body:
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and (path := parts(one.targets[0])):
            yield from _listed(script, path, one.value)
            containers |= {path} if _is_container(script, one.value) else set()
        for inner in ast.walk(one) if isinstance(one, ast.For) else ():
            yield from (found for found in _added(inner) if found[0] in containers)


def _listed(script: Script, path: Path, value: ast.expr) -> Iterator[tuple[Path, ast.Call]]:
    """What a container is made with: a comprehension, or a dictionary with other containers."""
    if not isinstance(value, ast.Call) or not _is_container(script, value):
        return
    for given in value.args:
        each = given.value if isinstance(given, ast.Starred) else given
        if isinstance(each, COMPREHENSIONS) and isinstance(each.elt, ast.Call):
            yield path, each.elt
        elif isinstance(each, ast.DictComp) and isinstance(each.value, ast.Call):
            yield path, each.value
        elif isinstance(each, ast.Dict):
            for key, inner in zip(each.keys, each.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield from _listed(script, (*path, key.value), inner)
        elif isinstance(each, ast.Call) and ast.unparse(each.func) == "dict":
            for keyword in each.keywords:
                if keyword.arg:
                    yield from _listed(script, (*path, keyword.arg), keyword.value)


def _is_container(script: Script, value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and full_name(script, value.func) in (LIST, CHAIN, DICT)


def _added(node: ast.AST) -> Iterator[tuple[Path, ast.Call]]:
    """``self.layers.append(Block())``, and ``self.layers[name] = Block()``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
        path = parts(node.func.value)
        if path and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
            yield path, node.args[0]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        target = node.targets[0]
        if isinstance(target, ast.Subscript) and (path := parts(target.value)):
            yield path, node.value


def _is_made_there_only(script: Script, layer: ast.ClassDef, calls: list[ast.Call]) -> bool:
    """Whether nothing else is done with the class: none lies in another, none is of a class made of it."""
    known = [call.func for call in calls]
    for call in script.walk(ast.Call):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("super", "isinstance"):
            known += call.args
    return all(
        any(one is each for each in known)
        for one in script.walk(ast.Name)
        if isinstance(one, ast.Name) and one.id == layer.name
    )
