"""A training script or configuration of a person's own, checked; a click mends a copy beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches, unified_diff
from html import escape
from pathlib import Path

import shardscope as ss
from shardscope.planner.preflight import Finding, findings_in, noted
from shardscope.planner.preflight.script import Script
from shardscope_widgets import shared
from shardscope_widgets.checks_view import ChecksView
from shardscope_widgets.view import View

NOTHING = "Nothing to mend: no check has anything against this file."
NOT_READ = "This is no Python, nor a configuration: a syntax error, or a notebook. Nothing was checked."
CONFIGURATIONS = (".yaml", ".yml")
MAX_BYTES = 2**20
CONTEXT_LINES = 1
MARK = "\ufeff"
"""What Windows' editors begin a file of UTF-8 with."""


class ScriptChecks(View):
    """Asks for a file, and shows what the preflight finds in it; it is read, never run.

    What is applied is written to a copy (``train.mended.py``), what no click can mend is noted there as a
    comment. The file itself stays as it is, and so does a copy that somebody has changed meanwhile.
    ``on_apply`` gets the plan of a strategy that only a plan can take over.
    """

    def __init__(
        self, plan: ss.Plan | None = None, *, on_apply: Callable[[ss.Plan], None] | None = None
    ) -> None:
        self._plan = plan
        self._file: Path | None = None
        self._copy: Path | None = None
        self._mark = self._before = self._text = self._error = ""
        self.path = shared.text(
            "",
            "A training script, or an accelerate configuration: the path of a file",
            placeholder="train.py or accelerate.yaml",
        )
        self.path.observe(self._read, "value")
        self.words = shared.html()
        self.checks = ChecksView(on_apply=on_apply, on_apply_source=self._take, on_note=self._note)
        self.changed = shared.html()
        head = shared.html("<h2>Your script <span class='ss-hint'>read, never run</span></h2>")
        super().__init__([head, self.path, self.words, self.checks, self.changed], layout=shared.layout())
        for name in ("ss-root", "ss-script"):
            self.add_class(name)
        self._show()

    def offer(self, plan: ss.Plan) -> None:
        """Check the file against ``plan``."""
        if plan is not self._plan:
            self._plan = plan
            self._show()

    def freeze(self, frozen: bool) -> None:
        """Let nothing be pressed: what is shown is no answer to what is asked now."""
        self.checks.freeze(frozen)

    def _read(self, change: object = None) -> None:
        self._file = self._copy = None
        self._mark = self._before = self._error = ""
        name = self.path.value.strip()
        try:
            if name:
                # A notebook may change its folder before the click.
                file = _expanded(name)
                text = _text_of(file)
                self._file, self._before = file.absolute(), text.removeprefix(MARK)
                self._mark = text[: len(text) - len(self._before)]
        except ValueError as error:
            self._error = str(error)
        self._text = self._before
        self._show()

    def _take(self, text: str) -> None:
        assert self._file is not None
        try:
            left, new = ((self._mark + each).encode() for each in (self._text, text))
            self._copy = _write(new, self._file, self._copy, left)
        except OSError as error:
            self._error = f"No copy in {self._file.parent} can be written: {error.strerror}."
        else:
            self._text, self._error = text, ""
        self._show()

    def _note(self, finding: Finding) -> None:
        text = noted(self._text, finding)
        assert text is not None
        self._take(text)

    def _show(self) -> None:
        self.words.value = f"<p class='ss-error'>{escape(self._error)}</p>" if self._error else ""
        self.checks.layout = shared.layout(display="" if self._file else "none")
        self.checks.nothing = NOTHING if self._is_understood() else NOT_READ
        found = findings_in(self._text, self._plan) if self._file else []
        self.checks.show(found, notable=[one for one in found if noted(self._text, one) is not None])
        self.changed.value = "" if self._copy is None else _changed(self._before, self._text, self._copy)

    def _is_understood(self) -> bool:
        suffix = "" if self._file is None else self._file.suffix
        is_python = suffix != ".ipynb" and Script(source=self._text).tree is not None
        return is_python or suffix in CONFIGURATIONS


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def _text_of(file: Path) -> str:
    """The file's text, line ends as they are. Raises ``ValueError`` in words."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: byte {error.start} is no UTF-8.") from None
    except (OSError, ValueError) as error:
        near = _nearest(file)
        hint = f" Nearest: {near}." if near else ""
        words = getattr(error, "strerror", None) or error
        raise ValueError(f"{file} cannot be read: {words}.{hint}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{file} has more than 1 MiB, which no training script has.")
    return text


def _write(data: bytes, file: Path, copy: Path | None, left: bytes) -> Path:
    """Write to ``copy``, if that is as it was ``left``, or else to a new one. Raises ``OSError``."""
    if copy is not None and not copy.is_symlink() and copy.is_file() and copy.read_bytes() == left:
        copy.write_bytes(data)
        return copy
    for number in range(1, 1000):
        name = file.with_name(f"{file.stem}.mended{f'-{number}' * (number > 1)}{file.suffix}")
        with suppress(FileExistsError), name.open("xb") as opened:
            opened.write(data)
            return name
    raise OSError(None, "a thousand mended copies are there already")


def _nearest(file: Path) -> Path | None:
    try:
        names = [one.name for one in file.parent.iterdir() if one.suffix in (".py", ".yaml", ".yml")]
    except OSError:
        return None
    found = get_close_matches(file.name, names, n=1)
    return file.parent / found[0] if found else None


def _changed(before: str, after: str, copy: Path) -> str:
    """Where the mended copy is, and what is other in it."""
    lines = list(unified_diff(before.splitlines(), after.splitlines(), n=CONTEXT_LINES, lineterm=""))[2:]
    rows = "".join(f"<span class='{_kind(line)}'>{escape(line) or ' '}</span>\n" for line in lines)
    return (
        f"<div class='ss-hint'>Written to <code>{escape(str(copy))}</code>; your own file is as it was.</div>"
        f"<pre class='ss-diff'>{rows}</pre>"
    )


def _kind(line: str) -> str:
    return {"+": "ss-added", "-": "ss-removed", "@": "ss-place"}.get(line[:1], "")
