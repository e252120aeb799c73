"""``profile="nsys"`` with a stand-in for nsys, which records its command and runs the rest as a child."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run_helpers import make_plan, seconds_until
from tests.requirements import thorough

import shardscope as ss

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > {record}
shift
while case "$1" in --*) true ;; *) false ;; esac; do shift; done
"$@"
code=$?
echo written > {report}
exit $code
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nsys"
    program.write_text(STAND_IN.format(record=tmp_path / "command", report=tmp_path / "report"))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return tmp_path / "command"


def test_ranks_run_under_nsys(record: Path, tmp_path: Path) -> None:
    run = ss.launch(make_plan(2), ss.Pretrain(num_steps=3, profile="nsys"), folder=tmp_path / "runs")
    assert run.wait(120) == "finished", run.error
    command = record.read_text().splitlines()
    assert command[0] == "profile" and f"--output={run.folder}/traces/all-ranks" in command
    assert "--trace=cuda,nvtx,osrt" in command and "--trace-fork-before-exec=true" in command
    assert command[5:8] == [sys.executable, "-P", "-m"] and command[8] == "shardscope.runs.launch.launcher"
    assert (tmp_path / "report").is_file(), "the end of the ranks was not the end of nsys"
    assert len([line for line in run.metrics() if "loss" in line]) == 2 * 3


@thorough()
def test_run_under_nsys_is_stopped(record: Path, tmp_path: Path) -> None:
    run = ss.launch(make_plan(2), ss.Pretrain(num_steps=100_000, profile="nsys"), folder=tmp_path / "runs")
    seconds_until(lambda: len(run.metrics()) > 2 or run.status == "failed")
    run.stop()
    assert run.wait(30) == "stopped", run.error


def test_nsys_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"Pretrain\.profile is 'nsys'; allowed: .* there is no nsys"):
        ss.launch(make_plan(2), ss.Pretrain(num_steps=1, profile="nsys"), folder=tmp_path / "runs")
    with pytest.raises(ValueError, match=r"Pretrain\.profile is 'perf'; allowed: True, False or 'nsys'"):
        ss.Pretrain(profile="perf")  # type: ignore[arg-type]
