"""Lists of very many runs, and of runs that logged very much."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from tests.faults import slow_test
from tests.requirements import thorough
from written_runs import write_run

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line
from shardscope.runs import totals

LISTED = """
import sys, tracemalloc
import shardscope as ss
from shardscope.records import json_files
from shardscope.runs import totals
json_files.PIECE_BYTES = totals.TAIL_BYTES = 2**16
# What is imported and cached once is not counted.
warm = ss.runs(sys.argv[2])
warm.to_frame(), warm.curves("loss"), warm.compare(warm[0], warm[0])._repr_html_()
tracemalloc.start()
found = ss.runs(sys.argv[1])
html = found._repr_html_()
{then}
held, peak = tracemalloc.get_traced_memory()
print(len(found), held, peak)
"""
RESIDENT = r"""
import re, sys
from pathlib import Path
import shardscope as ss
found = ss.runs(sys.argv[1])
html = found._repr_html_()
# Not getrusage: its ru_maxrss has the size of the process that forked this one.
most = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
print(len(found), html.count("<tr>"), most * 1024)
"""


def run_alone(source: str, *arguments: Path) -> tuple[int, int, int]:
    """Run ``source`` in a process of its own, which prints three numbers."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    first, second, third = map(int, printed.split())
    return first, second, third


def write_copies(parent: Path, num_runs: int) -> None:
    """Write ``num_runs`` ended runs of ten steps, each as long ago as its number says."""
    first = write_run("run-0000", num_done=10, parent=parent)
    description = json.loads((first / "run.json").read_text())
    for number in range(1, num_runs):
        path = parent / f"run-{number:04}"
        shutil.copytree(first, path)
        more = {"name": path.name, "created": description["created"] + number}
        (path / "run.json").write_text(json.dumps({**description, **more}))


@pytest.fixture
def folder_of_one_run(tmp_path: Path) -> Path:
    """One run, for what is imported with the first list."""
    write_copies(tmp_path / "small", 1)
    return tmp_path / "small"


@thorough()
def test_fault_58_a_list_of_many_runs_needs_a_few_kilobytes_each(
    tmp_path: Path, folder_of_one_run: Path
) -> None:
    write_copies(tmp_path / "runs", 300)
    num_runs, held, peak = run_alone(LISTED.format(then=""), tmp_path / "runs", folder_of_one_run)
    # 100 MiB for 5,000 are 20 KiB for one.
    assert num_runs == 300 and held < 300 * 12 * 2**10 and peak < 300 * 20 * 2**10, (held, peak)


@slow_test
def test_fault_58_five_thousand_runs_are_listed_in_a_hundred_megabytes(tmp_path: Path) -> None:
    write_copies(tmp_path / "runs", 5000)
    num_runs, num_rows, num_bytes = run_alone(RESIDENT, tmp_path / "runs")
    # Of the whole process, Python included.
    assert num_runs == 5000 and num_rows == 1 + 200 and num_bytes < 100 * 2**20


@thorough()
def test_fault_58_a_list_keeps_no_metrics(tmp_path: Path, folder_of_one_run: Path) -> None:
    """Neither do its table, frame, curves and comparison: parsed metrics take several times their bytes."""
    for number, name in enumerate(("a", "b")):
        path = write_run(name, num_done=0, number=number, parent=tmp_path / "runs")
        for rank in (0, 1):
            with RunFolder(path).events(rank).open("w") as file:
                for step in range(2_000):
                    line = {"step": step, "rank": rank, "time": 1.0, "loss": 2.0, "step_seconds": 0.25}
                    file.write(json.dumps(line | {f"metric_{n}": step + 0.5 for n in range(40)}) + "\n")
    size = sum(RunFolder(path).events(rank).stat().st_size for rank in (0, 1))
    then = "found.to_frame(), found.curves('loss'), found.compare('a', 'b')._repr_html_()"
    _, held, peak = run_alone(LISTED.format(then=then), tmp_path / "runs", folder_of_one_run)
    assert held < size / 2 and peak < size, (held, peak, size)


def make_frame(parent: Path) -> pd.DataFrame:
    return ss.runs(parent).to_frame()


def test_a_cached_summary_is_equal_and_reads_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run("one", parent=tmp_path)
    first = make_frame(tmp_path)
    assert (path / "summary.json").stat().st_mode & 0o777 == 0o600

    def compute(*_: object) -> None:
        raise AssertionError("the metrics of an ended run are read again")

    monkeypatch.setattr(totals, "_compute_from_files", compute)
    pd.testing.assert_frame_equal(first, make_frame(tmp_path))
    assert first["steps"][0] == 20 and math.isclose(
        first["loss"][0], ss.runs(tmp_path)[0].metrics()[19]["loss"]
    )


def test_an_active_run_has_no_cached_summary_and_a_changed_run_is_read_again(tmp_path: Path) -> None:
    path = write_run("one", "running", parent=tmp_path)
    assert make_frame(tmp_path)["steps"][0] == 20 and not (path / "summary.json").exists()
    append_line(RunFolder(path).status, {"time": 2e9, "status": "finished", "reason": "done"})
    assert make_frame(tmp_path)["steps"][0] == 20 and (path / "summary.json").exists()
    append_line(RunFolder(path).events(0), {"step": 99, "rank": 0, "time": 1.0, "loss": 0.125})
    changed = make_frame(tmp_path)
    assert changed["steps"][0] == 21 and changed["loss"][0] == 0.125


@pytest.mark.parametrize(
    "forged",
    [
        {"status": "finished"},
        {"loss": "low"},
        {"num_steps": -1},
        {"num_steps": 2.5},
        {"plan": ["x"]},
        {"tensor_bytes": True},
        {"source": "x"},
        {"loss": [1]},
    ],
)
def test_a_forged_summary_is_ignored(tmp_path: Path, forged: dict[str, object]) -> None:
    path = write_run("one", "failed", parent=tmp_path)
    first = make_frame(tmp_path)
    kept = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**kept, **forged}))
    pd.testing.assert_frame_equal(first, make_frame(tmp_path))
    assert list(make_frame(tmp_path)["status"]) == ["failed"]


def test_the_html_table_shows_the_newest_runs_and_to_frame_all(tmp_path: Path) -> None:
    write_copies(tmp_path, 205)
    found = ss.runs(tmp_path)
    html = found._repr_html_()
    assert "run-0204" in html and "run-0004" not in html and "5 older ones are not shown" in html
    assert len(found.to_frame()) == 205
