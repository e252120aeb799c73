"""Tests of out-of-memory reports: messages of several torch versions, predictions and fixes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.machine.host import find_memory_limit
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, read_json, write_json
from shardscope.runs.explain.failure import find_failures
from shardscope.runs.explain.failure_report import explain_failures
from shardscope.runs.explain.oom_kills import OomKills, describe_kill_sender, read_oom_kills
from shardscope.runs.explain.out_of_memory import Shortage, parse_shortage
from shardscope.runs.explain.out_of_memory_fixes import format_memory_numbers, suggest_fix
from shardscope.runs.run import Run
from shardscope.runs.watch import host_monitor as host_watch
from shardscope.runs.watch.host_monitor import HostMemoryMonitor, HostSample, read_used_bytes

MIB, GIB = 2**20, 2**30

TORCH_1 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.10 GiB (GPU 3; 79.10 GiB total capacity; "
    "70.00 GiB already allocated; 410.00 MiB free; 74.00 GiB reserved in total by PyTorch)"
)
TORCH_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB (GPU 3; 79.10 GiB "
    "total capacity; 70.00 GiB already allocated; 410.00 MiB free; 74.00 GiB reserved in total by "
    "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation."
)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB. GPU 3 has a total "
    "capacty of 79.10 GiB of which 410.00 MiB is free. Including non-PyTorch memory, this process has "
    "78.70 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 4.00 GiB "
    "is reserved by PyTorch but unallocated."
)
TORCH_2_5 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB. GPU 3 has a total "
    "capacity of 79.10 GiB of which 410.00 MiB is free. Process 4242 has 12.50 GiB memory in use. "
    "Process 77 has 512.00 MiB memory in use. Including non-PyTorch memory, this process has 66.20 GiB "
    "memory in use. Of the allocated memory 60.00 GiB is allocated by PyTorch, with 1.00 GiB allocated "
    "in private pools, and 4.00 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("text", [TORCH_1, TORCH_2_0, TORCH_2_1, TORCH_2_5])
def test_out_of_memory_messages_of_every_torch_version_are_parsed_alike(text: str) -> None:
    shortage = parse_shortage(f"Traceback (most recent call last):\n  File ...\n{text}\n")
    assert shortage is not None
    others = round(12.5 * GIB) + 512 * MIB if text is TORCH_2_5 else 0
    assert shortage == Shortage(
        memory_kind="GPU memory",
        requested_bytes=round(2.1 * GIB),
        free_bytes=410 * MIB,
        total_bytes=round(79.1 * GIB),
        gpu=3,
        other_process_bytes=others,
    )


@pytest.mark.parametrize(
    ("text", "place", "asked"),
    [
        ("torch.AcceleratorError: CUDA error: out of memory", "GPU memory", None),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
            "GPU memory",
            None,
        ),
        ("ncclUnhandledCudaError: ...\nCuda failure 2 'out of memory'", "GPU memory", None),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)",
            "host memory",
            2**42,
        ),
        ("  x = bytes(n)\nMemoryError", "host memory", None),
        (
            "  if 'CUDA out of memory' in words:\nnumpy._core._exceptions._ArrayMemoryError: Unable to "
            "allocate 8.00 GiB for an array with shape (1073741824,) and data type float64",
            "host memory",
            2**33,
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "host memory", None),
    ],
)
def test_out_of_memory_messages_of_other_libraries_are_parsed(
    text: str, place: str, asked: int | None
) -> None:
    shortage = parse_shortage(text)
    assert shortage is not None and (shortage.memory_kind, shortage.requested_bytes, shortage.free_bytes) == (
        place,
        asked,
        None,
    )


def test_other_errors_are_not_parsed_as_out_of_memory() -> None:
    for text in (
        "",
        "ValueError: memory",
        "RuntimeError: shapes (2, 3) and (4, 5)",
        "class MemoryErrors: pass",
    ):
        assert parse_shortage(text) is None


def make_plan(layout: ss.Layout, cluster: str = "8xh100-sxm-80gb") -> ss.Plan:
    return ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse(cluster), ss.Recipe(), layout)


def test_a_plan_predicted_not_to_fit_gets_the_planners_repairs() -> None:
    plan, shortage = make_plan(ss.Layout.ddp()), parse_shortage(TORCH_2_1)
    assert shortage is not None
    told = format_memory_numbers(shortage, plan)
    assert all(fact in told for fact in ("2.10 GiB", "0.40 free of 79.1", "predicted peak 202"))
    words = suggest_fix(shortage, plan, trains_the_plan=True)
    assert "202 of 79.1" in words
    assert plan.repairs()[0][0] in words and "saves" in words


def test_a_plan_predicted_to_fit_gets_repairs_that_save_the_missing_bytes() -> None:
    plan, shortage = make_plan(ss.Layout.fsdp2()), parse_shortage(TORCH_2_1)
    assert shortage is not None and plan.memory().fits and plan.repairs() == []
    assert "saves" in suggest_fix(shortage, plan, trains_the_plan=True)
    # Nothing wins as much as the whole peak.
    absurd = dataclasses.replace(shortage, requested_bytes=2**50)
    assert suggest_fix(absurd, plan, trains_the_plan=True) == ""
    # Other people's processes, if they and the plan are more than the card.
    held = dataclasses.replace(shortage, other_process_bytes=60 * GIB)
    assert "60.0 GiB" in suggest_fix(held, plan, trains_the_plan=True)
    assert "memory the plan does not predict" in suggest_fix(shortage, plan, trains_the_plan=False)


def run_folder(tmp_path: Path, plan: ss.Plan, **more: Any) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    description = {"world_size": 2, "created": 1.0, "plan": json.loads(plan.to_json()), **more}
    write_json(folder.run_json, description)
    append_line(folder.status, {"time": 1.0, "status": "running", "reason": "2 ranks at work"})
    return folder


def test_the_error_of_a_run_has_numbers_a_fix_and_the_ranks_that_lost_their_peer(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp()), trains_the_plan=True)
    lost = {
        "time": 1.0,
        "summary": "raised DistBackendError: NCCL error",
        "traceback": "...",
        "peer_lost": True,
    }
    write_json(folder.error(0), lost)
    summary = "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB."
    first = {"time": 2.0, "summary": summary, "traceback": f"Traceback ...\n{TORCH_2_5}", "peer_lost": False}
    write_json(folder.error(1), first)
    run = Run(folder)
    assert run.error is not None and run.error.startswith("Traceback ...\ntorch.OutOfMemoryError")
    facts = ("rank 1 ran out of GPU memory", "2.10 GiB", "0.40 free of 79.1", "predicted peak 202")
    assert all(fact in run.error for fact in facts) and "What would have prevented it" in run.error
    assert run.error.endswith("rank 0 raised DistBackendError: NCCL error")
    description = read_json(folder.run_json) or {}
    assert all(fact in explain_failures(find_failures(folder, 2), description).reason for fact in facts)
    # Of a rank that torch elastic was quicker to bury, nobody knows the exit code.
    folder.error(0).unlink()
    append_line(folder.exits, {"time": 3.0, "rank": 0, "code": None})
    unseen = explain_failures(find_failures(folder, 2), description).text
    assert "rank 0 ended before its task returned" in unseen and "not known" in unseen
    # A function's memory is not the plan's, and a damaged plan has no prediction at all.
    for damage in ({"trains_the_plan": False}, {"plan": {"version": -1}}):
        assert (
            "predicted peak" not in explain_failures(find_failures(folder, 2), {**description, **damage}).text
        )


def test_fault_10_the_fix_after_a_kill_is_for_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortage = Shortage(memory_kind="host memory")
    assert suggest_fix(shortage, make_plan(ss.Layout.fsdp2()), trains_the_plan=True) == ""
    on_cpus = make_plan(ss.Layout.ddp(), "2xcpu")
    words = suggest_fix(shortage, on_cpus, trains_the_plan=True)
    assert words.startswith("What would have prevented it")
    # None at all where somebody else sent the signal.
    folder = run_folder(tmp_path, on_cpus, trains_the_plan=True)
    append_line(folder.exits, {"time": 2.0, "rank": 0, "code": -9})
    counted = [OomKills(0, 0)]
    monkeypatch.setattr(host_watch, "read_oom_kills", lambda: counted[-1])
    host, failures = HostMemoryMonitor(folder, 2), find_failures(folder, 2)
    description = read_json(folder.run_json) or {}
    for number in (1, 0):
        counted.append(OomKills(number, number))
        assert (words in explain_failures(failures, description, host).text) == bool(number)
    # After the supervisor's own death nobody knows: then nothing is said of memory.
    unwatched = explain_failures(failures, description)
    assert unwatched.reason == "rank 0 was killed by SIGKILL" and "prevented" not in unwatched.text


def test_a_rank_that_its_supervisor_killed_has_not_failed_as_well(tmp_path: Path) -> None:
    """Rank 0 of another node waited in a collective for rank 1, and "was killed as well"."""
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp(), "2xcpu"), trains_the_plan=True)
    append_line(folder.exits, {"time": 2.0, "rank": 0, "code": -9, "was_ended": True})
    append_line(folder.exits, {"time": 1.0, "rank": 1, "code": -9})
    failures = find_failures(folder, 2)
    assert [(failure.rank, failure.is_consequence) for failure in failures] == [(1, False), (0, True)]
    text = explain_failures(failures, read_json(folder.run_json) or {}).text
    assert "were ended for it:\n  rank 0 was killed by SIGKILL" in text and "as well" not in text


def test_fault_10_only_the_last_error_in_a_log_counts(tmp_path: Path) -> None:
    """A log tells of shortages that were handled; what follows the last traceback is the end."""
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp()))
    log = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x()\n{TORCH_2_5}\nbye\n'
    folder.log(0).write_text(log)

    def read_reason(code: int | None) -> str:
        folder.exits.unlink(missing_ok=True)
        append_line(folder.exits, {"time": 2.0, "rank": 0, "code": code})
        return explain_failures(find_failures(folder, 2), {}).reason

    assert read_reason(7) == read_reason(None)
    assert read_reason(7).startswith(
        "rank 0 ran out of GPU memory"
    ) and "2.10 GiB, 0.40 free of 79.1" in read_reason(7)
    assert read_reason(-11).startswith("rank 0 crashed with SIGSEGV")
    folder.log(0).write_text("".join(f"[rank0]: {line}\n" for line in log.splitlines()))
    assert read_reason(7).startswith("rank 0 ran out of GPU memory")
    folder.log(0).write_text(f'{log}Traceback ...\n  File "a.py", line 9, in g\nKeyError: 1\n')
    assert read_reason(7).startswith("rank 0 exited with code 7")
    folder.log(0).write_text(f"warning: {TORCH_2_5}\n")
    assert read_reason(7).startswith("rank 0 exited with code 7")
    assert read_reason(-6).startswith("rank 0 aborted with SIGABRT")
    said = "terminate called after throwing an instance of"
    folder.log(0).write_text(f"{said} 'std::bad_alloc'\n  what():  std::bad_alloc\nFatal Python error: A\n")
    assert "host memory" in read_reason(-6)
    folder.log(0).write_text(f"{said} 'c10::OutOfMemoryError'\n  what():  CUDA out of memory.\n")
    assert "GPU memory" in read_reason(-6)


def test_a_crash_is_quoted_from_its_first_frame_with_the_path_of_the_log(tmp_path: Path) -> None:
    """The last 4 KiB of a crash are frames of the launcher and names of modules."""
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp()))
    append_line(folder.exits, {"time": 2.0, "rank": 0, "code": -11})

    def read_text() -> str:
        return explain_failures(find_failures(folder, 2), {}).text

    assert "Its log, logs/rank-0.log in the run folder, is empty." in read_text()
    frames = [f'  File "/site-packages/torch/{name}.py", line 5 in call' for name in range(200)]
    crash = ["Fatal Python error: Segmentation fault", "", '  File "train.py", line 23 in my_kernel', *frames]
    folder.log(0).write_text("\n".join(["step 7", *crash, ""]))
    text = read_text()
    assert "The end of its log, logs/rank-0.log in the run folder:\nstep 7\nFatal Python error" in text
    assert "in my_kernel" in text and text.endswith("\n...") and len(text) < 6000


def test_used_memory_is_read_from_the_cgroup_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "slurm" / "job"
    (job / "step").mkdir(parents=True)
    for folder, most, held in ((tmp_path / "slurm", "max", 9 * GIB), (job, str(4 * GIB), 3 * GIB)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{held}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/slurm/job/step\n")
    limit = find_memory_limit(membership, tmp_path)
    assert limit == (4 * GIB, job) and read_used_bytes(job) == 2 * GIB and read_used_bytes(job / "step") == 0
    monkeypatch.setattr(host_watch, "find_memory_limit", lambda: limit)
    watch = HostMemoryMonitor(run_folder(tmp_path, make_plan(ss.Layout.ddp(), "2xcpu")), 1)
    watch.pids[0] = os.getpid()
    watch.sample()
    assert watch.seen[0].total_bytes == 4 * GIB and watch.seen[0].free_bytes <= 2 * GIB


def test_fault_10_the_reason_of_a_killed_rank_has_host_memory_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [OomKills(3, 8)]
    monkeypatch.setattr(host_watch, "read_oom_kills", lambda: counted[-1])
    watch = HostMemoryMonitor(run_folder(tmp_path, make_plan(ss.Layout.ddp(), "2xcpu")), 2)
    still = "counted no out-of-memory kill"
    assert watch.describe_kill(None) == watch.describe_kill(0) and still in watch.describe_kill(0)
    watch.seen[0] = HostSample(rank_bytes=21 * GIB, free_bytes=20 * GIB, total_bytes=24 * GIB)
    words = watch.describe_kill(0)
    assert still in words and "21.0 GiB, with 20.0 of 24.0 GiB free" in words
    assert not watch.may_have_run_out(0) and not watch.may_have_run_out(1)
    watch.seen[1] = HostSample(rank_bytes=21 * GIB, free_bytes=GIB, total_bytes=24 * GIB)
    assert watch.may_have_run_out(1), "a daemon may be quicker than the kernel"
    assert still in watch.describe_kill(1) and "little memory was free" in watch.describe_kill(1)
    counted.append(OomKills(4, 9))
    assert watch.describe_kill(0) == (
        "host memory ran out: the kernel's out-of-memory killer struck once in this memory group "
        "during the run; it last used 21.0 GiB, with 20.0 of 24.0 GiB free"
    )
    assert watch.may_have_run_out(0) and watch.may_have_run_out(1)
    write_json(watch.folder.rank(1), {"pid": 1})
    watch.sample()
    assert watch.seen[1].rank_bytes > 0 and 0 <= watch.seen[1].free_bytes <= watch.seen[1].total_bytes


@pytest.mark.parametrize(
    ("kills", "struck", "words"),
    [
        ((2, 2), True, "struck 2 times in this memory group"),
        ((None, 1), True, "struck once on this machine"),
        (
            (0, 1),
            False,
            "struck elsewhere on this machine, not in this memory group: another process sent it",
        ),
        ((0, 0), False, "counted no out-of-memory kill: another process sent it"),
        ((0, None), False, "counted no out-of-memory kill: another process sent it"),
        ((None, 0), False, "counted no out-of-memory kill: another process sent it"),
        (
            (None, None),
            None,
            "this system does not count out-of-memory kills; the kernel or another process sent it",
        ),
    ],
)
def test_fault_10_the_sender_of_a_kill_follows_from_the_oom_counters(
    kills: tuple[int | None, int | None], struck: bool | None, words: str
) -> None:
    assert OomKills(*kills).any_kill is struck
    assert words in describe_kill_sender(OomKills(*kills), is_full=False)
    full = describe_kill_sender(OomKills(*kills), is_full=True)
    assert ("little" in full) == (struck is not True)


def test_fault_10_the_oom_counter_of_this_processs_own_cgroup_is_read(tmp_path: Path) -> None:
    """Version 2, version 1, a container that sees only its own root, and no group at all."""
    job, membership, machine = tmp_path / "slurm" / "job", tmp_path / "cgroup", tmp_path / "vmstat"
    job.mkdir(parents=True)
    machine.write_text("nr_free_pages 7\noom_kill 12\n")

    def count() -> OomKills:
        return read_oom_kills(membership, tmp_path, machine)

    membership.write_text("0::/slurm/job\n")
    assert count() == (None, 12)
    (tmp_path / "memory.events").write_text("oom 9\noom_kill 9\noom_group_kill 0\n")
    assert count() == (9, 12)
    (job / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert count() == (2, 12)
    membership.write_text("4:cpu,memory:/slurm/job\n0::/\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    assert count() == (5, 12)
    own = tmp_path / "memory" / "slurm" / "job"
    own.mkdir(parents=True)
    (own / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert count() == (1, 12)
    assert OomKills(3, None).subtract(OomKills(1, 7)) == (2, None)
    assert read_oom_kills(tmp_path / "none", tmp_path, tmp_path / "none") == (None, None)


@pytest.mark.parametrize(
    ("code", "words"), [(0, None), (None, None), (7, "exited with code 7"), (-11, "crashed with SIGSEGV")]
)
def test_a_crash_after_the_task_returned_is_reported_as_such(
    tmp_path: Path, code: int | None, words: str | None
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.rank(1), {"exit": "finished"})
    append_line(folder.exits, {"monotonic": 1.0, "rank": 1, "code": code})
    reasons = [failure.reason for failure in find_failures(folder, 2)]
    if words is None:
        assert reasons == []
        return
    (reason,) = reasons
    assert reason.startswith(f"rank 1 {words}") and reason.endswith("after its task had returned")


def test_failures_on_several_nodes_name_the_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp()), trains_the_plan=True, num_nodes=2, world_size=4)
    for number, name in enumerate(("gpu-03", "gpu-07")):
        node = NodeFolder(folder.path, number, 2)
        (folder.path / "nodes").mkdir(exist_ok=True)
        node.create_own()
        write_json(node.node_json, {"name": name})
    killed = NodeFolder(folder.path, 1, 2)
    append_line(killed.exits, {"time": 2.0, "rank": 3, "code": -9})
    lost = {"time": 3.0, "summary": "raised DistBackendError: x", "traceback": "...", "peer_lost": True}
    write_json(folder.error(0), lost)
    report = explain_failures(find_failures(folder, 4), read_json(folder.run_json) or {})
    assert report.reason == "rank 3 on node 1 (gpu-07) was killed by SIGKILL"
    assert report.text.startswith(f"{report.reason}.\n") and "rank 0 on node 0 (gpu-03) raised" in report.text
    summary = "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB."
    first = {"time": 1.0, "summary": summary, "traceback": f"Traceback ...\n{TORCH_2_5}", "peer_lost": False}
    write_json(folder.error(2), first)
    report = explain_failures(find_failures(folder, 4), read_json(folder.run_json) or {})
    assert report.reason.startswith("rank 2 on node 1 (gpu-07) ran out of GPU memory: ")


def test_a_rank_that_another_process_terminated_is_the_cause(tmp_path: Path) -> None:
    """A memory guard sends SIGTERM; torch elastic does to the other ranks, after one has ended."""
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp()))
    lost = {"time": 2.0, "summary": "raised RuntimeError: gone", "traceback": "T", "peer_lost": True}
    write_json(folder.error(1), lost)
    append_line(folder.exits, {"time": 2.5, "rank": 0, "code": -15})
    append_line(folder.exits, {"time": 3.0, "rank": 1, "code": 1})
    first, other = find_failures(folder, 2)
    assert (first.rank, first.is_consequence, other.rank) == (0, False, 1)
    assert first.reason.startswith("rank 0 was ended by SIGTERM: another process sent it")
    # torch elastic's SIGTERM comes after the end of a rank.
    folder.exits.unlink()
    append_line(folder.exits, {"time": 3.0, "rank": 1, "code": 1})
    append_line(folder.exits, {"time": 3.5, "rank": 0, "code": -15})
    assert [failure.rank for failure in find_failures(folder, 2)] == [1, 0]
    # Nor is it the cause beside a failure of another rank's own.
    folder.exits.unlink()
    write_json(folder.error(1), {**lost, "summary": "raised KeyError: 'x'", "peer_lost": False})
    append_line(folder.exits, {"time": 1.0, "rank": 0, "code": -15})
    assert [failure.rank for failure in find_failures(folder, 2)] == [1, 0]


def test_a_rank_that_lost_its_peer_names_the_ranks_that_have_returned(tmp_path: Path) -> None:
    """Ranks with fewer batches than others return first: no rank has failed, and yet the run has."""
    folder = run_folder(tmp_path, make_plan(ss.Layout.ddp()))
    lost = {
        "time": 1.0,
        "summary": "raised RuntimeError: Connection closed",
        "traceback": "T",
        "peer_lost": True,
    }
    write_json(folder.error(1), lost)
    write_json(folder.rank(0), {"pid": 1, "exit": "finished", "ended": 0.5})
    first, *others = find_failures(folder, 2)
    assert first.reason.startswith("rank 1 raised RuntimeError: Connection closed; rank 0 had returned from")
    assert first.reason.endswith("the same number of steps") and "\n\nRank 0 had returned" in first.text
    assert not others
    # With a failure of its own, a rank that lost its peer is only a consequence.
    write_json(folder.error(0), {**lost, "time": 2.0, "summary": "raised KeyError: 'x'", "peer_lost": False})
    assert [failure.reason for failure in find_failures(folder, 2)] == [
        "rank 0 raised KeyError: 'x'",
        "rank 1 raised RuntimeError: Connection closed",
    ]
