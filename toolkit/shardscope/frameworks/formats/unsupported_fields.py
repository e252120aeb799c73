"""Fields of a plan that a format lacks, listed in a comment of its file and read back from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import refuse
from shardscope.core.recipe import Recipe
from shardscope.frameworks.formats.text import uncommented

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.text_positions import Keys
    from shardscope.frameworks.formats.documents import Document

    Says = dict[str, tuple[Keys, Any]]

ALWAYS = frozenset({"seq_len", "micro_batch_size", "global_batch_size", "method", "precision", "optimizer"})
"""Recipe fields that are listed even if they have their default value: every run needs them."""
COMMENT = "# Not said here"
OPENING = "Not said here, for this format has no words for it, and up to"


def unsaid(plan: Plan, recipe: Collection[str], layout: Collection[str] = ()) -> list[tuple[str, object]]:
    """Return fields and values of the plan that a file does not contain.

    ``recipe`` and ``layout`` are the names of fields that it does contain. Fields with their default value
    are left out, except those in :data:`ALWAYS`.
    """
    found: list[tuple[str, object]] = []
    for noun, said, always in ((plan.recipe, recipe, ALWAYS), (plan.layout, layout, frozenset())):
        for field in fields(noun):
            value = getattr(noun, field.name)
            if field.name not in said and (field.name in always or value != field.default):
                found.append((field.name, value))
    return found


def sentences(found: list[tuple[str, object]], who: str) -> list[str]:
    """Return ``found`` as sentences of a comment, which leaves these fields to ``who``."""
    if not found:
        return []
    listed = ", ".join(f"{name}={value!r}" for name, value in found)
    return [f"{OPENING} {who}: {listed}."]


def stated(text: str, name: str) -> dict[str, Any]:
    """Return fields and values that :func:`sentences` wrote into a comment of ``text``, the file ``name``.

    Raises ``ValueError`` if the comment cannot be parsed after an edit.
    """
    found: dict[str, Any] = {}
    for sentence in uncommented(text):
        if not sentence.startswith(OPENING):
            continue
        listed = sentence.partition(": ")[2].removesuffix(".")
        try:
            call = ast.parse(f"dict({listed})", mode="eval").body
            assert isinstance(call, ast.Call)
            found |= {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, AssertionError) as error:
            line = _comment_line(text, COMMENT)
            raise ValueError(
                f'{name}, line {line}, the comment "{OPENING} ...": it is to list field=value, and cannot be '
                "read; fix it, or delete it and give recipe=."
            ) from error
    return found


def noted(document: Document, text: str, layout: type[Layout]) -> tuple[Says, Says]:
    """Return the recipe's and the layout's fields in an export's comment, and record their lines.

    Raises ``ValueError`` for a field that neither recipe nor ``layout`` has.
    """
    of_recipe = {field.name for field in fields(Recipe)}
    known = of_recipe | {field.name for field in fields(layout)}
    recipe_says: Says = {}
    layout_says: Says = {}
    for name, value in stated(text, document.name).items():
        line = _comment_line(text, rf"\b{name}=")
        if name not in known:
            where = f"{document.name}, line {line}, its comment of what is not said here: this field"
            refuse(where, name, ", ".join(sorted(known)), "leave it out")
        says = recipe_says if name in of_recipe else layout_says
        says[name] = ((COMMENT, name), value)
        document.lines[(COMMENT, name)] = line
    return recipe_says, layout_says


def _comment_line(text: str, pattern: str) -> int:
    lines = enumerate(text.splitlines(), start=1)
    return next((number for number, line in lines if line.startswith("#") and re.search(pattern, line)), 1)
