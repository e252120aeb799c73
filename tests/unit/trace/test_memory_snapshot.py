"""Tests of memory snapshots: live allocations at the peak, and rejection of pickles that would run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardscope.records.folder import RunFolder
from shardscope.runs.explain.measured import build_measured_memory
from shardscope.trace.memory_snapshot import BEFORE, SHOWN_FRAMES, load_memory_snapshot

MIB = 2**20
ATTENTION = [
    {"filename": "/env/torch/nn/functional.py", "line": 7, "name": "linear"},
    {"filename": "/code/model/attention.py", "line": 41, "name": "forward"},
    {"filename": "/code/train.py", "line": 3, "name": "main"},
]
ADAM = [
    {"filename": "CachingAllocator.cpp", "line": 12, "name": "malloc"},
    {"filename": "/env/torch/optim/adam.py", "line": 99, "name": "step"},
]


def make_event(action: str, addr: int, size: int = 0, frames: Any = ()) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": list(frames), "stream": 0}


def make_block(size: int, state: str, frames: Any = ()) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": list(frames)}


def make_snapshot() -> dict[str, Any]:
    """Build a snapshot in the format that ``torch.cuda.memory._snapshot`` documents.

    It has weights from before the recording, activations that were freed, and optimizer states that stayed;
    the peak is at the second activation.
    """
    return {
        "segments": [
            {
                "address": 1000,
                "total_size": 20 * MIB,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "allocated_size": 11 * MIB,
                "active_size": 11 * MIB,
                "blocks": [
                    make_block(8 * MIB, "active_allocated"),
                    make_block(3 * MIB, "active_allocated", ADAM),
                ],
            },
            {
                "address": 10**9,
                "total_size": 2 * MIB,
                "stream": 0,
                "segment_type": "small",
                "segment_pool_id": (0, 0),
                "allocated_size": 0,
                "active_size": 0,
                "blocks": [make_block(2 * MIB, "inactive")],
            },
        ],
        "device_traces": [
            [
                make_event("segment_alloc", 1000, 20 * MIB),
                make_event("free_requested", 77, 1 * MIB),
                make_event("free_completed", 77, 1 * MIB),
                make_event("alloc", 1, 4 * MIB, ATTENTION),
                make_event("alloc", 2, 5 * MIB, ATTENTION),
                make_event("free_requested", 2, 5 * MIB),
                make_event("free_completed", 2, 5 * MIB),
                make_event("free_requested", 1, 4 * MIB),
                make_event("free_completed", 1, 4 * MIB),
                make_event("alloc", 1000 + 8 * MIB, 3 * MIB, ADAM),
            ]
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
    }


def write_snapshot(folder: Path, content: Any) -> Path:
    path = folder / "rank-0.pickle"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return path


def test_reports_live_allocations_at_the_peak(tmp_path: Path) -> None:
    summary = load_memory_snapshot(write_snapshot(tmp_path, make_snapshot()))
    assert summary.peak_bytes == (8 + 4 + 5) * MIB
    assert [(live.frame, live.num_bytes, live.num_allocations) for live in summary.at_peak] == [
        ("model/attention.py:41 forward", 9 * MIB, 2),
        (BEFORE, 8 * MIB, 1),
    ]
    assert [(segment.kind, segment.total_bytes, segment.allocated_bytes) for segment in summary.segments] == [
        ("large", 20 * MIB, 11 * MIB),
        ("small", 2 * MIB, 0),
    ]
    assert (summary.reserved_bytes, summary.allocated_bytes) == (22 * MIB, 11 * MIB)
    assert summary.num_events == 10
    assert "attention.py:41" in str(summary)


def test_peak_can_be_at_the_start_or_end_of_the_recording(tmp_path: Path) -> None:
    early = make_snapshot()
    early["device_traces"] = [[make_event("free_requested", 5, 90 * MIB)]]
    assert load_memory_snapshot(write_snapshot(tmp_path, early)).peak_bytes == (90 + 8 + 3) * MIB
    late = make_snapshot()
    late["device_traces"] = [[make_event("alloc", 1000 + 8 * MIB, 3 * MIB, ADAM)]]
    summary = load_memory_snapshot(write_snapshot(tmp_path, late))
    assert summary.peak_bytes == 11 * MIB
    assert summary.at_peak[-1].frame == "optim/adam.py:99 step"
    late["device_traces"] = []
    assert load_memory_snapshot(write_snapshot(tmp_path, late)).peak_bytes == 11 * MIB


def test_smallest_frames_are_summed_into_one_entry(tmp_path: Path) -> None:
    many = make_snapshot()
    many["device_traces"] = [
        [
            make_event("alloc", line, MIB, [{"filename": "a.py", "line": line, "name": "f"}])
            for line in range(1, 50)
        ]
    ]
    summary = load_memory_snapshot(write_snapshot(tmp_path, many))
    assert len(summary.at_peak) == SHOWN_FRAMES + 1
    assert sum(live.num_bytes for live in summary.at_peak) == summary.peak_bytes
    assert summary.at_peak[-1].frame.endswith(" other places")


class Malicious:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_fault_39_code_in_a_snapshot_is_not_run(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "trap"
    bad = make_snapshot() | {"extra": Malicious(trap)}
    with pytest.raises(ValueError, match=r"is no memory snapshot \(references posix\.mkdir\)"):
        load_memory_snapshot(write_snapshot(tmp_path, pickle.dumps(bad, protocol)))
    assert not trap.exists()
    pickle.loads(pickle.dumps(bad, protocol))
    assert trap.exists(), "the trap does not work, so this test shows nothing"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_fault_40_reads_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    assert pickle.HIGHEST_PROTOCOL >= 5
    summary = load_memory_snapshot(write_snapshot(tmp_path, pickle.dumps(make_snapshot(), protocol)))
    assert (summary.peak_bytes, summary.num_events) == (17 * MIB, 10)


def test_fault_40_rejects_out_of_band_buffers(tmp_path: Path) -> None:
    buffers: list[pickle.PickleBuffer] = []
    extra = {"extra": pickle.PickleBuffer(b"x" * 64)}
    content = pickle.dumps(make_snapshot() | extra, protocol=5, buffer_callback=buffers.append)
    assert buffers
    with pytest.raises(ValueError, match="is no memory snapshot"):
        load_memory_snapshot(write_snapshot(tmp_path, content))


def test_fault_41_snapshot_must_be_a_regular_file(tmp_path: Path) -> None:
    real = write_snapshot(tmp_path, make_snapshot())
    (tmp_path / "link.pickle").symlink_to(real)
    os.mkfifo(tmp_path / "pipe.pickle")
    (tmp_path / "folder.pickle").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(ValueError, match=r"symbolic link|pipe|folder") as caught:
            load_memory_snapshot(tmp_path / f"{name}.pickle")
        assert "Fix: " in str(caught.value)


def test_fault_39_rejects_persistent_ids(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refers to an object outside of it"):
        load_memory_snapshot(write_snapshot(tmp_path, b"Psomewhere\n."))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not a pickle", "is no memory snapshot"),
        (pickle.dumps(make_snapshot())[:-40], "is no memory snapshot"),
        ([1, 2], "holds a list"),
        ({}, "has no list of dicts as segments"),
        ({"segments": [3]}, "has no list of dicts as segments"),
        ({"segments": [{"total_size": -1}]}, "has no whole number as total_size"),
        ({"segments": [{"total_size": True}]}, "has no whole number as total_size"),
        ({"segments": [{"total_size": 5}]}, "has no list of dicts as blocks"),
        ({"segments": [], "device_traces": 3}, "has no list of device_traces"),
        ({"segments": [], "device_traces": [[{"action": "alloc"}]]}, "has no whole number as addr"),
    ],
    ids=str,
)
def test_rejects_malformed_snapshots(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_memory_snapshot(write_snapshot(tmp_path, content))
    assert "Fix: " in str(caught.value)


def test_rejects_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_memory_snapshot(tmp_path / "rank-0.pickle")


def test_run_lists_its_memory_snapshots(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.memory_snapshots() == {}
    for rank in (3, 12):
        folder.memory_snapshot(rank).parent.mkdir(exist_ok=True)
        folder.memory_snapshot(rank).write_bytes(pickle.dumps(make_snapshot()))
    (folder.memory_snapshot(0).parent / "rank-1.part").write_bytes(b"being written")
    report = build_measured_memory(None, {}, [], folder.memory_snapshots())
    assert sorted(report.snapshot_files) == [3, 12]
    assert report.snapshot().path == folder.memory_snapshot(3)
    assert report.snapshot(12).peak_bytes == 17 * MIB
    with pytest.raises(ValueError, match="rank is 5; allowed: ranks that took a memory snapshot: 3, 12"):
        report.snapshot(5)
    with pytest.raises(ValueError, match="none did"):
        build_measured_memory(None, {}, []).snapshot()
