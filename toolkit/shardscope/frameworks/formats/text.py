"""Text of YAML, comments and shell-safe names in exported files."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping

WIDTH = 100

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", "none"})
"""Strings that some YAML reader parses as another type."""


def format_comment(sentences: Iterable[str]) -> str:
    """Return sentences as lines with "# "; continuation lines are indented."""
    lines: list[str] = []
    for sentence in sentences:
        # One line first: a model's name may contain line breaks, which would end the comment.
        plain = " ".join(sentence.split())
        lines += textwrap.wrap(
            plain, WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "".join(f"# {line}\n" for line in lines)


def render_yaml(values: Mapping[str, object], indent: int = 0) -> str:
    """Return nested mappings of scalars, lists of scalars, lists of mappings and text of several lines as
    YAML, in their own order."""
    lines = []
    for key, value in values.items():
        name = f"{' ' * indent}{key}:"
        if isinstance(value, Mapping):
            lines.append(f"{name}\n{render_yaml(value, indent + 2)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines.append(f"{name}\n{''.join(_render_item(item, indent) for item in value)}")
        elif isinstance(value, str) and "\n" in value:
            # A block scalar: its lines are written as they are.
            lines.append(f"{name} |\n{textwrap.indent(value, ' ' * (indent + 2))}")
        else:
            lines.append(f"{name} {_render_scalar(value)}\n")
    return "".join(lines)


def _render_item(item: Mapping[str, object], indent: int) -> str:
    """Return one mapping of a list: a dash takes the place of the first line's indentation."""
    text = render_yaml(item, indent + 2)
    return f"{' ' * indent}- {text[indent + 2 :]}"


def _render_scalar(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_render_scalar(item) for item in value)}]"
    # Anything but a plain word is written as JSON, which YAML contains.
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)


def make_shell_safe(text: str) -> str:
    """Return ``text`` as a name that is safe in a shell, a file name and a Slurm job."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:64] or "plan"
