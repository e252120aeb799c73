"""Parts of a plan that a file does not contain: the caller's arguments or ``plan.json`` in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardscope.core.errors import FieldError, Value, add_article, refuse, warn_user
from shardscope.core.recipe import Recipe
from shardscope.core.serialization import replace_fields
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.formats.documents import Document, read_text
from shardscope.frameworks.formats.exported import PLAN_FILE
from shardscope.machine.user_folders import expand_home

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan

FileFields = dict[str, tuple[KeyPath, object]]
"""Recipe or layout field -> its keys in a file and its value; None: the file does not set it."""


@dataclass(frozen=True, kw_only=True)
class PlanParts:
    """Parts of a plan that another tool's file does not contain."""

    architecture: Architecture | None
    cluster: Cluster | None
    recipe: Recipe
    layout: Layout | None
    """Layout of the ``plan.json`` in the file's folder, if there is one."""
    is_recipe_open: bool = False
    """Whether neither the caller nor a ``plan.json`` gives the recipe."""

    def require_architecture(self, file: str) -> Architecture:
        """Return the architecture, which few files contain. Raises ``ValueError`` if it is missing."""
        return _require(self.architecture, "architecture", file, 'ss.models["llama-3.1-8b"]')

    def require_cluster(self, file: str) -> Cluster:
        """Return the cluster, of which files contain at most the world size. Raises ``ValueError``."""
        return _require(self.cluster, "cluster", file, 'ss.Cluster.parse("8xh100-sxm-80gb")')


Part = TypeVar("Part")


def _require(part: Part | None, noun: str, file: str, fix: str) -> Part:
    """Return the part. Raises ``ValueError`` if it is None, since neither caller nor files have it."""
    if part is None:
        kind = add_article(noun.capitalize())
        refuse(
            noun, None, f"{kind}: {file} has none, and there is no {PLAN_FILE} in its folder", f"{noun}={fix}"
        )
    return part


def load_plan_parts(
    file: str | Path | None,
    architecture: Architecture | None,
    cluster: Cluster | None,
    recipe: Recipe | None,
) -> PlanParts:
    """Return the caller's arguments, completed from ``plan.json`` in the folder of ``file``, if it exists.

    Raises ``ValueError`` for arguments of another type and for an invalid ``plan.json``.
    """
    from shardscope.core.architecture import Architecture as ArchitectureClass
    from shardscope.core.cluster import Cluster as ClusterClass
    from shardscope.core.plan import Plan

    for noun, value, kind in (
        ("architecture", architecture, ArchitectureClass),
        ("cluster", cluster, ClusterClass),
        ("recipe", recipe, Recipe),
    ):
        if value is not None and not isinstance(value, kind):
            refuse(noun, value, f"{add_article(kind.__name__)} or None", Value(None))
    # An export has plan.json in the same folder. It is read only if the caller leaves something open.
    plan_file = expand_home(file).parent / PLAN_FILE if file is not None else None
    stored = None
    if plan_file is not None and plan_file.is_file() and None in (architecture, cluster, recipe):
        try:
            stored = Plan.from_json(read_text(plan_file))
        except ValueError as error:
            raise ValueError(f"{plan_file} is not a valid plan: {error}") from error
    return PlanParts(
        architecture=architecture or (stored.architecture if stored else None),
        cluster=cluster or (stored.cluster if stored else None),
        recipe=recipe or (stored.recipe if stored else Recipe()),
        layout=stored.layout if stored else None,
        is_recipe_open=recipe is None and stored is None,
    )


def apply_to_recipe(recipe: Recipe, document: Document, file_fields: FileFields) -> Recipe:
    """Return ``recipe`` with the values in ``file_fields``. Raises ``ValueError`` with file, line and key."""
    values = {field: value for field, (_, value) in file_fields.items() if value is not None}
    with locate_errors(document, file_fields):
        return replace_fields(recipe, values)


def build_plan(
    parts: PlanParts,
    document: Document,
    recipe: Recipe,
    file_fields: FileFields,
    make_layout: Callable[[], Layout],
) -> Plan:
    """Return the plan that a file describes; ``file_fields`` has the keys of layout and recipe fields.

    Raises ``ValueError`` with file, line and key for invalid values. Warns of keys that were not read.
    """
    from shardscope.core.plan import Plan

    with locate_errors(document, file_fields):
        layout = make_layout()
    # Errors in the file are reported before missing parts.
    architecture, cluster = parts.require_architecture(document.name), parts.require_cluster(document.name)
    with locate_errors(document, file_fields):
        plan = Plan(architecture, cluster, recipe, layout)
    warn_of_unread_keys(document)
    return plan


def warn_of_unread_keys(document: Document) -> None:
    """Warn of keys that are valid for the other tool but not part of a plan, if there are any."""
    sentences = []
    if unread := document.list_unread_keys():
        sentences.append(f"not understood, and so not in the plan: {', '.join(unread)}")
        if costly := document.list_costly_keys():
            sentences.append(
                f"Predictions are without {', '.join(costly)}, which can change memory or step time"
            )
    sentences += document.list_ignored_keys()
    if sentences:
        warn_user(f"{document.name}: {'. '.join(sentences)}", UserWarning)


@contextmanager
def locate_errors(document: Document, file_fields: FileFields) -> Iterator[None]:
    """Add file, line and key to errors of fields that the file sets."""
    try:
        yield
    except FieldError as refusal:
        key_paths = {field: keys for field, (keys, _) in file_fields.items()}
        raise document.add_location(refusal, key_paths) from refusal
