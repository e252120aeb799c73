"""The final status of a run from its evidence: markers first, exit codes second."""

from __future__ import annotations

from typing import Any

import pytest

from shardscope.runs.explain.failure import Failure
from shardscope.runs.verdict import Evidence, decide_status

RETURNED = {"exit": "finished"}
AT_WORK = {"ready": 1.0}


def make_failure(rank: int | None, reason: str) -> Failure:
    return Failure(rank=rank, time=1.0, reason=reason, text=reason, raised="", is_consequence=False)


def decide(markers: list[dict[str, Any]], launcher_code: int | None = 0, **more: Any) -> tuple[str, str]:
    evidence = Evidence(markers=markers, launcher_code=launcher_code, **{"failures": (), **more})
    return tuple(decide_status(evidence))


@pytest.mark.parametrize("code", [0, 1, -9, 120])
@pytest.mark.parametrize("marker", [{}, AT_WORK, {"exit": "failed"}, {"exit": ["finished"]}])
def test_fault_51_no_exit_code_makes_a_run_finished(marker: dict[str, Any], code: int) -> None:
    assert decide([marker], code)[0] == "failed"
    status, reason = decide([RETURNED, marker], code)
    assert status == "failed" and (code != 0 or "rank 1" in reason)


@pytest.mark.parametrize("code", [0, 1, -9, 120])
def test_fault_52_no_exit_code_makes_a_run_failed(code: int) -> None:
    status, reason = decide([RETURNED], code)
    assert status == "finished" and reason.startswith("the task returned on every rank")
    assert ("later, rank 0" in reason) == (code != 0)
    # The code of a launcher of several ranks is no rank's.
    assert decide([RETURNED, RETURNED], code) == ("finished", "the task returned on every rank")


def test_events_after_every_task_returned_are_in_the_reason() -> None:
    late = make_failure(1, "rank 1 exited with code 7 after its task had returned")
    status, reason = decide([RETURNED, RETURNED], 1, failures=[late])
    assert status == "finished" and reason.endswith(late.reason)
    left = "process 7 (sleep)"
    assert decide([RETURNED, RETURNED], -9, failures=[late], left_behind=left)[1].endswith(
        f"; then ended {left}"
    )


def test_a_run_without_ranks_is_not_finished() -> None:
    assert decide([{}], 0)[0] == "failed"
    status, reason = decide([{}], None, stop_reason="Stop was pressed")
    assert status == "stopped" and reason.startswith("Stop was pressed")


def test_a_stop_is_a_failure_only_if_a_rank_failed_before() -> None:
    stop = {"stop_reason": "Stop was pressed"}
    assert decide([AT_WORK], -9, **stop, was_ended=True) == ("stopped", "Stop was pressed")
    status, reason = decide([RETURNED], 0, **stop)
    assert status == "stopped" and "every rank returned" in reason
    died = [make_failure(0, "rank 0 raised ValueError: x")]
    assert decide([AT_WORK], 1, **stop, failures=died) == ("failed", "rank 0 raised ValueError: x")


def test_the_reason_of_a_killed_launcher_names_the_likely_sender() -> None:
    status, reason = decide([AT_WORK, AT_WORK], -9, killer="memory ran out")
    assert status == "failed" and "launcher" in reason and reason.endswith("SIGKILL: memory ran out")
    assert decide([AT_WORK], -9, killer="memory ran out")[1].startswith("rank 0 was killed by SIGKILL")
    assert decide([AT_WORK, AT_WORK], -9)[1].endswith("SIGKILL"), "nothing follows without a known sender"
