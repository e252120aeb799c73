"""Serialization of the public objects: versioned JSON with strict keys."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from shardscope.core.errors import FieldError, check_keys, refuse
from shardscope.core.html_table import render_html_dataclass
from shardscope.core.json_text import find_key_lines, parse_json
from shardscope.core.text_positions import KeyPath, TextPositions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")

FORMAT_VERSION = 1
"""Incremented when the meaning of a stored field changes; older versions stay readable."""


class Serializable:
    """Mixin with ``to_dict/from_dict`` (plain, nested) and ``to_json/from_json`` (versioned, for files)."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]  # subclasses are dataclasses

    def to_dict(self) -> dict[str, object]:
        """Return all fields by name, nested objects as dicts."""
        return {
            field.name: _to_plain_data(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.init
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Create the object from ``to_dict``'s output. Raises ``ValueError`` for unknown or missing keys."""
        fields = [field for field in dataclasses.fields(cls) if field.init]
        check_keys(cls.__name__, data, [field.name for field in fields])
        for field in fields:
            # A missing field without default would raise TypeError in the constructor.
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            if field.name not in data and not has_default:
                refuse(
                    f"{cls.__name__}.{field.name}",
                    None,
                    "a value, because the field has no default",
                    f"add {field.name!r}",
                )
        return cls(**data)

    def to_json(self) -> str:
        """Return one JSON object with the class name, the format version and the fields."""
        envelope = {"shardscope": type(self).__name__, "version": FORMAT_VERSION, **self.to_dict()}
        return json.dumps(envelope, indent=2)

    def _repr_html_(self) -> str:
        """Return the fields as an HTML table for notebooks."""
        return render_html_dataclass(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Create the object from :meth:`to_json`'s output.

        Raises ``ValueError`` for another class, an unknown version, and bad keys or values.
        """
        return parse_text(text, cls.__name__, cls.from_dict)


def replace_fields(subject: D, changes: Mapping[str, object]) -> D:
    """Return a copy of a dataclass with ``changes``, like ``dataclasses.replace``.

    For field names that are known at run time only, whose types mypy cannot check. Raises ``ValueError``
    like the constructor.
    """
    values = {field.name: getattr(subject, field.name) for field in dataclasses.fields(subject) if field.init}
    return type(subject)(**{**values, **changes})


def read_parts(data: Mapping[str, object], kinds: Mapping[str, type[Serializable]]) -> dict[str, object]:
    """Return ``data`` with an object of ``kinds[key]`` instead of each nested mapping ``data[key]``.

    Other values of these keys are left to the constructor's checks. Errors have ``key`` in their path.
    """
    fields = dict(data)
    for key, kind in kinds.items():
        value = fields.get(key)
        if not isinstance(value, Mapping):
            continue
        try:
            fields[key] = kind.from_dict(value)
        except FieldError as error:
            error.key_path = (key, *error.key_path)
            raise
    return fields


def parse_text(text: str, class_name: str, create: Callable[[Mapping[str, object]], T]) -> T:
    """Return ``create(fields)`` of a versioned JSON text. Its errors name line and key."""
    data = _read_envelope(text, class_name)
    try:
        return create(data)
    except FieldError as error:
        positions = _find_positions(text, class_name, data)
        paths = _find_key_paths(positions.lines, error, class_name)
        raise positions.add_location(error, paths) from error


def _find_positions(text: str, class_name: str, data: Mapping[str, object]) -> TextPositions:
    """Return the positions of all keys; without line numbers if the text is a single line."""
    lines = find_key_lines(text) if "\n" in text.strip() else {}
    return TextPositions(name=f"{class_name} JSON", values=data, lines=lines)


def _find_key_paths(lines: Mapping[KeyPath, int], error: FieldError, class_name: str) -> dict[str, KeyPath]:
    """Return the key paths of the invalid fields, and of the fields that the message compares them with."""
    parent = error.key_path
    owner = re.match(r"\w*", error.field)[0]  # type: ignore[index]
    part_name = re.sub(r"(?<!^)(?=[A-Z])", "_", owner).lower()
    paths: dict[str, KeyPath] = {}
    # Field names repeat in nested objects: prefer the path inside the object that raised the error.
    for name in dict.fromkeys((*error.field_names, *error.mentioned_names)):
        candidates = [path for path in lines if path[-1] == name and path[: len(parent)] == parent]
        in_part = [path for path in candidates if path[-2:-1] == (part_name,)]
        if in_part or (name not in error.field_names and len(candidates) == 1):
            paths[name] = (in_part or candidates)[0]
        elif name in error.field_names and (parent or owner == class_name):
            paths[name] = (*parent, name)
    return paths


def _read_envelope(text: object, class_name: str) -> dict[str, object]:
    """Return the fields of a versioned JSON text. Raises ``ValueError`` for another class or version."""
    source = f"the text that {class_name}.to_json() returns"
    path = str(text) if isinstance(text, str | PathLike) else ""
    if path.endswith(".json") and "{" not in path:
        fix = f"{class_name}.from_json(Path({path!r}).read_text())"
        refuse(f"{class_name} JSON", path, f"{source}, not the path of its file", fix)
    if not isinstance(text, str):
        fix = f"{class_name}.from_dict" if isinstance(text, Mapping) else source
        refuse(f"{class_name} JSON", text, "text (a str)", fix)
    try:
        # Windows editors add a byte-order mark; it has no meaning.
        data = parse_json(f"{class_name} JSON", text.lstrip("\ufeff"))
    except RecursionError as error:
        raise ValueError(f"{class_name} JSON is nested too deeply; allowed: {source}.") from error
    if not isinstance(data, dict):
        refuse(f"{class_name} JSON", data, "one JSON object", source)
    # The class before the fields: an unknown key would hide that the file holds another object.
    stored_class, version = data.get("shardscope"), data.get("version")
    if stored_class != class_name:
        location = _find_positions(text, class_name, data).locate("shardscope")
        refuse(location, stored_class, repr(class_name), f"use {class_name}.from_json on a {class_name}")
    # Not isinstance, because true is an int in Python.
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        location = _find_positions(text, class_name, data).locate("version")
        refuse(location, version, f"1 to {FORMAT_VERSION}", "pip install -U shardscope")
    return {key: value for key, value in data.items() if key not in ("shardscope", "version")}


def _to_plain_data(value: object) -> object:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _to_plain_data(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain_data(item) for item in value]
    return value
