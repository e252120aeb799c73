"""``run.profile`` on live runs: the steps that are recorded, what is refused, and ends in mid-recording."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import run_tasks as tasks
from run_helpers import seconds_until
from tests.requirements import few, thorough

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.runs.profiling_request import read_recording_state

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def launch_training(folder: Path, framework: str = "ddp", num_steps: int = 100_000, **fields: Any) -> ss.Run:
    layout = getattr(ss.Layout, framework)()
    plan = ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=32, global_batch_size=2),
        layout,
    )
    return ss.launch(plan, ss.Pretrain(num_steps=num_steps, **fields), folder=folder)


def wait_for_steps(run: ss.Run, count: int = 3) -> None:
    seconds_until(lambda: len(run.metrics()) >= 2 * count or run.status == "failed")
    assert run.status != "failed", run.error


def wait_for_recording(run: ss.Run, number: int) -> None:
    def is_finished() -> bool:
        state = read_recording_state(run)
        assert state is not None and run.status not in ("failed", "lost"), run.error
        return state.request.number == number and state.is_finished

    seconds_until(is_finished)


def read_rank_pid(run: ss.Run, rank: int) -> int:
    return int(json.loads((run.folder / "ranks" / f"rank-{rank}.json").read_text())["pid"])


def count_recorded_steps(trace: Any) -> dict[int, int]:
    return dict(Counter(row["rank"] for row in trace.steps()))


def list_names(trace: Any) -> set[str]:
    return {trace.names[index] for index in set(trace.name_index.tolist())}


def read_losses(run: ss.Run) -> list[object]:
    return [record["loss"] for record in run.metrics() if record["rank"] == 0 and "loss" in record]


@pytest.mark.parametrize("framework", few(["ddp", "fsdp2"], ["ddp"]))
def test_live_run_is_profiled_and_trains_on_with_the_same_losses(framework: str, tmp_path: Path) -> None:
    plain = launch_training(tmp_path / "plain", framework, num_steps=90)
    assert plain.wait(120) == "finished", plain.error
    run = launch_training(tmp_path / "profiled", framework, num_steps=90)
    wait_for_steps(run)
    with pytest.raises(ValueError, match=r"rank.* is 2; allowed: a whole number from 0 to 1"):
        run.profile(ranks=[0, 2])
    for wrong in (0, 1001, 2.5, True):
        with pytest.raises(ValueError, match=r"num_steps is .*; allowed: a whole number from 1 to 1,000"):
            run.profile(wrong)  # type: ignore[arg-type]
    assert run.profile(4, modules=True) == 1
    with pytest.raises(ValueError, match="one recording at a time"):
        run.profile()
    with pytest.raises(ValueError, match="Recording 1 of the run"):
        run.trace()
    wait_for_recording(run, 1)
    assert run.profile(2, ranks=1, shapes=True, stacks=True, memory=True) == 2
    assert run.wait(120) == "finished", run.error
    assert read_losses(run) == read_losses(plain)
    # The newest one: two steps, on one rank, with all that was requested.
    newest, first = run.trace(), run.trace(1)
    assert count_recorded_steps(newest) == {1: 2}
    assert list(newest.modules()) and list(newest.memory())
    # The first one is still there: four steps on both ranks, with named phases and layers.
    assert count_recorded_steps(first) == {0: 4, 1: 4}
    assert {"forward", "backward", "optimizer", "layers.0"} <= list_names(first)
    assert not list(first.modules()) and not list(first.memory())
    assert "layers.0" not in list_names(newest)
    with pytest.raises(ValueError, match="recording is 0; allowed: recordings of this run: 1, 2"):
        run.trace(0)
    with pytest.raises(
        ValueError, match="a run that is finished'; allowed: a run that is queued, starting or running"
    ):
        run.profile()
    assert ss.Run.attach(run.folder).trace(1).ranks == [0, 1]
    assert ss.Trace.load(run.folder).ranks == [1]


@thorough()
def test_recording_of_the_task_itself_is_kept_and_refuses_another(tmp_path: Path) -> None:
    run = launch_training(tmp_path, profile=True)
    seconds_until(lambda: read_recording_state(run) is not None or run.status == "failed", 120)
    refused = 0
    number = 0
    while not number:
        try:
            number = run.profile(1)
        except ValueError as error:
            refused += "one recording at a time" in str(error)
    assert refused and number == 1
    wait_for_recording(run, 1)
    run.stop()
    run.wait(30)
    assert (count_recorded_steps(run.trace(0)), count_recorded_steps(run.trace())) == (
        {0: 3, 1: 3},
        {0: 1, 1: 1},
    )


@thorough()
def test_function_is_profiled_between_its_reads_of_should_stop(plan: Any, tmp_path: Path) -> None:
    run = ss.launch(plan, tasks.reads_stop_and_commands, folder=tmp_path)
    seconds_until(lambda: run.reads_stop_requests or run.status == "failed")
    assert run.profile(5) == 1
    wait_for_recording(run, 1)
    run.stop(checkpoint=True)
    assert run.wait(30) == "stopped", run.error
    trace = run.trace()
    assert count_recorded_steps(trace) == {0: 5, 1: 5}
    per_step = Counter(trace.names[index] for index in trace.name_index.tolist())["my step"]
    assert per_step == 2 * 5, "one range a step and rank: both reads of a step are one boundary"
    assert not [record for record in run.metrics() if record.get("command") == "profile"]


def test_function_without_step_boundaries_is_refused(plan: Any, tmp_path: Path) -> None:
    run = ss.launch(plan, tasks.Log(10_000, 0.05), folder=tmp_path)
    wait_for_steps(run)
    with pytest.raises(ValueError, match=r"without step boundaries.; .*read ctx\.should_stop once per step"):
        run.profile()
    run.stop()
    assert run.wait(30) == "stopped"


def wait_for_ranks_to_record(run: ss.Run) -> None:
    seconds_until(
        lambda: (
            len(run.engine_reports()) == 2 and all("recording" in r for r in run.engine_reports().values())
        )
    )
    started = len(run.metrics())
    seconds_until(lambda: len(run.metrics()) > started + 8)


@thorough()
def test_stop_while_recording_keeps_the_trace_and_saves_no_checkpoint(tmp_path: Path) -> None:
    run = launch_training(tmp_path, save_every=10_000)
    wait_for_steps(run)
    run.profile(1000)
    wait_for_ranks_to_record(run)
    run.press("Stop")
    assert run.wait(90) == "stopped" and run.error is None
    counts = count_recorded_steps(run.trace())
    assert set(counts) == {0, 1} and 1 <= counts[0] == counts[1] < 1000
    assert not (run.folder / "tmp").exists() and not list(run.folder.glob("checkpoints/*"))


@thorough()
def test_second_stop_while_recording_ends_the_ranks_at_once(tmp_path: Path) -> None:
    run = launch_training(tmp_path)
    wait_for_steps(run)
    run.profile(1000, stacks=True, memory=True)
    wait_for_ranks_to_record(run)
    run.stop()
    seconds_until(lambda: run.status == "stopping")
    run.stop()
    assert run.wait(20) == "stopped" and run.error is None
    assert not (run.folder / "tmp").exists()
    if not RunFolder(run.folder).list_recordings():
        with pytest.raises(ValueError, match="it ended while it recorded"):
            run.trace()


@thorough()
def test_stop_of_a_function_that_reads_no_stop_keeps_its_trace(plan: Any, tmp_path: Path) -> None:
    run = ss.launch(plan, tasks.reads_commands_only, folder=tmp_path)
    seconds_until(lambda: len(run.metrics()) > 4 or run.status == "failed")
    run.profile(1000)
    wait_for_ranks_to_record(run)
    run.stop()
    assert run.wait(60) == "stopped", run.error
    assert set(count_recorded_steps(run.trace())) == {0, 1}


KERNEL = """
import sys, time
from pathlib import Path
sys.path += {path!r}
from test_live_profile import launch_training
run = launch_training(Path({folder!r}), save_every=10_000)
print(run.folder, flush=True)
time.sleep(1000)
"""


@thorough()
@pytest.mark.parametrize("request_before", ["a recording", "save and stop"])
def test_the_end_of_the_kernel_keeps_what_is_being_saved(request_before: str, tmp_path: Path) -> None:
    code = KERNEL.format(path=sys.path, folder=str(tmp_path))
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert kernel.stdout is not None
        run = ss.Run.attach(kernel.stdout.readline().strip())
        wait_for_steps(run)
        if request_before == "a recording":
            run.profile(1000, stacks=True)
            wait_for_ranks_to_record(run)
        else:
            run.stop(checkpoint=True)
            seconds_until(lambda: run.status == "stopping")
    finally:
        kernel.kill()
        kernel.communicate()
    assert run.wait(90) == "stopped" and run.error is None
    if request_before == "a recording":
        assert run.reason == "the kernel that launched it ended"
        assert set(count_recorded_steps(run.trace())) == {0, 1}
    else:
        assert list(run.folder.glob("checkpoints/*"))


@thorough()
def test_save_and_stop_while_recording_writes_the_steps_so_far(tmp_path: Path) -> None:
    run = launch_training(tmp_path)
    wait_for_steps(run)
    run.profile(1000)
    started = len(read_losses(run))
    seconds_until(lambda: len(read_losses(run)) > started + 6)
    run.stop(checkpoint=True)
    assert run.wait(60) == "stopped", run.error
    counts = count_recorded_steps(run.trace())
    assert set(counts) == {0, 1} and 3 < counts[0] < 1000 and counts[0] == counts[1]


@thorough()
def test_rank_that_dies_while_profiling_leaves_the_trace_of_the_others(tmp_path: Path) -> None:
    run = launch_training(tmp_path)
    wait_for_steps(run)
    run.profile(1000)
    started = len(read_losses(run))
    seconds_until(lambda: len(read_losses(run)) > started + 6)
    os.kill(read_rank_pid(run, 1), signal.SIGKILL)
    assert run.wait(30) == "failed"
    assert "rank 1" in run.reason
    trace = run.trace()
    assert trace.ranks == [0] and count_recorded_steps(trace)[0] > 3
    assert any("rank" in note for note in trace.notes), "the missing rank is named"
