"""ZeRO-3 with selective recomputation: its hooks all-gather inside of the recomputed layer."""

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
