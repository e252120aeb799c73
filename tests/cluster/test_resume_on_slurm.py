"""Resume of a Slurm run: the same target, options and retries, from its newest checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cluster.runs import assert_nothing_is_left, make_plan, wait_for
from tests.cluster.test_attempts import read_job_id
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import needs, thorough

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope_widgets.run.runs_view import RunsView

needs("accelerate")


@thorough()
def test_the_runs_tab_resumes_on_the_same_target(
    slurm: TwoNodeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    setup = tmp_path / "setup"
    target = ss.Slurm(
        partition="debug", time=25, setup=[f"echo once >> {setup}"], extra={"comment": "melville"}
    )
    task = ss.Pretrain(num_steps=80)
    run = ss.launch(make_plan("2x1xcpu"), task, folder="runs", name="saved", on=target, retries=1)
    wait_for(lambda: len(run.metrics()) > 8 or run.status in FINAL)
    run.stop(checkpoint=True)
    assert run.wait(60) == "stopped", (run.status, run.reason)
    done = max(int(record["step"]) for record in run.metrics()) + 1
    view = RunsView()
    try:
        (key,) = re.findall("data-act='(resume:[^']*)'", view.table.value)
        view.table.press_button(key)
        wait_for(lambda: not view.is_list_shown or "role='alert'" in view.toolbar.value, 60)
        again = view.run_view.run
        assert again is not None, view.toolbar.value
        shown = slurm.run("scontrol", "show", "job", read_job_id(again))
        assert "Partition=debug" in shown and "TimeLimit=00:25:00" in shown and "Comment=melville" in shown
        assert again.wait(360) == "finished", (again.status, again.reason, again.error)
    finally:
        view.close()
    steps = [record["step"] for record in again.metrics() if record["rank"] == 1 and "loss" in record]
    assert steps == list(range(done, 80))
    assert setup.read_text().split().count("once") >= 2 and len(again.attempts) == 1
    assert again.plan == run.plan
    for one in (run, again):
        assert_nothing_is_left(one, slurm)
