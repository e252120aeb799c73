"""The optimizer in a script: gradients that are never set to zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.runs.checks.script import DEFINITIONS, LOOPS, Script, at_line

OPTIMIZER = re.compile(r"\w*optim\w*|(\w+_)?opt(_\w+)?", re.IGNORECASE)
"""Variables that hold an optimizer. The ``step`` of an engine (DeepSpeed's, ours) zeroes gradients itself."""


def check_zero_grad(script: Script) -> Iterator[Finding]:
    """Find a step, in a loop or a function, whose gradients add up over all steps before."""
    stored = (
        one for one in script.nodes if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load)
    )
    # ``parameter.grad = None`` does the same.
    if {"zero_grad", "set_to_none"} & set(script.uses) or any(one.attr == "grad" for one in stored):
        return
    for call in script.calls("step") if "backward" in script.uses else ():
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        is_repeated = any(isinstance(one, (*LOOPS, *DEFINITIONS)) for one in script.around(call))
        if is_repeated and OPTIMIZER.fullmatch(script.name_of(owner)):
            why = "no zero_grad in this text: each backward adds to the gradients of all steps before."
            change = "optimizer.zero_grad() after each step"
            yield at_line(call.lineno, "gradients-never-zeroed", "danger", why, change)
            return
