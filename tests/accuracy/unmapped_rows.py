"""The error that explains why a row has no plan."""

from __future__ import annotations


class UnmappedError(Exception):
    """The row cannot be a plan: the reason is what the report counts."""
