"""Memory of the output head and loss of transformers' models: full logits, chunked, or Liger's fused loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import count
from shardscope.core.ops import ceil_div, map_distinct, maximum, minimum, where
from shardscope.core.precision import FP32
from shardscope.families.registry import family_of
from shardscope.memory.activations.logits import Logits, compute_logits_per_token
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules

LOSS_CHUNK_TOKENS = 1024
"""Tokens per chunk of logits with ``loss="chunked"`` (training/model/loss.py)."""


def resolve_loss(plan: Plan) -> str:
    """Return the loss that a plan runs: the recipe's, or its kernels' default."""
    return plan.recipe.loss or ("fused" if plan.kernels == "liger" else "full")


def compute_chunked_loss(
    tokens: Any, vocab: Any, hidden: Any, modules: Modules, capped: bool = False
) -> Logits:
    """Return the bytes of a chunked head and loss, recomputed in backward.

    Forward: one chunk's fp32 logits and log-softmax. Backward with several chunks: these, the logits'
    gradient and the accumulated weight gradient; or, between two chunks, the old sum, the new gradient and
    the new sum, of the weight or of the head's input. With one chunk, the weight gradient is computed once,
    together with the logits' gradient; autocast casts it, and has freed the weight's copy by then. ``capped``
    logits (Gemma 2) save their tanh for backward. Checked in tests/runs/test_loss.py.
    """
    chunk = minimum(tokens, LOSS_CHUNK_TOKENS)
    several = tokens > LOSS_CHUNK_TOKENS
    weight = vocab * hidden * modules.trained
    gradient = weight * modules.compute
    # The backward of each slice of the head's input is a gradient as long as the whole input; these are
    # summed.
    states = several * tokens * hidden * modules.stream
    inside = chunk * vocab * (3 * FP32 + capped * modules.compute) + several * gradient + states
    once = weight * FP32 if modules.autocast else gradient + chunk * vocab * modules.compute
    between = maximum(3 * gradient + states, gradient + 3 * states)
    return Logits(chunk * vocab * 2 * FP32, maximum(inside, where(several, between, once)))


def compute_fused_loss(tokens: Any, vocab: Any, hidden: Any, modules: Modules) -> Logits:
    """Return the bytes of Liger's fused linear cross-entropy (liger-kernel 0.8).

    Source: ops/fused_linear_cross_entropy.py. Forward already computes the gradients of its input and of the
    head's weight, in their own dtypes; logits exist for one chunk of tokens at a time, with as many bytes as
    the input.
    """
    chunk = minimum(_round_up_to_power_of_2(ceil_div(tokens, ceil_div(vocab, hidden))), tokens)
    kept = hidden * modules.stream * (tokens + vocab * modules.trained)
    return Logits(chunk * vocab * modules.compute + kept, kept)


def _round_up_to_power_of_2(number: Any) -> Any:
    return map_distinct(lambda number: 1 << (number - 1).bit_length(), number)


def compute_logits_terms(
    plan: Plan, modules: Modules, tokens: Any, is_last: Any, vocab: Any = None
) -> tuple[Term, Term]:
    """Return logits and loss at the end of forward and at the start of backward; 0 but on the last stage.

    ``vocab``: vocabulary rows on one rank; None: divided by tp.
    """
    if vocab is None:
        vocab = ceil_div(plan.architecture.vocab_size, plan.degrees.tp)
    loss, hidden = resolve_loss(plan), plan.architecture.hidden_size
    capped = family_of(plan.architecture).has_softcapping
    if loss == "full":
        each = compute_logits_per_token(
            vocab, modules.kernels, modules.compute, capped, parallel=plan.layout.splits_sequence
        )
        found = Logits(tokens * each.forward, tokens * each.backward)
    elif loss == "fused":
        found = compute_fused_loss(tokens, vocab, hidden, modules)
    else:
        found = compute_chunked_loss(tokens, vocab, hidden, modules, capped)

    def words(num_bytes: int, when: str) -> str:
        if not is_last:
            return "only the last pipeline stage has the head"
        if loss != "full":
            return f"{count(tokens, 'token')}, {vocab:,} vocabulary · {_OTHER_LOSSES[loss]}"
        return (
            f"{count(tokens, 'token')} × {vocab:,} vocabulary × {num_bytes // (tokens * vocab)} bytes {when} "
            f"· {modules.kernels} loss: logits, fp32 copies, gradient"
        )

    return (
        Term(is_last * found.forward, lambda: words(found.forward, "at the end of forward")),
        Term(is_last * found.backward, lambda: words(found.backward, "as backward starts")),
    )


_OTHER_LOSSES = {
    "fused": "gradients of the head's input and weight, and a chunk of logits (liger-kernel 0.8)",
    "chunked": f"logits of {LOSS_CHUNK_TOKENS:,} tokens at a time, computed again in backward",
}
