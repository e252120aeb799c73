"""Checks of a launch's arguments, before anything is created."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.frameworks.registry import check_trained
from shardscope.runs.launch.environment import check_seconds
from shardscope.runs.requirements import check_train_extra
from shardscope.runs.task_source import check_task, uses_engine

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NEEDED = ("torch", "accelerate", "cloudpickle")
MAX_NAME_LENGTH = 100
MAX_NAME_BYTES = 240
"""A folder's name has at most 255 bytes (Linux's NAME_MAX), some of which a number at its end needs."""


def check_request(plan: Plan, task: object, parent: Path, name: str | None) -> None:
    """Check plan, task and installed packages, whatever machines run them.

    Raises ``ValueError`` or ``ImportError`` as ``ss.launch`` does.
    """
    check_plan(plan)
    check_task("launch.task", task)
    check_train_extra("Launching", NEEDED)
    check_seconds(os.environ)
    _check_task_and_plan(plan, task, parent, name)


def check_plan(plan: object) -> None:
    """Raise ``ValueError`` unless ``plan`` is a plan."""
    from shardscope.core.plan import Plan  # Imported lazily: ``import shardscope`` must take milliseconds.

    if not isinstance(plan, Plan):
        refuse("launch.plan", plan, "a Plan", "ss.Plan(architecture, cluster, recipe, layout)")


def check_name(field: str, name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """Return ``name``. Raises ``ValueError`` naming ``field`` unless it can be a folder's name."""
    fits = isinstance(name, str) and 0 < len(name) <= max_length and not name.startswith(".")
    if not fits or any(not character.isprintable() or character in "/\\" for character in name):
        allowed = f"1 to {max_length} printable characters without slashes, not starting with a dot"
        refuse(field, name, allowed, Value("my-run"))
    # Other alphabets have up to four bytes per character.
    max_bytes = MAX_NAME_BYTES - (MAX_NAME_LENGTH - max_length)
    encoded = name.encode()
    if len(encoded) > max_bytes:
        allowed = f"at most {max_bytes} bytes in UTF-8; these are {len(encoded)}"
        refuse(field, name, allowed, Value(encoded[:max_bytes].decode(errors="ignore")))
    return name


def _check_task_and_plan(plan: Plan, task: object, parent: Path, name: str | None) -> None:
    """Raise ``ValueError`` if the task cannot run the plan: here, instead of seconds later on the ranks."""
    check = getattr(task, "check", None)
    if callable(check):
        check(plan)
    elif uses_engine(task):  # The user's own function: ctx.engine would raise on every rank.
        check_trained(plan)
    if callable(check_launch := getattr(task, "check_launch", None)):
        check_launch(plan, parent, name)
