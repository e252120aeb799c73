"""What the soak found, as a table of faults, outcomes and times."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from tests.soak.faults import FAULTS
from tests.soak.soaking import Outcome

HEAD = "| fault | launches | how they ended | median, s | worst, s |\n|---|---:|---|---:|---:|"

LOOKED_FOR = (
    "Looked for after each launch: processes (below this one, which adopts orphans; by an environment mark; "
    "by session), ports, shared memory, temporary files, threads, open files and the environment of the "
    "launching process, and in the run's folder its status, its reason, the pickled task, halves of "
    "files and a key that ranks print. Seconds are from the fault to the last process; those marked + from "
    "the launch."
)


def line(outcome: Outcome) -> str:
    """One launch, as it is printed."""
    told = f"{outcome.choice.number:3} {outcome.choice.fault.name} · {outcome.work} · {outcome.ended[:120]}"
    wrong = "".join(f"\n    LEFT OR WRONG: {words}" for words in outcome.wrong)
    return f"{told} · {outcome.seconds:.1f} s{wrong}"


def report(found: Sequence[Outcome], *, seed: int, seconds: float) -> str:
    """The whole of it, in Markdown."""
    rows = [row for fault in FAULTS if (row := _row([o for o in found if o.choice.fault is fault]))]
    wrong = [f"- {o.choice.number} ({o.choice.fault.name}): {words}" for o in found for words in o.wrong]
    return "\n".join(
        [
            f"# {len(found)} launches with faults: {verdict(found)}",
            "",
            f"`python -m tests.soak --launches {len(found)} --seed {seed}`, {seconds / 60:.0f} min on "
            f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, torch "
            f"{version('torch')}, accelerate {version('accelerate')}. CPU ranks over gloo.",
            "",
            LOOKED_FOR,
            "",
            HEAD,
            *rows,
            *(["", "## Left or wrong", "", *wrong] if wrong else []),
            "",
        ]
    )


def verdict(found: Sequence[Outcome]) -> str:
    """One line."""
    bad = sum(bool(outcome.wrong) for outcome in found)
    return f"{bad} left something or said something wrong" if bad else "left behind: nothing"


def _row(found: Sequence[Outcome]) -> str:
    if not found:
        return ""
    fault = found[0].choice.fault
    ends = Counter(outcome.ended.partition(":")[0] for outcome in found)
    told = ", ".join(f"{status} {count}" for status, count in ends.most_common())
    bad = sum(bool(outcome.wrong) for outcome in found)
    times = [outcome.seconds for outcome in found]
    mark = "+" * fault.ends_alone
    return (
        f"| {fault.name} | {len(found)} | {told}{f'; **{bad} wrong**' if bad else ''} | "
        f"{statistics.median(times):.1f}{mark} | {max(times):.1f}{mark} |"
    )
