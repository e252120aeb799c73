"""One real GPU: a run's own memory has the prediction's components, the allocator's totals and a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", [ss.Layout.ddp(), ss.Layout.fsdp2()], ids=["ddp", "fsdp2"])
def test_a_run_on_a_gpu_is_measured_by_component(
    one_gpu: ss.Cluster, layout: ss.Layout, tmp_path: Path
) -> None:
    recipe = ss.Recipe(seq_len=512, micro_batch_size=4, global_batch_size=8)
    plan = ss.Plan(ss.Architecture.of_size("120m"), one_gpu, recipe, layout)
    run = ss.launch(plan, ss.Pretrain(num_steps=6, memory_snapshot=True), folder=tmp_path)
    try:
        status = run.wait(timeout=300)
        assert status == "finished", f"{status}: {run.reason}\n{run.error}\n{run.logs(0)}"
    finally:
        run.stop()

    report, predicted = run.memory(), plan.memory()
    print(f"\n{report.sentence}\nmeasured {dict(report.components)}\npredicted {dict(predicted.components)}")
    assert report.tier == "measured"
    assert report.at("rest")["parameters"] == predicted.at("rest")["parameters"]
    assert report.at("rest")["optimizer"] == pytest.approx(predicted.at("rest")["optimizer"], rel=1e-3)
    # The allocator's own peak is the sum of what was counted and of what was not told apart.
    (rank,) = report
    assert report.tensor_bytes <= rank["peak_memory_bytes"]
    assert report.tensor_bytes == pytest.approx(rank["peak_memory_bytes"], rel=0.02)
    assert report.components["other"] < 0.15 * report.tensor_bytes
    assert 100 * 2**20 < report.components["runtime"] < one_gpu.gpu.usable_bytes
    assert report.error == pytest.approx(0, abs=0.25)

    (snapshot,) = (run.folder / "memory_snapshots").iterdir()
    assert snapshot.name == "rank-0.pickle" and snapshot.stat().st_size > 10_000
    assert "memory snapshot: memory_snapshots/rank-0.pickle" in run.logs(0)
    summary = report.snapshot()
    assert summary.num_events > 100 and "no stack" not in summary.at_peak[0].frame
    # What was asked for; the allocator's own peak is of sizes rounded up, and of all steps.
    assert 0.5 * rank["peak_memory_bytes"] < summary.peak_bytes <= rank["peak_memory_bytes"]
    assert 0 < summary.allocated_bytes <= summary.reserved_bytes
