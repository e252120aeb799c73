"""The traceback of a failed run shows the user's own line of code, in a notebook's cell and in a file."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
from run_helpers import make_plan
from tests.requirements import needs

from shardscope.runs.launch.launch import launch
from shardscope.runs.launch.packing import MAX_SOURCE_CHARACTERS, collect_cell_sources, pack
from shardscope.runs.run import Run

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

HELPER_CELL = """
def check_batch(batch):
    if not batch:
        raise ValueError("the batch is empty")  # a helper of an earlier cell
"""

TASK_CELL = """
import sys
sys.path.insert(0, {tests!r})
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch

def train(ctx):
    check_batch(batch=[])  # the line of the notebook that failed

run = launch(make_plan(1), train, name="cell", folder={folder!r})
run.wait(60)
"""

FILE_TASK = """
def train(ctx):
    settings = {}
    return settings["learning_rate"]  # the line of the file that failed
"""


@pytest.mark.alone
def test_a_functions_traceback_shows_the_lines_of_the_notebook(tmp_path: Path) -> None:
    jupyter_client = needs("jupyter_client")
    manager = jupyter_client.KernelManager()
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = jupyter_client.kernelspec.KernelSpec(argv=argv, language="python")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        for code in (HELPER_CELL, TASK_CELL.format(tests=str(Path(__file__).parent), folder=str(tmp_path))):
            reply = client.execute_interactive(code, timeout=90)["content"]
            assert reply["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    run = Run.attach(tmp_path / "cell")
    assert run.status == "failed" and run.error is not None
    assert "check_batch(batch=[])  # the line of the notebook that failed" in run.error
    assert 'raise ValueError("the batch is empty")  # a helper of an earlier cell' in run.error
    assert "the line of the notebook that failed" in run.logs(0)


def test_a_functions_traceback_shows_the_line_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_training_code.py").write_text(FILE_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    import my_training_code  # type: ignore[import-not-found]

    run = launch(make_plan(1), my_training_code.train, folder=tmp_path / "runs")
    assert run.wait(60) == "failed" and run.error is not None
    assert 'return settings["learning_rate"]  # the line of the file that failed' in run.error


def test_the_sent_source_is_bounded_and_contains_the_newest_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache: dict[str, Any] = {
        f"<cell {number}>": (0, None, ["#" * (MAX_SOURCE_CHARACTERS // 4)], "") for number in range(20)
    }
    cache["lazy"] = (lambda: "",)
    cache[__file__] = (0, None, ["already on disk"], __file__)
    monkeypatch.setattr(linecache, "cache", cache)
    sent = collect_cell_sources()
    assert 1 <= len(sent) <= 4 and "<cell 19>" in sent and __file__ not in sent
    assert len(pack(len, None)) < 1.1 * MAX_SOURCE_CHARACTERS
