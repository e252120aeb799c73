"""Where in a text a refused value stands: a refusal of what a file says names its lines and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardscope.core.errors import FieldError

Keys = tuple[str, ...]
"""The way to a value: the keys from the outside to it."""


@dataclass(kw_only=True)
class Places:
    """The values of one text, and the lines on which they stand."""

    name: str
    """What a person calls the text: mostly a file's name."""
    values: Mapping[str, Any]
    """The whole, nested as the text nests it."""
    lines: dict[Keys, int]
    """The line (from 1) on which each key stands, by the way to it."""

    def get(self, *keys: str) -> Any:
        """The value at the end of ``keys``; None where there is none."""
        found: Any = self.values
        for key in keys:
            if not isinstance(found, Mapping):
                return None
            found = found.get(key)
        return found

    def where(self, *keys: str) -> str:
        """A key, its file and its line, as messages name it."""
        return self.all_of([keys])

    def all_of(self, ways: Iterable[Keys]) -> str:
        """Several keys: ``a.yaml, line 3, b.c and line 7, d``."""
        return f"{self.name}, {' and '.join(self._at(keys) for keys in ways)}"

    def _at(self, keys: Keys) -> str:
        # A key that is left out would stand where its section does.
        parts = (keys[:length] for length in range(len(keys), 0, -1))
        line = next((self.lines[part] for part in parts if part in self.lines), None)
        return f"{f'line {line}, ' if line else ''}{'.'.join(keys)}"

    def located(self, refusal: FieldError, ways: Mapping[str, Keys]) -> FieldError:
        """The same refusal, behind the places of all that it names; ``ways`` has the keys of its fields.

        What is refused comes first, then what it is held against. Of a product, what is 1 has no part in it.
        """
        own = [ways[name] for name in refusal.refused if name in ways]
        others = [ways[name] for name in refusal.named if name in ways]
        if len(refusal.refused) > 1:  # a product
            own, others = [], own + others
        # A key that is left out is missing where its section stands.
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
