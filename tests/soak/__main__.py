"""``python -m tests.soak [--launches 200] [--seed N]``: launches with faults, each checked for residue.

Exits with 1 if anything was left behind, a status was wrong or a run took too long. The report goes to
``artifacts/soak``, with the folders of the failed runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.choices import draw_choices
from tests.soak.faults import FAULTS
from tests.soak.report import format_outcome, format_report, format_verdict
from tests.soak.runner import run_choices


def main(arguments: list[str] | None = None) -> int:
    """Run the soak. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--launches", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of faults, tasks and times (default 0)")
    parser.add_argument("--only", type=int, metavar="N", help="only the N-th launch of that seed")
    parser.add_argument("--faults", nargs="+", metavar="WORD", help="only faults with one of these words")
    parser.add_argument("--report", type=Path, default=Path("artifacts/soak"), help="folder of the report")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not options.faults or any(w in fault.name for w in options.faults)]
    if options.launches < 1 or not faults:
        parser.error(f"--launches is 1 or more; faults: {', '.join(fault.name for fault in FAULTS)}")
    chosen = list(draw_choices(options.seed, options.only or options.launches, faults))
    chosen = chosen[-1:] if options.only else chosen
    options.report.mkdir(parents=True, exist_ok=True)
    started_at, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="shardscope-soak-") as folder:
        for outcome in run_choices(chosen, Path(folder), options.report.absolute()):
            outcomes.append(outcome)
            print(format_outcome(outcome), flush=True)
    text = format_report(outcomes, seed=options.seed, seconds=time.monotonic() - started_at)
    (options.report / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwrote {options.report / 'report.md'}\n{format_verdict(outcomes)}")
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
