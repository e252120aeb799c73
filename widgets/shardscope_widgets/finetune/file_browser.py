"""The folders of the server, to choose a data file, a folder of them, or a model's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from html import escape
from itertools import islice
from pathlib import Path

from shardscope.training.examples.folder_files import LOADERS
from shardscope_widgets.kit.clickable import Clickable, IgnoredError

MAX_SCANNED = 5000
"""Entries that are read of a folder: one with a million files shall not stop the notebook."""
MAX_SHOWN = 200
MAX_PATH = 44
"""Characters of the folder's path in the heading."""
MODEL_FILE = "config.json"
UP, HERE, GO, PICK = "up", "here", "go", "pick"
"""Actions; the last two have the number of the entry."""


class FileBrowser(Clickable):
    """One folder at a time: its folders, and what can be picked. ``on_pick`` receives the path.

    ``picks_folder(folder)`` returns whether a folder can be picked itself, ``suffixes`` the endings of files
    that can be. Empty until :meth:`toggle`.
    """

    def __init__(
        self,
        title: str,
        on_pick: Callable[[Path], None],
        *,
        picks_folder: Callable[[Path], bool],
        suffixes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(self._handle_action, "ss-browser")
        self._title, self._on_pick = title, on_pick
        self._picks_folder, self._suffixes = picks_folder, suffixes
        self._folder = Path()
        self._entries: list[Path] = []
        self._lines: list[str] = []
        self._note = ""
        self.is_open = False

    def toggle(self, typed: str = "") -> None:
        """Open at the folder that ``typed`` is or lies in, or close."""
        self.is_open = not self.is_open
        if not self.is_open:
            self.value = ""
        else:
            path = Path(typed).expanduser().absolute() if typed else Path.cwd()
            self._open(next(folder for folder in (path, *path.parents) if folder.is_dir()))

    def _handle_action(self, act: str) -> None:
        name, _, number = act.partition(":")
        if name == UP:
            self._open(self._folder.parent)
        elif name == HERE and self._picks_folder(self._folder):
            self._pick(self._folder)
        elif name in (GO, PICK) and number.isdigit() and int(number) < len(self._entries):
            path = self._entries[int(number)]
            (self._open if name == GO else self._pick)(path)
        else:
            raise IgnoredError(act)

    def _pick(self, path: Path) -> None:
        self.toggle()
        self._on_pick(path)

    def _open(self, folder: Path) -> None:
        try:
            with os.scandir(folder) as entries:
                scanned = list(islice(entries, MAX_SCANNED))
            folders, files = self._sort(scanned)
        except OSError as error:
            # The folder shown before stays.
            self.value = self._render(f"{folder} cannot be opened: {error.strerror or error}.")
            return
        self._folder = folder
        # Half of the lines for each, unless the other has fewer.
        num_folders = min(len(folders), max(MAX_SHOWN // 2, MAX_SHOWN - len(files)))
        shown = [*folders[:num_folders], *files[: MAX_SHOWN - num_folders]]
        self._entries = [Path(entry.path) for entry in shown]
        self._lines = [self._render_entry(number, entry) for number, entry in enumerate(shown)]
        left = len(folders) + len(files) - len(shown)
        note = f"{left:,} more are not listed: type the path. " if left else ""
        if len(scanned) == MAX_SCANNED:
            note += f"Only {MAX_SCANNED:,} entries of this folder were read."
        self._note = note or ("" if shown else f"No folders, and no {self._title}, here.")
        self.value = self._render("")

    def _sort(self, entries: list[os.DirEntry[str]]) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
        """Return the folders, and the files that can be picked, by name."""
        visible = sorted(
            (entry for entry in entries if not entry.name.startswith(".")),
            key=lambda entry: entry.name.lower(),
        )
        folders = [entry for entry in visible if _is_folder(entry)]
        names = set(self._suffixes)
        files = [
            entry for entry in visible if Path(entry.name).suffix.lower() in names and entry not in folders
        ]
        return folders, files

    def _render_entry(self, number: int, entry: os.DirEntry[str]) -> str:
        name = escape(entry.name)
        # Data are often in folders of folders; a model's folder is seldom opened.
        is_model = not self._suffixes and self._picks_folder(Path(entry.path))
        act = GO if _is_folder(entry) and not is_model else PICK
        note = "" if act == GO else "model" if is_model else _format_size(entry)
        slash = "/" if act == GO else ""
        button = f"<button type='button' class='ss-{act}' data-act='{act}:{number}'>{name}{slash}</button>"
        return f"{button}<span>{note}</span>"

    def _render(self, error: str) -> str:
        parent = escape(str(self._folder.parent), quote=True)
        up = f"<button type='button' class='ss-act' data-act='{UP}' title='{parent}'>Up</button>"
        here = (
            f"<button type='button' class='ss-act' data-act='{HERE}'>Use this folder</button>"
            if self._picks_folder(self._folder)
            else ""
        )
        alert = f"<p role='alert'>{escape(error)}</p>" if error else ""
        lines = "".join(f"<li>{line}</li>" for line in self._lines)
        note = f"<p class='ss-soft'>{escape(self._note)}</p>" if self._note else ""
        return (
            f"<div role='group' aria-label='Choose {escape(self._title, quote=True)}'>"
            f"<div class='ss-browser-head'>{up}{_render_folder(self._folder)}{here}</div>"
            f"{alert}<ul data-roving>{lines}</ul>{note}</div>"
        )


def _render_folder(folder: Path) -> str:
    """Return a path, of a long one the end."""
    text = str(folder)
    shown = text if len(text) <= MAX_PATH else f"…{text[1 - MAX_PATH :]}"
    return f"<b title='{escape(text, quote=True)}'>{escape(shown)}</b>"


def has_data_files(folder: Path) -> bool:
    """Return whether a folder can be data: one of its first files has a known ending."""
    return _has_entry(folder, lambda name: Path(name).suffix.lower() in LOADERS)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder has the configuration of a Hugging Face model."""
    try:
        return (folder / MODEL_FILE).is_file()
    except OSError:
        return False


def shorten_path(path: Path) -> str:
    """Return the path as a user would type it: relative, if it lies in the notebook's folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def _has_entry(folder: Path, is_wanted: Callable[[str], bool]) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(is_wanted(entry.name) for entry in islice(entries, MAX_SCANNED))
    except OSError:
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _format_size(entry: os.DirEntry[str]) -> str:
    try:
        size = float(entry.stat().st_size)
    except OSError:  # A link that leads nowhere.
        return ""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:  # What rounding would turn into 1000.
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
