"""Processor time of a recorded step over that of others, by option of ``run.profile``, on two CPU ranks.

``python -m benchmarks.profiling_costs`` prints the table COSTS of ``shardscope/runs/profiling_request.py``.
Processor time and not seconds, so that other work of the machine does not count. Writing the trace, after the
last recorded step, is not part of a step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil

import shardscope as ss
from shardscope.runs.profiling_request import read_recording_state

OPTIONS = ("plain", "shapes", "stacks", "memory", "modules")
NUM_STEPS = 20
EDGE = 3
"""Recorded steps that are not counted at each end of a recording, which begins and ends between two looks."""
ROUNDS = 3


def measure_window(run: ss.Run, num_steps: int) -> float:
    """Return rank 0's processor seconds per step over the next ``num_steps`` steps."""
    rank = psutil.Process(json.loads((run.folder / "ranks" / "rank-0.json").read_text())["pid"])
    first = wait_for_step(run, count_steps(run) + 1)
    began = rank.cpu_times()
    last = wait_for_step(run, first + num_steps)
    ended = rank.cpu_times()
    return (ended.user + ended.system - began.user - began.system) / (last - first)


def wait_for_step(run: ss.Run, goal: int) -> int:
    """Wait until rank 0 has logged ``goal`` steps. Return how many it has."""
    while (count := count_steps(run)) < goal:
        time.sleep(0.002)
    return count


def count_steps(run: ss.Run) -> int:
    """Return the number of steps that rank 0 has logged."""
    return sum(record["rank"] == 0 for record in run.metrics())


def measure_ratio(run: ss.Run, option: str) -> float:
    """Return the cost of a recorded step over that of the steps before the recording."""
    plain = measure_window(run, NUM_STEPS)
    number = run.profile(NUM_STEPS + 2 * EDGE, **({} if option == "plain" else {option: True}))
    while True:
        state = read_recording_state(run)
        if state is not None and state.request.number == number and "recording" in state.states:
            break
        time.sleep(0.002)
    wait_for_step(run, count_steps(run) + EDGE - 1)
    recorded = measure_window(run, NUM_STEPS)
    while (state := read_recording_state(run)) is not None and not state.is_finished:
        time.sleep(0.05)
    return recorded / plain


def main() -> None:
    """Print the median ratio of each option over some rounds."""
    plan = ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=64, global_batch_size=2),
        ss.Layout.ddp(),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = ss.launch(plan, ss.Pretrain(num_steps=1_000_000), folder=Path(folder))
        wait_for_step(run, 5)
        ratios: dict[str, list[float]] = {option: [] for option in OPTIONS}
        for _ in range(ROUNDS):
            for option in OPTIONS:
                ratios[option].append(measure_ratio(run, option))
                print(option, f"{ratios[option][-1]:.2f}", flush=True)
        run.stop()
        run.wait()
    for option, values in ratios.items():
        print(f'    "{option}": {statistics.median(values):.2f},')


if __name__ == "__main__":
    main()
