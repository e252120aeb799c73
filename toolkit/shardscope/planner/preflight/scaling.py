"""Backward in fp16 without a loss scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardscope.own_code.brain_float import in_bf16
from shardscope.own_code.exported import comes_after_training
from shardscope.own_code.script import Script, keywords
from shardscope.planner.preflight.finding import Finding

SCALERS = re.compile(
    r"\w*(GradScaler|LossScaler|NativeScaler)\w*|(\w+_)?scaler|\w*loss_scal\w*|scale_loss|FP16_?Optimizer",
    re.IGNORECASE,
)
"""Names of what scales a loss: torch's, apex's, a person's own."""
OWN_SCALING = ("Trainer", "initialize", "engine")
"""Names of what scales a loss by itself: transformers, deepspeed, ``ctx.engine``."""
ACCELERATOR = "Accelerator"
MIXED_PRECISION = "mixed_precision"
POSITION = 2
"""Where ``Accelerator`` takes it without a keyword."""
OWN_ENGINES = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
"""Plugins of an Accelerator that scale a loss whatever its own precision."""
NOT_WEIGHTS = ("bnb_4bit_compute_dtype",)
"""Keywords whose type is that of a product alone."""


def unscaled(script: Script) -> Iterator[Finding]:
    """Backward in fp16 without a loss scale: gradients below 6e-8 become zero."""
    line = min(_halved(script), default=None)
    if line is None or "backward" not in script.names or _scales(script):
        return
    smallest = 2.0**-24
    yield Finding(
        name="fp16-without-loss-scaling",
        severity="danger",
        why=f"Line {line}: gradients in fp16 without a loss scale become zero below {smallest:.1g} "
        "(Micikevicius et al. 2018, section 3.2).",
        number=smallest,
        change="torch.amp.GradScaler around backward and step, or bfloat16",
        source=in_bf16(script),
        line=line,
    )


def _halved(script: Script) -> Iterator[int]:
    """Lines that say fp16 as a type of torch, or ``.half()``, of what is trained afterwards."""
    apart = {
        id(node)
        for found in script.walk(ast.Compare, ast.keyword, ast.IfExp)
        if isinstance(found, ast.Compare) or getattr(found, "arg", None) in NOT_WEIGHTS or _has_bf16(found)
        for node in ast.walk(found)
    }
    # What is saved in fp16 is trained in something else.
    apart |= {id(node) for call in script.calls("save") for node in ast.walk(call)}
    said = ((node, line) for node, line in _said(script) if id(node) not in apart)
    yield from (line for node, line in said if not comes_after_training(script, node))


def _said(script: Script) -> Iterator[tuple[ast.AST, int]]:
    """All places of fp16 and their lines; a number of that name is none."""
    for node in script.walk(ast.Call, ast.Attribute, ast.Name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "half":
            yield node, node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of_torch = script.aliases.get(node.value.id, node.value.id) == "torch"
            if of_torch and node.attr in ("float16", "half"):
                yield node, node.lineno
        if isinstance(node, ast.Name) and script.aliases.get(node.id) in ("float16", "half"):
            yield node, node.lineno


def _has_bf16(node: ast.AST) -> bool:
    """``torch.bfloat16 if is_there else torch.float16``."""
    return isinstance(node, ast.IfExp) and "bfloat16" in ast.unparse(node)


def _scales(script: Script) -> bool:
    """Whether something scales the loss, or may: an import alone does not."""
    for node in script.walk(ast.Name, ast.Attribute, ast.keyword, ast.arg):
        local = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None))) or ""
        name = script.aliases.get(local, local)
        if SCALERS.fullmatch(name) or (name in OWN_SCALING and name not in script.defined):
            return True
    return _accelerator_scales(script)


def _accelerator_scales(script: Script) -> bool:
    """An Accelerator makes a scaler for mixed fp16, and for nothing else.

    With a precision that is no literal, that the script looks up later or that another module chose, it may.
    """
    calls = script.calls(ACCELERATOR)
    if not calls:
        read = (getattr(one, "id", getattr(one, "attr", "")) for one in script.walk(ast.Name, ast.Attribute))
        return any(script.aliases.get(name, name) == ACCELERATOR for name in read)
    return any(
        isinstance(node, ast.Attribute) and node.attr == MIXED_PRECISION for node in script.walk(ast.AST)
    ) or any(_may_scale(call) for call in calls)


def _may_scale(call: ast.Call) -> bool:
    given = keywords(call)
    if len(given) < len(call.keywords) or any(name in given for name in OWN_ENGINES):
        return True
    precision = given.get(MIXED_PRECISION, call.args[POSITION] if len(call.args) > POSITION else None)
    if precision is None:
        return False
    return not isinstance(precision, ast.Constant) or precision.value == "fp16"
