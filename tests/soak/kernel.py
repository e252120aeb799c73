"""Program of a launching process to be killed: launch one choice, print its folder, hold the lease."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.soak.choices import Choice
from tests.soak.faults import FAULTS

from shardscope.runs.launch.launch import launch


def main(seed: int, number: int, fault: str, folder: Path) -> None:
    """Launch one choice. Never returns."""
    choice = Choice(seed=seed, number=number, fault=next(one for one in FAULTS if one.name == fault))
    plan, task, _ = choice.build_task()
    run = launch(plan, task, folder=folder, outlive_kernel=choice.fault.where == "outlived")
    print(run.folder, flush=True)
    while True:
        time.sleep(1000)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
