"""``python -m tests.parity [--seed N] [--rows NAME ...]``: runs, prints and writes docs/parity.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.parity.launches import ReferenceRunError, run_rows
from tests.parity.machine import Machine
from tests.parity.report import DOCUMENT, format_document, format_line
from tests.parity.table import ROWS, Row


def main(arguments: list[str] | None = None) -> int:
    """Run the rows. Returns 1 if any does not hold, 2 if the single process does not finish."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows whose names have one of these words")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs here")
    parser.add_argument("--write", type=Path, help="where the table goes (default: docs/parity.md, if whole)")
    chosen = parser.parse_args(arguments)
    if chosen.seed < 0:
        parser.error("--seed must be 0 or more")
    rows = select_rows(chosen.rows)
    if not rows:
        parser.error(
            f"no row has {' or '.join(chosen.rows)} in its name; rows: {', '.join(r.name for r in ROWS)}"
        )
    is_whole = len(rows) == len(ROWS) and chosen.seed == 0
    done = []
    with tempfile.TemporaryDirectory(prefix="shardscope-parity-") as scratch:
        try:
            for outcome in run_rows(rows, folder=chosen.keep or Path(scratch), seed=chosen.seed):
                done.append(outcome)
                print(f"{format_line(outcome)}  {outcome.seconds:.0f} s", flush=True)
        except ReferenceRunError as error:
            print(error, file=sys.stderr)
            return 2
    path = chosen.write or (DOCUMENT if is_whole else None)
    if path is not None:
        path.write_text(
            format_document(done, device="CPU ranks over gloo", versions=Machine.here().libraries),
            encoding="utf-8",
        )
    broken = [outcome for outcome in done if not outcome.holds]
    print(f"{len(done) - len(broken)} of {len(done)} rows hold" + (f"; {path} is written" if path else ""))
    return 1 if broken else 0


def select_rows(words: list[str] | None) -> list[Row]:
    """Select the rows whose names have one of ``words``; all without."""
    return [row for row in ROWS if not words or any(word in row.name for word in words)]


if __name__ == "__main__":
    sys.exit(main())
