"""Our breakdown beside that of Holistic Trace Analysis, on traces where its rules are the same as ours.

It is no dependency: ``HTA_PYTHON`` names an interpreter that has it. Without ``HTA_DISABLE_NS_ROUNDING=1`` it
rounds to microseconds, it counts operators with an argument ``stream`` as work of the GPU, and it knows
communication by "nccl" in the name, so these traces have no such operators and only such names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.trace_loading import find_hta
from tests.unit.trace.trace_events import Events, all_reduce, copy, kernel, launch, step, write_ranks

from shardscope.trace import Trace

_ASK = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
times = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
overlap = analysis.get_comm_comp_overlap(visualize=False).to_dict("records")
print(json.dumps({row["rank"]: row | more for row, more in zip(times, overlap)}))
"""


def ask_hta(folder: Path) -> dict[str, dict[str, Any]]:
    python = find_hta()
    if python is None:
        pytest.skip(
            "needs Holistic Trace Analysis: HTA_PYTHON names an interpreter that has it, as after "
            "python -m venv other && other/bin/pip install HolisticTraceAnalysis"
        )
    command = [python, "-c", _ASK, str(folder)]
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def make_rank(rank: int) -> Events:
    """Return three steps with compute, communication partly behind it, copies, gaps and odd nanoseconds."""
    events: Events = []
    for number in range(3):
        begin = 1_000_000 * number + 137 * rank
        events += [
            step(number, begin, begin + 900_001),
            launch(begin + 1_000, begin + 3_000, 10 * number + 1),
            kernel(begin + 5_001, begin + 300_123 + 7_777 * rank, correlation=10 * number + 1),
            launch(begin + 4_000, begin + 6_000, 10 * number + 2),
            all_reduce(begin + 200_000, begin + 520_457, correlation=10 * number + 2),
            launch(begin + 7_000, begin + 8_000, 10 * number + 3),
            kernel(begin + 600_003, begin + 700_009, "layer_norm", correlation=10 * number + 3),
            launch(begin + 9_000, begin + 9_500, 10 * number + 4),
            copy(begin + 690_000, begin + 750_000, correlation=10 * number + 4),
        ]
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy"):
            event["args"]["stream"] = event["tid"]  # by which HTA knows the GPU's work
    return events


def test_breakdown_is_that_of_holistic_trace_analysis(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path, {rank: make_rank(rank) for rank in range(2)}, schemaVersion=1)
    theirs = ask_hta(folder)
    for row in Trace.load(folder, cache=False).breakdown():
        other = theirs[str(row["rank"])]
        seconds = {
            "compute_time(us)": row["compute_seconds"],
            "non_compute_time(us)": row["exposed_communication_seconds"] + row["copy_seconds"],
            "idle_time(us)": row["idle_seconds"],
            "kernel_time(us)": row["span_seconds"],
        }
        for name in ("compute_time(us)", "non_compute_time(us)"):
            assert seconds[name] * 1e6 == pytest.approx(other[name], abs=0.001), name
        # Its span is from the first kernel to the last; ours has the time before the first kernel as well.
        assert seconds["kernel_time(us)"] - seconds["idle_time(us)"] == pytest.approx(
            (other["kernel_time(us)"] - other["idle_time(us)"]) / 1e6, abs=1e-9
        )
        share = row["overlapped_seconds"] / row["communication_seconds"]
        assert 100 * share == pytest.approx(other["comp_comm_overlap_pctg"], abs=0.01)
