"""Peaks where ZeRO reduces gradients: DeepSpeed's own engine compared with predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.in_process_rehearsal import list_stages
from tests.requirements import needs, needs_installed, thorough
from tests.unit.random_plans import LLAMA

needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]

import shardscope as ss  # noqa: E402
from shardscope.rehearsal.result import TENSOR_COMPONENTS  # noqa: E402

WIDE = replace(
    LLAMA, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, vocab_size=8000,
)  # fmt: skip
"""A model for few tokens, so that the peak is where gradients are reduced."""
PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"stage": 1, "pp": 4, "reduce_bucket_size": 6_000_000},
    "stage 3, not contiguous": {
        "stage": 3,
        "reduce_bucket_size": 100_000_000,
        "contiguous_gradients": False,
        "stage3_prefetch_bucket_size": 2_000_000,
        "stage3_max_reuse_distance": 1_000_000,
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_peak_during_gradient_reduction_is_predicted(name: str) -> None:
    plan = ss.Plan(
        WIDE,
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(seq_len=32, global_batch_size=8),
        ss.Layout.zero(**PLANS[name]),
    )
    for rehearsed, predicted in zip(list_stages(plan), plan.memory().by_stage, strict=True):
        peak = max(
            sum(predicted.at(phase).components[part] for part in TENSOR_COMPONENTS)
            for phase in ("forward", "backward", "optimizer")
        )
        assert peak == pytest.approx(rehearsed.peak.num_bytes, rel=0.01)
