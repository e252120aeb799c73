"""Checks of a training script, a configuration or a notebook function."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import shardscope as ss
from shardscope.planner.checks import Finding
from shardscope.runs.checks.findings import check_script
from shardscope.runs.checks.script import Script
from shardscope_widgets.checks.findings import list_html, row_html, worst_first
from shardscope_widgets.checks.own_code import OwnCode, functions_here, read
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View

NOTHING = "No findings: every check of this file passed."
NOT_READ = "This is no Python, nor a configuration: a syntax error, or a notebook. Nothing was checked."
CONFIGURATIONS = (".yaml", ".yml")


class ScriptChecks(View):
    """An input for a file or a function, and its findings. The code is read, never executed or changed.

    ``functions`` are found by name; by default, the notebook's.
    """

    def __init__(self, plan: ss.Plan | None = None, *, functions: Mapping[str, Any] | None = None) -> None:
        self._plan, self._functions = plan, functions
        self._code: OwnCode | None = None
        self.findings: list[Finding] = []
        self.path = controls.create_text_box(
            "",
            "A training script or an accelerate configuration by its path, or a function of this notebook by "
            "its name",
            placeholder="train.py, accelerate.yaml, or a function's name",
        )
        self.path.observe(self._read, "value")
        self.error, self.list = controls.create_html(), controls.create_html()
        head = controls.create_html(
            "<h2>Your script <span class='ss-hint'>read, never run or changed</span></h2>"
        )
        super().__init__(
            [Sheet("checks"), head, self.path, self.error, self.list], layout=controls.share_layout()
        )
        for name in ("ss-root", "ss-view", "ss-checks", "ss-script"):
            self.add_class(name)

    def offer(self, plan: ss.Plan) -> None:
        """Check the file against ``plan``."""
        if plan is not self._plan:
            self._plan = plan
            self._show()

    def freeze(self, frozen: bool) -> None:
        """Dim the findings while an input is invalid."""
        (self.add_class if frozen else self.remove_class)("ss-old")

    def _read(self, change: object = None) -> None:
        self._code = None
        self.error.value = ""
        name = self.path.value.strip()
        try:
            if name:
                self._code = read(name, functions_here() if self._functions is None else self._functions)
        except ValueError as error:
            self.error.value = f"<p class='ss-error' role='alert'>{escape(str(error))}</p>"
        self._show()

    def _show(self) -> None:
        code = self._code
        if code is None:
            self.findings, self.list.value = [], ""
            return
        self.findings = worst_first(_findings_of(code, self._plan))
        nothing = NOTHING if _is_understood(code) else NOT_READ
        rows = [row_html(one, place=_place(code, one)) for one in self.findings]
        self.list.value = list_html(self.findings, rows) if rows else f"<p class='ss-hint'>{nothing}</p>"


def _findings_of(code: OwnCode, plan: ss.Plan | None) -> list[Finding]:
    """Return the preflight findings in the text, except in the imports appended for a function."""
    last = len(code.text.splitlines())
    return [one for one in check_script(code.text + code.known, plan) if (one.line or 0) <= last]


def _is_understood(code: OwnCode) -> bool:
    is_python = code.file.suffix != ".ipynb" and Script(source=code.text).tree is not None
    return is_python or code.file.suffix in CONFIGURATIONS


def _place(code: OwnCode, finding: Finding) -> str:
    """Return ``train.py, line 12``."""
    name = code.function or code.file.name
    return name if finding.line is None else f"{name}, line {finding.line}"
