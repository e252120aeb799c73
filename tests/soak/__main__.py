"""``python -m tests.soak [--launches 200] [--seed N]``: launches with faults, and what they left behind.

Exits with 1 if anything was left, said wrong or took too long. The report goes to ``artifacts/soak`` as well,
with the folders of the runs that went wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.choices import choices
from tests.soak.faults import FAULTS
from tests.soak.report import line, report, verdict
from tests.soak.soaking import outcomes


def main(arguments: list[str] | None = None) -> int:
    """Soak. The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--launches", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of faults, tasks and moments (default 0)")
    parser.add_argument("--only", type=int, metavar="N", help="only the N-th launch of that seed")
    parser.add_argument("--faults", nargs="+", metavar="WORD", help="only faults with one of these words")
    parser.add_argument("--report", type=Path, default=Path("artifacts/soak"), help="folder of the report")
    given = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not given.faults or any(w in fault.name for w in given.faults)]
    if given.launches < 1 or not faults:
        parser.error(f"--launches is 1 or more; faults: {', '.join(fault.name for fault in FAULTS)}")
    chosen = list(choices(given.seed, given.only or given.launches, faults))
    chosen = chosen[-1:] if given.only else chosen
    given.report.mkdir(parents=True, exist_ok=True)
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="shardscope-soak-") as folder:
        for outcome in outcomes(chosen, Path(folder), given.report.absolute()):
            found.append(outcome)
            print(line(outcome), flush=True)
    text = report(found, seed=given.seed, seconds=time.monotonic() - began)
    (given.report / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwrote {given.report / 'report.md'}\n{verdict(found)}")
    return int(any(outcome.wrong for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
