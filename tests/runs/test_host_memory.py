"""Host memory really runs out: the kernel kills a rank, and the run says so with its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory_cgroup import limited_memory
from tests.requirements import thorough

from shardscope.runs.run import Run

GIB = 2**30
LIMIT_BYTES = 3 * GIB // 2
"""More than a supervisor, a launcher and two ranks with torch need: the greedy rank is the largest."""

LAUNCH = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
import run_tasks as tasks
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch
run = launch(make_plan(2), tasks.takes_all_memory, folder=Path(sys.argv[2]), name="greedy")
print(run.wait(100))
"""


@thorough()
@pytest.mark.usefixtures("bounded_time", "nothing_left")
def test_fault_10_the_kernels_oom_killer_ends_a_rank(tmp_path: Path) -> None:
    """The run has its own memory cgroup, so that no other process runs out of memory."""
    with limited_memory(LIMIT_BYTES) as members:
        done = subprocess.run(
            [sys.executable, "-c", LAUNCH, str(members), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )
        assert done.stdout.strip() == "failed", done.stderr
    run = Run.attach(tmp_path / "greedy")
    killed = "rank 1 was killed by SIGKILL: host memory ran out: the kernel's out-of-memory killer struck "
    assert run.reason.startswith(killed), run.reason
    assert "in this memory group during the run; it last used " in run.reason
    assert " of 1.50 GiB free" in run.reason, run.reason
    assert run.error is not None and "rank 1 takes all there is" in run.error
