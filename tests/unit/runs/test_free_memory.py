"""A launch looks at what is free on the cards, through a stand-in of the driver's library."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import GIB, TOTAL, pretend_cards
from tests.requirements import needs_installed

import shardscope as ss
from shardscope.machine.detection import read_gpu_states
from shardscope.machine.processes import identify_machine
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_json, write_json
from shardscope.runs.backends import this_machine
from shardscope.runs.launch.free_memory import TooLittleFreeError, check_free_memory, describe_runs_on_gpus
from shardscope.runs.watch import host_monitor as host_watch


def make_plan(size: str = "1b") -> ss.Plan:
    return ss.Plan(
        ss.Architecture.of_size(size), ss.Cluster.parse("2xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
    )


def test_free_memory_and_processes_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, [30 * GIB, 70 * GIB, 50 * GIB], [(42, 40 * GIB), (43, None)])
    first, *rest = read_gpu_states()
    assert first.processes == ((42, 40 * GIB), (43, None)) and first.total_bytes == TOTAL
    assert [card.free_bytes for card in rest] == [70 * GIB, 50 * GIB]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [card.index for card in read_gpu_states()] == [2, 0]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu_states() == []


def test_free_memory_counts_only_on_the_gpus_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    peak = plan.memory().peak_bytes
    pretend_cards(monkeypatch, [peak, peak, 0])
    assert check_free_memory(plan, read_gpu_states()[:2], needs_peak=True) == ""
    assert check_free_memory(plan, [], needs_peak=True) == ""


def test_less_free_memory_than_the_peak_raises_or_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    pretend_cards(monkeypatch, [TOTAL, plan.memory().peak_bytes - 1])
    words = check_free_memory(plan, read_gpu_states(), needs_peak=False)
    assert words.startswith("GPU 1 has ") and "the plan's predicted peak is " in words
    with pytest.raises(TooLittleFreeError, match=r"launch\.plan on GPU 1 is .*or force=True"):
        check_free_memory(plan, read_gpu_states(), needs_peak=True)


def test_each_gpu_is_compared_with_its_ranks_pipeline_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ss.Cluster.parse("4xh100-sxm-80gb")
    plan = ss.Plan(ss.Architecture.of_size("1b"), cluster, ss.Recipe(), ss.Layout.fsdp2(pp=2))
    first, second = (stage.peak_bytes for stage in plan.memory().by_stage)
    assert first != second
    free = [first, first, second, second]
    pretend_cards(monkeypatch, free)
    assert check_free_memory(plan, read_gpu_states(), needs_peak=True) == ""
    for rank, stage in ((1, 0), (3, 1)):
        pretend_cards(monkeypatch, [num_bytes - (rank == each) for each, num_bytes in enumerate(free)])
        with pytest.raises(
            TooLittleFreeError, match=rf"GPU {rank} is .*pipeline stage {stage}'s predicted peak"
        ):
            check_free_memory(plan, read_gpu_states(), needs_peak=True)


def test_runs_of_another_machine_use_no_gpu_of_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for machine in (identify_machine(), "another"):
        folder = RunFolder(tmp_path / machine.split()[0])
        folder.create()
        record = {"world_size": 1, "created": time.time(), "machine": machine, "gpus": [0]}
        write_json(folder.run_json, record, as_is=("machine",))
    pretend_cards(monkeypatch, [TOTAL])
    assert describe_runs_on_gpus(ss.runs(tmp_path), read_gpu_states()).count(" on GPU 0") == 1


@needs_installed("torch")
def test_a_launch_stores_import_paths_unredacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PASSWORD", "workshop")
    monkeypatch.syspath_prepend("/home/me/workshop")
    monkeypatch.setenv("PYTHONPATH", "/home/me/workshop")
    monkeypatch.setattr(this_machine, "start_supervisor", lambda *_: None)
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("1xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
    )
    run = ss.launch(plan, ss.Pretrain(num_steps=1), folder=tmp_path)
    description = read_json(run.folder / "run.json") or {}
    assert description["sys_path"][0] == description["pythonpath"] == "/home/me/workshop"
    assert run.is_on_this_machine


@needs_installed("torch")
def test_a_built_in_task_raises_and_a_function_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_cards(monkeypatch, [2 * GIB, TOTAL], [(42, 77 * GIB), (43, None)])
    who = r"end the processes on it \(process 42 with 77.0 GiB, process 43\), or .*CUDA_VISIBLE_DEVICES"
    with pytest.raises(
        ValueError, match=rf"GPU 0 is '2.00 of 79.6 GiB free'; allowed: at least .*predicted peak .*{who}"
    ):
        ss.launch(make_plan(), ss.Pretrain(num_steps=2), folder=tmp_path)
    assert not list(tmp_path.iterdir())

    def train(ctx: Any) -> None:
        raise AssertionError("never started here")

    monkeypatch.setattr(this_machine, "start_supervisor", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="GPU 0 has 2.00 of 79.6 GiB free"):
        forced = ss.launch(make_plan(), ss.Pretrain(num_steps=2), folder=tmp_path, name="forced", force=True)
    append_line(forced.folder / "status.jsonl", {"time": 1.0, "status": "stopped", "reason": "x"})
    with pytest.warns(RuntimeWarning, match="GPU 0 has 2.00 of 79.6 GiB free"):
        run = ss.launch(make_plan(), train, folder=tmp_path)
    assert "2.00 of 79.6 GiB free" in run.reason and run.gpus == [0, 1]
    # The second launch while the first holds the cards, whose memory may still be free.
    pretend_cards(monkeypatch, [TOTAL, TOTAL, TOTAL])
    with pytest.warns(
        RuntimeWarning, match=rf"^the run {run.name} is starting on GPU 0, 1: run\.stop\(\) ends it$"
    ):
        second = ss.launch(make_plan(), train, folder=tmp_path, name="second")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with pytest.warns(RuntimeWarning) as said:
        ss.launch(make_plan(), train, folder=tmp_path, name="third")
    assert str(said[0].message).count(" on GPU 0: run.stop()") == 2
    assert said[0].filename == __file__
    for each in (run, second):
        append_line(each.folder / "status.jsonl", {"time": 1.0, "status": "stopped", "reason": "x"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        one = ss.Plan(
            ss.Architecture.of_size("1b"), ss.Cluster.parse("h100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp()
        )
        assert ss.launch(one, train, folder=tmp_path, name="fourth").reason == "the supervisor is starting"


def test_on_an_idle_gpu_that_is_too_small_the_fix_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("30b")
    pretend_cards(monkeypatch, [TOTAL, TOTAL])
    with pytest.raises(ValueError, match=r"launch\.plan on GPU 0") as caught:
        check_free_memory(plan, read_gpu_states(), needs_peak=True)
    assert plan.repairs()[0].change in str(caught.value)


def test_too_many_cpu_ranks_for_the_hosts_memory_raise_or_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that many share it would take everybody's memory."""

    def train(ctx: Any) -> None:
        pass

    large = ss.Plan(ss.Architecture.of_size("1b"), ss.Cluster.parse("2xcpu"), ss.Recipe(), ss.Layout.ddp())
    monkeypatch.setattr(host_watch, "read_free_host_memory", lambda: (3 * GIB, 16 * GIB))
    monkeypatch.setattr(this_machine, "start_supervisor", lambda *_: None)
    with pytest.raises(TooLittleFreeError) as refused:
        ss.launch(large, ss.Pretrain(num_steps=2), folder=tmp_path)
    words = str(refused.value)
    assert refused.value.field == "launch.plan on this host"
    assert "3.00 of 16.0 GiB" in words and "2 CPU ranks" in words and "force=True" in words
    assert not list(tmp_path.iterdir())
    with pytest.warns(RuntimeWarning, match="this host has 3.00 of 16.0 GiB free"):
        ss.launch(large, ss.Pretrain(num_steps=2), folder=tmp_path, name="forced", force=True)
    # Of a function nobody knows what it takes.
    with pytest.warns(RuntimeWarning, match="this host has 3.00 of 16.0 GiB free"):
        ss.launch(large, train, folder=tmp_path, name="function")
    monkeypatch.setattr(host_watch, "read_free_host_memory", lambda: (500 * GIB, 512 * GIB))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ss.launch(large, ss.Pretrain(num_steps=2), folder=tmp_path, name="roomy")
