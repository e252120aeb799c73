"""The output head of transformers' models: whole logits, logits in chunks, or inside Liger's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import ceil_div, largest, looked_up, smallest, where
from shardscope.core.number_format import count
from shardscope.core.precision import FP32
from shardscope.families.registry import family_of
from shardscope.memory.activations.logits import Logits, logits_per_token
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once with ``loss="chunked"`` (training/model/loss.py)."""


def loss_in_force(plan: Plan) -> str:
    """Which loss a plan runs: the recipe's, or what its kernels bring."""
    return plan.recipe.loss or ("fused" if plan.kernels == "liger" else "full")


def chunked(tokens: Any, vocab: Any, hidden: Any, modules: Modules, capped: bool = False) -> Logits:
    """Bytes of head and loss in chunks that are recomputed in backward, counted in tests/runs/test_loss.py.

    Forward: a chunk's fp32 logits and log-softmax. Backward: beside these the logits' gradient and, of
    several chunks, the sum of the weight's gradients so far; or, between two chunks, that sum, the new
    gradient and the new sum; or as many of the head's input. Of one chunk alone the gradient comes once,
    beside that of the logits; autocast casts it, and has let go of the weight's copy by then. ``capped``
    logits (Gemma 2) leave their tanh for backward.
    """
    chunk = smallest(tokens, LOSS_CHUNK_TOKENS)
    several = tokens > LOSS_CHUNK_TOKENS
    weight = vocab * hidden * modules.trained
    gradient = weight * modules.compute
    # Each chunk's slice of the head's input gives back a gradient as long as all of them, and these add up.
    states = several * tokens * hidden * modules.stream
    inside = chunk * vocab * (3 * FP32 + capped * modules.compute) + several * gradient + states
    once = weight * FP32 if modules.autocast else gradient + chunk * vocab * modules.compute
    between = largest(3 * gradient + states, gradient + 3 * states)
    return Logits(chunk * vocab * 2 * FP32, largest(inside, where(several, between, once)))


def fused(tokens: Any, vocab: Any, hidden: Any, modules: Modules) -> Logits:
    """Bytes of Liger's fused linear cross-entropy (liger-kernel 0.8, ops/fused_linear_cross_entropy.py).

    Forward already makes the gradients of its input and of the head's weight, in their own types; logits
    exist for a chunk of tokens at a time, as many bytes as the input has.
    """
    chunk = smallest(_next_power_of_2(ceil_div(tokens, ceil_div(vocab, hidden))), tokens)
    kept = hidden * modules.stream * (tokens + vocab * modules.trained)
    return Logits(chunk * vocab * modules.compute + kept, kept)


def _next_power_of_2(number: Any) -> Any:
    return looked_up(lambda number: 1 << (number - 1).bit_length(), number)


def head_terms(
    plan: Plan, modules: Modules, tokens: Any, is_last: Any, vocab: Any = None
) -> tuple[Term, Term]:
    """Logits and loss at the end of forward, and as backward starts: on the last pipeline stage only.

    ``vocab`` are the vocabulary's rows on one rank; None: a part of them over tp.
    """
    if vocab is None:
        vocab = ceil_div(plan.architecture.vocab_size, plan.degrees.tp)
    loss, hidden = loss_in_force(plan), plan.architecture.hidden_size
    capped = family_of(plan.architecture).has_softcapping
    if loss == "full":
        each = logits_per_token(
            vocab, modules.kernels, modules.compute, capped, parallel=plan.layout.splits_sequence
        )
        found = Logits(tokens * each.forward, tokens * each.backward)
    elif loss == "fused":
        found = fused(tokens, vocab, hidden, modules)
    else:
        found = chunked(tokens, vocab, hidden, modules, capped)

    def words(num_bytes: int, when: str) -> str:
        if not is_last:
            return "only the last pipeline stage has the head"
        if loss != "full":
            return f"{count(tokens, 'token')}, {vocab:,} vocabulary · {_SPARING[loss]}"
        return (
            f"{count(tokens, 'token')} × {vocab:,} vocabulary × {num_bytes // (tokens * vocab)} bytes {when} "
            f"· {modules.kernels} loss: logits, fp32 copies, gradient"
        )

    return (
        Term(is_last * found.forward, lambda: words(found.forward, "at the end of forward")),
        Term(is_last * found.backward, lambda: words(found.backward, "as backward starts")),
    )


_SPARING = {
    "fused": "gradients of the head's input and weight, and a chunk of logits (liger-kernel 0.8)",
    "chunked": f"logits of {LOSS_CHUNK_TOKENS:,} tokens at a time, computed again in backward",
}
