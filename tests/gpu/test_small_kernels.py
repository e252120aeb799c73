"""Steps that the host bounds, on one real GPU: measured seconds and kernels, and the predicted seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_one_gpu import record
from tests.requirements import needs_installed

import shardscope as ss

pytestmark = pytest.mark.gpu

NUM_STEPS = 24
FIRST = 14
"""The first step whose seconds count: those before it warm up or are recorded."""
SHORT: dict[str, Any] = {"seq_len": 512, "micro_batch_size": 1}
RUNS: dict[str, tuple[ss.Layout, dict[str, Any]]] = {
    "ddp": (ss.Layout.ddp(), SHORT),
    "ddp_mb8": (ss.Layout.ddp(), {"seq_len": 512, "micro_batch_size": 8}),
    "ddp_bf16": (ss.Layout.ddp(), {**SHORT, "precision": "bf16"}),
    "ddp_eager": (ss.Layout.ddp(), {**SHORT, "attention": "eager"}),
    "ddp_full": (ss.Layout.ddp(), {**SHORT, "recompute": "full"}),
    "ddp_lora": (ss.Layout.ddp(), {**SHORT, "method": "lora"}),
    "ddp_compiled": (ss.Layout.ddp(), {**SHORT, "kernels": "compiled"}),
    "fsdp2": (ss.Layout.fsdp2(), SHORT),
    "zero1": (ss.Layout.zero(1), SHORT),
    "zero3": (ss.Layout.zero(3), SHORT),
    "megatron": (ss.Layout.megatron(), SHORT),
    "megatron_mb8": (ss.Layout.megatron(), {"seq_len": 512, "micro_batch_size": 8}),
}
MODEL = ss.Architecture(
    name="24-layer Llama of hidden size 1024",
    model_type="llama",
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=64,
    vocab_size=32_000,
    max_position_embeddings=2048,
)


@pytest.mark.parametrize("name", list(RUNS))
def test_a_step_of_small_kernels(one_gpu: ss.Cluster, name: str, tmp_path: Path) -> None:
    layout, recipe = RUNS[name]
    if layout.framework in ("deepspeed", "megatron"):
        needs_installed(layout.framework)
    batch = 4 * recipe["micro_batch_size"]
    plan = ss.Plan(MODEL, one_gpu, ss.Recipe(global_batch_size=batch, **recipe), layout)
    run = ss.launch(plan, ss.Pretrain(num_steps=NUM_STEPS, profile=True), folder=tmp_path)
    try:
        status = run.wait(timeout=400)
        assert status == "finished", f"{status}: {run.reason}\n{run.error}\n{run.logs(0)}"
    finally:
        run.stop()
    steps = sorted(line["step_seconds"] for line in run.metrics() if line["step"] >= FIRST)
    seconds, predicted = steps[len(steps) // 2], plan.step()
    trace = run.trace()
    assert trace is not None
    num_kernels = sum(row["num_launches"] for row in trace.launches()) / len(trace.steps())
    idle = {row["cause"]: round(row["share"], 3) for row in trace.idle()}
    print(
        f"\n{name} on {one_gpu.gpu.name}: step predicted {1e3 * predicted.seconds:.1f} ms, measured "
        f"{1e3 * seconds:.1f}, {predicted.seconds / seconds - 1:+.1%}; {num_kernels:,.0f} launches a step, "
        f"{1e6 * seconds / num_kernels:.1f} us each; idle {idle}"
    )
    assert num_kernels > 24 * 4 * 50, "a layer's forward and backward start more than 50 kernels"
    (memory,) = run.memory()
    if os.environ.get("SHARDSCOPE_RECORD") == "1":
        record(plan, run, memory["peak_memory_bytes"])
