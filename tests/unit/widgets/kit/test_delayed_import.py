"""What the import of the widgets leaves unloaded works when it is used."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import shardscope_widgets
assert "jsonschema" not in sys.modules, "nbformat's validation is loaded before anybody uses it"
import plotly.graph_objects as go
import plotly.io as pio
pio.renderers.default = "plotly_mimetype"
go.Figure(go.Bar(y=[3])).show()
import nbformat
from nbformat import v4
nbformat.validate(nbformat.v4.new_notebook(cells=[v4.new_code_cell("1 + 1")]))
"""


def test_plotly_and_nbformat_work_after_the_widgets_are_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "application/vnd.plotly.v1+json" in done.stdout


def test_a_module_that_is_not_installed_is_still_missing() -> None:
    code = """
from shardscope_widgets.kit.delayed_import import delay_import
with delay_import("not_installed_anywhere"):
    try:
        import not_installed_anywhere
    except ModuleNotFoundError:
        print("missing")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "missing\n"
