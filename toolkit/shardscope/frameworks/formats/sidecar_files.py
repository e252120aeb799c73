"""Parts of a plan that a file does not contain: the caller's arguments or ``plan.json`` in its folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import FieldError, Value, refuse, with_article
from shardscope.core.recipe import Recipe
from shardscope.core.text_positions import Keys
from shardscope.frameworks.formats.documents import Document, text_of
from shardscope.frameworks.formats.exported import PLAN_FILE

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan

Said = Mapping[str, tuple[Keys, Any]]
"""Recipe or layout field -> its keys in a file and its value; None: the file does not set it."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Parts of a plan that another tool's file does not contain."""

    architecture: Architecture | None
    cluster: Cluster | None
    recipe: Recipe
    layout: Layout | None
    """Layout of the ``plan.json`` in the file's folder, if there is one."""
    is_recipe_open: bool = False
    """Whether neither the caller nor a ``plan.json`` gives the recipe."""

    def need(self, noun: str, file: str, fix: str) -> Any:
        """Return the part named ``noun``. Raises ``ValueError`` if it is missing."""
        found = getattr(self, noun)
        if found is None:
            article = "an" if noun[0] in "aeiou" else "a"
            allowed = (
                f"{article} {noun.capitalize()}: {file} does not hold one, and no {PLAN_FILE} lies beside it"
            )
            refuse(noun, None, allowed, f"{noun}={fix}")
        return found

    def the_architecture(self, file: str) -> Architecture:
        """Return the architecture, which few files contain. Raises ``ValueError`` if it is missing."""
        found: Architecture = self.need("architecture", file, 'ss.models["llama-3.1-8b"]')
        return found

    def the_cluster(self, file: str) -> Cluster:
        """Return the cluster, of which files contain at most the world size. Raises ``ValueError``."""
        found: Cluster = self.need("cluster", file, 'ss.Cluster.parse("8xh100-sxm-80gb")')
        return found


def rest_of(
    file: str | Path | None,
    architecture: Architecture | None,
    cluster: Cluster | None,
    recipe: Recipe | None,
) -> Rest:
    """Return the caller's arguments, completed from ``plan.json`` in the folder of ``file``, if it exists.

    Raises ``ValueError`` for arguments of another type and for an invalid ``plan.json``.
    """
    from shardscope.core.architecture import Architecture as AnArchitecture
    from shardscope.core.cluster import Cluster as ACluster
    from shardscope.core.plan import Plan

    for noun, value, kind in (
        ("architecture", architecture, AnArchitecture),
        ("cluster", cluster, ACluster),
        ("recipe", recipe, Recipe),
    ):
        if value is not None and not isinstance(value, kind):
            refuse(noun, value, f"{with_article(kind.__name__)} or None", Value(None))
    beside = Path(file).expanduser().parent / PLAN_FILE if file is not None else None
    stored = None
    if beside is not None and beside.is_file() and None in (architecture, cluster, recipe):
        try:
            stored = Plan.from_json(text_of(beside))
        except ValueError as error:
            raise ValueError(f"{beside}, beside the file, is no plan: {error}") from error
    return Rest(
        architecture=architecture or (stored.architecture if stored else None),
        cluster=cluster or (stored.cluster if stored else None),
        recipe=recipe or (stored.recipe if stored else Recipe()),
        layout=stored.layout if stored else None,
        is_recipe_open=recipe is None and stored is None,
    )


def changed(recipe: Recipe, document: Document, said: Said) -> Recipe:
    """Return ``recipe`` with the values in ``said``. Raises ``ValueError`` with file, line and key."""
    values = {field: value for field, (_, value) in said.items() if value is not None}
    with named(document, said):
        return replace(recipe, **values)


def planned(
    rest: Rest, document: Document, recipe: Recipe, said: Said, make_layout: Callable[[], Layout]
) -> Plan:
    """Return the plan that a file describes; ``said`` has the keys of layout and recipe fields.

    Raises ``ValueError`` with file, line and key for invalid values. Warns of keys that were not read.
    """
    from shardscope.core.plan import Plan

    with named(document, said):
        layout = make_layout()
    # Errors in the file are reported before missing parts.
    architecture, cluster = rest.the_architecture(document.name), rest.the_cluster(document.name)
    with named(document, said):
        plan = Plan(architecture, cluster, recipe, layout)
    if document.unread():
        warnings.warn(
            f"{document.name}: not understood, and so not in the plan: {', '.join(document.unread())}",
            stacklevel=4,
        )
    return plan


@contextmanager
def named(document: Document, said: Said) -> Iterator[None]:
    """Add file, line and key to errors of fields that the file sets."""
    try:
        yield
    except FieldError as refusal:
        ways = {field: keys for field, (keys, _) in said.items()}
        raise document.located(refusal, ways) from refusal
