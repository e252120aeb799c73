"""Tests of errors and warnings: they name the line of the user's code."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from shardscope.core.errors import refuse, warn_user


@pytest.mark.parametrize("kind", [str, Path])
def test_a_long_path_keeps_the_name_of_its_file(kind: type) -> None:
    path = kind(
        "/mnt/shared-filesystem/projects/language-models/2026-11/experiments/fineweb/train-00012.parquet"
    )
    with pytest.raises(
        ValueError, match=r"^Task\.data is .*/mnt/.*\.\.\..*/train-00012\.parquet'\)?; allowed: a file"
    ):
        refuse("Task.data", path, "a file", "the file's path")


@pytest.fixture
def show_error() -> Iterator[Callable[[str], str]]:
    """Return a function that runs a cell in IPython and returns the traceback that is shown."""
    # Cells of tests are not for the developer's history.
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("colors", "nocolor")
    shown: list[str] = []
    shell._showtraceback = lambda kind, value, lines: shown.append("\n".join(lines))

    def show(cell: str) -> str:
        shown.clear()
        shell.run_cell(cell, store_history=True)
        (text,) = shown
        return str(text)

    shell.run_cell("import shardscope as ss\nfrom dataclasses import replace", store_history=True)
    yield show
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


def test_a_notebook_shows_the_users_code_alone(show_error: Callable[[str], str], tmp_path: Path) -> None:
    text = show_error("replace(ss.Recipe(), seq_len=0)")
    assert "Cell In[2], line 1\n----> 1 replace(ss.Recipe(), seq_len=0)\n\nFieldError: Recipe.seq_len" in text
    assert "File " not in text and "shardscope/" not in text
    # The user's function stands in a file.
    (tmp_path / "lab.py").write_text("def build(ss):\n    return ss.Recipe(seq_len=0)\n")
    text = show_error(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport lab\nlab.build(ss)")
    sys.path.remove(str(tmp_path))
    assert "----> 4 lab.build(ss)" in text and "----> 2     return ss.Recipe(seq_len=0)" in text
    assert text.count("File ") == 1 and "lab.py:2, in build(ss)" in text


def test_an_error_in_a_callback_shows_the_callback(show_error: Callable[[str], str]) -> None:
    text = show_error(
        "def report(*_):\n    build()\n\ndef build():\n    ss.Recipe(seq_len=0)\n\n"
        'ss.search(ss.models["qwen3-0.6b"], ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(), progress=report)'
    )
    lines = [line.partition("> ")[2] for line in text.splitlines() if line.startswith("--")][1:]
    assert [line.split()[0] for line in lines] == ["7", "2", "5"], text
    assert text.count("Cell In[2]") == 3 and "File " not in text


@pytest.mark.parametrize("magic", ["%%time\n", "%%timeit\n", "%time ", "%timeit "])
def test_magics_of_timing_show_no_empty_lines_of_code(show_error: Callable[[str], str], magic: str) -> None:
    text = show_error(f"{magic}ss.Recipe(seq_len=0)")
    assert text.count("Cell In[2], line 1") == 1 and "ss.Recipe(seq_len=0)" in text and "File " not in text


def test_notes_and_the_users_other_errors_are_shown(show_error: Callable[[str], str]) -> None:
    text = show_error(
        "try:\n    ss.Recipe(seq_len=0)\n"
        "except ValueError as error:\n    error.add_note('Of run 7.')\n    raise"
    )
    assert text.endswith("Nearest fix: 1.\nOf run 7.") and "File " not in text
    handling = "try:\n    {}['rate']\nexcept KeyError as error:\n    "
    assert "KeyError: 'rate'\n\nDuring handling" in show_error(f"{handling}ss.Recipe(seq_len=0)").replace(
        "\n\n\n", "\n\n"
    )
    cause = "try: ss.Recipe(seq_len=0)\n    except ValueError as wrong: raise wrong from error"
    assert "direct cause" in show_error(f"{handling}{cause}")
    # What the package itself handled is no news, nor is a suppressed one.
    for cell in (
        "ss.Recipe(seq_len=1.5)",
        f"{handling}raise ss.core.errors.FieldError('a', 0, '1', '1') from None",
    ):
        text = show_error(cell)
        assert "FieldError" in text and "Error: 'rate'" not in text and "File " not in text, text


def test_other_modes_of_tracebacks_are_ipythons_own(show_error: Callable[[str], str]) -> None:
    for mode in ("Verbose", "Plain"):
        text = show_error(f"%xmode {mode}\nss.Recipe(seq_len=0)")
        assert "core/recipe.py" in text and "core/errors.py" in text


def test_a_warning_in_a_thread_of_ours_does_not_name_the_standard_library() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("here")
        thread = threading.Thread(target=warn_user, args=("in a thread",))
        thread.start()
        thread.join()
    assert [str(one.message) for one in caught] == ["here", "in a thread"]
    assert caught[0].filename == __file__ and "threading" not in caught[1].filename
