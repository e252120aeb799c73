"""Other tools' configuration files as nested values with line numbers for error messages."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from shardscope.core.errors import Fix, Value, check_choice, check_integer, find_similar, refuse, warn_user
from shardscope.core.json_text import blank_comments, check_depth, find_key_lines, parse_json
from shardscope.core.text_positions import KeyPath, TextPositions
from shardscope.machine.user_folders import expand_home

if TYPE_CHECKING:
    import yaml  # type: ignore[import-untyped,unused-ignore]

Choice = TypeVar("Choice")

MAX_BYTES = 1_000_000
"""Maximum size of a file; real configurations have a few kilobytes."""


@dataclass(kw_only=True)
class Document(TextPositions):
    """Content of one file. Every ``ValueError`` names the file, the line and the key."""

    costly_keys: frozenset[str] = frozenset()
    """Names of keys that are in no plan although they change memory or step time."""
    _unread: list[tuple[str, str]] = field(default_factory=list)
    """(name of a key, its description) for each key that a plan cannot represent."""
    _ignored: list[str] = field(default_factory=list)
    """Sentences about keys that the other tool itself ignores."""

    def read_section(self, *keys: str) -> Mapping[str, object]:
        """Return the mapping at ``keys``, empty if missing or null. Raises ``ValueError`` otherwise."""
        section = self.get(*keys)
        if section is None:
            return {}
        if not isinstance(section, Mapping):
            self.refuse(keys, "a mapping of keys to values", "leave it out")
        return section

    def read_number(self, *keys: str, low: int, high: int = 2**53) -> int | None:
        """Return an integer from ``low`` to ``high``, written 500000000 or 5e8; None if it is missing."""
        value = self.get(*keys)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # DeepSpeed's own examples write 5e8
        return check_integer(self.locate(*keys), value, low=low, high=high)

    def read_flag(self, *keys: str) -> bool | None:
        """Return a boolean, in any spelling of YAML readers and accelerate's environment; None if missing."""
        value = self.get(*keys)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or isinstance(value, bool):
            return value
        return self.refuse(keys, "true or false", "true" if value else "false")

    def read_choice(self, *keys: str, among: Iterable[Choice]) -> Choice | None:
        """Return one of ``among``; None if it is missing."""
        value = self.get(*keys)
        return None if value is None else check_choice(self.locate(*keys), value, among)

    def refuse(self, keys: KeyPath, allowed: str, fix: Fix) -> NoReturn:
        """Raise ``ValueError`` for the value at ``keys``."""
        refuse(self.locate(*keys), self.get(*keys), allowed, fix)

    def check_keys(
        self, keys: KeyPath, planned: Iterable[str], ignored: Mapping[str, object] | Iterable[str]
    ) -> None:
        """Raise ``ValueError`` for unknown keys under ``keys``, with a similar known key if there is one.

        ``planned`` are the keys that become part of a plan, ``ignored`` the format's other keys. The latter
        are listed in :meth:`list_unread_keys`, unless their value is the default given in ``ignored``, or one
        of the defaults in a tuple.
        """
        # A key with the default value changes nothing, so it needs no warning.
        planned = list(planned)
        defaults = ignored if isinstance(ignored, Mapping) else {}
        known = [*planned, *ignored]
        for key, value in self.read_section(*keys).items():
            if key not in known:
                similar = find_similar(key, known)
                allowed = f"{similar or known[0]!r} and {len(known) - 1} other keys"
                fix: Fix = Value(similar) if similar else "leave it out"
                refuse(f"{self.locate(*keys, key)}: this key", key, allowed, fix)
            if key not in planned and not (key in defaults and _is_default(value, defaults[key])):
                self.add_unread_key((*keys, key))

    def add_unread_key(self, keys: KeyPath) -> None:
        """Add a key that the other tool accepts and a plan cannot represent."""
        self._unread.append((self.get_name(keys)[-1], self._describe_key(keys)))

    def add_ignored_key(self, keys: KeyPath, reason: str) -> None:
        """Add a key that the other tool accepts and ignores, with the reason as a clause."""
        self._ignored.append(f"{self._describe_key(keys)} is not in the plan: {reason}")

    def _describe_key(self, keys: KeyPath) -> str:
        return f"{'.'.join(self.get_name(keys))} (line {self.lines.get(keys)})"

    def list_ignored_keys(self) -> tuple[str, ...]:
        """Return sentences about the file's keys that the other tool ignores."""
        return tuple(self._ignored)

    def list_unread_keys(self) -> tuple[str, ...]:
        """Return the file's valid keys that a plan cannot represent."""
        return tuple(description for _, description in self._unread)

    def list_costly_keys(self) -> tuple[str, ...]:
        """Return the names of those that change memory or step time."""
        return tuple(name for name, _ in self._unread if name in self.costly_keys)


def _is_default(value: object, default: object) -> bool:
    return value in default if isinstance(default, tuple) else value == default


def read_text(file: str | Path) -> str:
    """Return the text of ``file``. Raises ``ValueError`` unless it is a readable UTF-8 file of up to 1 MB."""
    if not isinstance(file, str | Path) or not str(file) or "\0" in str(file):
        has_content = isinstance(file, Mapping)
        refuse("file", file, "the path of a file", "a file with this" if has_content else "the file's path")
    path = expand_home(file)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a FIFO would block, a device never ends
            refuse("file", str(file), "a regular file", "the path of the file itself")
        if status.st_size > MAX_BYTES:
            refuse("file", str(file), f"at most {MAX_BYTES:,} bytes", "a configuration")
        # "utf-8-sig" drops the byte order mark that Windows editors write.
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 at byte {error.start}; save it as UTF-8.") from error


def read_json(file: str | Path, allow_comments: bool = False) -> Document:
    """Read a JSON file with one object. Raises ``ValueError`` for anything else.

    ``allow_comments`` allows trailing commas, too. A file with either is reported: not every tool reads it.
    """
    text, name = read_text(file), Path(file).name
    plain = blank_comments(text) if allow_comments else text
    check_depth(name, plain)
    values = parse_json(name, plain)
    if not isinstance(values, dict):
        refuse(name, values, "one JSON object", Value({}))
    if plain != text:
        warn_user(
            f"{name} has comments or trailing commas: deepspeed.initialize reads them, but Accelerate and "
            "transformers' Trainer stop at them.",
            UserWarning,
        )
    return Document(name=name, values=values, lines=find_key_lines(plain))


def read_yaml(file: str | Path) -> Document:
    """Read a YAML file with one mapping of scalars, lists and mappings, without tags and aliases.

    Raises ``ValueError`` for anything else, and ``ModuleNotFoundError`` without PyYAML.
    """
    text, name = read_text(file), Path(file).name
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('Reading YAML needs PyYAML: pip install "shardscope[train]".') from error
    # ``compose`` returns nodes, which have line numbers and whose tags have not run any constructor.
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{name}{line}: {getattr(error, 'problem', None) or error}.") from error
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply to be a configuration.") from error
    lines: dict[KeyPath, int] = {}
    values = _YamlConverter(name, lines).convert(root, ()) if root is not None else None
    if not isinstance(values, dict):
        refuse(name, values, "one YAML mapping", "distributed_type: FSDP")
    return Document(name=name, values=values, lines=lines)


class _YamlConverter:
    """Conversion of YAML nodes to plain values. Aliases are errors: they can expand without bound."""

    def __init__(self, name: str, lines: dict[KeyPath, int]) -> None:
        import yaml

        self.name, self.lines = name, lines
        self.yaml = yaml
        self.loader = yaml.SafeLoader("")
        self.seen: set[int] = set()

    def convert(self, node: yaml.Node, keys: KeyPath) -> object:
        """Return the value of the node at ``keys``, and record the lines of the keys below."""
        # An alias is the node of its anchor, met a second time.
        if id(node) in self.seen:
            raise self._make_error(node, "an alias; allowed: the value itself")
        self.seen.add(id(node))
        if isinstance(node, self.yaml.ScalarNode):
            return self._convert_scalar(node, keys)
        if isinstance(node, self.yaml.SequenceNode):
            return [self.convert(item, keys) for item in node.value]
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, self.yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self._make_error(key_node, "a key that is not a string; allowed: plain keys")
            # PyYAML would keep the last of two equal keys without a warning.
            if key in values:
                raise self._make_error(key_node, f"duplicate key {key!r}; remove one of the two")
            self.lines[(*keys, key)] = key_node.start_mark.line + 1
            values[key] = self.convert(value_node, (*keys, key))
        return values

    def _convert_scalar(self, node: yaml.ScalarNode, keys: KeyPath) -> object:
        try:
            value: object = self.loader.construct_object(node)
        except (self.yaml.YAMLError, ValueError) as error:
            line, value_text = node.start_mark.line + 1, node.value[:40]
            raise ValueError(
                f"{self.name}, line {line}, {'.'.join(keys)}: {value_text!r} is not a plain value."
            ) from error
        return value

    def _make_error(self, node: yaml.Node, problem: str) -> ValueError:
        return ValueError(f"{self.name}, line {node.start_mark.line + 1}: {problem}.")
