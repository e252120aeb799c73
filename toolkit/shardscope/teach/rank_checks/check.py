"""One check on one rank, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from shardscope.teach.rank_checks.bucketed_all_reduce import check_bucketed_all_reduce
from shardscope.teach.rank_checks.collectives import CollectiveCounter
from shardscope.teach.rank_checks.learner import Learner, LearnerError, OtherRankError, ProblemError
from shardscope.teach.rank_checks.one_layer_fsdp import check_one_layer_fsdp
from shardscope.teach.rank_checks.sharded_optimizer import check_sharded_optimizer

if TYPE_CHECKING:
    from shardscope.runs.launch.context import Context


class Check(Protocol):
    """One check: it returns a sentence about a right answer, and raises :class:`ProblemError`."""

    def __call__(self, learner: Learner, answer: object) -> str:
        """Check the answer on this rank."""


CHECKS: dict[str, Check] = {
    "bucketed_all_reduce": check_bucketed_all_reduce,  # type: ignore[dict-item]
    "sharded_optimizer": check_sharded_optimizer,  # type: ignore[dict-item]
    "one_layer_fsdp": check_one_layer_fsdp,  # type: ignore[dict-item]
}
"""Checks by name; ``two_ranks.py`` has made sure that the answer is of the kind that each one calls."""


def check_on_rank(ctx: Context, check: str, answer: object, file_name: str) -> None:
    """Run one check on this rank and write its report; no problem of the answer is raised."""
    torch.set_num_threads(1)
    # The first operator in a dispatch mode imports 800 modules, for seconds: not in the learner's time.
    with CollectiveCounter():
        torch.zeros(1) + 1
    learner = Learner(ctx, file_name)
    try:
        summary = CHECKS[check](learner, answer)
    except LearnerError as error:
        learner.report_exception(error.__cause__ or error)
    except ProblemError as problem:
        learner.report(problem=str(problem))
    except OtherRankError:
        pass
    else:
        learner.report(problem="", summary=summary)
