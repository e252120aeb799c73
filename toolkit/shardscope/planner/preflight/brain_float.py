"""A script's fp16 as bf16, which has fp32's range and needs no loss scale."""

from __future__ import annotations

import ast
import re

from shardscope.planner.preflight.edits import Edit, mended, renamed, replaced
from shardscope.planner.preflight.script import DEFINITIONS, Script, keywords

HALVES = ("float16", "half")
"""What torch calls fp16."""
TOLD_OTHERWISE = re.compile(r"fp16|(?<!b)float16|HalfTensor", re.IGNORECASE)
"""What texts and names have in them that say fp16 to something else: an option, a library, a type."""
SAYING = ("value", "id", "attr", "arg", "name")
"""Where nodes of the syntax have their text."""
WITH_A_DEFAULT = "autocast"
"""What computes in fp16 on a GPU where it is told no type."""


def in_bf16(script: Script) -> str | None:
    """The script with torch's bf16 wherever it says torch's fp16.

    None on a GPU without bf16, and where fp16 is also said in a way that this does not change, or asked for.
    """
    if script.plan is None or "bf16" not in script.plan.cluster.gpu.peak_flops:
        return None
    if _is_said_otherwise(script) or any(
        "dtype" not in keywords(one) for one in script.calls(WITH_A_DEFAULT)
    ):
        return None
    edits: list[Edit] = []
    for node in script.walk(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr not in HALVES:
            continue
        if _is_torch(script, node.value):
            edits.append(replaced(script, node, f"{ast.unparse(node.value)}.bfloat16"))
        elif node.attr == "half" and _is_called(script, node):
            edits.append(renamed(script, node, "bfloat16"))
        else:
            return None
    return mended(script, *edits) if edits else None


def _is_torch(script: Script, node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and script.aliases.get(node.id) == "torch"


def _is_called(script: Script, function: ast.Attribute) -> bool:
    """``tensor.half()``; handed on it may be anything's."""
    return any(
        isinstance(call, ast.Call) and call.func is function and not call.args and not call.keywords
        for call in script.walk(ast.Call)
    )


def _is_said_otherwise(script: Script) -> bool:
    """Whether fp16 is a text, an option, a name of its own, or what something is compared with."""
    if any(alias.name in HALVES for one in script.walk(ast.ImportFrom) for alias in one.names):  # type: ignore[attr-defined]
        return True
    for node in script.walk(ast.Constant, ast.Name, ast.Attribute, ast.keyword, ast.arg, *DEFINITIONS):
        said = next((text for name in SAYING if isinstance(text := getattr(node, name, None), str)), "")
        if said not in HALVES and TOLD_OTHERWISE.search(said):
            return True
        if isinstance(node, ast.Constant) and said in HALVES:
            return True
    compared = (found for one in script.walk(ast.Compare) for found in ast.walk(one))
    return any(isinstance(found, ast.Attribute) and found.attr in HALVES for found in compared)
