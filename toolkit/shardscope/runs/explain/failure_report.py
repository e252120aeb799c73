"""Explanation of a failed run: the rank that failed first and why, the consequences, and a suggested fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardscope.runs.explain.failure import SIGKILL, SIGNAL_WORDS
from shardscope.runs.explain.out_of_memory import Shortage, parse_shortage

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.explain.failure import Failure
    from shardscope.runs.watch.host_monitor import HostMemoryMonitor

MAX_NAMED_FAILURES = 8


class FailureReport(NamedTuple):
    """Explanation of a failed run."""

    reason: str
    """Reason, one line."""
    text: str
    """The traceback of the rank that failed first, followed by the suggested fix and the other failures."""


def explain_failures(
    failures: Sequence[Failure],
    description: Mapping[str, object],
    host: HostMemoryMonitor | None = None,
) -> FailureReport:
    """Return the explanation of a failed run.

    ``failures`` start with the root cause, ``description`` is the content of ``run.json``, ``host`` has the
    memory samples of ranks that were killed.
    """
    # SIGKILL leaves no message. It is often the kernel's out-of-memory killer, so host memory is the suspect.
    first = failures[0]
    reason, paragraphs = first.reason, []
    was_killed = SIGNAL_WORDS[SIGKILL] in first.reason
    shortage = Shortage(memory_kind="host memory") if was_killed else parse_shortage(first.raised)
    if shortage is not None:
        numbers, fix = _describe_memory(
            shortage, _read_plan(description), trains_the_plan=description.get("trains_the_plan") is True
        )
        if was_killed:
            # A SIGKILL has no sender: report host memory only if the samples or OOM counters point to it.
            is_memory = host is not None and first.rank is not None and host.may_have_run_out(first.rank)
            kill = "" if host is None else host.describe_kill(first.rank)
            numbers = "; ".join(filter(None, (kill, numbers if is_memory else "")))
            fix = fix if is_memory else ""
        who = "the launcher" if first.rank is None else f"rank {first.rank}{first.where}"
        reason = first.reason if was_killed else f"{who} ran out of {shortage.memory_kind}"
        reason = f"{reason}: {numbers}" if numbers else reason
        paragraphs += [f"{reason}.", fix]
    paragraphs += _list_other_failures(failures[1:])
    return FailureReport(reason, "\n\n".join(filter(None, (first.text.rstrip(), *paragraphs))))


def _list_other_failures(failures: Sequence[Failure]) -> list[str]:
    paragraphs = []
    for title, is_consequence in (
        ("Failed as well, later:", False),
        ("These ranks only lost their peer, or were ended for it:", True),
    ):
        # After a known failure, an end with an unknown exit code was most likely caused by torch elastic.
        lines = [
            failure.reason
            for failure in failures
            if (failure.is_consequence or failure.is_unexplained) == is_consequence
        ]
        if lines:
            more = [f"and {len(lines) - MAX_NAMED_FAILURES} more"] * (len(lines) > MAX_NAMED_FAILURES)
            paragraphs.append("\n  ".join([title, *lines[:MAX_NAMED_FAILURES], *more]))
    return paragraphs


def _describe_memory(shortage: Shortage, plan: Plan | None, *, trains_the_plan: bool) -> tuple[str, str]:
    """Return the memory numbers and the suggested fix.

    If the plan's memory cannot be predicted, there is no prediction among the numbers and no fix.
    """
    from shardscope.runs.explain.out_of_memory_fixes import format_memory_numbers, suggest_fix

    # The plan's numbers are of no use for a function that may train another model.
    try:
        numbers = format_memory_numbers(shortage, plan if trains_the_plan else None)
        return numbers, suggest_fix(shortage, plan, trains_the_plan=trains_the_plan) if plan else ""
    except (ValueError, ArithmeticError):
        return format_memory_numbers(shortage, None), ""


def _read_plan(description: Mapping[str, object]) -> Plan | None:
    import json

    from shardscope.core.plan import Plan

    try:
        return Plan.from_json(json.dumps(description.get("plan")))
    except ValueError:
        return None
