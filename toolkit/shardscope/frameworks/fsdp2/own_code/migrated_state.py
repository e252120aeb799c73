"""A checkpoint that FSDP1 gathers whole, as the function has it that reads models of FSDP2."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.own_code.bindings import is_dotted_name, only_value, scope_of
from shardscope.own_code.edits import Edit, has_comment, imported, replaced, without
from shardscope.own_code.script import Script, keywords

MODULE = "torch.distributed.checkpoint.state_dict"
GET, OPTIONS = "get_model_state_dict", "StateDictOptions"
KIND = "StateDictType.FULL_STATE_DICT"
OTHER_NAMES = frozenset(
    {
        *("compile", "DistributedDataParallel", "DataParallel", "_metadata", "move_to_end"),
        *("_register_state_dict_hook", "register_state_dict_post_hook"),
    }
)
"""What has the function give weights other names than the model does, or reads more than weights of it."""
KINDS = frozenset({"state_dict_type", "set_state_dict_type"})
"""What has a state be anything but whole."""
ON_ONE_RANK = ("offload_to_cpu", "rank0_only")


class Gathering(NamedTuple):
    """``with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT): state = model.state_dict()``.

    Or its one line without a block, where nothing names another kind: FSDP1's own is whole.
    """

    block: ast.With | ast.Assign
    model: str
    state: str
    is_on_one_rank: bool
    """Whether rank 0 alone gets it, in its host's memory."""
    config: ast.expr | None
    """A name of what it was told, if it has one."""


def gatherings(script: Script, old_class: str) -> list[Gathering]:
    """Blocks of which the text settles what they gather, and where to."""
    if OTHER_NAMES & set(script.names):
        return []
    found = (_gathering(script, block, old_class) for block in script.walk(ast.With))
    return [one for one in found if one is not None]


def by_default(script: Script, made: ast.Assign) -> Iterator[Gathering]:
    """Lines without a block, after ``made``, in which the model is wrapped."""
    asked = {getattr(one, "attr", "") for one in script.walk(ast.Attribute)}
    if KINDS & asked or OTHER_NAMES & set(script.names):
        return
    model = ast.unparse(made.targets[0])
    for one in script.walk(ast.Assign):
        assert isinstance(one, ast.Assign)
        is_after = one.lineno > made.lineno and scope_of(script, one) is scope_of(script, made)
        if is_after and (state := _state(one, model)) and not has_comment(script, one):
            yield Gathering(one, model, state, False, None)


def _state(statement: ast.stmt, model: str) -> str:
    """``state`` of ``state = model.state_dict()``; "" of another line."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return ""
    target = statement.targets[0]
    is_asked = ast.unparse(statement.value) == f"{model}.state_dict()"
    return target.id if is_asked and isinstance(target, ast.Name) else ""


def by_function(script: Script, found: list[Gathering]) -> list[Edit]:
    """Those blocks as ``get_model_state_dict``, and what they alone were told gone."""
    edits: list[Edit] = []
    for one in found:
        local, imports = imported(script, one.block, MODULE, GET, OPTIONS)
        kept = ", cpu_offload=True" if one.is_on_one_rank else ""
        options = f"{local[OPTIONS]}(full_state_dict=True{kept})"
        text = f"{one.state} = {local[GET]}({one.model}, options={options})"
        # One import at the top serves all of them.
        edits += [*(edit for edit in imports if edit not in edits), replaced(script, one.block, text)]
    configs = {one.config.id: one.config for one in found if isinstance(one.config, ast.Name)}
    return edits + [
        edit for config in configs.values() for edit in unread(script, config, _readers(found, config))
    ]


def _readers(found: list[Gathering], config: ast.Name) -> int:
    return sum(isinstance(one.config, ast.Name) and one.config.id == config.id for one in found)


def unread(script: Script, read: ast.Name, num_reads: int = 1) -> list[Edit]:
    """The line that gives ``read`` its value gone, if at most ``num_reads`` places read it, all known.

    One of the module that a function reads may be for other modules, too.
    """
    uses = [one for one in script.walk(ast.Name) if getattr(one, "id", "") == read.id]
    made = next((one for one in script.walk(ast.Assign) if getattr(one, "targets", [None])[0] in uses), None)
    if not isinstance(made, ast.Assign) or not _does_nothing(script, made.value):
        return []
    is_local = scope_of(script, made) is scope_of(script, read)
    named = script.walk(ast.Constant, ast.Global, ast.Attribute)
    is_named = any(
        read.id in (getattr(one, "value", ""), getattr(one, "attr", ""), *getattr(one, "names", ()))
        for one in named
    ) or isinstance(scope_of(script, made), ast.ClassDef)
    if len(uses) > 1 + num_reads or not is_local or is_named or has_comment(script, made):
        return []
    gone = without(script, made)
    return [] if gone is None else [gone]


MAKERS = frozenset(
    {
        *("MixedPrecision", "CPUOffload", "ModuleWrapPolicy", "partial"),
        *("FullStateDictConfig", "ShardedStateDictConfig"),
    }
)
"""What makes an object, and does nothing beside."""


def _does_nothing(script: Script, value: ast.expr) -> bool:
    """Whether nobody misses that it is asked for: a number, a name, or an object that only FSDP1 reads."""
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)]
    others = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return all(script.called(one) in MAKERS for one in calls) and not any(
        isinstance(one, others) for one in ast.walk(value)
    )


def _gathering(script: Script, block: ast.AST, old_class: str) -> Gathering | None:
    assert isinstance(block, ast.With)
    call = block.items[0].context_expr
    if len(block.items) > 1 or block.items[0].optional_vars is not None or has_comment(script, block):
        return None
    if not isinstance(call, ast.Call) or call.keywords or not 2 <= len(call.args) <= 3:
        return None
    if not _is_method(script, call, "state_dict_type") or _root(script, call.func) != old_class:
        return None
    model, kind, config = call.args[0], call.args[1], call.args[2] if len(call.args) > 2 else None
    state = _state(block.body[0], ast.unparse(model)) if len(block.body) == 1 else ""
    place = _placed(script, config)
    if place is None or not state or not is_dotted_name(model) or ast.unparse(kind) != KIND:
        return None
    return Gathering(block, ast.unparse(model), state, place, config)


def _is_method(script: Script, call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and script.called(call) == name


def _root(script: Script, function: ast.expr) -> str:
    root = function.value if isinstance(function, ast.Attribute) else function
    return script.aliases.get(root.id, root.id) if isinstance(root, ast.Name) else ""


def _placed(script: Script, config: ast.expr | None) -> bool | None:
    """Whether rank 0 alone gets it; None where the text does not settle that."""
    if config is None:
        return False
    made = only_value(script, config.id, config) if isinstance(config, ast.Name) else config
    if isinstance(config, ast.Name) and _is_touched(script, config.id):
        return None
    if not isinstance(made, ast.Call) or script.called(made) != "FullStateDictConfig" or made.args:
        return None
    given = {name: ast.unparse(value) for name, value in keywords(made).items()}
    if len(given) < len(made.keywords) or not set(given) <= set(ON_ONE_RANK):
        return None
    offload, rank0_only = (given.get(name, "False") for name in ON_ONE_RANK)
    # Whole on rank 0's own GPU is no choice that the function has: it is in the host's memory then. Nor is
    # whole in that of every rank, which no other place is as good as.
    return {("True", "True"): True, ("False", "True"): True, ("False", "False"): False}.get(
        (offload, rank0_only)
    )


def _is_touched(script: Script, name: str) -> bool:
    """Whether a config is used but where it is made and as the last argument of ``state_dict_type``."""
    given = {id(call.args[2]) for call in script.calls("state_dict_type") if len(call.args) == 3}
    uses = [one for one in script.walk(ast.Name) if isinstance(one, ast.Name) and one.id == name]
    return any(isinstance(one.ctx, ast.Load) and id(one) not in given for one in uses)
