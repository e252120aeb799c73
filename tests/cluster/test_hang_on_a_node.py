"""A rank on one node that makes no progress, while the others wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.runs import assert_nothing_is_left, make_plan, wait_for
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.records.folder import FINAL

needs("accelerate")


@thorough()
def test_fault_82_a_rank_on_node_1_sleeps_in_a_step(
    slurm: TwoNodeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep_on_rank_1(ctx: object) -> None:
        import time

        import torch
        import torch.distributed as dist

        def sleep_until_woken() -> None:
            while not (ctx.folder / "wake").exists():
                time.sleep(0.1)

        # Enough steps after the sleep that the nodes, which look once a second, say that it is over.
        for step in range(100):
            if (ctx.rank, step) == (1, 12):
                sleep_until_woken()
            dist.all_reduce(torch.ones(1))
            ctx.log(value=1.0)
            time.sleep(0.05)

    monkeypatch.setenv("SHARDSCOPE_HANG_SECONDS", "2")
    run = ss.launch(make_plan("2x1xcpu"), sleep_on_rank_1, folder=tmp_path, on=ss.Slurm())
    wait_for(lambda: "no step for" in run.reason or run.status in FINAL)
    assert run.status == "running", (run.status, run.reason, run.error)
    name = ss.Run.attach(run.folder).nodes[1].name
    assert f"rank 0 waits for rank 1 on node 1 ({name})" in run.reason, run.reason
    # The rank may be in a function that its loop calls.
    assert "sleep_until_woken" in run.reason and "rank 0: all_reduce" in run.reason, run.reason
    # Each node has written its own ranks' stacks.
    assert "where rank 1 stands" in run.logs(1) and "in sleep_until_woken" in run.logs(1)
    assert "where rank 0 stands" in run.logs(0) and "in all_reduce" in run.logs(0)
    assert "in sleep_until_woken" in (run.folder / "stacks" / "rank-1.txt").read_text()
    assert (run.folder / "nodes" / "1" / "hang.json").exists()
    (run.folder / "wake").touch()
    assert run.wait(60) == "finished", (run.status, run.reason, run.error)
    assert any("make progress again" in str(record["reason"]) for record in run.history), run.history
    assert_nothing_is_left(run, slurm)
