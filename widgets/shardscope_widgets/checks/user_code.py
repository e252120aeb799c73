"""The user's code to check: a file, or a function of this notebook by name."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

MAX_BYTES = 2**20
BYTE_ORDER_MARK = "\ufeff"
SUFFIXES = (".py", ".yaml", ".yml")


class UserCode(NamedTuple):
    """The text to check, and its origin."""

    text: str
    file: Path
    function: str = ""
    """The function's name; empty for a file."""
    known: str = ""
    """Notebook imports that a function uses, appended to its text for the check."""


def read_user_code(name: str, functions: Mapping[str, object]) -> UserCode:
    """Return the file at the path ``name``, or the function of that name among ``functions``.

    Raise ``ValueError`` with a message for the user.
    """
    file = _expand_path(name)
    function = functions.get(name)
    if not _is_file(file) and inspect.isfunction(function):
        text, known = _read_function_source(name, function), write_imports_of(function)
        return UserCode(text, file.with_name(f"{name}.py"), name, known)
    return UserCode(_read_text(file, functions).removeprefix(BYTE_ORDER_MARK), file)


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # The name is too long for a path.
        return False


def list_notebook_functions() -> Mapping[str, object]:
    """Return the names defined in the notebook's cells; none outside a notebook."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def _read_function_source(name: str, function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ValueError(f"{name} has no source text: define the function in a cell.") from None


def write_imports_of(function: FunctionType) -> str:
    """Return the imports behind the function's global names, one per line; "" if there are none."""
    lines = []
    for name in sorted(_find_names(function.__code__)):
        value = function.__globals__.get(name)
        if inspect.ismodule(value):
            lines.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif (origin := _find_origin(value)) is not None:
            home, original_name = origin
            lines.append(
                f"from {home} import {original_name}" + ("" if original_name == name else f" as {name}")
            )
    return "".join(f"\n{line}" for line in lines) + "\n" if lines else ""


def _find_names(code: CodeType) -> set[str]:
    """Return the names that a function and its inner functions use."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *(name for one in inner for name in _find_names(one))}


def _find_origin(value: object) -> tuple[str, str] | None:
    """Return the shortest module path that has a class or function, and its name there.

    None for objects that the notebook defines, and for anything but classes and functions.
    """
    module = getattr(value, "__module__", None)
    if not (inspect.isclass(value) or inspect.isroutine(value)) or module in (None, "__main__", "builtins"):
        return None
    parts = str(module).split(".")
    homes = (".".join(parts[: number + 1]) for number in range(len(parts)))
    # Not getattr, which would trigger the imports of a lazily importing package.
    name = value.__name__
    home = next((one for one in homes if vars(sys.modules.get(one, sys)).get(name) is value), None)
    return None if home is None else (home, name)


def _expand_path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def _read_text(file: Path, functions: Mapping[str, object]) -> str:
    try:
        with file.open("rb") as opened:
            # One byte more than allowed shows that the file is too large without reading all of it.
            data = opened.read(MAX_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text file: byte {error.start} is not UTF-8.") from None
    except (OSError, ValueError) as error:
        near = _find_nearest_name(file, functions)
        hint = f" Closest name: {near}." if near else ""
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{file} cannot be read: {reason}.{hint}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{file} has more than 1 MiB: too large for a training script.")
    return text


def _find_nearest_name(file: Path, functions: Mapping[str, object]) -> str | None:
    """Return the closest name among the folder's files and the notebook's functions."""
    try:
        files = {one.name: str(one) for one in file.parent.iterdir() if one.suffix in SUFFIXES}
    except OSError:
        files = {}
    notebook_names = {
        name: name
        for name, value in functions.items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == "__main__"
    }
    matches = get_close_matches(file.name, [*files, *notebook_names], n=1)
    return {**notebook_names, **files}[matches[0]] if matches else None
