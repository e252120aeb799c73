"""Models of one to eight billion parameters on one real GPU: memory and step time, and their predictions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_one_gpu import NOT_TENSORS, record

import shardscope as ss
from shardscope.core.number_format import format_gib

pytestmark = pytest.mark.gpu

NUM_STEPS = 12
RUNS: dict[str, tuple[str, ss.Layout, dict[str, Any]]] = {
    "1b_fsdp2": ("llama-3.2-1b", ss.Layout.fsdp2(), {"seq_len": 4096, "micro_batch_size": 2}),
    "1b_ddp": ("llama-3.2-1b", ss.Layout.ddp(), {"seq_len": 4096, "micro_batch_size": 1}),
    "1b_full": (
        "llama-3.2-1b",
        ss.Layout.fsdp2(),
        {"seq_len": 8192, "micro_batch_size": 2, "recompute": "full"},
    ),
    "qwen_selective": (
        "qwen3-1.7b",
        ss.Layout.fsdp2(),
        {"seq_len": 2048, "micro_batch_size": 4, "recompute": "selective"},
    ),
    "3b_full": (
        "llama-3.2-3b",
        ss.Layout.fsdp2(),
        {"seq_len": 2048, "micro_batch_size": 2, "recompute": "full"},
    ),
    "8b_lora": (
        "llama-3.1-8b",
        ss.Layout.ddp(),
        {"seq_len": 2048, "micro_batch_size": 2, "method": "lora"},
    ),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_model_of_real_size_takes_what_was_predicted(
    one_gpu: ss.Cluster, name: str, tmp_path: Path
) -> None:
    model, layout, recipe = RUNS[name]
    batch = 2 * recipe["micro_batch_size"]
    plan = ss.Plan(ss.models[model], one_gpu, ss.Recipe(global_batch_size=batch, **recipe), layout)
    report = plan.memory()
    if not report.fits:
        pytest.skip(f"needs {format_gib(report.peak_bytes)} GiB: run it on a GPU that has them")
    run = ss.launch(plan, ss.Pretrain(num_steps=NUM_STEPS, learning_rate=1e-4), folder=tmp_path)
    try:
        status = run.wait(timeout=400)
        assert status == "finished", f"{status}: {run.reason}\n{run.error}\n{run.logs(0)}"
    finally:
        run.stop()
    (memory,) = run.memory()
    measured = memory["peak_memory_bytes"]
    predicted = sum(value for key, value in report.components.items() if key not in NOT_TENSORS)
    steps = sorted(line["step_seconds"] for line in run.metrics() if line["step"] >= NUM_STEPS // 2)
    seconds, expected = steps[len(steps) // 2], plan.step().seconds
    print(
        f"\n{name} on {one_gpu.gpu.name}: tensors predicted {predicted / 2**30:.2f} GiB, measured "
        f"{measured / 2**30:.2f}, {predicted / measured - 1:+.1%}; step predicted {expected:.3f} s, measured "
        f"{seconds:.3f}, {expected / seconds - 1:+.1%}"
    )
    assert abs(predicted / measured - 1) < 0.1
    if os.environ.get("SHARDSCOPE_RECORD") == "1":
        record(plan, run, measured)
