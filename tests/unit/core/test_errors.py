"""Tests of errors and warnings: they name the line of the user's code."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import shardscope as ss
from shardscope.core.errors import FieldError, refuse, warn_user


@pytest.mark.parametrize("kind", [str, Path])
def test_a_long_path_keeps_the_name_of_its_file(kind: type) -> None:
    path = kind(
        "/mnt/shared-filesystem/projects/language-models/2026-11/experiments/fineweb/train-00012.parquet"
    )
    with pytest.raises(
        ValueError, match=r"^Task\.data is .*/mnt/.*\.\.\..*/train-00012\.parquet'\)?; allowed: a file"
    ):
        refuse("Task.data", path, "a file", "the file's path")


def test_a_notebook_shows_the_users_lines_and_the_message_instead_of_a_traceback() -> None:
    with pytest.raises(FieldError) as caught:
        replace(ss.Recipe(), seq_len=0)
    (line, message) = caught.value._render_traceback_()
    assert line.startswith("test_errors.py, line ") and line.endswith(": replace(ss.Recipe(), seq_len=0)")
    assert message == f"FieldError: {caught.value}"
    # IPython's own frames, which run a cell, are no lines of the user.
    shell, shown = InteractiveShell(), list[str]()
    shell._showtraceback = lambda kind, value, lines: shown.extend(lines)
    shell.run_cell("import shardscope as ss\ndef f():\n    ss.Recipe(seq_len=0)\n\nf()")
    assert shown == [
        "Cell, line 5: f()",
        "Cell, line 3, in f: ss.Recipe(seq_len=0)",
        f"FieldError: {caught.value}",
    ]


def test_a_warning_in_a_thread_of_ours_does_not_name_the_standard_library() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("here")
        thread = threading.Thread(target=warn_user, args=("in a thread",))
        thread.start()
        thread.join()
    assert [str(one.message) for one in caught] == ["here", "in a thread"]
    assert caught[0].filename == __file__ and "threading" not in caught[1].filename
