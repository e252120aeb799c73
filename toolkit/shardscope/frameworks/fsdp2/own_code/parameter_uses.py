"""Whether a script does with a model's parameters only what DTensors do as plain tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from shardscope.own_code.script import Script

ASKED = ("parameters", "named_parameters")
TAKERS = ("clip_grad_norm_", "list", "get_total_norm")
"""Functions that take parameters as they take DTensors; ``list`` gives them on."""
COUNTED = ("numel", "requires_grad", "requires_grad_", "element_size")
"""What a parameter is asked that a DTensor answers alike. Not its shape: a flat parameter has one axis, by
which decay is left out."""


def are_plain(script: Script, optimizers: Iterable[str]) -> bool:
    """Whether all parameters go to ``optimizers``, to the clipping of their norm, or are counted; and no
    gradient is read."""
    reads = script.walk(ast.Attribute)
    if any(
        getattr(one, "attr", "") == "grad" and isinstance(getattr(one, "ctx", None), ast.Load)
        for one in reads
    ):
        return False
    takers = {*TAKERS, *optimizers}
    understood: set[int] = set()
    for node in script.walk(ast.Call, ast.comprehension, ast.For):
        if isinstance(node, ast.Call) and script.called(node) in takers:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            understood |= {id(inner) for one in given for inner in _handed_on(one)}
        if isinstance(node, ast.For) and _are_counted(node.target, node.body):
            understood.add(id(node.iter))
    for node in script.walk(ast.ListComp, ast.GeneratorExp, ast.SetComp):
        assert isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp)
        for one in node.generators:
            if _are_counted(one.target, [node.elt, *one.ifs], and_handed_on=node.elt):
                understood.add(id(one.iter))
    calls = [call for name in ASKED for call in script.calls(name)]
    return all(id(call) in understood for call in calls)


def _handed_on(given: ast.expr) -> Iterator[ast.expr]:
    """An argument, and what groups of an optimizer have in them."""
    yield given
    if isinstance(given, ast.List | ast.Tuple):
        for one in given.elts:
            yield from _handed_on(one)
    if isinstance(given, ast.Dict):
        for value in given.values:
            yield from _handed_on(value)


def _are_counted(
    target: ast.expr, where: list[ast.stmt] | list[ast.expr], and_handed_on: ast.expr | None = None
) -> bool:
    """Whether the last name of a loop's target, the parameter, is only counted, or is what comes out."""
    names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
    if not names:
        return False
    counted = {
        id(one.value)
        for part in where
        for one in ast.walk(part)
        if isinstance(one, ast.Attribute) and one.attr in COUNTED
    }
    counted |= {
        id(one.args[0])
        for part in where
        for one in ast.walk(part)
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "type" and one.args
    }
    uses = [
        one for part in where for one in ast.walk(part) if isinstance(one, ast.Name) and one.id == names[-1]
    ]
    return all(id(one) in counted or one is and_handed_on for one in uses)
