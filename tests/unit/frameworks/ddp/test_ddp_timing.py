"""DDP's all-reduce in a step: what of it backward cannot overlap."""

from __future__ import annotations

import pytest

import shardscope as ss


@pytest.mark.parametrize(
    ("model", "embedding"), [("llama-3.2-1b", 128_256 * 2048), ("llama-3.2-3b", 128_256 * 3072)]
)
def test_embedding_is_reduced_after_backward(model: str, embedding: int) -> None:
    """Its gradient is the last one, and far larger than a bucket."""
    arch, cluster = ss.models[model], ss.Cluster.parse("8xh100-sxm-80gb")
    for method, least in (("full", embedding / arch.num_parameters), ("lora", 0)):
        recipe = ss.Recipe(global_batch_size=8, method=method)
        report = ss.Plan(arch, cluster, recipe, ss.Layout.ddp()).step()
        (reduction,) = (one for one in report.communication if one.part == "gradients")
        exposed = reduction.exposed_seconds / reduction.seconds
        assert exposed >= least * (1 - 1e-9)
        if method == "full":
            assert exposed == pytest.approx(least, rel=0.01)
