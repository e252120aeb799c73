"""Whether a script that wraps a model in one call also makes units inside of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardscope.own_code.script import Script, keywords

POLICIES = ("auto_wrap_policy", "policy")
POLICY_POSITION = 4
"""Where ``FullyShardedDataParallel`` takes its policy without a keyword."""
OLD_CLASS = "FullyShardedDataParallel"
HELPERS = ("wrap", "auto_wrap", "enable_wrap")
"""Functions that wrap what they are given as FSDP1's context says."""
THEIR_HOMES = ("fsdp", "fairscale")
"""Modules that have them; ``textwrap`` is none."""
LOOKING = ("isinstance", "issubclass", "cast", "type", "hasattr", "getattr", "print", "state_dict_type")
"""Functions that are given a class and wrap nothing with it."""


def wraps_inside(script: Script, call: ast.Call) -> bool:
    """Whether layers are wrapped as well: by a policy, by a helper, or by a function that is handed on.

    Calls in loops, and in functions that run more than once, are the caller's to see.
    """
    return _has_policy(script, call) or _calls_helper(script) or _is_handed_on(script, script.called(call))


def _has_policy(script: Script, call: ast.Call) -> bool:
    """One that is not None; options of a dictionary may have one."""
    if any(keyword.arg is None for keyword in call.keywords):
        return True
    given = [value for name, value in keywords(call).items() if name in POLICIES]
    if script.called(call) == OLD_CLASS:
        given += call.args[POLICY_POSITION : POLICY_POSITION + 1]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def _calls_helper(script: Script) -> bool:
    """``wrap(layer)`` of FSDP's, imported by its name or as its module's."""
    for name in HELPERS:
        for call in script.calls(name):
            home = script.modules.get(getattr(call.func, "id", ""), "")
            if isinstance(call.func, ast.Attribute):
                home = ast.unparse(call.func.value)
                home = f"{home}.{script.modules.get(home.partition('.')[0], '')}"
            if any(part in home for part in THEIR_HOMES):
                return True
    return False


def _is_handed_on(script: Script, wrapper: str) -> bool:
    """``map(fully_shard, layers)``, ``model.apply(shard_block)``, ``apply(lambda m: fully_shard(m))``."""
    shards = {wrapper} | {
        function.name  # type: ignore[attr-defined]
        for function in script.walk(ast.FunctionDef)
        if any(script.called(node) == wrapper for node in ast.walk(function))
    }
    for given in _handed(script):
        local = getattr(given, "id", getattr(given, "attr", ""))
        if script.aliases.get(local, local) in shards:
            return True
        if isinstance(given, ast.Lambda) and any(script.called(node) in shards for node in ast.walk(given)):
            return True
    return False


def _handed(script: Script) -> Iterator[ast.expr]:
    """What is given to a function that may call it, or is given another name."""
    for node in script.walk(ast.Call, ast.Assign):
        if isinstance(node, ast.Call) and script.called(node) not in LOOKING:
            yield from node.args
            yield from (keyword.value for keyword in node.keywords)
        if isinstance(node, ast.Assign):
            yield node.value
