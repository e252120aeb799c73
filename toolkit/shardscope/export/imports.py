"""The import statements of a script: whatever its parts ask for, once each and in order."""

from __future__ import annotations

import ast
import sys

WIDTH = 110


def imports_of(*parts: str) -> str:
    """Import statements of several texts as one: the standard library's, then others', sorted."""
    plain: set[str] = set()
    named: dict[str, set[str]] = {}
    for node in ast.parse("\n".join(parts)).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            named.setdefault(node.module, set()).update(alias.name for alias in node.names)
        else:
            plain.add(ast.unparse(node))
    lines = [(line.split()[1], line) for line in sorted(plain)]
    lines += [(module, _from(module, named[module])) for module in sorted(named)]
    ours: list[str] = []
    others: list[str] = []
    for module, line in lines:
        (ours if module.partition(".")[0] in sys.stdlib_module_names else others).append(line)
    return "\n".join((*ours, "", *others))


def _from(module: str, names: set[str]) -> str:
    """In the order of isort: constants, classes, functions."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name.strip("_")[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= WIDTH:
        return line
    listed = "".join(f"    {name},\n" for name in ordered)
    return f"from {module} import (\n{listed})"
