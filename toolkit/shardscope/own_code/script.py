"""A person's own training code, read and never run: its calls, its imports, its lines."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan

MAX_CHARACTERS = 2**20
"""Longer than any script that a person wrote."""
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, kw_only=True)
class Script:
    """Source code, and the plan that it will train where that is known."""

    source: str
    """Python, or the lines of a configuration."""
    plan: Plan | None = None
    """What it will train."""

    @cached_property
    def text(self) -> str:
        """:attr:`source`; that of a function inside another from the margin on."""
        return self.source if _parsed(self.source) else textwrap.dedent(self.source)

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax of :attr:`text`; None where that is no Python (a configuration, a notebook's magics)."""
        return _parsed(self.text)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> what was imported under it: ``FSDP`` -> ``FullyShardedDataParallel``."""
        found: dict[str, str] = {}
        for node in self.walk(ast.ImportFrom, ast.Import):
            for alias in node.names:  # type: ignore[attr-defined]
                found[alias.asname or alias.name] = alias.name.rpartition(".")[2]
        return found

    @cached_property
    def modules(self) -> dict[str, str]:
        """Local name -> the module that it was imported from: ``wrap`` -> ``torch.distributed.fsdp.wrap``.

        One of the person's own package has its dots before it.
        """
        return {
            alias.asname or alias.name: "." * node.level + (node.module or "")
            for node in self.walk(ast.ImportFrom)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    @cached_property
    def defined(self) -> set[str]:
        """Functions and classes that it defines itself."""
        return {node.name for node in self.walk(*DEFINITIONS)}  # type: ignore[attr-defined]

    @cached_property
    def names(self) -> dict[str, int]:
        """Every name, attribute and keyword that occurs, under its imported name, and its first line."""
        found: dict[str, int] = {}
        for node in self.walk(ast.Name, ast.Attribute, ast.ImportFrom, ast.Import, ast.keyword):
            line = getattr(node, "lineno", 1)
            for name in _names_of(node):
                found.setdefault(self.aliases.get(name, name), line)
        return found

    def calls(self, name: str) -> list[ast.Call]:
        """Calls of ``name``, however it was imported, in the order of the text."""
        nodes = (node for node in self.walk(ast.Call) if isinstance(node, ast.Call))
        return sorted((node for node in nodes if self.called(node) == name), key=lambda call: call.lineno)

    def called(self, call: ast.AST) -> str:
        """The imported name of what a call calls; "" where it has none."""
        function = getattr(call, "func", None)
        name = getattr(function, "attr", getattr(function, "id", ""))
        return self.aliases.get(name, name)

    def walk(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """All nodes of these kinds."""
        yield from (node for node in self._nodes if isinstance(node, kinds))

    @cached_property
    def scopes(self) -> dict[int, ast.AST | None]:
        """Node, by its id -> the innermost function or class around it; None: the module itself."""
        found: dict[int, ast.AST | None] = {}
        left: list[tuple[ast.AST, ast.AST | None]] = [] if self.tree is None else [(self.tree, None)]
        while left:
            node, scope = left.pop()
            found[id(node)] = scope
            inside = node if isinstance(node, DEFINITIONS) else scope
            left += [(child, inside) for child in ast.iter_child_nodes(node)]
        return found

    @cached_property
    def comment_lines(self) -> frozenset[int] | None:
        """Lines that have a comment; None where that cannot be told."""
        # A lone carriage return ends a line for Python's parser, and not for tokenize.
        text = self.text.replace("\r\n", "\n").replace("\r", "\n")
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except (tokenize.TokenError, SyntaxError):
            return None
        return frozenset(one.start[0] for one in tokens if one.type == tokenize.COMMENT)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return [] if self.tree is None else list(ast.walk(self.tree))

    def is_repeated(self, call: ast.Call) -> bool:
        """Whether a call may run more than once: in a loop, or in a function that runs more than once or is
        handed on."""
        return any(call in ast.walk(loop) for loop in self.walk(*LOOPS)) or any(
            call in ast.walk(function) and self.is_used_often(function.name)
            for function in self.walk(ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        )

    def is_used_often(self, function: str) -> bool:
        """Whether a function is called more than once or in a loop, or is handed on."""
        calls = self.calls(function)
        named = sum(isinstance(node, ast.Name) and node.id == function for node in self.walk(ast.Name))
        handed_on = named > len(calls)
        looped = any(call in ast.walk(loop) for call in calls for loop in self.walk(*LOOPS))
        return len(calls) > 1 or handed_on or looped


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.keyword):
        return [node.arg] if node.arg else []
    return [alias.name.rpartition(".")[2] for alias in node.names]  # type: ignore[attr-defined]


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    """Arguments of a call by name."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def source_of(task: object) -> str | None:
    """The source of a person's function or script; None for other tasks and where it cannot be found."""
    if callable(read := getattr(task, "source_text", None)):
        text: str | None = read()
        return text
    while isinstance(task, functools.partial):
        task = task.func
    if not inspect.isfunction(task) and not inspect.ismethod(task):
        return None
    try:
        return inspect.getsource(task)
    except (OSError, TypeError):
        return None


def names_engine(task: object) -> bool:
    """Whether a person's function reads ``engine`` off something that it was given, as ``ctx.engine``.

    What functions that it calls do is not looked at, nor a function without a source.
    """
    source = source_of(task)
    if source is None or "engine" not in source:
        return False
    script = Script(source=source)
    given = {node.arg for node in script.walk(ast.arg) if isinstance(node, ast.arg)} - {"self"}
    read = (node for node in script.walk(ast.Attribute) if isinstance(node, ast.Attribute))
    return any(
        node.attr == "engine" and isinstance(node.value, ast.Name) and node.value.id in given for node in read
    )
