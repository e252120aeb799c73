"""Common claims about these frameworks, each beside our own number, with a verdict and the reason."""

from __future__ import annotations

from collections.abc import Callable

from shardscope.planner.claims import fitting, llama, speed, state
from shardscope.planner.claims.claim import Claim, Claims, Number, Verdict

__all__ = ["CHECKED", "Claim", "Claims", "Number", "Verdict", "claims"]

CHECKED: tuple[Callable[[], Claim], ...] = (
    state.seventy_billion,
    state.four_cards,
    state.stages_of_zero,
    fitting.lora_on_a_node,
    fitting.one_gpu_with_nvme,
    speed.offload_halves,
    speed.fsdp2_against_zero_3,
    speed.fsdp2_against_megatron,
    speed.near_the_peak,
    llama.llama_405b,
)
"""All claims, as functions that compute them."""


def claims() -> Claims:
    """Return all claims, computed with the current ``plan.memory()`` and ``plan.step()``."""
    return Claims(check() for check in CHECKED)
