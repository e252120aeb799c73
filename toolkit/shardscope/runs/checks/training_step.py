"""Checks of the training step in a script: fp16 without loss scaling, and gradients that are never zeroed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.runs.checks.script import (
    DEFINITIONS,
    LOOPS,
    Script,
    find_line,
    flag_line,
    is_constant,
    read_keywords,
)

SCALERS = re.compile(
    r"\w*(GradScaler|LossScaler|NativeScaler)\w*|(\w+_)?scaler|\w*loss_scal\w*|scale_loss|FP16_?Optimizer"
    r"|Trainer|initialize|engine",
    re.IGNORECASE,
)
"""Names of loss scalers (torch's, apex's, the user's own) and of code that scales by itself: transformers'
Trainer, ``deepspeed.initialize``, ``ctx.engine``."""
SCALING_PLUGINS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
MIXED_PRECISION_POSITION = 2
"""Position of ``mixed_precision`` among the arguments of ``Accelerator``."""
SMALLEST = 2.0**-24
"""Smallest positive (subnormal) fp16 number."""


def check_loss_scaling(script: Script) -> Iterator[Finding]:
    """Find a backward pass in fp16 without loss scaling, whose small gradients underflow to zero."""
    line = min(_find_fp16_lines(script), default=None)
    if line is not None and "backward" in script.uses and not _scales_loss(script):
        why = (
            f"gradients in fp16 without a loss scale become zero below {SMALLEST:.1g} (Micikevicius et al. "
            "2018, section 3.2)."
        )
        change = "torch.amp.GradScaler around backward and step, or bfloat16"
        yield flag_line(line, "fp16-without-loss-scaling", "danger", why, change, SMALLEST)


def _find_fp16_lines(script: Script) -> Iterator[int]:
    """Yield the lines that convert something to fp16 that is trained."""
    backward = [(script.find_scope(call), call.lineno) for call in script.find_calls("backward")]
    for node in script.nodes:
        if not _is_fp16(script, node) or any(_is_exempt(script, one) for one in script.walk_up(node)):
            continue
        # Skip conversions after the last backward: the model is only saved or evaluated in fp16.
        last = max(
            (line for scope, line in backward if scope is script.find_scope(node)), default=find_line(node)
        )
        if find_line(node) <= last:
            yield find_line(node)


def _is_fp16(script: Script, node: ast.AST) -> bool:
    """Return whether ``node`` is ``model.half()``, ``torch.float16`` or ``float16`` imported from torch."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "half"
    if isinstance(node, ast.Attribute):
        return script.resolve_name(node.value) == "torch" and node.attr in ("float16", "half")
    return isinstance(node, ast.Name) and script.aliases.get(node.id) in ("float16", "half")


def _is_exempt(script: Script, node: ast.AST) -> bool:
    """Return whether fp16 in ``node`` is no training precision.

    It may be compared, an alternative to bf16, the type of a saved file, or bitsandbytes' compute type.
    """
    if isinstance(node, ast.IfExp):
        return "bfloat16" in ast.unparse(node)
    if isinstance(node, ast.Call):
        return script.resolve_name(node.func).startswith("save")
    return isinstance(node, ast.Compare) or getattr(node, "arg", None) == "bnb_4bit_compute_dtype"


def _scales_loss(script: Script) -> bool:
    """Return whether something scales the loss, or may do so."""
    names = {node.arg for node in script.nodes if isinstance(node, ast.arg | ast.keyword) and node.arg}
    if any(SCALERS.fullmatch(name) for name in (set(script.uses) | names) - script.defined):
        return True
    # Accelerator.backward scales by itself, with a GradScaler that it creates for fp16.
    accelerators = script.find_calls("Accelerator")
    # An Accelerator created in another file has an unknown precision.
    is_hidden = not accelerators and "Accelerator" in script.uses
    return is_hidden or "mixed_precision" in script.uses or any(map(_may_scale, accelerators))


def _may_scale(accelerator: ast.Call) -> bool:
    """Return whether an Accelerator scales the loss: for ``fp16``, or for a precision not in the text."""
    arguments, position = read_keywords(accelerator), MIXED_PRECISION_POSITION
    if len(arguments) < len(accelerator.keywords) or any(name in arguments for name in SCALING_PLUGINS):
        return True
    by_position = accelerator.args[position] if len(accelerator.args) > position else None
    precision = arguments.get("mixed_precision", by_position)
    return precision is not None and not is_constant(precision, None, "no", "bf16", "fp8")


# ---- Gradients that are never zeroed


OPTIMIZER = re.compile(r"\w*optim\w*|(\w+_)?opt(_\w+)?", re.IGNORECASE)
"""Names of optimizer variables. An engine's ``step`` (DeepSpeed's, ours) zeroes the gradients itself."""


def check_zero_grad(script: Script) -> Iterator[Finding]:
    """Find an optimizer step, in a loop or a function, without zeroed gradients."""
    stored = (
        one for one in script.nodes if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load)
    )
    # ``parameter.grad = None`` zeroes as well.
    if {"zero_grad", "set_to_none"} & set(script.uses) or any(one.attr == "grad" for one in stored):
        return
    # Without a backward in this text the loop may be elsewhere, and with it the call that zeroes.
    for call in script.find_calls("step") if "backward" in script.uses else ():
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        is_repeated = any(isinstance(one, (*LOOPS, *DEFINITIONS)) for one in script.walk_up(call))
        if is_repeated and OPTIMIZER.fullmatch(script.resolve_name(owner)):
            why = "no zero_grad in this text: each backward adds to the gradients of all steps before."
            change = "optimizer.zero_grad() after each step"
            yield flag_line(call.lineno, "gradients-never-zeroed", "danger", why, change)
            return
