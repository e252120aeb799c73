"""The output head where logits of all tokens never exist at once: in chunks, or inside Liger's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.memory.arithmetic import ceil_div, smallest
from shardscope.memory.logits import Logits
from shardscope.memory.precision import FP32

if TYPE_CHECKING:
    from shardscope.memory.modules.saved import Modules
    from shardscope.plan import Plan

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once with ``loss="chunked"`` (training/loss.py)."""


def loss_in_force(plan: Plan) -> str:
    """Which loss a plan runs: the recipe's, or what its kernels bring."""
    return plan.recipe.loss or ("fused" if plan.kernels == "liger" else "full")


def chunked(tokens: Any, vocab: Any, hidden: Any, modules: Modules) -> Logits:
    """Bytes of head and loss in chunks that are recomputed in backward, counted in tests/runs/test_loss.py.

    Forward: a chunk's fp32 logits and log-softmax. Backward: beside these the logits' gradient and the sum of
    the weight's gradients so far; or, between two chunks, that sum, the new gradient and the new sum.
    """
    chunk = smallest(tokens, LOSS_CHUNK_TOKENS)
    gradient = vocab * hidden * modules.compute * modules.trained
    inside = chunk * vocab * 3 * FP32 + gradient
    return Logits(chunk * vocab * 2 * FP32, _larger(inside, 3 * gradient))


def fused(tokens: Any, vocab: Any, hidden: Any, modules: Modules) -> Logits:
    """Bytes of Liger's fused linear cross-entropy (liger-kernel 0.8, ops/fused_linear_cross_entropy.py).

    Forward already makes the gradients of its input and of the head's weight, in their own types; logits
    exist for a chunk of tokens at a time, as many bytes as the input has.
    """
    chunk = smallest(_next_power_of_2(ceil_div(tokens, ceil_div(vocab, hidden))), tokens)
    kept = hidden * modules.stream * (tokens + vocab * modules.trained)
    return Logits(chunk * vocab * modules.compute + kept, kept)


def _larger(first: Any, second: Any) -> Any:
    return first + second - smallest(first, second)


def _next_power_of_2(number: Any) -> Any:
    if isinstance(number, np.ndarray):
        return 2 ** np.ceil(np.log2(number)).astype(np.int64)
    return 1 << (number - 1).bit_length()
