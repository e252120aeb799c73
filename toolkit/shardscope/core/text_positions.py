"""Positions of values in a text, so that validation errors name the file, line and key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardscope.core.errors import FieldError

Keys = tuple[str, ...]
"""Path to a value: its keys, outermost first."""


@dataclass(kw_only=True)
class Places:
    """The values of one text and their line numbers."""

    name: str
    """Display name of the text, usually the file's name."""
    values: Mapping[str, Any]
    """All values, nested as in the text."""
    lines: dict[Keys, int]
    """Key path -> line number, from 1."""

    def get(self, *keys: str) -> Any:
        """Return the value at the path ``keys``; None if it does not exist."""
        found: Any = self.values
        for key in keys:
            if not isinstance(found, Mapping):
                return None
            found = found.get(key)
        return found

    def where(self, *keys: str) -> str:
        """Return the location of a key for messages: file, line, key."""
        return self.all_of([keys])

    def all_of(self, ways: Iterable[Keys]) -> str:
        """Return the location of several keys: ``a.yaml, line 3, b.c and line 7, d``."""
        return f"{self.name}, {' and '.join(self._at(keys) for keys in ways)}"

    def _at(self, keys: Keys) -> str:
        # A missing key has no line of its own: use the line of its section.
        parts = (keys[:length] for length in range(len(keys), 0, -1))
        line = next((self.lines[part] for part in parts if part in self.lines), None)
        return f"{f'line {line}, ' if line else ''}{'.'.join(keys)}"

    def located(self, refusal: FieldError, ways: Mapping[str, Keys]) -> FieldError:
        """Return the error with the locations of the fields that it names; ``ways`` has their key paths.

        The invalid fields come first, then those that the message compares them with. For a product of
        degrees, fields that are 1 are omitted.
        """
        own = [ways[name] for name in refusal.refused if name in ways]
        others = [ways[name] for name in refusal.named if name in ways]
        if len(refusal.refused) > 1:  # a product
            own, others = [], own + others
        # A missing field is located at its section.
        found = [keys for keys in own if any(self._says(keys[:end]) for end in range(1, len(keys) + 1))]
        found += [
            keys
            for keys in dict.fromkeys(others)
            if keys not in own and self._says(keys) and not _is_one(self.get(*keys))
        ]
        places = found or own
        return refusal.behind(self.all_of(places) if places else self.name)

    def _says(self, keys: Keys) -> bool:
        return keys in self.lines or self.get(*keys) is not None


def _is_one(value: object) -> bool:
    return type(value) is int and value == 1
