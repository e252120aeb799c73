"""Report of a soak: a table of faults, outcomes and times."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from tests.soak.faults import FAULTS
from tests.soak.runner import Outcome

HEAD = "| fault | launches | how they ended | median, s | worst, s |\n|---|---:|---|---:|---:|"

CHECKED = (
    "Checked after each launch: processes (below this one, which adopts orphans; by an environment mark; "
    "by session), ports, shared memory, temporary files, threads, open files and the environment of the "
    "launching process, and in the run folder its status, its reason, the pickled task, partly written "
    "files and a key that ranks print. Seconds are from the fault to the last process; those marked + from "
    "the launch."
)


def format_outcome(outcome: Outcome) -> str:
    """Return the lines that are printed for one launch."""
    line = f"{outcome.choice.number:3} {outcome.choice.fault.name} · {outcome.task} · {outcome.ended[:120]}"
    wrong = "".join(f"\n    LEFT OR WRONG: {problem}" for problem in outcome.wrong)
    return f"{line} · {outcome.seconds:.1f} s{wrong}"


def format_report(outcomes: Sequence[Outcome], *, seed: int, seconds: float) -> str:
    """Return the report in Markdown."""
    rows = [
        row
        for fault in FAULTS
        if (row := _format_row([outcome for outcome in outcomes if outcome.choice.fault is fault]))
    ]
    wrong = [
        f"- {outcome.choice.number} ({outcome.choice.fault.name}): {problem}"
        for outcome in outcomes
        for problem in outcome.wrong
    ]
    return "\n".join(
        [
            f"# {len(outcomes)} launches with faults: {format_verdict(outcomes)}",
            "",
            f"`python -m tests.soak --launches {len(outcomes)} --seed {seed}`, {seconds / 60:.0f} min on "
            f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, torch "
            f"{version('torch')}, accelerate {version('accelerate')}. CPU ranks over gloo.",
            "",
            CHECKED,
            "",
            HEAD,
            *rows,
            *(["", "## Left or wrong", "", *wrong] if wrong else []),
            "",
        ]
    )


def format_verdict(outcomes: Sequence[Outcome]) -> str:
    """Return the result as one line."""
    bad = sum(bool(outcome.wrong) for outcome in outcomes)
    return f"{bad} left something or said something wrong" if bad else "left behind: nothing"


def _format_row(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    fault = outcomes[0].choice.fault
    ends = Counter(outcome.ended.partition(":")[0] for outcome in outcomes)
    statuses = ", ".join(f"{status} {count}" for status, count in ends.most_common())
    bad = sum(bool(outcome.wrong) for outcome in outcomes)
    times = [outcome.seconds for outcome in outcomes]
    mark = "+" * fault.ends_by_itself
    return (
        f"| {fault.name} | {len(outcomes)} | {statuses}{f'; **{bad} wrong**' if bad else ''} | "
        f"{statistics.median(times):.1f}{mark} | {max(times):.1f}{mark} |"
    )
