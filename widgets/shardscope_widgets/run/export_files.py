"""The files of an export as a list: the purpose of each one, and its launch command to copy."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from shlex import quote

from shardscope.frameworks.formats.exported import Exported


def render_file_list(files: Sequence[Exported], folder: Path) -> str:
    """Return the list as HTML, files that need no further values first; ``folder`` contains them."""
    rows = "".join(_render_file(file, folder) for file in sorted(files, key=_start_order))
    return (
        f"<div class='ss-files'><div class='ss-hint'>{len(files)} files in "
        f"<code>{escape(str(folder))}</code></div><ul>{rows}</ul></div>"
    )


def _start_order(file: Exported) -> tuple[bool, int]:
    return not file.start_command, len(file.inputs)


def _render_file(file: Exported, folder: Path) -> str:
    command = _render_command(file, folder)
    return f"<li><code>{escape(file.name)}</code><div>{escape(file.what)}{command}</div></li>"


def _render_command(file: Exported, folder: Path) -> str:
    if not file.start_command:
        return ""
    # The copied command includes the folder, because a terminal may be in any directory.
    command = escape(f"cd {quote(str(folder.absolute()))} && {file.start_command}", quote=True)
    label = escape(f"Copy the command that starts {file.name}", quote=True)
    open_values = [f"{'<...>' if name.isdigit() else name}: {line}" for name, line in file.inputs]
    return (
        f"<div class='ss-command'><code title='{command}'>{escape(file.start_command)}</code>"
        f"<button type='button' class='ss-act' data-copy='{command}' aria-label='{label}'>Copy</button></div>"
        + "".join(f"<div>{escape(line)}</div>" for line in open_values)
    )
