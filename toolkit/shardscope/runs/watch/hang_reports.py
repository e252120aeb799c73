"""Reports of the hang detection: the position of each rank of a node, and the text for all nodes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from shardscope.core.number_format import format_count
from shardscope.records.json_values import is_int, is_number
from shardscope.runs.watch.stack_requests import MAX_NAMED_RANKS, NO_STACKS, is_stopped
from shardscope.runs.watch.stacks import describe_position, waits_in_collective

Kind = Literal["steps", "activity"]
"""Whether no step was logged (``hang.py``), or nothing happened at all (``standstill.py``)."""


class HangReport(NamedTuple):
    """The ranks of one node that make no progress, or of several nodes."""

    kind: Kind
    hangs: bool
    """False while a rank's stack explains the delay, such as a checkpoint."""
    waited: float
    """Seconds without progress."""
    median: float
    """Median seconds of a step; 0 for a task that logs none."""
    steps: Mapping[int, int]
    """The last step of each rank that has logged any."""
    positions: Mapping[int, str]
    """Where the ranks are."""
    waiting: Sequence[int]
    """The ranks that wait in a collective."""
    busy: Mapping[int, str]
    """The ranks whose stack explains the delay, and how."""
    stopped: Sequence[int] = ()
    """The ranks that are stopped by SIGSTOP or a debugger."""
    returned: Sequence[int] = ()
    """The ranks whose task has returned, so that others wait for them in vain."""

    def to_record(self) -> dict[str, object]:
        """Return the report as JSON has it."""
        return self._asdict()


def build_report(
    kind: Kind,
    replies: Mapping[int, str],
    *,
    hangs: bool,
    waited: float,
    median: float = 0.0,
    steps: Mapping[int, int] | None = None,
    busy: Mapping[int, str] | None = None,
    returned: Sequence[int] = (),
) -> HangReport:
    """Return the report of ranks that have answered with their Python stacks, ``replies``."""
    positions = {rank: describe_position(reply) or reply.strip() for rank, reply in replies.items()}
    return HangReport(
        kind=kind,
        hangs=hangs,
        waited=waited,
        median=median,
        steps=steps or {},
        positions=positions,
        waiting=[rank for rank, reply in replies.items() if waits_in_collective(reply)],
        busy=busy or {},
        stopped=tuple(rank for rank, reply in replies.items() if is_stopped(reply)),
        returned=tuple(returned),
    )


def parse_report(record: object) -> HangReport | None:
    """Return the report in a record that another node has written; None if there is none."""
    if not isinstance(record, dict):
        return None
    waited, median = record.get("waited"), record.get("median")
    if not is_number(waited) or not is_number(median):
        return None
    return HangReport(
        kind="steps" if record.get("kind") == "steps" else "activity",
        hangs=record.get("hangs") is True,
        waited=float(waited),
        median=float(median),
        steps={rank: step for rank, step in _by_rank(record.get("steps")) if is_int(step)},
        positions={rank: text for rank, text in _by_rank(record.get("positions")) if isinstance(text, str)},
        waiting=_read_ranks(record.get("waiting")),
        busy={rank: text for rank, text in _by_rank(record.get("busy")) if isinstance(text, str)},
        stopped=tuple(_read_ranks(record.get("stopped"))),
        returned=tuple(_read_ranks(record.get("returned"))),
    )


def _read_ranks(record: object) -> list[int]:
    return list(filter(is_int, record)) if isinstance(record, list) else []


def _by_rank(record: object) -> Iterable[tuple[int, object]]:
    items = record.items() if isinstance(record, dict) else ()
    return ((int(rank), value) for rank, value in items if rank.isdecimal() and rank.isascii())


def merge_reports(reports: Sequence[HangReport]) -> HangReport:
    """Return one report for the ranks of several nodes."""
    by_steps = [report for report in reports if report.kind == "steps"]
    merged = by_steps or reports
    return HangReport(
        kind="steps" if by_steps else "activity",
        hangs=all(report.hangs for report in reports),
        waited=max(report.waited for report in merged),
        median=statistics.median(report.median for report in merged),
        steps={rank: step for report in reports for rank, step in report.steps.items()},
        positions={rank: text for report in reports for rank, text in report.positions.items()},
        waiting=[rank for report in reports for rank in report.waiting],
        busy={rank: text for report in reports for rank, text in report.busy.items()},
        stopped=tuple(rank for report in reports for rank in report.stopped),
        returned=tuple(rank for report in reports for rank in report.returned),
    )


def describe_hang(report: HangReport, name_node: Callable[[int], str] | None = None) -> str:
    """Return a report as one line; ``name_node(rank)`` names the node of a rank, if there are several."""
    if report.kind == "steps":
        text = f"no step for {report.waited:.0f} s, while a step takes {report.median:.2g} s"
    else:
        text = (
            f"no activity for {report.waited:.0f} s: no metrics, no output, almost no CPU time, and "
            "unchanged stacks"
        )
    # The ranks that others wait for come first: they are most likely the cause.
    # One that has returned is not behind, but has had fewer steps to do.
    steps = {rank: step for rank, step in report.steps.items() if rank not in report.returned}
    least, most = (end(steps.values(), default=0) for end in (min, max))
    first = [rank for rank, step in steps.items() if step == least] if least < most else []
    if first:
        behind = format_count(most - least, "step")
        text += f"; {_list_ranks(first, name_node)} {'is' if len(first) == 1 else 'are'} {behind} behind"
    elif report.waiting and len(report.waiting) < len(report.positions):
        first = [rank for rank in report.positions if rank not in report.waiting]
        text += f"; in a collective {'rank' if len(report.waiting) == 1 else 'ranks'} "
        text += f"{_list_numbers(report.waiting)} wait{'s' * (len(report.waiting) == 1)} for "
        text += _list_ranks(first, name_node)
    if report.returned:
        have = "has" if len(report.returned) == 1 else "have"
        text += f"; {_list_ranks(report.returned, name_node)} {have} returned from the task"
    if report.busy:
        named = list(report.busy.items())[:MAX_NAMED_RANKS]
        text += f"; {', '.join(f'rank {rank} is {reason}' for rank, reason in named)}"
    # A stopped rank is the cause itself, even where the others do not wait in Python (inside of backward).
    at_work = (rank for rank in report.positions if rank not in report.returned)
    by_cause = sorted(at_work, key=lambda rank: (rank not in report.stopped, rank not in first))
    named_first = by_cause[:MAX_NAMED_RANKS]
    text += "".join(f"; rank {rank}: {report.positions[rank]}" for rank in named_first)
    if all(f"{position}\n" in NO_STACKS for position in report.positions.values()):
        return text
    return f"{text}. The Python stack of each rank is in its log"


def _list_numbers(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:MAX_NAMED_RANKS]))}{' and more' * (len(numbers) > MAX_NAMED_RANKS)}"


def _list_ranks(numbers: Sequence[int], name_node: Callable[[int], str] | None) -> str:
    text = f"rank{'s' * (len(numbers) > 1)} {_list_numbers(numbers)}"
    if name_node is None:
        return text
    nodes = dict.fromkeys(name_node(rank) for rank in numbers[:MAX_NAMED_RANKS])
    return f"{text} on {', '.join(nodes)}"
