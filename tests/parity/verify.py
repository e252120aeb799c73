"""``python -m tests.parity.verify``: the parity table, speed and memory on this machine, as a report.

``notebooks/90_verify_this_machine.ipynb`` calls the same functions, cell by cell.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.parity import launches
from tests.parity.comparison import Outcome
from tests.parity.machine import Machine
from tests.parity.report import format_line, format_table, list_missing_runs, list_setups, speed_table
from tests.parity.speed import Speed, measure_speeds
from tests.parity.table import ONE_GPU_ROWS, QUICK, ROWS, Row

REPORT = "shardscope_report.md"


def rows_for(machine: Machine) -> tuple[Row, ...]:
    """Return the rows that fit on this machine's GPUs; with one GPU, each engine on one rank.

    On CPU ranks only a few rows, because `make parity` runs all of them.
    """
    if not machine.on_gpus:
        return QUICK
    return tuple(row for row in (*ONE_GPU_ROWS, *ROWS) if row.num_ranks <= machine.num_ranks)


def verify_rows(machine: Machine, folder: Path, rows: Sequence[Row] | None = None) -> list[Outcome]:
    """Run the rows, printing each as it ends."""
    done = []
    here = machine.cluster if machine.on_gpus else None
    for outcome in launches.run_rows(rows or rows_for(machine), folder=folder, here=here):
        done.append(outcome)
        print(f"{format_line(outcome)}  {outcome.seconds:.0f} s", flush=True)
    return done


def print_speeds(machine: Machine, folder: Path, names: tuple[str, ...] | None = None) -> list[Speed]:
    """Run each framework for a few steps and print its speed."""
    done = []
    for speed in measure_speeds(machine, folder, names):
        done.append(speed)
        result = speed.why or f"{speed.tokens_per_second:,.0f} tokens/s"
        print(f"{speed.name:<10} {result}", flush=True)
    return done


def write_report(machine: Machine, outcomes: Sequence[Outcome], measured: Sequence[Speed]) -> str:
    """Return the report as Markdown. It names no host, folder or user."""
    same = sum(outcome.holds and outcome.verdict == "same" for outcome in outcomes)
    parts = [
        "# Shardscope on this machine",
        f"{machine.device}. {machine.libraries}.",
        f"## Training parity: {same} of {len(outcomes)} rows equal the single process",
        format_table(outcomes),
        list_setups(outcomes),
        list_missing_runs(outcomes),
        "## Measured and predicted speed and memory",
        speed_table(measured),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run everything. Returns 1 if a row does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.verify", description=__doc__)
    parser.add_argument("--write", type=Path, default=Path(REPORT), help=f"the report (default: {REPORT})")
    chosen = parser.parse_args(arguments)
    machine = Machine.here()
    print(machine)
    with tempfile.TemporaryDirectory(prefix="shardscope-verify-") as scratch:
        try:
            outcomes = verify_rows(machine, Path(scratch))
        except launches.ReferenceRunError as error:
            print(error, file=sys.stderr)
            return 2
        measured = print_speeds(machine, Path(scratch))
        chosen.write.write_text(write_report(machine, outcomes, measured), encoding="utf-8")
    print(f"{chosen.write} is written; nothing was sent anywhere")
    return 0 if all(outcome.holds for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
