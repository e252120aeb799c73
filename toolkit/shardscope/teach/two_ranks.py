"""Code answers: a learner's function or class runs on two CPU ranks and is compared with one process.

:class:`CodeOnRanks` launches the ranks and reads their reports; ``rank_checks/`` is what each rank runs.
"""

from __future__ import annotations

import inspect
import linecache
import tempfile
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING

from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.records.folder import FINAL
from shardscope.records.json_files import read_json
from shardscope.runs.launch.launch import launch
from shardscope.teach.answers import Judgement
from shardscope.teach.rank_checks.reports import CALL_SECONDS, report_path

if TYPE_CHECKING:
    from shardscope.runs.launch.context import Context
    from shardscope.runs.run import Run

RANKS = 2
RUN_SECONDS = 180.0
"""Most seconds of a whole check: the start of two ranks takes some ten."""
STOP_SECONDS = 30.0
MAX_PRINTED_LINES = 5
MAX_PRINTED = 300
"""Lines and characters of a rank's output that the feedback repeats."""


@dataclass(frozen=True)
class RankTask:
    """The task of the ranks: check ``answer`` by the check of that name in ``rank_checks/check.py``."""

    check: str
    answer: object
    file_name: str
    """File that the answer was compiled from, a notebook's cell: frames in it are the learner's."""

    def __call__(self, ctx: Context) -> None:
        from shardscope.teach.rank_checks.check import check_on_rank

        check_on_rank(ctx, self.check, self.answer, self.file_name)


@dataclass(frozen=True, kw_only=True)
class CodeOnRanks:
    """A function, or a class with one method to call, that two gloo ranks run; see :class:`Expected`."""

    check: str
    """Name of the check in ``rank_checks/check.py``."""
    signature: str
    """How it is called: ``average_gradients(parameters, bucket_bytes)``."""
    num_arguments: int
    method: str | None = None
    """Method that a class needs; None: a function is expected."""

    def judge(self, answer: object) -> Judgement:
        """Run the answer on two ranks; problems of its type or signature are found before."""
        problem = self._find_wrong_kind(answer)
        if problem:
            return Judgement(False, problem, False)
        with tempfile.TemporaryDirectory(prefix="shardscope-answer-", ignore_cleanup_errors=True) as folder:
            try:
                run = launch(_build_plan(), RankTask(self.check, answer, _find_file(answer)), folder=folder)
            except (ValueError, OSError, RuntimeError, ImportError) as error:
                return Judgement(False, f"The two ranks did not start: {error}", False)
            try:
                run.wait(timeout=RUN_SECONDS)
            finally:
                # Also if the learner interrupts the cell: no rank may outlive its check.
                ended_in_time = _end(run)
            return _read_reports(run, ended_in_time)

    def _find_wrong_kind(self, answer: object) -> str | None:
        """Return what is wrong with the answer's type or parameters, or None."""
        kind = "a function" if self.method is None else f"a class with a method {self.method}"
        expected = f"expected: {kind}, called as {self.signature}."
        if self.method is None:
            if not isinstance(answer, FunctionType):
                return f"The answer is of type {type(answer).__name__}; {expected}"
            lazy = inspect.iscoroutinefunction(answer) or inspect.isgeneratorfunction(answer)
            if lazy:
                return f"A call of {answer.__name__} would not run its body (async, or yield); {expected}"
        else:
            if not inspect.isclass(answer):
                return f"The answer is of type {type(answer).__name__}; {expected}"
            if not callable(getattr(answer, self.method, None)):
                return f"{answer.__name__} has no method {self.method}; {expected}"
        try:
            inspect.signature(answer).bind(*range(self.num_arguments))
        except (TypeError, ValueError):
            return f"{answer.__name__} cannot be called so: {expected}"
        return None


def _build_plan() -> Plan:
    """Return a plan of two CPU ranks, whose model no check uses."""
    return Plan(
        Architecture.of_size("2m"),
        Cluster.parse(f"{RANKS}xcpu"),
        Recipe(seq_len=32, micro_batch_size=1, global_batch_size=RANKS, precision="fp32"),
        Layout.ddp(),
    )


def _find_file(answer: object) -> str:
    """Return the name that the answer's code was compiled under."""
    functions = [answer] if isinstance(answer, FunctionType) else list_functions(answer)
    return functions[0].__code__.co_filename if functions else ""


def list_functions(answer: object) -> list[FunctionType]:
    """Return the functions that a class itself defines."""
    members = vars(answer).values() if inspect.isclass(answer) else ()
    return [member for member in members if isinstance(member, FunctionType)]


def _end(run: Run) -> bool:
    """Stop the run if it is not over, and wait for its end. Return whether it was over."""
    if run.status in FINAL:
        return True
    run.stop()
    run.wait(timeout=STOP_SECONDS)
    return False


def _read_reports(run: Run, ended_in_time: bool) -> Judgement:
    """Return the judgement of the ranks' reports: the first problem counts, others often follow from it."""
    found = {rank: read_json(report_path(run.folder, rank)) for rank in range(RANKS)}
    reports = {rank: report for rank, report in found.items() if report is not None}
    problems = {rank: report for rank, report in reports.items() if report.get("problem")}
    if not problems and len(reports) == RANKS and run.status == "finished":
        return Judgement(True, str(reports[0].get("summary", "")))
    stuck = {rank: report for rank, report in problems.items() if report["problem"] == "stuck"}
    if problems and len(stuck) == len(problems):
        text = _describe_deadlock(stuck)
    elif problems:
        rank = min(problems, key=lambda rank: float(str(problems[rank]["time"])))
        text = _describe_problem(rank, problems[rank])
    elif not ended_in_time:
        text = f"The check took more than {RUN_SECONDS:.0f} s and was stopped: is this machine busy?"
    else:
        text = (
            f"The ranks ended without an answer ({run.reason}). Collectives that ranks call with tensors of "
            "different sizes can end like this."
        )
    printed = "\n".join(run.logs(0).strip().splitlines()[-MAX_PRINTED_LINES:])[:MAX_PRINTED]
    return Judgement(False, text + (f" Rank 0 printed: {printed}" if printed else ""))


def _describe_problem(rank: int, report: dict[str, object]) -> str:
    where = _quote_line(report)
    if report["problem"] == "raised":
        return f"Rank {rank} raised {report['error']}{f' in {where}' if where else ''}."
    return str(report["problem"])


def _describe_deadlock(stuck: dict[int, dict[str, object]]) -> str:
    """Return which line each rank waits in."""
    states = []
    for rank, report in sorted(stuck.items()):
        where = _quote_line(report)
        states.append(f"rank {rank} " + (f"is in {where}" if where else "has returned from it"))
    return (
        f"Stopped: your code did not return on every rank within {CALL_SECONDS:.0f} s. "
        f"{'; '.join(states)}. A collective returns when every rank of its group has called it, in the "
        "same order."
    ).replace(". rank", ". Rank")


def _quote_line(report: dict[str, object]) -> str:
    """Return the number and the text of the learner's line in a report, or ``""``."""
    line, file_name = report.get("line"), report.get("file")
    if not isinstance(line, int) or not isinstance(file_name, str):
        return ""
    text = linecache.getline(file_name, line).strip()
    return f"line {line} of the cell" + (f" (`{text}`)" if text else "")
