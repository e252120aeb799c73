"""Memory of the final norm, the output head and the loss: full logits, chunked, or Liger's fused loss."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_count
from shardscope.core.ops import ceil_div, map_distinct, maximum, minimum, where
from shardscope.core.precision import FP32
from shardscope.families.registry import find_family
from shardscope.memory.activations.modules.layernorm import casts_norms
from shardscope.memory.activations.modules.liger import compute_liger_final_norm
from shardscope.memory.report import Term, zero_term

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules

LOSS_CHUNK_TOKENS = 1024
"""Tokens per chunk of logits with ``loss="chunked"`` (training/model/loss.py)."""

_LOSS_SOURCES = {
    "fused": "gradients of the head's input and weight, and a chunk of logits (liger-kernel 0.8)",
    "chunked": f"logits of {LOSS_CHUNK_TOKENS:,} tokens at a time, computed again in backward",
}


class Logits(NamedTuple):
    """Bytes at the end of forward and at the start of backward."""

    forward: int
    backward: int


# ---- Final norm ----


@lru_cache(maxsize=4096)
def compute_final_norm_saved(architecture: Architecture, modules: Modules) -> int:
    """Return the bytes per token saved by the final norm, without the head's input."""
    hidden = architecture.hidden_size
    if modules.kernels == "liger":
        return compute_liger_final_norm(architecture, modules)
    if architecture.norm == "layernorm":
        number = modules.compute if casts_norms(architecture, modules) else modules.normed
        return hidden * number + 2 * FP32
    normed = FP32 if find_family(architecture).scales_before_cast else modules.stream
    # RMSNorm: its fp32 input, 1/rms and, for the weight's gradient, the normalized input.
    return hidden * FP32 + FP32 + hidden * normed * modules.trained


def compute_final_norm(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token at the final norm's backward, on top of its saved tensors."""
    if arch.norm == "layernorm" or modules.kernels == "liger":
        return arch.hidden_size * modules.normed
    # The gradient of x^2 in eager PyTorch: four fp32 tensors of the hidden size.
    return arch.hidden_size * (4 * FP32)


def compute_norm_after_head(arch: Architecture, modules: Modules, head_input: int) -> int:
    """Return bytes per token at the final norm's backward, after the head's.

    The head has freed ``head_input`` bytes per token by then. A trained RMSNorm has also freed its normalized
    output when the gradient of x^2 is computed.
    """
    if not modules.trained or modules.kernels != "transformers":
        return compute_final_norm(arch, modules)
    if arch.norm == "layernorm":
        return arch.hidden_size * 2 * modules.stream - head_input
    normed = FP32 if find_family(arch).scales_before_cast else modules.stream
    return arch.hidden_size * (5 * FP32 - normed) - head_input


def compute_norm_after_block(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token at the backward of the norm after a layer's feed-forward; 0 if it has none.

    On top of all that the layer has saved and of the residual stream's gradient, less the normalized input,
    which is freed by then: the gradient of x^2 and of the product with 1/rms, in five fp32 tensors.
    """
    family = find_family(arch)
    is_after = arch.norms_per_layer == 4 or family.is_post_norm
    if not is_after or arch.norm != "rmsnorm" or modules.kernels != "transformers":
        return 0
    normed = modules.stream if family.is_post_norm else modules.compute
    freed = (FP32 if family.scales_before_cast else normed) * modules.trained
    return arch.hidden_size * (5 * FP32 - freed)


def compute_norm_after_saved(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token that the norm after a layer's feed-forward saves; 0 if it has none."""
    if not compute_norm_after_block(arch, modules):
        return 0
    family = find_family(arch)
    normed = FP32 if family.scales_before_cast else modules.stream if family.is_post_norm else modules.compute
    return arch.hidden_size * (FP32 + normed * modules.trained)


# ---- Head and loss ----


def resolve_loss(plan: Plan) -> str:
    """Return the loss that a plan runs: the recipe's, or its kernels' default."""
    return plan.recipe.loss or ("fused" if plan.kernels == "liger" else "full")


def compute_head_input(architecture: Architecture, modules: Modules, loss: str = "full") -> int:
    """Return the bytes per token of the head's saved input, never sharded by sequence parallelism.

    A fused loss saves gradients instead (:func:`compute_fused_loss`), a chunked loss its input.
    """
    keeps_input = modules.trained or modules.keeps_frozen_inputs
    width = {"full": modules.compute * keeps_input, "chunked": modules.stream, "fused": 0}[loss]
    return architecture.hidden_size * width


def compute_logits_terms(
    plan: Plan, modules: Modules, tokens: int, is_last: bool, vocab: int | None = None
) -> tuple[Term, Term]:
    """Return logits and loss at the end of forward and at the start of backward; 0 but on the last stage.

    ``vocab``: vocabulary rows on one rank; None: divided by tp.
    """
    if is_last is False:
        no_head = zero_term("only the last pipeline stage has the head")
        return no_head, no_head
    if vocab is None:
        vocab = ceil_div(plan.architecture.vocab_size, plan.degrees.tp)
    rows, loss, hidden = vocab, resolve_loss(plan), plan.architecture.hidden_size
    capped = find_family(plan.architecture).has_softcapping
    if loss == "full":
        token = compute_logits_per_token(
            rows, modules.kernels, modules.compute, capped, parallel=plan.layout.splits_sequence
        )
        logits = Logits(tokens * token.forward, tokens * token.backward)
    elif loss == "fused":
        logits = compute_fused_loss(tokens, rows, hidden, modules)
    else:
        logits = compute_chunked_loss(tokens, rows, hidden, modules, capped)

    def explain(num_bytes: int, when: str) -> str:
        if loss != "full":
            return f"{format_count(tokens, 'token')}, {rows:,} vocabulary · {_LOSS_SOURCES[loss]}"
        return (
            f"{format_count(tokens, 'token')} × {rows:,} vocabulary × {num_bytes // (tokens * rows)} bytes "
            f"{when} · {modules.kernels} loss: logits, fp32 copies, gradient"
        )

    return (
        Term(is_last * logits.forward, lambda: explain(logits.forward, "at the end of forward")),
        Term(is_last * logits.backward, lambda: explain(logits.backward, "as backward starts")),
    )


def compute_logits_per_token(
    vocab: int, kernels: str, compute: int, capped: bool = False, parallel: bool = False
) -> Logits:
    """Return the bytes of one token's logits on the rank that has the head.

    ``transformers``: the half-precision logits are upcast, and the log-softmax is a second fp32 tensor;
    backward has the log-softmax and the gradients of both (``ForCausalLMLoss``, ``F.cross_entropy``), because
    the engine frees the model's output. ``capped`` logits (Gemma 2) save their tanh for backward. With
    ``parallel`` logits over tensor-parallel ranks (DTensor's ``loss_parallel``, tensor/parallel/loss.py),
    each end has one more fp32 tensor: logits minus their maximum; and the softmax plus its sum with the
    targets' part. ``megatron``: vocab-parallel cross entropy copies the logits to fp32, turns the copy into
    softmax and gradient in place, and casts it.
    """
    if kernels == "megatron":
        # In fp32, `.float()` copies nothing, and the gradient needs no cast.
        logits = vocab * (compute + FP32 if compute < FP32 else FP32)
        return Logits(logits, logits)
    # An fp32 model's logits need no copy: `.float()` returns them.
    copy = compute if compute < FP32 else 0
    tanh = compute if capped else 0
    shifted = FP32 * parallel
    return Logits(vocab * (copy + tanh + 2 * FP32 + shifted), vocab * (tanh + 3 * FP32 + shifted))


def compute_chunked_loss(
    tokens: int, vocab: int, hidden: int, modules: Modules, capped: bool = False
) -> Logits:
    """Return the bytes of a chunked head and loss, recomputed in backward.

    Forward: one chunk's fp32 logits and log-softmax. Backward with several chunks: these, the logits'
    gradient and the accumulated weight gradient; or, between two chunks, the old sum, the new gradient and
    the new sum, of the weight or of the head's input. With one chunk, the weight gradient is computed once,
    together with the logits' gradient; autocast casts it, and has freed the weight's copy by then. ``capped``
    logits (Gemma 2) save their tanh for backward. Checked in tests/runs/test_chunked_loss.py.
    """
    chunk = minimum(tokens, LOSS_CHUNK_TOKENS)
    has_several = tokens > LOSS_CHUNK_TOKENS
    weight = vocab * hidden * modules.trained
    gradient = weight * modules.compute
    # The backward of each slice of the head's input is a gradient as long as the whole input; these are
    # summed.
    states = has_several * tokens * hidden * modules.stream
    in_chunk = chunk * vocab * (3 * FP32 + capped * modules.compute) + has_several * gradient + states
    only_chunk = weight * FP32 if modules.autocast else gradient + chunk * vocab * modules.compute
    between_chunks = maximum(3 * gradient + states, gradient + 3 * states)
    return Logits(chunk * vocab * 2 * FP32, maximum(in_chunk, where(has_several, between_chunks, only_chunk)))


def compute_fused_loss(tokens: int, vocab: int, hidden: int, modules: Modules) -> Logits:
    """Return the bytes of Liger's fused linear cross-entropy (liger-kernel 0.8).

    Source: ops/fused_linear_cross_entropy.py. Forward already computes the gradients of its input and of the
    head's weight, in their own dtypes; logits exist for one chunk of tokens at a time, with as many bytes as
    the input.
    """
    chunk = count_fused_chunk_tokens(tokens, vocab, hidden)
    gradients = hidden * modules.stream * (tokens + vocab * modules.trained)
    return Logits(chunk * vocab * modules.compute + gradients, gradients)


def count_fused_chunk_tokens(tokens: int, vocab: int, hidden: int) -> int:
    """Return the tokens of one chunk of Liger's fused linear cross-entropy."""
    return minimum(_round_up_to_power_of_2(ceil_div(tokens, ceil_div(vocab, hidden))), tokens)


def _round_up_to_power_of_2(number: int) -> int:
    def round_up(number: int) -> int:
        return 1 << (number - 1).bit_length()

    return map_distinct(round_up, number)
