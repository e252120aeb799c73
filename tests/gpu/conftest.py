"""The machine that the GPU tests run on; all of them skip where there is none."""

from __future__ import annotations

import dataclasses

import pytest

import shardscope as ss


@pytest.fixture(scope="session")
def one_gpu() -> ss.Cluster:
    """One GPU of this machine. Asked here, not at import: collecting the tests must not touch CUDA."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that torch can use")
    cluster = ss.Cluster.detect()
    if cluster.gpu.name == "cpu":
        pytest.skip("torch sees a CUDA device, but NVML does not, or it is not an NVIDIA one")
    return dataclasses.replace(cluster, gpus_per_node=1)
