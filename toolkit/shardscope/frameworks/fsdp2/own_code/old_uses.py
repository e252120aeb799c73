"""What a script does with a model of FSDP1 beside making it: whether one of FSDP2 does the same there."""

from __future__ import annotations

import ast
import re

from shardscope.frameworks.fsdp2.own_code import parameter_uses
from shardscope.frameworks.fsdp2.own_code.migrated_state import by_default, gatherings
from shardscope.frameworks.fsdp2.own_code.sharded_blocks import blocks
from shardscope.own_code.bindings import scope_of, sees
from shardscope.own_code.edits import Edit, behind, first_argument, replaced
from shardscope.own_code.script import Script

OLD_CLASS = "FullyShardedDataParallel"
CLIPPING = "clip_grad_norm_"
ITS_OWN = frozenset(
    {
        *("state_dict", "load_state_dict", "state_dict_type", "set_state_dict_type", "optim_state_dict"),
        *("optim_state_dict_to_load", "no_sync", "summon_full_params", "module", "ShardedGradScaler"),
        *("_fsdp_wrapped_module", "deepcopy", "init_empty_weights", "deferred_init", "parallelize_module"),
        *("register_comm_hook", "check_is_root", "full_optim_state_dict", "full_tensor"),
    }
)
"""What is another thing of a model of FSDP2, or is not there: a person has to look at each.

It has no copies, and leaves weights on the meta device where they are, which FSDP1 made by itself.
"""
META = "meta"
WITHOUT_DTENSORS = ("apex", "bitsandbytes", "deepspeed", "galore_torch", "lion_pytorch", "schedulefree")
"""Packages whose optimizers take flat parameters, and no DTensors."""
OPTIMIZER = re.compile(r"optim|(^|_)opt($|_)", re.IGNORECASE)
"""Names of an optimizer, and of what makes one."""


def are_plain(script: Script, calls: list[ast.Call], made: ast.Assign) -> bool:
    """Whether the class is used in those calls alone, and its model, which is given its name in ``made``, in
    ways that FSDP2's is used as well."""
    gathered = [*gatherings(script, OLD_CLASS), *by_default(script, made)]
    understood = {id(node) for one in gathered for node in ast.walk(one.block)}
    understood |= {id(node) for one in blocks(script, OLD_CLASS, made) for node in one.understood}
    nodes = [one for one in script.walk(ast.Name, ast.Attribute) if id(one) not in understood]
    local = [one for one in nodes if isinstance(one, ast.Name)]
    attributes = {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    uses = [one for one in local if script.aliases.get(one.id) == OLD_CLASS]
    names = attributes | {one.id for one in local}
    # A loop's variable may well be called module.
    own = ITS_OWN & attributes or (ITS_OWN - {"module"}) & names
    return (
        {id(one) for one in uses} == {id(call.func) for call in calls}
        and all(script.modules.get(one.id, "").startswith("torch.") for one in uses)
        and not own
        and not _is_on_meta(script)
        and not _has_other_optimizers(script)
        and not _is_part(script, calls[-1])
        and not _is_optimized_before(script, calls[-1])
        and parameter_uses.are_plain(script, _optimizers(script))
    )


def _is_on_meta(script: Script) -> bool:
    return any(isinstance(one, ast.Constant) and one.value == META for one in script.walk(ast.Constant))


def _is_part(script: Script, call: ast.Call) -> bool:
    """Whether a part of a model is wrapped: with the rest there would be DTensors beside plain ones."""
    model = call.args[0] if call.args else None
    if not isinstance(model, ast.Attribute):
        return False
    kinds = [one for one in script.walk(ast.ClassDef) if call in ast.walk(one)]
    bases = [ast.unparse(base) for one in kinds if isinstance(one, ast.ClassDef) for base in one.bases]
    return ast.unparse(model.value) != "self" or any(base.endswith("Module") for base in bases)


def _has_other_optimizers(script: Script) -> bool:
    imported = [one.name for one in script.walk(ast.alias) if isinstance(one, ast.alias)]
    roots = {name.partition(".")[0] for name in (*imported, *script.modules.values())}
    return bool(roots & set(WITHOUT_DTENSORS))


def _is_optimized_before(script: Script, call: ast.Call) -> bool:
    """Whether an optimizer may have been made before, of parameters that are replaced."""
    asked = [*script.calls("parameters"), *script.calls("named_parameters")]
    made = [
        one
        for one in script.walk(ast.Name, ast.Attribute, ast.Call)
        if OPTIMIZER.search(_given_or_called(script, one))
    ]
    helped = [one for name in _makers(script, asked) for one in script.calls(name)]
    scope = scope_of(script, call)
    # Whoever calls the function that wraps may have made one before.
    entries = [(None, call), (scope, call), *_callers(script, scope)]
    return any(
        one.lineno < entry.lineno and scope_of(script, one) is place  # type: ignore[attr-defined]
        for one in (*asked, *made, *helped)
        for place, entry in entries
    )


def _callers(script: Script, scope: ast.AST | None) -> list[tuple[ast.AST | None, ast.Call]]:
    """Calls of a function or of a method's class, and where each stands."""
    found: list[tuple[ast.AST | None, ast.Call]] = []
    while scope is not None:
        calls = script.calls(getattr(scope, "name", ""))
        found += [(scope_of(script, one), one) for one in calls]
        scope = scope_of(script, scope)
    return found


def _optimizers(script: Script) -> tuple[str, ...]:
    """Names of what is called and may make an optimizer."""
    called = {script.called(call): call for call in script.walk(ast.Call)}
    return tuple(name for name, call in called.items() if OPTIMIZER.search(_called_from(script, call)))


def _called_from(script: Script, call: ast.AST) -> str:
    """``torch.optim.AdamW``, as it is written or was imported."""
    function = getattr(call, "func", None)
    return f"{_home_and_name(script, function)} {ast.unparse(function)}" if function is not None else ""


def _makers(script: Script, asked: list[ast.Call]) -> set[str]:
    """The script's own functions that name an optimizer and ask for parameters."""
    naming = [
        one for one in script.walk(ast.Name, ast.Attribute) if OPTIMIZER.search(_home_and_name(script, one))
    ]
    in_both = {_function(script, one) for one in naming} & {_function(script, one) for one in asked}
    return in_both - {""}


def _function(script: Script, node: ast.AST) -> str:
    return getattr(scope_of(script, node), "name", "")


def _home_and_name(script: Script, node: ast.AST) -> str:
    """``torch.optim.AdamW`` of a name that was imported from there."""
    local = getattr(node, "id", getattr(node, "attr", ""))
    return f"{script.modules.get(local, '')}.{local}"


def _given_or_called(script: Script, node: ast.AST) -> str:
    """The name that is given something, or that a call calls."""
    if isinstance(node, ast.Call):
        return script.called(node)
    is_read = isinstance(getattr(node, "ctx", None), ast.Load)
    return "" if is_read else str(getattr(node, "id", getattr(node, "attr", "")))


def clipped_by_torch(script: Script, models: set[str]) -> list[Edit] | None:
    """The norms of ``models`` by torch's function instead of their own; None where others have theirs clipped
    so, or where the script has no name for torch."""
    edits = []
    for call in script.calls(CLIPPING):
        model = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if _is_given_parameters(call):
            continue
        if model not in models or not (call.args or call.keywords) or not sees(script, "torch", call):
            return None
        edits.append(replaced(script, call.func, f"torch.nn.utils.{CLIPPING}"))
        edits.append(first_argument(script, call, f"{model}.parameters()"))
        edits += _as_number(script, call)
    return edits


def _is_given_parameters(call: ast.Call) -> bool:
    """Whether it is torch's function, or works as that does."""
    return ".parameters()" in "".join(map(ast.unparse, call.args))


def norms_as_numbers(script: Script, model: str, made: ast.stmt) -> list[Edit] | None:
    """Norms that torch's function tells of ``model`` already, read as plain tensors after ``made``.

    None where it is asked for others' as well, or where a condition leaves the model as it is.
    """
    told = [
        call for call in script.calls(CLIPPING) if ".parameters()" in "".join(map(ast.unparse, call.args))
    ]
    edits = [edit for call in told for edit in _as_number(script, call)]
    is_sure = all(ast.unparse(call.args[0]) == f"{model}.parameters()" for call in told)
    around = [ast.unparse(one.test) for one in script.walk(ast.If) if made in ast.walk(one)]  # type: ignore[attr-defined]
    is_sure = is_sure and all("__name__" in test for test in around)
    return edits if is_sure or not edits else None


def _as_number(script: Script, call: ast.Call) -> list[Edit]:
    """The norm as a plain tensor for whoever reads it: a DTensor is not to be formatted, for one."""
    is_read = not any(one.value is call for one in script.walk(ast.Expr))  # type: ignore[attr-defined]
    return [behind(script, call, ".full_tensor()")] if is_read else []
