"""Serialization of the public objects: versioned JSON with strict keys."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from shardscope.core.errors import FieldError, known_keys, refuse
from shardscope.core.html_table import html_dataclass
from shardscope.core.json_text import key_lines, parse_json
from shardscope.core.text_positions import Keys, Places

Made = TypeVar("Made")

FORMAT_VERSION = 1
"""Incremented when the meaning of a stored field changes; older versions stay readable."""


class JsonNoun:
    """Mixin with ``to_dict/from_dict`` (plain, nested) and ``to_json/from_json`` (versioned, for files)."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, nested objects as dicts."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.init
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create the object from ``to_dict``'s output. Raises ``ValueError`` for unknown or missing keys."""
        fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        known_keys(cls.__name__, data, [field.name for field in fields])
        for field in fields:
            # A missing field without default would raise TypeError in the constructor.
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            if field.name not in data and not has_default:
                refuse(f"{cls.__name__}.{field.name}", None, "a value, for it has no default", "put it in")
        return cls(**data)

    def to_json(self) -> str:
        """Return one JSON object with the class name, the format version and the fields."""
        envelope = {"shardscope": type(self).__name__, "version": FORMAT_VERSION, **self.to_dict()}
        return json.dumps(envelope, indent=2)

    def _repr_html_(self) -> str:
        """Return the fields as an HTML table for notebooks."""
        return html_dataclass(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Create the object from :meth:`to_json`'s output.

        Raises ``ValueError`` for another class, an unknown version, and bad keys or values.
        """
        return from_text(text, cls.__name__, cls.from_dict)


def part(noun: type[Any], data: Mapping[str, Any], key: str) -> Any:
    """Create the nested ``noun`` from ``data[key]``. Its errors get ``key`` in front of their path."""
    try:
        return noun.from_dict(data[key])
    except FieldError as refusal:
        refusal.way = (key, *refusal.way)
        raise


def from_text(text: str, noun: str, make: Callable[[Mapping[str, Any]], Made]) -> Made:
    """Return ``make(fields)`` of a versioned JSON text. Its errors name line and key."""
    data = _read_envelope(text, noun)
    try:
        return make(data)
    except FieldError as refusal:
        places = _places(text, noun, data)
        raise places.located(refusal, _ways(places.lines, refusal, noun)) from refusal


def _places(text: str, noun: str, data: Mapping[str, Any]) -> Places:
    """Return the positions of all keys; without line numbers if the text is a single line."""
    lines = key_lines(text) if "\n" in text.strip() else {}
    return Places(name=f"{noun} JSON", values=data, lines=lines)


def _ways(lines: Mapping[Keys, int], refusal: FieldError, noun: str) -> dict[str, Keys]:
    """Return the key paths of the invalid fields, and of the fields that the message compares them with."""
    inside = refusal.way
    owner = re.match(r"\w*", refusal.field)[0]  # type: ignore[index]
    part_name = re.sub(r"(?<!^)(?=[A-Z])", "_", owner).lower()
    found: dict[str, Keys] = {}
    # Field names repeat in nested objects: prefer the path inside the object that raised the error.
    for name in dict.fromkeys((*refusal.refused, *refusal.named)):
        places = [way for way in lines if way[-1] == name and way[: len(inside)] == inside]
        of_part = [way for way in places if way[-2:-1] == (part_name,)]
        if of_part or (name not in refusal.refused and len(places) == 1):
            found[name] = (of_part or places)[0]
        elif name in refusal.refused and (inside or owner == noun):
            found[name] = (*inside, name)
    return found


def _read_envelope(text: str, noun: str) -> dict[str, Any]:
    """Return the fields of a versioned JSON text. Raises ``ValueError`` for another class or version."""
    given: object = text
    if not isinstance(given, str):
        fix = f"{noun}.from_dict" if isinstance(given, Mapping) else f"the text that {noun}.to_json() gives"
        refuse(f"{noun} JSON", given, "text (a str)", fix)
    try:
        # Windows editors add a byte-order mark; it has no meaning.
        data = parse_json(f"{noun} JSON", text.lstrip("\ufeff"))
    except RecursionError as error:
        raise ValueError(
            f"{noun} JSON is nested too deeply; allowed: what {noun}.to_json() gives."
        ) from error
    if not isinstance(data, dict):
        refuse(f"{noun} JSON", data, "one JSON object", f"the text that {noun}.to_json() gives")
    kind, version = data.get("shardscope"), data.get("version")
    if kind != noun:
        where = _places(text, noun, data).where("shardscope")
        refuse(where, kind, repr(noun), f"use {noun}.from_json on a {noun}")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        where = _places(text, noun, data).where("version")
        refuse(where, version, f"1 to {FORMAT_VERSION}", "pip install -U shardscope")
    return {key: value for key, value in data.items() if key not in ("shardscope", "version")}


def _plain(value: Any) -> Any:
    if isinstance(value, JsonNoun):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
