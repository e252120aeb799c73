"""Plan fields that another tool's format cannot express: written into comments of its file, and read back.

An exported file stays valid for its own tool. A plan that is read from it alone, without ``plan.json``, is
complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.recipe import Recipe
from shardscope.frameworks.formats.text import format_comment

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.frameworks.formats.documents import Document
    from shardscope.frameworks.formats.sidecar_files import FileFields


ALWAYS = frozenset({"seq_len", "micro_batch_size", "global_batch_size", "method", "precision", "optimizer"})
"""Recipe fields that are listed even if they have their default value: every run needs them."""
# The colon tells these lines from ordinary comments with an equals sign.
FIELD_LINE = re.compile(r"#: *(\w+) *= *(.*)")
"""Comment line with one field: ``#: seq_len = 4096``, the value as JSON."""
SECTION = "comment"
"""First key of these fields in a document's key paths, as if the comment were a section of the file."""


def find_missing_fields(
    plan: Plan, recipe_fields: Collection[str], layout_fields: Collection[str] = ()
) -> list[tuple[str, object]]:
    """Return fields and values of the plan that a file does not contain.

    ``recipe_fields`` and ``layout_fields`` are the names of fields that it does contain. Fields with their
    default value are left out, except those in :data:`ALWAYS`.
    """
    missing: list[tuple[str, object]] = []
    for part, contained, always in (
        (plan.recipe, recipe_fields, ALWAYS),
        (plan.layout, layout_fields, frozenset()),
    ):
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name not in contained and (field.name in always or value != field.default):
                missing.append((field.name, value))
    return missing


def render_comment_fields(missing: list[tuple[str, object]], owner: str) -> str:
    """Return ``missing`` as comment lines, under a sentence that leaves these fields to ``owner``."""
    if not missing:
        return ""
    heading = format_comment([f"Fields of the plan that this format cannot express, which {owner} sets:"])
    return heading + "".join(f"#: {name} = {json.dumps(value)}\n" for name, value in missing)


def read_comment_fields(document: Document, text: str, layout: type[Layout]) -> tuple[FileFields, FileFields]:
    """Return the recipe's and the layout's fields in the comments of ``text``, and record their lines.

    Raises ``ValueError`` for a field that neither recipe nor ``layout`` has, or a value that is not JSON.
    """
    recipe_names = {field.name for field in fields(Recipe)}
    known = recipe_names | {field.name for field in fields(layout)}
    recipe_values: FileFields = {}
    layout_values: FileFields = {}
    for line, name, value_text in _find_field_lines(text):
        where = f"{document.name}, line {line}, a plan field in a comment"
        if name not in known:
            refuse(f"{where}: its name", name, ", ".join(sorted(known)), "delete the line")
        # RecursionError: deep nesting exhausts Python's parser before it is found to be invalid.
        try:
            value: object = json.loads(value_text)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}, {name}: {value_text[:40]!r} is not JSON; allowed: a line #: field = value. "
                "Nearest fix: correct it, or delete it and pass recipe=."
            ) from error
        target = recipe_values if name in recipe_names else layout_values
        target[name] = ((SECTION, name), value)
        # For errors of the constructors, which know the field only.
        document.lines[(SECTION, name)] = line
    return recipe_values, layout_values


def _find_field_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, field, value as JSON) for each comment line with a field."""
    for number, line in enumerate(text.splitlines(), start=1):
        match = FIELD_LINE.fullmatch(line.rstrip())
        if match:
            yield number, match[1], match[2]
