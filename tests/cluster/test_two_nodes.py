"""``ss.launch(on=ss.Slurm())`` on a real Slurm of two nodes: CPU ranks train as on one machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.cluster.runs import (
    assert_nothing_is_left,
    launch_endless,
    list_processes,
    losses,
    make_plan,
    train_until_stopped,
    wait_for,
)
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import every_case, needs, skip_without, thorough

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.runs.profiling_request import read_recording_state

needs("accelerate")

STEPS = 4
FRAMEWORKS = {
    "ddp": (ss.Layout.ddp, "torch"),
    "fsdp2": (ss.Layout.fsdp2, "torch"),
    "zero": (partial(ss.Layout.zero, stage=3), "deepspeed"),
    "megatron": (ss.Layout.megatron, "megatron"),
}


CASES = ["ddp", *(pytest.param(name, marks=thorough()) for name in FRAMEWORKS if name != "ddp")]


@pytest.mark.parametrize("name", CASES)
def test_two_nodes_train_as_one_machine(
    name: str, slurm: TwoNodeSlurm, tmp_path: Path, train_here: Callable[[ss.Layout, int], list[float]]
) -> None:
    make_layout, package = FRAMEWORKS[name]
    skip_without(package)
    task = ss.Pretrain(num_steps=STEPS)
    run = ss.launch(
        make_plan("2x1xcpu", make_layout()), task, folder=tmp_path, name="nodes", on=ss.Slurm(time=30)
    )
    assert run.status in ("queued", "starting")
    run.wait(360)
    across = losses(run)
    # Each node wrote its own files, and the job's script holds no more than what starts the processes.
    names = [json.loads((run.folder / "nodes" / node / "node.json").read_text())["name"] for node in "01"]
    assert sorted(names) == ["node1", "node2"]
    assert across == pytest.approx(train_here(make_layout(), STEPS), abs=1e-5) and len(across) == STEPS
    assert_nothing_is_left(run, slurm)


@thorough()
def test_two_ranks_on_each_node(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = ss.launch(make_plan("2x2xcpu"), ss.Pretrain(num_steps=2), folder=tmp_path, on=ss.Slurm())
    run.wait(360)
    assert len(losses(run)) == 2
    assert {record["rank"] for record in run.metrics()} == {0, 1, 2, 3}
    assert_nothing_is_left(run, slurm)


@every_case()
def test_a_job_that_waits_is_profiled_when_it_starts(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    target = ss.Slurm(extra={"begin": "now+10"})
    run = ss.launch(make_plan("2x1xcpu"), ss.Pretrain(num_steps=6), folder=tmp_path, on=target)
    wait_for(lambda: run.status == "queued" and "job" in run.reason, 60)
    assert run.profile(2, ranks=[1], shapes=True) == 1
    assert run.wait(180) == "finished", run.reason
    assert run.trace().steps().to_frame().groupby("rank")["step"].nunique().to_dict() == {1: 2}
    assert_nothing_is_left(run, slurm)


@every_case()
def test_a_live_run_on_two_nodes_is_profiled_on_both(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = launch_endless(slurm, tmp_path)
    assert ss.Run.attach(run.folder).profile(3) == 1

    def is_recorded() -> bool:
        state = read_recording_state(run)
        return state is not None and state.is_finished

    wait_for(is_recorded, 60)
    run.stop()
    assert run.wait(60) == "stopped", (run.status, run.reason)
    steps = run.trace().steps().to_frame()
    assert steps.groupby("rank")["step"].nunique().to_dict() == {0: 3, 1: 3}
    assert_nothing_is_left(run, slurm)


@thorough()
def test_stop(slurm: TwoNodeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "aB3" * 12
    monkeypatch.setenv("HF_TOKEN", token)
    run = launch_endless(slurm, tmp_path)
    # The rendezvous listens on node 0's own address only.
    meeting = json.loads((run.folder / "nodes" / "0" / "rendezvous.json").read_text())
    listening = [
        entry.laddr.ip
        for entry in psutil.net_connections("tcp")
        if entry.status == psutil.CONN_LISTEN and entry.laddr.port == meeting["port"]
    ]
    assert listening == [meeting["address"]]
    # The token is in the ranks' environment, and nowhere that others read.
    assert token not in slurm.run("scontrol", "show", "job", "--details")
    texts = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    assert not any(token.encode() in text for text in texts)
    run.stop()
    assert run.wait(60) == "stopped" and run.reason == "run.stop() was called"
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_76_stop_with_checkpoint_from_another_notebook(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = launch_endless(slurm, tmp_path)
    code = f"import shardscope as ss; ss.Run.attach({str(run.folder)!r}).stop(checkpoint=True)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert run.wait(60) == "stopped", (run.status, run.reason)
    # Both ranks left after the same step, and saved.
    assert [(run.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["saved", "saved"]
    steps = [
        max(int(record["step"]) for record in run.metrics() if record["rank"] == rank) for rank in (0, 1)
    ]
    assert steps[0] == steps[1]
    assert_nothing_is_left(run, slurm)


@thorough()
def test_a_run_outlives_the_process_that_launched_it(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    code = (
        "import shardscope as ss; recipe = ss.Recipe(seq_len=64, global_batch_size=2, precision='fp32');"
        "plan = ss.Plan(ss.Architecture.of_size('2m'), ss.Cluster.parse('2x1xcpu'), recipe, ss.Layout.ddp());"
        f"ss.launch(plan, ss.Pretrain(num_steps=2), folder={str(tmp_path)!r}, name='run', on=ss.Slurm())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    run = ss.Run.attach(tmp_path / "run")
    assert run.wait(300) == "finished", (run.status, run.reason, run.error)
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_67_scancel_from_outside(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = launch_endless(slurm, tmp_path)
    job_id = json.loads((run.folder / "job.json").read_text())["job_id"]
    slurm.run("scancel", job_id)
    assert run.wait(60) == "stopped" and "scancel" in run.reason, (run.status, run.reason)
    assert_nothing_is_left(run, slurm)


@thorough()
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=every_case())])
def test_fault_65_lost_node(lost: int, slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = launch_endless(slurm, tmp_path)
    record = json.loads((run.folder / "nodes" / str(lost) / "node.json").read_text())
    slurm.kill_node(record["name"])
    began = time.monotonic()
    try:
        # The other node's ranks end by themselves.
        wait_for(lambda: not list_processes(run.folder), 60)
        waited = time.monotonic() - began
        status = run.wait(60)
        # Slurm gives a node up ten seconds after its daemon's last sign (SlurmdTimeout).
        assert slurm.wait_until_empty(120) == []
    finally:
        slurm.start_node(record["name"])
        slurm.wait_until_idle()
    if lost == 0:
        assert status == "lost", (status, run.reason)
    else:
        assert status == "failed" and f"node 1 ({record['name']}) is lost" in run.reason, (status, run.reason)
    print(f"ranks of the other node ended after {waited:.0f} s")


@thorough()
def test_failing_rank_is_named(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    def fail_on_rank_1(ctx: object) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        if ctx.rank == 1:
            raise ValueError("this rank fails")
        dist.all_reduce(torch.ones(1))

    run = ss.launch(make_plan("2x1xcpu"), fail_on_rank_1, folder=tmp_path, on=ss.Slurm())
    assert run.wait(300) == "failed"
    assert "rank 1" in run.reason and "this rank fails" in run.error
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_73_stop_of_a_waiting_job(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = ss.launch(
        make_plan("2x1xcpu"), train_until_stopped, folder=tmp_path, on=ss.Slurm(extra={"begin": "now+1hour"})
    )
    wait_for(lambda: "BeginTime" in run.reason and "estimated start" in run.reason, 60)
    assert run.status == "queued"
    run.stop()
    assert run.wait(60) == "stopped" and "before any rank started" in run.reason
    assert slurm.wait_until_empty() == []
    # The end is stored: another handle needs no answer of Slurm, which forgets the job.
    assert json.loads((run.folder / "job_end.json").read_text())["status"] == "stopped"
    assert not (run.folder / "task.pkl").exists()
    assert [record["status"] for record in ss.Run.attach(run.folder).history] == ["queued", "stopped"]


def test_fault_72_what_the_partition_has_not_is_refused(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    cases = [
        (make_plan("2x1xcpu"), ss.Slurm(partition="debugg"), "Slurm.partition", "'debug'"),
        (make_plan("3x1xcpu", batch=3), ss.Slurm(), "plan.cluster.num_nodes", "2 nodes"),
        (make_plan("2x8xa100-sxm-80gb", batch=16), ss.Slurm(), "plan.cluster.gpus_per_node", "1 a100 GPU"),
        (make_plan("2x1xh100-sxm-80gb"), ss.Slurm(), "plan.cluster.gpu", "1 a100 GPU"),
        (make_plan("2x1xcpu"), ss.Slurm(extra={"nodelist": "node7"}), "launch.on", "Invalid node name"),
    ]
    for plan, target, field, text in cases:
        with pytest.raises(FieldError) as refused:
            ss.launch(plan, train_until_stopped, folder=tmp_path / "none", on=target)
        assert refused.value.field == field and text in str(refused.value), str(refused.value)
    assert not (tmp_path / "none").exists() and slurm.list_jobs() == []
