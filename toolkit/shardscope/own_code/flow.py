"""What the values in a script are made from: by name, whatever the order in which its lines run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from shardscope.own_code.script import Script

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One script's values. Two variables of one name are taken for one, so that rather too much is found."""

    script: Script

    @cached_property
    def origins(self) -> dict[str, list[ast.AST]]:
        """Key of a name or attribute (:func:`key_of`) -> what it is made from: values, arguments, bodies."""
        found: dict[str, list[ast.AST]] = defaultdict(list)
        for node in self.script.walk(ast.AST):
            for key, origin in (*_bound(node), *_changed(node), *_defined(node), *self._handed(node)):
                found[key].append(origin)
        return found

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """Functions of the script by the name that calls them: a class's ``__init__`` by the class's."""
        found: dict[str, list[Function]] = defaultdict(list)
        for node in self.script.walk(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            if is_function(node):
                found[node.name].append(node)
            elif isinstance(node, ast.ClassDef):
                found[node.name] += [one for one in _methods(node) if one.name == "__init__"]
        return found

    def grown(self, belongs: Callable[[ast.AST, set[str]], bool], start: Iterable[str] = ()) -> set[str]:
        """Keys that have an origin of which ``belongs`` says so, given those found before; with ``start``."""
        found, waiting = set(start), list(self.origins)
        while waiting:
            key = waiting.pop()
            if key and key not in found and any(belongs(origin, found) for origin in self.origins[key]):
                found.add(key)
                waiting += self._readers[key]
        return found

    @cached_property
    def _readers(self) -> dict[str, set[str]]:
        """Key -> the keys of what is made from it in one expression."""
        found: dict[str, set[str]] = defaultdict(set)
        for key, origins in self.origins.items():
            for origin in origins:
                for node in ast.walk(origin) if isinstance(origin, ast.expr) else ():
                    found[key_of(node)].add(key)
        return found

    def _handed(self, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
        """Parameters of the script's own functions, from the arguments that they are called with."""
        if not isinstance(node, ast.Call):
            return
        for function in self.functions.get(self.script.called(node), ()):
            named = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
            positional = named[1:] if named[:1] in (["self"], ["cls"]) else named
            yield from zip(positional, node.args, strict=False)
            yield from ((one.arg, one.value) for one in node.keywords if one.arg)


def key_of(node: ast.AST | None) -> str:
    """``ids`` for a name, ``.ids`` for an attribute, whosever it is; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def is_function(node: ast.AST) -> TypeGuard[Function]:
    """Whether ``node`` defines a function or a method."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a statement or a loop gives a name."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _paired(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield from _paired(node.target, node.value)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _paired(node.target, node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _paired(node.optional_vars, node.context_expr)


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    """``a, b = c, d`` one by one; of ``a, b = c`` both are made from ``c``, and ``a[0] = c`` is ``a``'s."""
    if isinstance(target, ast.Tuple | ast.List):
        one_by_one = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        values = value.elts if one_by_one else [value] * len(target.elts)  # type: ignore[attr-defined]
        for each, its_value in zip(target.elts, values, strict=True):
            yield from _paired(each, its_value)
        return
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    yield key_of(target), value


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """``ids.append(...)``, and what two branches choose between by their test."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield key_of(getattr(node.value.func, "value", None)), node.value
    if isinstance(node, ast.If):
        branches = [
            {key for line in branch for each in ast.walk(line) for key, _ in _bound(each)}
            for branch in (node.body, node.orelse)
        ]
        # The parts of the test, for the test itself is one of who does something.
        parts = [part for part in ast.walk(node.test) if key_of(part)]
        yield from ((key, part) for key in branches[0] & branches[1] for part in parts)


def _defined(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Bodies of functions, classes and methods, and what they return."""
    if isinstance(node, ast.ClassDef):
        yield node.name, node
        yield from ((f".{method.name}", method) for method in _methods(node))
    elif is_function(node):
        yield node.name, node
        for each in ast.walk(node):
            if isinstance(each, ast.Return) and each.value is not None:
                yield node.name, each.value


def _methods(node: ast.ClassDef) -> list[Function]:
    return [one for one in node.body if is_function(one)]
