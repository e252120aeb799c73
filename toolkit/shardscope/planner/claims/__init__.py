"""Common claims about these frameworks, each beside our own number, with a verdict and the reason."""

from __future__ import annotations

from collections.abc import Callable

from shardscope.planner.claims import memory, speed
from shardscope.planner.claims.claim import Claim, Claims, Number, Verdict

__all__ = ["CHECKED", "Claim", "Claims", "Number", "Verdict", "claims"]

CHECKED: tuple[Callable[[], Claim], ...] = (
    memory.seventy_billion,
    memory.four_cards,
    memory.stages_of_zero,
    memory.lora_on_a_node,
    memory.one_gpu_with_nvme,
    speed.offload_halves,
    speed.fsdp2_against_zero_3,
    speed.fsdp2_against_megatron,
    speed.near_the_peak,
    speed.llama_405b,
)
"""All claims, as functions that compute them."""


def claims() -> Claims:
    """Return all claims, computed with the current ``plan.memory()`` and ``plan.step()``."""
    return Claims(check() for check in CHECKED)
