"""A training script, configuration or function of a person's own, checked; a click mends a copy beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import unified_diff
from html import escape
from pathlib import Path
from typing import Any

import shardscope as ss
from shardscope.own_code.script import Script
from shardscope.planner.preflight import Finding, findings_in, noted
from shardscope_widgets.checks.own_code import OwnCode, functions_here, read
from shardscope_widgets.checks.view import ChecksView
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.view import View

NOTHING = "Nothing to mend: no check has anything against this file."
NOT_READ = "This is no Python, nor a configuration: a syntax error, or a notebook. Nothing was checked."
CONFIGURATIONS = (".yaml", ".yml")
CONTEXT_LINES = 1


class ScriptChecks(View):
    """Asks for a file or a function, and shows what the preflight finds in it; it is read, never run.

    What is applied is written to a copy (``train.mended.py``), what no click can mend is noted there as a
    comment. The file itself stays as it is, and so does a copy that somebody has changed meanwhile; a
    function's cell loads the copy. ``on_apply`` gets the plan of a strategy that only a plan can take over.
    ``functions`` are found by name; without them, the notebook's.
    """

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        functions: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan, self._functions = plan, functions
        self._code: OwnCode | None = None
        self._copy: Path | None = None
        self._text = self._error = ""
        self.path = controls.text(
            "",
            "A training script or an accelerate configuration by its path, or a function of this notebook by "
            "its name",
            placeholder="train.py, accelerate.yaml, or a function's name",
        )
        self.path.observe(self._read, "value")
        self.words = controls.html()
        self.checks = ChecksView(on_apply=on_apply, on_apply_source=self._take, on_note=self._note)
        self.changed = controls.html()
        head = controls.html("<h2>Your script <span class='ss-hint'>read, never run</span></h2>")
        super().__init__([head, self.path, self.words, self.checks, self.changed], layout=controls.layout())
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
        self._code = self._copy = None
        self._error = self._text = ""
        name = self.path.value.strip()
        try:
            if name:
                self._code = read(name, functions_here() if self._functions is None else self._functions)
                self._text = self._code.text
        except ValueError as error:
            self._error = str(error)
        self._show()

    def _take(self, text: str) -> None:
        assert self._code is not None
        file, mark = self._code.file, self._code.mark
        try:
            left, new = ((mark + each).encode() for each in (self._text, text))
            self._copy = _write(new, file, self._copy, left)
        except OSError as error:
            self._error = f"No copy in {file.parent} can be written: {error.strerror}."
        else:
            self._text, self._error = text, ""
        self._show()

    def _note(self, finding: Finding) -> None:
        text = noted(self._text, finding)
        assert text is not None
        self._take(text)

    def _show(self) -> None:
        self.words.value = f"<p class='ss-error'>{escape(self._error)}</p>" if self._error else ""
        self.checks.layout = controls.layout(display="" if self._code else "none")
        self.checks.nothing = NOTHING if self._is_understood() else NOT_READ
        found = self._found()
        self.checks.show(found, notable=[one for one in found if noted(self._text, one) is not None])
        code, copy = self._code, self._copy
        self.changed.value = "" if code is None or copy is None else _changed(code, self._text, copy)

    def _found(self) -> list[Finding]:
        """What the preflight finds in the text, and in none of the imports that are read behind it."""
        if self._code is None:
            return []
        known = self._code.known
        found = findings_in(self._text + known, self._plan)
        last = len(self._text.splitlines())
        return [
            replace(one, source=None if one.source is None else one.source.removesuffix(known))
            for one in found
            if (one.line or 0) <= last
        ]

    def _is_understood(self) -> bool:
        suffix = "" if self._code is None else self._code.file.suffix
        is_python = suffix != ".ipynb" and Script(source=self._text).tree is not None
        return is_python or suffix in CONFIGURATIONS


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


def _changed(code: OwnCode, after: str, copy: Path) -> str:
    """Where the mended copy is, and what is other in it."""
    lines = list(unified_diff(code.text.splitlines(), after.splitlines(), n=CONTEXT_LINES, lineterm=""))[2:]
    rows = "".join(f"<span class='{_kind(line)}'>{escape(line) or ' '}</span>\n" for line in lines)
    told = "your own file is as it was."
    if code.function:
        told = (
            f"<code>{escape(code.function)}</code> in this notebook is as it was: "
            f"<code>%load {escape(copy.name)}</code> in a cell brings the copy in."
        )
    return (
        f"<div class='ss-hint'>Written to <code>{escape(str(copy))}</code>; {told}</div>"
        f"<pre class='ss-diff'>{rows}</pre>"
    )


def _kind(line: str) -> str:
    return {"+": "ss-added", "-": "ss-removed", "@": "ss-place"}.get(line[:1], "")
