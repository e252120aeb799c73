"""Checks of a training script, a configuration or a notebook function."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import shardscope as ss
from shardscope.planner.checks import Finding
from shardscope.runs.checks.findings import check_script
from shardscope.runs.checks.script import Script
from shardscope_widgets.checks.findings import render_finding, render_list, sort_worst_first
from shardscope_widgets.checks.user_code import UserCode, list_notebook_functions, read_user_code
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View

NOTHING = "No findings: every check of this file passed."
NOT_READ = "Nothing was checked: this is neither valid Python nor a YAML configuration."
CONFIGURATIONS = (".yaml", ".yml")


class ScriptChecks(View):
    """An input for a file or a function, and its findings. The code is read, never executed or changed.

    ``functions`` are found by name; by default, the notebook's.
    """

    def __init__(self, plan: ss.Plan | None = None, *, functions: Mapping[str, object] | None = None) -> None:
        self._plan, self._functions = plan, functions
        self._code: UserCode | None = None
        self.findings: list[Finding] = []
        self.path = controls.create_text_box(
            "",
            "Path of a training script or accelerate configuration, or name of a function of this notebook",
            placeholder="train.py, accelerate.yaml, or a function's name",
        )
        self.path.observe(self._read_code, "value")
        controls.read_again(self.path, self._read_code)
        self.error, self.list = controls.create_html(), controls.create_html()
        head = controls.create_html(
            "<h2>Your script <span class='ss-hint'>read only: never executed or changed</span></h2>"
        )
        super().__init__(
            [Sheet("checks"), head, self.path, self.error, self.list], layout=controls.share_layout()
        )
        controls.add_classes(self, "ss-root", "ss-view", "ss-checks", "ss-script")

    def set_plan(self, plan: ss.Plan) -> None:
        """Check the file against ``plan``."""
        if plan is not self._plan:
            self._plan = plan
            self._show_findings()

    def freeze(self, frozen: bool) -> None:
        """Dim the findings while an input is invalid."""
        controls.set_class(self, "ss-old", frozen)

    def _read_code(self, change: object = None) -> None:
        self._code = None
        self.error.value = ""
        name = self.path.value.strip()
        try:
            if name:
                self._code = read_user_code(
                    name, list_notebook_functions() if self._functions is None else self._functions
                )
        except ValueError as error:
            self.error.value = f"<p class='ss-error' role='alert'>{escape(str(error))}</p>"
        self._show_findings()

    def _show_findings(self) -> None:
        code = self._code
        if code is None:
            self.findings, self.list.value = [], ""
            return
        self.findings = sort_worst_first(_check_code(code, self._plan))
        nothing = NOTHING if _is_understood(code) else NOT_READ
        rows = [render_finding(one, place=_describe_location(code, one)) for one in self.findings]
        self.list.value = render_list(self.findings, rows) if rows else f"<p class='ss-hint'>{nothing}</p>"


def _check_code(code: UserCode, plan: ss.Plan | None) -> list[Finding]:
    """Return the preflight findings in the text, except in the imports appended for a function."""
    # Imports that a notebook function uses are appended so that names resolve; they are not the user's lines.
    last = len(code.text.splitlines())
    return [one for one in check_script(code.text + code.known, plan) if (one.line or 0) <= last]


def _is_understood(code: UserCode) -> bool:
    is_python = code.file.suffix != ".ipynb" and Script(source=code.text).tree is not None
    return is_python or code.file.suffix in CONFIGURATIONS


def _describe_location(code: UserCode, finding: Finding) -> str:
    """Return ``train.py, line 12``."""
    name = code.function or code.file.name
    return name if finding.line is None else f"{name}, line {finding.line}"
