"""Positions of values in a text, so that validation errors name the file, line and key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardscope.core.errors import FieldError

KeyPath = tuple[str, ...]
"""Path to a value: its keys, outermost first."""


@dataclass(kw_only=True)
class TextPositions:
    """The values of one text and their line numbers."""

    name: str
    """Display name of the text, usually the file's name."""
    values: Mapping[str, object]
    """All values, nested as in the text."""
    lines: dict[KeyPath, int]
    """Key path -> line number, from 1."""
    names: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Key path -> that in the text, of keys that :meth:`rename_key` has renamed."""

    def get(self, *keys: str) -> object:
        """Return the value at the path ``keys``; None if it does not exist."""
        value: object = self.values
        for key in keys:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def rename_key(self, keys: KeyPath, name: str) -> None:
        """Give the value at ``keys`` another name; locations still have the one in the text."""
        section = self.get(*keys[:-1])
        assert isinstance(section, dict)
        section[name] = section.pop(keys[-1])
        self.names[(*keys[:-1], name)] = keys
        for path in [path for path in self.lines if path[: len(keys)] == keys]:
            self.lines[(*keys[:-1], name, *path[len(keys) :])] = self.lines.pop(path)

    def get_name(self, keys: KeyPath) -> KeyPath:
        """Return the key path as the text has it."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.names:
                return (*self.names[keys[:length]], *keys[length:])
        return keys

    def locate(self, *keys: str) -> str:
        """Return the location of a key for messages: file, line, key."""
        return self.locate_all([keys])

    def locate_all(self, paths: Iterable[KeyPath]) -> str:
        """Return the location of several keys: ``a.yaml, line 3, b.c and line 7, d``."""
        return f"{self.name}, {' and '.join(self._describe_position(keys) for keys in paths)}"

    def _describe_position(self, keys: KeyPath) -> str:
        # A missing key has no line of its own: use the line of its section.
        sections = (keys[:length] for length in range(len(keys), 0, -1))
        line = next((self.lines[section] for section in sections if section in self.lines), None)
        return f"{f'line {line}, ' if line else ''}{'.'.join(self.get_name(keys))}"

    def add_location(self, error: FieldError, paths: Mapping[str, KeyPath]) -> FieldError:
        """Return the error with the locations of the fields that it names; ``paths`` has their key paths.

        The invalid fields come first, then those that the message compares them with. For a product of
        degrees, fields that are 1 are omitted.
        """
        # A product of degrees has no field at fault: only degrees above 1 are worth a line number.
        invalid = [paths[name] for name in error.field_names if name in paths]
        compared = [paths[name] for name in error.mentioned_names if name in paths]
        if len(error.field_names) > 1:  # a product
            invalid, compared = [], invalid + compared
        # A missing field is located at its section.
        located = [
            keys for keys in invalid if any(self._is_present(keys[:end]) for end in range(1, len(keys) + 1))
        ]
        located += [
            keys
            for keys in dict.fromkeys(compared)
            if keys not in invalid and self._is_present(keys) and not _is_one(self.get(*keys))
        ]
        keys_to_name = located or invalid
        return error.with_location(self.locate_all(keys_to_name) if keys_to_name else self.name)

    def _is_present(self, keys: KeyPath) -> bool:
        return keys in self.lines or self.get(*keys) is not None


def _is_one(value: object) -> bool:
    return type(value) is int and value == 1
