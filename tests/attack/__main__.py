"""``python -m tests.attack [--seed 0] [--folders 2000]``: every public call on damaged run folders.

Every public call on every folder answers or raises ``ValueError`` within two seconds, executes nothing, hides
no other run, changes no file outside of the folder and lets no HTML of it into a view. Exits with 1 if one
did not. ``--only K`` repeats the K-th try, and ``--keep`` keeps the folders of failed tries.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.attack.fuzzing import Outcome, run_tries
from tests.attack.recorded_runs import record_runs

ARTIFACTS = Path("artifacts/attack")


def main(arguments: list[str] | None = None) -> int:
    """Run the attack. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage (default 0)")
    parser.add_argument("--folders", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--only", type=int, metavar="K", help="only the K-th try of that seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: cores)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where folders that failed are left")
    options = parser.parse_args(arguments)
    recorded = (ARTIFACTS / "recorded").absolute()
    record_runs(recorded)
    numbers = [options.only] if options.only is not None else list(range(options.folders))
    outcomes: list[Outcome] = []
    started_at = time.monotonic()

    def make_tries(part: list[int]) -> None:
        for outcome in run_tries(part, options.seed, recorded, options.keep):
            outcomes.append(outcome)
            if outcome.wrong or options.only is not None:
                print(describe(outcome), flush=True)
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes)} tries after {time.monotonic() - started_at:.0f} s", flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        parts = [numbers[first :: options.workers] for first in range(options.workers)]
        for future in [pool.submit(make_tries, part) for part in parts if part]:
            future.result()
    failed = [outcome for outcome in outcomes if outcome.wrong]
    if failed and options.only is None:
        print(summarize(failed))
    print(f"{len(outcomes)} tries, {len(outcomes) - len(failed)} survived, {len(failed)} failed")
    return int(bool(failed))


def describe(outcome: Outcome) -> str:
    """Return the damage of one try, and what went wrong with it."""
    lines = [f"try {outcome.number}: {'; '.join(outcome.damage)}"]
    lines += [f"    {wrong}" for wrong in outcome.wrong] or ["    survived"]
    return "\n".join(lines)


def summarize(failed: list[Outcome]) -> str:
    """Return each kind of failure, how often it came, and the first try that shows it."""
    kinds: dict[str, list[int]] = collections.defaultdict(list)
    for outcome in sorted(failed, key=lambda outcome: outcome.number):
        for wrong in outcome.wrong:
            call, _, how = wrong.partition(": ")
            kind = re.sub(r"\d+(\.\d+)?", "N", re.sub(r"'.*'|\".*\"", "...", how.partition(" at ")[0]))[:60]
            place = how.rpartition(" at ")[2] if " at " in how else ""
            kinds[f"{call}: {kind} {place}"].append(outcome.number)
    rows = sorted(kinds.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"{len(numbers):5} x  {kind}  (--only {numbers[0]})" for kind, numbers in rows)


if __name__ == "__main__":
    sys.exit(main())
