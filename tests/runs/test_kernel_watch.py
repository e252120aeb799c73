"""The watcher of a cluster's run that ends with its kernel: real processes, without a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import list_processes, seconds_until

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_lines
from shardscope.runs.backends import kernel_watch
from shardscope.runs.backends.kernel_watch import KernelWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sees processes in /proc: run it on Linux")


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelWatch]:
    monkeypatch.setattr(kernel_watch, "RESTART_SECONDS", 0.05)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.set_status("queued", "a test")
    watch = KernelWatch(folder)
    yield watch
    watch.stop()


def test_a_watcher_that_is_killed_is_replaced(tmp_path: Path, watch: KernelWatch) -> None:
    (first,) = list_processes(tmp_path / "run")
    first.kill()
    seconds_until(lambda: [one for one in list_processes(tmp_path / "run") if one != first], 10)
    watch.stop()
    seconds_until(lambda: not list_processes(tmp_path / "run"), 10)
    time.sleep(0.2)
    assert not list_processes(tmp_path / "run"), "one that was stopped is not replaced"
    # The run has not ended by any of this.
    assert not read_lines(tmp_path / "run" / "control.jsonl")


def test_the_watcher_of_an_ended_run_leaves(tmp_path: Path, watch: KernelWatch) -> None:
    record = {"time": time.time(), "status": "finished", "reason": "a test"}
    append_line(tmp_path / "run" / "status.jsonl", record)
    seconds_until(lambda: not list_processes(tmp_path / "run"), 15)
