"""The machine that the GPU tests run on; all of them skip where there is none."""

from __future__ import annotations

import dataclasses

import pytest
from tests.requirements import needs

import shardscope as ss


@pytest.fixture(scope="session")
def one_gpu() -> ss.Cluster:
    """One GPU of this machine. Asked here, not at import: collecting the tests must not touch CUDA."""
    torch = needs("torch")
    needs("transformers")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that torch can use: run tests/gpu on a machine with one")
    cluster = ss.Cluster.detect()
    if cluster.gpu.name == "cpu":
        pytest.skip("torch sees a CUDA device and NVML none: run tests/gpu on a machine with an NVIDIA GPU")
    return dataclasses.replace(cluster, gpus_per_node=1)
