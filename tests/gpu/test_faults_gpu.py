"""Faults that only a GPU can show: a kernel that holds a CUDA context, and CUDA's own list of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss

pytestmark = pytest.mark.gpu

COUNT = """
import torch
from shardscope import Cluster
here = Cluster.detect()
print(torch.cuda.device_count(), 0 if here.gpu.name == "cpu" else here.gpus_per_node)
"""


def uses_cuda(ctx: Any) -> None:
    """Fails in a process that was forked from one that uses CUDA."""
    import torch

    ctx.log(device=str(ctx.device), total=torch.ones(8, device=ctx.device).sum())


def test_fault_17_a_kernel_that_holds_a_cuda_context(one_gpu: ss.Cluster, tmp_path: Path) -> None:
    import torch

    held = torch.ones(2**20, device="cuda")
    assert torch.cuda.is_initialized()
    plan = ss.Plan(
        ss.Architecture.of_size("2m"), one_gpu, ss.Recipe(seq_len=64, global_batch_size=1), ss.Layout.ddp()
    )
    run = ss.launch(plan, uses_cuda, folder=tmp_path)
    assert run.wait(120) == "finished", run.error
    (line,) = run.metrics()
    assert (line["device"], line["total"]) == ("cuda:0", 8.0)
    assert float(held.sum()) == 2**20, "the kernel's own tensors are as they were"


@pytest.mark.parametrize("visible", [None, "", "0", "9", "0,9", "0,0", "0,9,9", "-1", "x", "GPU-nowhere"])
def test_fault_20_this_machine_is_what_cuda_sees(one_gpu: ss.Cluster, visible: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", COUNT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    of_cuda, ours = done.stdout.split()
    assert of_cuda == ours
