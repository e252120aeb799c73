"""One real GPU: the plan of this machine trains on it, and its peak stands beside its prediction."""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from tests.accuracy.own_rows import append, own_rows
from tests.accuracy.rows import OWN

import shardscope as ss

pytestmark = pytest.mark.gpu

NUM_STEPS = 12
NOT_TENSORS = ("communication", "runtime", "fragmentation")
"""Components outside of torch.cuda.max_memory_allocated()."""
LAYOUTS = {"ddp": ss.Layout.ddp, "fsdp2": ss.Layout.fsdp2}


@pytest.mark.parametrize("framework", list(LAYOUTS))
def test_a_small_llama_trains_on_one_gpu(one_gpu: ss.Cluster, framework: str, tmp_path: Path) -> None:
    plan = ss.Plan(
        ss.Architecture.of_size("120m"),
        one_gpu,
        ss.Recipe(seq_len=512, micro_batch_size=4, global_batch_size=8),
        LAYOUTS[framework](),
    )
    run = ss.launch(plan, ss.Pretrain(num_steps=NUM_STEPS, learning_rate=5e-4, warmup=2), folder=tmp_path)
    try:
        status = run.wait(timeout=300)
        assert status == "finished", f"{status}: {run.reason}\n{run.error}\n{run.logs(0)}"
    finally:
        run.stop()

    losses = [line["loss"] for line in run.metrics()]
    assert len(losses) == NUM_STEPS
    assert losses[-1] < losses[0] - 0.5, losses

    made = run.engine_reports()[0]["engine"]
    assert made["framework"] == framework
    assert made["device"].startswith("cuda")
    assert "nccl" in made["backend"]
    assert made["world_size"] == 1

    (memory,) = run.memory()
    measured = memory["peak_memory_bytes"]
    components = plan.memory().components
    predicted = sum(value for name, value in components.items() if name not in NOT_TENSORS)
    print(
        f"\n{framework} on {one_gpu.gpu.name}: predicted tensors {predicted / 2**30:.3f} GiB, "
        f"measured {measured / 2**30:.3f} GiB, {predicted / measured - 1:+.1%}"
    )
    assert components["parameters"] <= measured <= one_gpu.gpu.usable_bytes
    if os.environ.get("SHARDSCOPE_RECORD") == "1":
        record(plan, run, measured)


def record(plan: ss.Plan, run: ss.Run, measured: int) -> None:
    """Append what was run and measured, in the form of published rows: `make accuracy` scores it."""
    steady = sorted([line["step_seconds"] for line in run.metrics()][NUM_STEPS // 2 :])
    rows = own_rows(
        plan,
        measured,
        run.memory().components,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions={name: found for name in ("torch", "transformers") if (found := find_version(name))},
        step_seconds=steady[len(steady) // 2],
    )
    append(OWN, rows)


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
