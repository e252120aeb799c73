"""What a run of 1,024 ranks costs whoever watches it: fake ranks write a run folder, one RunView reads it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import shardscope as ss
from shardscope.machine import processes
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, write_json

if TYPE_CHECKING:
    from shardscope_widgets import RunView

NUM_RANKS = 1024
NUM_OLD_STEPS = 100
"""Steps in the folder when the view opens it."""
NUM_NEW_STEPS = 10
"""Steps that all ranks log while it is open, one after the other refresh."""


class Watched(NamedTuple):
    """Cost of one view, in seconds of the processor."""

    opening_seconds: float
    """Reading and drawing all earlier steps."""
    refresh_seconds: float
    """A refresh after every rank has logged a step."""
    idle_seconds: float
    """A refresh without news."""
    added_bytes: int
    """Memory of the process beyond that of an empty view."""


def measure_watching(folder: Path, num_ranks: int = NUM_RANKS) -> Watched:
    """Write a run of ``num_ranks`` fake ranks into ``folder`` and watch it in a fresh process."""
    write_run(folder, num_ranks)
    command = [sys.executable, "-m", "benchmarks.many_ranks", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Watched(*json.loads(done.stdout.splitlines()[-1]))


def write_run(path: Path, num_ranks: int) -> None:
    """Write the folder of a run that seems active, supervised by this process, with its first steps."""
    plan = ss.Plan(
        ss.models["llama-3.1-8b"],
        ss.Cluster.parse(f"{num_ranks // 8}x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=num_ranks),
        ss.Layout.fsdp2(),
    )
    folder, now = RunFolder(path), time.time()
    folder.create()
    description = {"plan": json.loads(plan.to_json()), "world_size": num_ranks, "trains_the_plan": True}
    write_json(folder.run_json, {**description, "name": path.name, "created": now})
    pid = os.getpid()
    record = {"pid": pid, "started": processes.read_start_time(pid), "machine": processes.identify_machine()}
    write_json(folder.supervisor, record, as_is=("machine",))
    append_line(folder.status, {"time": now, "status": "running", "reason": "all ranks have started"})
    for rank in range(num_ranks):
        lines = (format_line(rank, step) for step in range(NUM_OLD_STEPS))
        folder.events(rank).write_text("".join(lines))


def watch(folder: Path) -> Watched:
    """Open a view of the run in ``folder``, and refresh it while the ranks log."""
    from shardscope_widgets import RunView

    class Unwatched(RunView):
        """A view without a thread of its own: each refresh is measured here."""

        def _start_watching(self) -> None:
            pass

    before = read_resident_bytes()
    view = Unwatched()
    opening = measure_refresh(view, ss.Run.attach(folder))
    seconds = []
    for step in range(NUM_OLD_STEPS, NUM_OLD_STEPS + NUM_NEW_STEPS):
        append_step(folder, step)
        seconds.append(measure_refresh(view))
    # Of more than 64 MiB of old metrics the view reads a sample.
    assert view.num_steps >= NUM_NEW_STEPS, "all new steps were read"
    return Watched(opening, median(seconds), measure_refresh(view), read_resident_bytes() - before)


def measure_refresh(view: RunView, run: ss.Run | None = None) -> float:
    """Return the processor's seconds until ``view`` has drawn everything, after it was given ``run``."""
    start = time.process_time()
    if run is not None:
        view.show(run)
    while view.refresh():
        pass
    return time.process_time() - start


def read_resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def append_step(path: Path, step: int) -> None:
    """Append a step to the metrics of every rank, as the ranks would."""
    for file in sorted((path / "events").iterdir()):
        rank = int(file.stem.removeprefix("rank-"))
        with file.open("a") as events:
            events.write(format_line(rank, step))


def format_line(rank: int, step: int) -> str:
    """Return one line of metrics, with the names that a training task logs."""
    record = {
        "step": step,
        "rank": rank,
        "time": 1.8e9 + step,
        "loss": 10 / (step + 1),
        "gradient_norm": 1.5,
        "learning_rate": 3e-4,
        "step_seconds": 0.9 + rank % 7 / 100,
        "tokens_per_second": 9000.0,
        "allocated_bytes": 61e9,
    }
    return json.dumps(record) + "\n"


if __name__ == "__main__":
    print(json.dumps(watch(Path(sys.argv[1]))))
