"""Common claims about the frameworks, each with the predicted number, a verdict and the reason."""

from __future__ import annotations

from collections.abc import Callable

from shardscope.planner.claims import memory_claims, speed_claims
from shardscope.planner.claims.claim import Claim, Claims, Number, Verdict

__all__ = ["CHECKED", "Claim", "Claims", "Number", "Verdict", "claims"]

CHECKED: tuple[Callable[[], Claim], ...] = (
    memory_claims.check_70b_training_state,
    memory_claims.check_70b_on_four_gpus,
    memory_claims.check_zero_savings,
    memory_claims.check_70b_lora_on_one_node,
    memory_claims.check_175b_on_one_gpu,
    speed_claims.check_offload_slowdown,
    speed_claims.compare_fsdp2_with_zero_3,
    speed_claims.compare_fsdp2_with_megatron,
    speed_claims.check_share_of_peak,
    speed_claims.check_llama_405b,
)
"""All claims, as functions that compute them."""


def claims() -> Claims:
    """Return all claims, computed with the current ``plan.memory()`` and ``plan.step()``."""
    return Claims(check() for check in CHECKED)
