"""Fields of a plan that a format lacks, listed in a comment of its file and read back from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.recipe import Recipe
from shardscope.frameworks.formats.text import parse_comment

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.frameworks.formats.documents import Document
    from shardscope.frameworks.formats.sidecar_files import FileFields


ALWAYS = frozenset({"seq_len", "micro_batch_size", "global_batch_size", "method", "precision", "optimizer"})
"""Recipe fields that are listed even if they have their default value: every run needs them."""
COMMENT = "# Not said here"
OPENING = "Not said here, for this format has no words for it, and up to"


def find_unsupported_fields(
    plan: Plan, recipe_fields: Collection[str], layout_fields: Collection[str] = ()
) -> list[tuple[str, object]]:
    """Return fields and values of the plan that a file does not contain.

    ``recipe_fields`` and ``layout_fields`` are the names of fields that it does contain. Fields with their
    default value are left out, except those in :data:`ALWAYS`.
    """
    missing: list[tuple[str, object]] = []
    for noun, contained, always in (
        (plan.recipe, recipe_fields, ALWAYS),
        (plan.layout, layout_fields, frozenset()),
    ):
        for field in fields(noun):
            value = getattr(noun, field.name)
            if field.name not in contained and (field.name in always or value != field.default):
                missing.append((field.name, value))
    return missing


def describe_fields(missing: list[tuple[str, object]], owner: str) -> list[str]:
    """Return ``missing`` as sentences of a comment, which leaves these fields to ``owner``."""
    if not missing:
        return []
    listed = ", ".join(f"{name}={value!r}" for name, value in missing)
    return [f"{OPENING} {owner}: {listed}."]


def parse_fields(text: str, name: str) -> dict[str, object]:
    """Return the fields in a comment of ``text`` by :func:`describe_fields`; ``name`` is the file's.

    Raises ``ValueError`` if the comment cannot be parsed after an edit.
    """
    values: dict[str, object] = {}
    for sentence in parse_comment(text):
        if not sentence.startswith(OPENING):
            continue
        listed = sentence.partition(": ")[2].removesuffix(".")
        try:
            call = ast.parse(f"dict({listed})", mode="eval").body
            assert isinstance(call, ast.Call)
            values |= {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, AssertionError) as error:
            line = _find_comment_line(text, COMMENT)
            raise ValueError(
                f'{name}, line {line}, the comment "{OPENING} ...": allowed: a list of field=value. Nearest '
                "fix: correct it, or delete it and pass recipe=."
            ) from error
    return values


def read_noted_fields(document: Document, text: str, layout: type[Layout]) -> tuple[FileFields, FileFields]:
    """Return the recipe's and the layout's fields in an export's comment, and record their lines.

    Raises ``ValueError`` for a field that neither recipe nor ``layout`` has.
    """
    recipe_names = {field.name for field in fields(Recipe)}
    known = recipe_names | {field.name for field in fields(layout)}
    recipe_values: FileFields = {}
    layout_values: FileFields = {}
    for name, value in parse_fields(text, document.name).items():
        line = _find_comment_line(text, rf"\b{name}=")
        if name not in known:
            where = f"{document.name}, line {line}, the comment of fields that the format lacks: this field"
            refuse(where, name, ", ".join(sorted(known)), "leave it out")
        target = recipe_values if name in recipe_names else layout_values
        target[name] = ((COMMENT, name), value)
        document.lines[(COMMENT, name)] = line
    return recipe_values, layout_values


def _find_comment_line(text: str, pattern: str) -> int:
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if line.startswith("#") and re.search(pattern, line)), 1)
