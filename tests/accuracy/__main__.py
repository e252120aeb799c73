"""``python -m tests.accuracy --kind memory|time [--rows FILE ...]``: scores rows and writes the report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.accuracy.document import KINDS, replace_part
from tests.accuracy.memory_report import memory_report
from tests.accuracy.own_runs_report import own_report
from tests.accuracy.rehearsals import read_rehearsals, rehearsal_report, stored_files
from tests.accuracy.rows import OWN, Row, default_files, read
from tests.accuracy.scoring import MemoryScore, score_memory
from tests.accuracy.time_report import time_report
from tests.accuracy.time_rows import time_files
from tests.accuracy.time_scoring import score_time


def main(arguments: list[str] | None = None) -> int:
    """Score one kind of prediction. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="memory")
    parser.add_argument(
        "--rows", type=Path, nargs="+", metavar="FILE", help="rows in the form of measured.jsonl"
    )
    parser.add_argument(
        "--write", type=Path, help="where the report goes (default: docs/accuracy.md, unless --rows)"
    )
    chosen = parser.parse_args(arguments)
    missing = [path for path in chosen.rows or () if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(map(str, missing))}")
    broken: list[str] = []
    defaults = time_files() if chosen.kind == "time" else default_files()
    rows = read(chosen.rows or defaults, broken)
    for problem in broken:
        print(f"skipped: {problem}", file=sys.stderr)
    if broken and not rows:
        return 2
    report = (
        time_report(score_time(rows)) if chosen.kind == "time" else _report_memory(rows, bool(chosen.rows))
    )
    print(report, end="")
    if chosen.write is not None:
        chosen.write.parent.mkdir(exist_ok=True)
        chosen.write.write_text(report, encoding="utf-8")
    elif not chosen.rows:
        replace_part(chosen.kind, report)
    return 0


def _report_memory(rows: list[Row], has_other_rows: bool) -> str:
    score = score_memory(rows)
    return memory_report(score) if has_other_rows else full_report(score)


def full_report(score: MemoryScore) -> str:
    """Return the part about memory: published rows, stored rehearsals, and our own runs if there are any."""
    sections = [rehearsal_report(*read_rehearsals(stored_files()))]
    if OWN.is_file():
        sections.append(own_report(score_memory(read([OWN]))))
    return memory_report(score, *sections)


if __name__ == "__main__":
    # Score the catalogue's constants, not a calibration of this machine.
    os.environ["SHARDSCOPE_DATA_HOME"] = os.devnull
    sys.exit(main())
