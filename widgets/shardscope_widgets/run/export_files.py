"""The files of an export as a list: the purpose of each one, and its launch command to copy."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from shlex import quote

from shardscope.frameworks.formats.exported import Exported


def listed(files: Sequence[Exported], folder: Path) -> str:
    """Return the list as HTML, files that need no further values first; ``folder`` contains them."""
    rows = "".join(_row(file, folder) for file in sorted(files, key=_start_order))
    return (
        f"<div class='ss-files'><div class='ss-hint'>{len(files)} files in "
        f"<code>{escape(str(folder))}</code></div><ul>{rows}</ul></div>"
    )


def _start_order(file: Exported) -> tuple[bool, int]:
    return not file.start_command, len(file.inputs)


def _row(file: Exported, folder: Path) -> str:
    return f"<li><code>{escape(file.name)}</code><div>{escape(file.what)}{_command(file, folder)}</div></li>"


def _command(file: Exported, folder: Path) -> str:
    if not file.start_command:
        return ""
    # The copied command includes the folder, because a terminal may be in any directory.
    whole = escape(f"cd {quote(str(folder.absolute()))} && {file.start_command}", quote=True)
    told = escape(f"Copy the command that starts {file.name}", quote=True)
    asked = [f"{'<...>' if name.isdigit() else name}: {words}" for name, words in file.inputs]
    return (
        f"<div class='ss-command'><code title='{whole}'>{escape(file.start_command)}</code>"
        f"<button type='button' class='ss-act' data-copy='{whole}' aria-label='{told}'>Copy</button></div>"
        + "".join(f"<div>{escape(words)}</div>" for words in asked)
    )
