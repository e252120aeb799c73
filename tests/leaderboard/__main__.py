"""``python -m tests.leaderboard``: runs every estimator and writes docs/leaderboard.md."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.accuracy.rows import ROOT
from tests.leaderboard.estimators import ESTIMATORS, ask, prepare_environment
from tests.leaderboard.page import write_page
from tests.leaderboard.tables import collect_tables

PAGE = ROOT / "docs" / "leaderboard.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the estimators whose checkout is named, if they need one. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.leaderboard", description=__doc__)
    names = [estimator.name for estimator in ESTIMATORS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ESTIMATOR")
    parser.add_argument("--write", type=Path, default=PAGE)
    chosen = parser.parse_args(arguments)
    tables, plans = collect_tables()
    print(f"{len(plans)} plans in {len(tables)} tables", flush=True)
    asked = [
        estimator
        for estimator in ESTIMATORS
        if estimator.name in chosen.only and (not estimator.checkout or os.environ.get(estimator.checkout))
    ]
    for estimator in asked:
        prepare_environment(estimator.requirements)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        answers = dict(
            zip((one.name for one in asked), threads.map(partial(ask, plans=plans), asked), strict=True)
        )
    chosen.write.write_text(write_page(tables, ESTIMATORS, answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # Compare the catalogue's constants, not a calibration of this machine.
    os.environ["SHARDSCOPE_DATA_HOME"] = os.devnull
    sys.exit(main())
