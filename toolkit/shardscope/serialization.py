"""Nouns to JSON and back: versioned, strict about keys, the same for every noun."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from shardscope.validation import known_keys, refuse

FORMAT_VERSION = 1
"""Raised when the meaning of a stored field changes; older versions stay readable."""


class JsonNoun:
    """Adds ``to_dict/from_dict`` (plain, for nesting) and ``to_json/from_json`` (versioned, for files)."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; nested nouns as dicts of their own."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.init
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The noun that ``to_dict`` described. Raises ``ValueError`` for unknown or missing keys."""
        known_keys(cls.__name__, data, [f.name for f in dataclasses.fields(cls) if f.init])  # type: ignore[arg-type]
        try:
            return cls(**data)
        except TypeError as missing:
            raise ValueError(f"{cls.__name__} cannot be made from {sorted(data)}: {missing}") from missing

    def to_json(self) -> str:
        """One JSON object: the noun's name, the format version and its fields."""
        envelope = {"shardscope": type(self).__name__, "version": FORMAT_VERSION, **self.to_dict()}
        return json.dumps(envelope, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote; ``ValueError`` for other nouns, versions, keys or values."""
        data = read_envelope(text, cls.__name__)
        return cls.from_dict(data)


def read_envelope(text: str, noun: str) -> dict[str, Any]:
    """The fields inside a versioned JSON text, after checking noun, version and duplicate keys."""
    given: object = text
    if not isinstance(given, str):
        fix = f"{noun}.from_dict" if isinstance(given, Mapping) else f"the text that {noun}.to_json() gives"
        refuse(f"{noun} JSON", given, "text (a str)", fix)
    try:
        # A byte-order mark is what Windows editors add; it carries no meaning.
        data = json.loads(text.lstrip("\ufeff"), object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"{noun} JSON, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(
            f"{noun} JSON is nested too deeply; allowed: what {noun}.to_json() gives."
        ) from error
    if not isinstance(data, dict):
        refuse(f"{noun} JSON", data, "one JSON object", f"the text that {noun}.to_json() gives")
    if data.pop("shardscope", None) != noun:
        refuse(f"{noun} JSON key 'shardscope'", text[:40], repr(noun), f"use {noun}.from_json on a {noun}")
    version = data.pop("version", None)
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        refuse(f"{noun} JSON version", version, f"1 to {FORMAT_VERSION}", "pip install -U shardscope")
    return data


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"JSON key {key!r} stands twice; keep one of {data[key]!r} and {value!r}.")
        data[key] = value
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, JsonNoun):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
