"""What a list of thousands of runs costs: ``ss.runs()`` and its table, in a fresh process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, write_json

NUM_RUNS = 5000
NUM_STEPS = 10

_LIST = """
import json, resource, sys, time
import shardscope as ss
start = time.perf_counter()
found = ss.runs(sys.argv[1])
found._repr_html_()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([len(found), time.perf_counter() - start, peak]))
"""


class Listed(NamedTuple):
    """One list."""

    num_runs: int
    seconds: float
    resident_bytes: int
    """Of the whole process."""


def measure_listing(folder: Path) -> list[Listed]:
    """Write runs into ``folder`` and list them twice: the second list finds what the first one kept."""
    _write_runs(folder)
    lists = []
    for _ in range(2):
        command = [sys.executable, "-c", _LIST, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        lists.append(Listed(*json.loads(done.stdout)))
    return lists


def _write_runs(folder: Path) -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
    )
    first, now = RunFolder(folder / "run-0000"), time.time()
    first.create()
    description = {"plan": json.loads(plan.to_json()), "world_size": 2, "trains_the_plan": True}
    write_json(first.run_json, {**description, "name": "run-0000", "created": now})
    for status in ("starting", "finished"):
        append_line(first.status, {"time": now, "status": status, "reason": "it is"})
    for rank in range(2):
        for step in range(NUM_STEPS):
            line = {"step": step, "rank": rank, "time": now, "loss": 2.0, "step_seconds": 0.25}
            append_line(first.events(rank), line)
    for number in range(1, NUM_RUNS):
        path = folder / f"run-{number:04}"
        shutil.copytree(first.path, path)
        write_json(path / "run.json", {**description, "name": path.name, "created": now + number})
