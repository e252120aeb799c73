"""The calls of PyTorch's first FSDP as ``fully_shard`` has them, where every argument is understood."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import NamedTuple

from shardscope.frameworks.fsdp2.own_code.migrated_options import MODULE, Option, UnknownError, options_of
from shardscope.frameworks.fsdp2.own_code.migrated_state import by_default, by_function, gatherings, unread
from shardscope.frameworks.fsdp2.own_code.migrated_units import LAYER, Layers, layers_of
from shardscope.frameworks.fsdp2.own_code.old_uses import (
    OLD_CLASS,
    are_plain,
    clipped_by_torch,
    norms_as_numbers,
)
from shardscope.frameworks.fsdp2.own_code.sharded_blocks import blocks, without_blocks
from shardscope.own_code.bindings import is_dotted_name, root_of, scope_of
from shardscope.own_code.edits import Edit, has_comment, imported, mended, replaced, unless_too_deep
from shardscope.own_code.script import Script, keywords

SHARD = "fully_shard"
OPTIONS = "fsdp2_options"
"""The name for what all units take, parents and layers alike, as FSDP1's do."""


class _Wrapping(NamedTuple):
    """``FSDP(module, ...)``."""

    call: ast.Call
    module: ast.expr
    layers: Layers | None
    """What its policy makes units of."""
    options: list[Option]

    def passed(self, local: Mapping[str, str], *, of_a_layer: bool = False) -> str:
        """What ``fully_shard`` is told beside the module, by the names that the script has for classes."""
        return ", ".join(option.written(local, of_a_layer=of_a_layer) for option in self.options)


@unless_too_deep
def with_fully_shard(script: Script) -> str | None:
    """The script with its layers and its model sharded in the place of ``model = FSDP(model, ...)``.

    Its norms are clipped by torch's function then, as DTensors have them. None where wrapping is no class of
    layers, where an argument has no counterpart that the text settles, where a comment among them would be
    lost, and where the script does anything else with its model or its parameters that FSDP2 does otherwise.
    """
    if OPTIONS in script.text or LAYER in script.text:
        return None
    try:
        edits = _edits(script, [_wrapping(script, call) for call in script.calls(OLD_CLASS)])
    except UnknownError:
        return None
    return mended(script, *dict.fromkeys(edits))


def _wrapping(script: Script, call: ast.Call) -> _Wrapping:
    given = keywords(call)
    if len(given) < len(call.keywords) or len(call.args) != 1 or has_comment(script, call):
        raise UnknownError
    policy = given.pop("auto_wrap_policy", None)
    is_none = isinstance(policy, ast.Constant) and policy.value is None
    layers = None if policy is None or is_none else layers_of(script, policy, call)
    return _Wrapping(call, call.args[0], layers, options_of(script, given))


def _edits(script: Script, wrappings: list[_Wrapping]) -> list[Edit]:
    """Of the model, which comes last, and of its layers."""
    whole = wrappings[-1]
    statement = _assigned(script, whole)
    to = ast.unparse(statement.targets[0])
    calls = [one.call for one in wrappings]
    if not is_dotted_name(whole.module) or not are_plain(script, calls, statement):
        raise UnknownError
    local, edits = _names(script, wrappings, _first(script, wrappings[0].call, statement))
    for one in wrappings[:-1]:
        _refuse_unless_layer(script, one, whole)
        options = one.passed(local, of_a_layer=True)
        text = f"{local[SHARD]}({ast.unparse(one.module)}{options and ', '}{options})"
        edits.append(replaced(script, one.call, text))
    margin = "\n" + " " * statement.col_offset
    edits.append(replaced(script, statement, margin.join(_lines(whole, to, local))))
    clipped, told = clipped_by_torch(script, {to}), norms_as_numbers(script, to, statement)
    changed = without_blocks(script, blocks(script, OLD_CLASS, statement))
    if clipped is None or told is None or changed is None:
        raise UnknownError
    gathered = [*gatherings(script, OLD_CLASS), *by_default(script, statement)]
    edits += [*clipped, *told, *changed, *by_function(script, gathered)]
    return edits + _no_longer_read(script, calls)


def _assigned(script: Script, whole: _Wrapping) -> ast.Assign:
    found = [
        one for one in script.walk(ast.Assign) if isinstance(one, ast.Assign) and one.value is whole.call
    ]
    if not found or len(found[0].targets) != 1 or has_comment(script, found[0]):
        raise UnknownError
    return found[0]


def _first(script: Script, call: ast.Call, statement: ast.stmt) -> ast.stmt:
    """The line beside ``statement``, or that itself, that has the first call in it: imports go before it."""
    bodies = (getattr(one, name, None) for one in script.walk(ast.AST) for name in ("body", "orelse"))
    beside = next((body for body in bodies if isinstance(body, list) and statement in body), [statement])
    found: ast.stmt = next((one for one in beside if call in ast.walk(one)), statement)
    return found


def _names(script: Script, wrappings: list[_Wrapping], user: ast.stmt) -> tuple[dict[str, str], list[Edit]]:
    """What the script calls the functions and classes that are needed, and their imports."""
    needed = {MODULE: {SHARD}}
    options = (option for one in wrappings for option in one.options if option.made_of)
    layers = (one.layers for one in wrappings if one.layers is not None)
    for home, name in (
        *((option.home, option.made_of) for option in options),
        *(need for one in layers for need in one.needs),
    ):
        needed.setdefault(home, set()).add(name)
    local: dict[str, str] = {}
    edits: list[Edit] = []
    for home, names in needed.items():
        found, imports = imported(script, user, home, *sorted(names))
        local |= found
        edits += imports
    return local, edits


def _refuse_unless_layer(script: Script, one: _Wrapping, whole: _Wrapping) -> None:
    """A layer of the model, wrapped in a loop or a line of its own before the model is."""
    model, module = root_of(whole.module), root_of(one.module)
    is_part = module in _listed(script, one.call, model) or (
        module == model and ast.unparse(one.module) != ast.unparse(whole.module)
    )
    is_before = one.call.lineno < whole.call.lineno
    is_beside = scope_of(script, one.call) is scope_of(script, whole.call)
    # FSDP1 itself refuses a policy over what is wrapped already; each mesh makes process groups of its own.
    has_more = any((one.layers, whole.layers, *(option.home != MODULE for option in one.options)))
    if not (is_part and is_before and is_beside) or has_more:
        raise UnknownError


def _listed(script: Script, call: ast.Call, model: str | None) -> set[str | None]:
    """Variables of loops around ``call`` over something of ``model``."""
    loops = [
        one
        for one in script.walk(ast.For, ast.ListComp, ast.GeneratorExp)
        if isinstance(one, ast.For | ast.ListComp | ast.GeneratorExp) and call in ast.walk(one)
    ]
    over = [one for loop in loops for one in ([loop] if isinstance(loop, ast.For) else loop.generators)]
    names = [(_names_in(one.target), _names_in(one.iter)) for one in over]
    return {target for targets, sources in names if model in sources for target in targets}


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _lines(whole: _Wrapping, to: str, local: Mapping[str, str]) -> list[str]:
    """The layers of the model's policy, if it has one, and the model."""
    shard, model = local[SHARD], ast.unparse(whole.module)
    options, lines = whole.options, []
    common = ""
    if whole.layers is not None:
        *head, inside = whole.layers.loop(model, local)
        shared = [option.written(local) for option in options if not option.of_a_layer]
        options = [option for option in options if option.of_a_layer]
        lines = [f"{OPTIONS} = dict({', '.join(shared)})"] if shared else []
        common = f", **{OPTIONS}" if shared else ""
        inner = "".join(f", {option.written(local, of_a_layer=True)}" for option in options)
        lines += [*head, f"{inside}{shard}({LAYER}{common}{inner})"]
    own = "".join(f", {option.written(local)}" for option in options)
    sharded = f"{shard}({model}{common}{own})"
    return [*lines, sharded if to == model else f"{to} = {sharded}"]


def _no_longer_read(script: Script, calls: list[ast.Call]) -> list[Edit]:
    """Lines that gave a value to what only those calls read, gone."""
    given = [value for call in calls for value in keywords(call).values() if isinstance(value, ast.Name)]
    counts = {one.id: sum(other.id == one.id for other in given) for one in given}
    return [
        edit
        for one in {one.id: one for one in given}.values()
        for edit in unread(script, one, counts[one.id])
    ]
