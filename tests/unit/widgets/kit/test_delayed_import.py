"""Modules that the import of the widgets leaves unloaded: they work when they are used."""

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
IN_THREADS = """
import threading
import shardscope_widgets
made = []
def make_notebook():
    import nbformat
    made.append(nbformat.v4.new_notebook())
threads = [threading.Thread(target=make_notebook) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(made) == 8
"""


def test_plotly_and_nbformat_work_after_the_widgets_are_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "application/vnd.plotly.v1+json" in done.stdout


def test_several_threads_use_nbformat_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_THREADS], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


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
