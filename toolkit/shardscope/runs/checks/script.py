"""Syntax tree of a training script or function: its calls, imports and the ancestors of a node."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding, Severity

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MAX_CHARACTERS = 2**20
"""Maximum length of a source text, longer than any script written by hand."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
RANK = re.compile(
    r"((global|local|node|world|dist|ddp|dp|my|process)_)?(rank|RANK)(_id)?|get_(\w+_)?rank"
    r"|(local_)?process_index|is_\w*(main|master|rank)\w*|\w*main_process\w*|(LOCAL_|NODE_)RANK"
)
"""Names of variables and functions that are a rank, or whether it is the first one."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Source code, and the plan that it trains, if known."""

    source: str
    """Python code, or the text of an accelerate configuration."""
    plan: Plan | None = None

    @cached_property
    def tree(self) -> ast.Module | None:
        """Syntax tree; None if the text is not Python. The source of a nested function is dedented."""
        # ast.parse raises more than SyntaxError: ValueError for null bytes, the others for deep nesting.
        for text in (self.source, textwrap.dedent(self.source)):
            try:
                return ast.parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
        return None

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes in source order; nodes without a line come first."""
        nodes = [] if self.tree is None else list(ast.walk(self.tree))
        return sorted(nodes, key=find_line)

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Imported name by local name: ``FSDP`` -> ``FullyShardedDataParallel``."""
        return {
            alias.asname or alias.name: alias.name.rpartition(".")[2]
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }

    @cached_property
    def defined(self) -> set[str]:
        """Names of the functions and classes that the script defines."""
        return {node.name for node in self.nodes if isinstance(node, DEFINITIONS)}

    def resolve_name(self, node: ast.AST) -> str:
        """Return the imported name of a name or attribute, "" for other nodes."""
        if isinstance(node, ast.Attribute):
            return node.attr
        return self.aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """Lines of each name and attribute outside imports, by its imported name."""
        lines: dict[str, list[int]] = {}
        for node in self.nodes:
            if name := self.resolve_name(node):
                lines.setdefault(name, []).append(find_line(node))
        return lines

    def find_calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of these names in source order, resolving import aliases."""
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Call) and self.resolve_name(node.func) in names
        ]

    def walk_up(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of ``node``, innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def find_scope(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost function or class around ``node``; None for the module level."""
        return next((one for one in self.walk_up(node) if isinstance(one, DEFINITIONS)), None)

    def reads_rank(self, *nodes: ast.AST) -> bool:
        """Return whether ``nodes`` read a rank: ``rank``, ``os.environ["RANK"]``, ``dist.get_rank()``."""
        return any(self.is_rank(inner) for one in nodes for inner in ast.walk(one))

    def is_rank(self, node: ast.AST) -> bool:
        """Return whether ``node`` names a rank: a variable, a function or an environment variable."""
        text = node.value if isinstance(node, ast.Constant) else self.resolve_name(node)
        return isinstance(text, str) and RANK.fullmatch(text) is not None

    @cached_property
    def is_distributed(self) -> bool:
        """Return whether the script uses several ranks, or is a task function with the parameter ``ctx``."""
        makers = ("init_process_group", "DistributedDataParallel", "fully_shard", "Accelerator")
        named = any(name in self.uses for name in (*makers, "FullyShardedDataParallel", "get_rank"))
        return named or self.plan is not None or any(getattr(node, "arg", "") == "ctx" for node in self.nodes)


def find_line(node: ast.AST) -> int:
    """Return the first line of a node, 0 for nodes without one."""
    return int(getattr(node, "lineno", 0))


def read_keywords(call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call by name."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def is_constant(node: ast.AST | None, *values: object) -> bool:
    """Return whether ``node`` is one of these literals."""
    return isinstance(node, ast.Constant) and node.value in values


def flag_line(
    line: int, name: str, severity: Severity, why: str, change: str, number: float | None = None
) -> Finding:
    """Return a finding about a line."""
    return Finding(
        name=name, severity=severity, why=f"Line {line}: {why}", number=number, change=change, line=line
    )
