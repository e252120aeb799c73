"""ZeRO-3 inside of one layer: all-gathers of a recomputation, and norms after the feed-forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import needs, needs_installed, thorough

import shardscope as ss

needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]


@pytest.mark.parametrize("name", ["llama-3.1-70b", "gemma-7b"])
def test_backward_may_all_gather_what_forward_had_prefetched(name: str) -> None:
    """In forward, weights of a layer are prefetched before it: its recomputation has more all-gathers."""
    arch = replace(ss.models[name], num_hidden_layers=3)
    recipe = ss.Recipe(seq_len=512, global_batch_size=8, recompute="selective")
    plan = ss.Plan(arch, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.zero(stage=3))
    predicted, rehearsed = plan.memory(), rehearse_in_this_process(plan)
    assert predicted.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.002)


@pytest.mark.parametrize("name", ["gemma-3-1b", "olmo-2-1b"])
def test_the_norm_after_a_feed_forward_has_freed_its_tensors_at_the_product(name: str) -> None:
    arch = replace(ss.models[name], num_hidden_layers=2, sliding_window_layers=0, vocab_size=997)
    recipe = ss.Recipe(seq_len=2048, micro_batch_size=2, global_batch_size=4, precision="fp32")
    plan = ss.Plan(arch, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, ss.Layout.zero(stage=3))
    predicted, rehearsed = plan.memory(), rehearse_in_this_process(plan)
    assert predicted.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.006)
