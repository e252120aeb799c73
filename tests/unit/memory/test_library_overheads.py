"""Tests of library memory besides tensors, by GPU vendor and generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardscope as ss
from shardscope.memory.overheads import libraries as overheads

MIB = 2**20
SMALL = replace(ss.models["llama-3.2-1b"], num_hidden_layers=2)


def get_component_bytes(gpu: str, component: str) -> int:
    plan = ss.Plan(SMALL, ss.Cluster.parse(f"2x{gpu}"), ss.Recipe(global_batch_size=4), ss.Layout.fsdp2())
    return plan.memory().components[component]


@pytest.mark.parametrize(
    ("gpu", "mebibytes"),
    [("v100-sxm-32gb", 8.125), ("a100-sxm-80gb", 8.125), ("h100-sxm-80gb", 32), ("mi300x-192gb", 204)],
)
def test_blas_workspace_depends_on_the_gpu_generation(gpu: str, mebibytes: float) -> None:
    assert get_component_bytes(gpu, "runtime") == overheads.CONTEXT + int(mebibytes * MIB)


def test_rccl_needs_more_memory_than_nccl() -> None:
    assert get_component_bytes("mi250x-gcd-64gb", "communication") == 2**30
    assert get_component_bytes("a100-sxm-80gb", "communication") == overheads.COMMUNICATOR_OF_TWO


def test_unmeasured_gpu_generations_have_the_default_band() -> None:
    assert overheads.estimate_runtime("nvidia", None) == overheads.estimate_runtime("nvidia", "ada")


@pytest.mark.parametrize("gpu", ["mi300x-192gb", "h100-sxm-80gb"])
def test_explanations_name_the_library_of_the_vendor(gpu: str) -> None:
    cluster = ss.Cluster.parse(f"2x{gpu}")
    report = ss.Plan(SMALL, cluster, ss.Recipe(global_batch_size=4), ss.Layout.ddp()).memory()
    amd = gpu.startswith("mi")
    assert ("hipBLAS" if amd else "cuBLAS") in report.explain("runtime")
    assert ("LUMI" if amd else "nccl#964") in report.explain("communication")
