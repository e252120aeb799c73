"""Real CPU ranks count the tensors of a step, and the run's own memory stands beside its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few

import shardscope as ss
from shardscope.memory.report import MemoryReport

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def make_plan(layout: ss.Layout, **recipe: Any) -> ss.Plan:
    fields: dict[str, Any] = {"seq_len": 128, "micro_batch_size": 2, "global_batch_size": 8, **recipe}
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(**fields), layout)


@pytest.mark.parametrize(
    ("framework", "recompute"),
    few([("ddp", "none"), ("fsdp2", "none"), ("fsdp2", "full")], [("fsdp2", "full")]),
)
def test_measured_components_equal_the_predicted_ones(framework: str, recompute: str, tmp_path: Path) -> None:
    plan = make_plan(getattr(ss.Layout, framework)(), recompute=recompute)
    run = ss.launch(plan, ss.Pretrain(num_steps=3, memory_snapshot=True), folder=tmp_path)
    assert run.wait(120) == "finished", run.error
    report, predicted = run.memory(), plan.memory()
    assert isinstance(report, MemoryReport) and report.tier == "measured"
    assert [rank["rank"] for rank in report] == [0, 1]

    rest, expected = report.at("rest"), predicted.at("rest")
    assert rest["parameters"] == expected["parameters"]
    assert rest.get("gradients", 0) == expected["gradients"]
    # AdamW's step counters are four bytes a tensor.
    assert rest["optimizer"] == pytest.approx(expected["optimizer"], rel=1e-4)
    # Beside what the modules save there are ids, masks and rotary tables, which are small.
    forward, planned = report.at("forward"), predicted.at("forward")
    assert forward["activations"] == pytest.approx(planned["activations"], rel=0.002, abs=2**16)
    assert forward["logits"] == planned["logits"]
    # Two micro-batches: DDP holds what accumulates beside its buckets.
    assert forward["gradients"] == planned["gradients"]
    assert report.at("backward")["gradients"] == predicted.at("backward")["gradients"]
    assert report.error == pytest.approx(0, abs=0.003)
    assert "Measured" in report.sentence and "predicted" in report.sentence
    assert "no memory snapshot: only GPU ranks" in run.logs(0)
