"""Seconds of embedding, output head and loss: everything outside the decoder layers.

Numbers may be arrays of plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, map_distinct
from shardscope.core.precision import FP32
from shardscope.families.registry import find_family
from shardscope.memory.activations.head import (
    LOSS_CHUNK_TOKENS,
    compute_logits_per_token,
    count_fused_chunk_tokens,
    resolve_loss,
)
from shardscope.memory.state.stages import count_vocab_rows
from shardscope.timing.matmul import count_unaligned

if TYPE_CHECKING:
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.layers import LayerWork


class EndSeconds(NamedTuple):
    """Seconds of one micro-batch outside the layers of one stage."""

    forward: float
    """The head's matmul."""
    backward: float
    recomputation: float
    """Recomputation of the head's matmul with a chunked loss."""
    loss: float
    """Operators on logits, forward and backward."""
    lookup: float
    """The embedding lookup, and its backward's gradient."""


_NOTHING = EndSeconds(0.0, 0.0, 0.0, 0.0, 0.0)


def compute_end_seconds(work: LayerWork, stage: Stage) -> EndSeconds:
    """Return the seconds that the first and the last stage spend outside their layers."""
    # Identity checks: for arrays of plans, the fields are columns, and all of the formula is evaluated.
    if stage.is_first is False and stage.is_last is False:
        return _NOTHING
    if stage.is_last is False:
        return _NOTHING._replace(lookup=_compute_lookup(work, stage))
    plan, modules, arch, tokens = work.plan, work.modules, work.arch, work.tokens
    rows = count_vocab_rows(plan)
    kind = resolve_loss(plan)
    chunks: float = 1
    if kind == "chunked":
        chunks = ceil_div(tokens, LOSS_CHUNK_TOKENS)
    elif kind == "fused" and modules.kernels != "megatron":
        chunks = ceil_div(tokens, count_fused_chunk_tokens(tokens, rows, arch.hidden_size))
    hidden = arch.hidden_size
    # The weights are read again for each chunk.
    moved = chunks * rows * hidden + tokens * (rows + hidden)
    # The padded rows of the vocabulary are included.
    missed = tokens * map_distinct(partial(count_unaligned, hidden), stage.head // hidden)
    # The head stays in bf16 where layers multiply in fp8 (see HALF_PEAKS in ``timing/layers.py``).
    product = stage.is_last * work.half_rate.seconds(tokens * rows * hidden, moved, missed)
    logits = compute_logits_per_token(
        rows,
        modules.kernels,
        modules.compute,
        find_family(arch).has_softcapping,
        parallel=plan.layout.splits_sequence,
    )
    # Each tensor is written and read once.
    loss = stage.is_last * tokens * 2 * (logits.forward + logits.backward) / work.memory
    # The gradient of the input is always needed, that of the weights only if they train.
    gradients = (1 + modules.trained) * product
    if kind == "fused" and modules.kernels != "megatron":
        # Liger's forward computes the gradients too, chunk by chunk; backward only scales them.
        passes = work.rates.get_passes("liger")
        kernels = passes.kernels_ends_forward + chunks * passes.kernels_loss_chunk
        waiting = work.compute_waiting(kernels + passes.kernels_ends_backward, product + gradients + loss)
    else:
        passes = work.passes
        waiting = work.compute_waiting(passes.kernels_ends_forward, product + loss / 2)
        waiting = waiting + work.compute_waiting(passes.kernels_ends_backward, gradients + loss / 2)
    return EndSeconds(
        forward=product,
        backward=gradients,
        recomputation=(kind == "chunked") * product,
        loss=loss + stage.is_last * waiting,
        lookup=0.0 if stage.is_first is False else _compute_lookup(work, stage),
    )


def _compute_lookup(work: LayerWork, stage: Stage) -> float:
    """Return the lookup's seconds: one row per token is read and written.

    Backward zeroes a gradient of all rows, and adds to the rows in use.
    """
    stream, hidden, tokens = work.modules.stream, work.arch.hidden_size, work.tokens
    filled = work.modules.trained * (
        2 * count_vocab_rows(work.plan) * hidden * stream + 2 * tokens * hidden * FP32
    )
    return stage.is_first * (2 * tokens * hidden * stream + filled) / work.memory
