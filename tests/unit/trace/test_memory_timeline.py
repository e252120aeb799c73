"""Tests of the memory timeline by component, on hand-made snapshots with known answers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import thorough

from shardscope.trace.memory_snapshot import load_memory_snapshot
from shardscope.trace.memory_timeline import MAX_POINTS, load_memory_timeline

MIB = 2**20


def make_frames(*places: str) -> list[dict[str, Any]]:
    """Frames of "file:function", innermost first."""
    return [
        {"filename": file, "line": 1, "name": name} for file, _, name in (p.partition(":") for p in places)
    ]


CALL = "/env/torch/nn/modules/module.py:_call_impl"
FORWARD = make_frames("/env/torch/nn/modules/linear.py:forward", "/code/train.py:main")
LOSS = make_frames(
    "/env/transformers/loss/loss_utils.py:ForCausalLMLoss", "/env/torch/nn/modules/module.py:_call_impl"
)
BACKWARD = make_frames("/env/torch/autograd/graph.py:_engine_run_backward", "/code/train.py:main")
GATHER = make_frames(
    "/env/torch/distributed/fsdp/_fully_shard/_fsdp_param.py:alloc",
    "/env/torch/nn/modules/module.py:_call_impl",
)
ADAM = make_frames("/env/torch/optim/adamw.py:step", "/code/train.py:main")
DATA = make_frames("/code/data.py:collate")


def write_step(folder: Path, *, times: bool = True) -> Path:
    """Write a snapshot of one step over 8 MiB of parameters, in units of MiB and of a millisecond."""
    script: list[tuple[str, int, int, Any]] = [
        ("alloc", 1, 1, DATA),  # 8 parameters + 1 batch
        ("alloc", 2, 5, GATHER),
        ("alloc", 3, 4, FORWARD),
        ("free_requested", 2, 5, None),
        ("alloc", 4, 6, LOSS),  # 19: the peak is still to come
        ("alloc", 5, 3, BACKWARD),  # a temporary: freed within backward; 22
        ("free_requested", 4, 6, None),
        ("free_requested", 5, 3, None),
        ("alloc", 6, 7, BACKWARD),  # the gradient; 20
        ("free_requested", 3, 4, None),
        ("alloc", 7, 16, ADAM),  # 32: the peak
        ("free_requested", 6, 7, None),
        ("free_requested", 1, 1, None),
    ]
    events = [
        {"action": action, "addr": address, "size": size * MIB, "frames": frames or [], "stream": 0}
        for action, address, size, frames in script
    ]
    if times:
        for number, event in enumerate(events):
            event["time_us"] = 5_000_000 + 1000 * number
    block = {"size": 8 * MIB, "requested_size": 8 * MIB, "state": "active_allocated", "frames": []}
    kept = {
        "address": 7,
        "size": 16 * MIB,
        "requested_size": 16 * MIB,
        "state": "active_allocated",
        "frames": ADAM,
    }
    segment = {"address": 10**9, "total_size": 64 * MIB, "allocated_size": 24 * MIB, "blocks": [block, kept]}
    path = folder / "rank-0.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events]}))
    return path


def test_peak_is_attributed_to_components(tmp_path: Path) -> None:
    timeline = load_memory_snapshot(write_step(tmp_path)).timeline()
    assert timeline.at_peak == {
        "optimizer": 16 * MIB,
        "before_history": 8 * MIB,
        "gradients": 7 * MIB,
        "other": MIB,
    }
    assert list(timeline.at_peak) == ["optimizer", "before_history", "gradients", "other"]
    assert (
        timeline.peak_bytes
        == 32 * MIB
        == load_memory_snapshot(timeline_path := write_step(tmp_path)).peak_bytes
    )
    assert timeline_path.is_file()
    # After the 11th event, which is 10 ms after the first.
    assert timeline.peak_event == 11 and timeline.seconds is not None
    assert timeline.seconds[11] == pytest.approx(0.010)
    assert "0.031" in str(timeline) and "after 0.010 s" in str(timeline)


def test_components_rise_and_fall_with_their_events(tmp_path: Path) -> None:
    timeline = load_memory_timeline(write_step(tmp_path))
    mib = {name: (values // MIB).tolist() for name, values in timeline.num_bytes.items()}
    assert mib["gather_buffers"] == [0, 0, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert mib["logits"] == [0, 0, 0, 0, 0, 6, 6, 0, 0, 0, 0, 0, 0, 0]
    # The temporary of backward counts as an activation, the tensor that outlives backward as a gradient.
    assert mib["activations"] == [0, 0, 0, 4, 4, 4, 7, 7, 4, 4, 0, 0, 0, 0]
    assert mib["gradients"] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 0, 0]
    assert mib["optimizer"] == [0] * 11 + [16] * 3
    assert mib["before_history"] == [8] * 14
    rows = timeline.table().to_frame()
    assert len(rows) == 14 * 7 and rows["num_bytes"].sum() == timeline.total_bytes.sum()


def test_snapshot_without_times_or_history_has_a_timeline(tmp_path: Path) -> None:
    timeline = load_memory_timeline(write_step(tmp_path, times=False))
    assert timeline.seconds is None and timeline.peak_event == 11
    assert timeline.table()[0]["seconds"] is None
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    empty = load_memory_timeline(path)
    assert (empty.peak_bytes, dict(empty.at_peak), len(empty.table())) == (0, {}, 1)


@thorough()
def test_long_history_keeps_its_peak_in_the_table(tmp_path: Path) -> None:
    num_events = 50_000
    events = [{"action": "alloc", "addr": n, "size": 1, "frames": FORWARD} for n in range(num_events // 2)]
    events += [
        {"action": "free_requested", "addr": n, "size": 1, "frames": []} for n in range(num_events // 2)
    ]
    path = tmp_path / "rank-0.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    timeline = load_memory_timeline(path)
    rows = timeline.table()
    assert len(rows) <= MAX_POINTS + 2 and max(row["num_bytes"] for row in rows) == num_events // 2
    assert timeline.peak_event == num_events // 2


@pytest.mark.parametrize("opcodes", [b"r\xff\xff\xff\x7f", b"r\x00\x00\x00\x01", b"p268435455\n"])
def test_huge_memo_index_is_refused_before_it_takes_memory(opcodes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.pickle"
    path.write_bytes(b"\x80\x02}" + opcodes + b".")
    code = (
        "import resource, sys\n"
        "from shardscope.trace.memory_snapshot import load_memory_snapshot\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load_memory_snapshot(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    message, grown = done.stdout.strip().rsplit("\n", 1)
    assert "refers to memo entry" in message and int(grown) < 32 * 1024


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_large_memos_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    # More than 256 memo entries, long texts, large and negative numbers, floats, nested frames of 64 KB.
    extra = {f"key {n}" * (n % 40 + 1): [n, -n, 2**n, n / 3, None, True, ("x",) * 2] for n in range(400)}
    content = {"segments": [], "device_traces": [[]], "extra": extra, "long": "r\xff" * 70_000}
    path = tmp_path / "rank-0.pickle"
    path.write_bytes(pickle.dumps(content, protocol))
    assert load_memory_snapshot(path).num_events == 0
