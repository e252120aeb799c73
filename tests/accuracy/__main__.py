"""``python -m tests.accuracy --kind memory|time [--rows FILE ...]``: scores, prints, writes the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.accuracy.own_writing import own_report
from tests.accuracy.rehearsals import read_rehearsals, rehearsal_report, stored_files
from tests.accuracy.rows import OWN, ROOT, default_files, read
from tests.accuracy.scoring import MemoryScore, score_memory
from tests.accuracy.writing import memory_report


def main(arguments: list[str] | None = None) -> int:
    """Scores one kind of prediction. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument("--kind", choices=("memory", "time"), default="memory")
    parser.add_argument(
        "--rows", type=Path, nargs="+", metavar="FILE", help="rows in the form of measured.jsonl"
    )
    parser.add_argument(
        "--write", type=Path, help="where the report goes (default: docs/accuracy.md, unless --rows)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.kind == "time":
        print(
            "There is no step model yet (plan.step does not exist), so no step time can be scored.",
            file=sys.stderr,
        )
        return 2
    missing = [path for path in chosen.rows or () if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(map(str, missing))}")
    broken: list[str] = []
    rows = read(chosen.rows or default_files(), broken)
    for words in broken:
        print(f"left out: {words}", file=sys.stderr)
    if broken and not rows:
        return 2
    score = score_memory(rows)
    report = memory_report(score) if chosen.rows else full_report(score)
    # Its last line is the kind's closing one.
    print(report, end="")
    target = chosen.write or (None if chosen.rows else ROOT / "docs" / "accuracy.md")
    if target is not None:
        target.parent.mkdir(exist_ok=True)
        target.write_text(report, encoding="utf-8")
    return 0


def full_report(score: MemoryScore) -> str:
    """docs/accuracy.md: published rows, stored rehearsals, and our own runs where there are any."""
    sections = [rehearsal_report(*read_rehearsals(stored_files()))]
    if OWN.is_file():
        sections.append(own_report(score_memory(read([OWN]))))
    return memory_report(score, *sections)


if __name__ == "__main__":
    sys.exit(main())
