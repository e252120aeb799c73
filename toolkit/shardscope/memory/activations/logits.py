"""The output head's own memory: logits, their fp32 copies, the loss and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardscope.core.precision import FP32


class Logits(NamedTuple):
    """Bytes for one token at the end of forward and at the start of backward."""

    forward: Any
    backward: Any


def logits_per_token(
    vocab: Any, kernels: str, compute: Any, capped: bool = False, parallel: Any = False
) -> Logits:
    """Bytes that one token's row of the vocabulary takes on the rank that has the head.

    ``transformers``: the half-precision logits are upcast, the log-softmax is a second fp32 tensor; backward
    has that and the gradients of both (``ForCausalLMLoss``, ``F.cross_entropy``), for the engine lets go of
    the model's output. ``capped`` logits (Gemma 2) leave their tanh for backward. ``parallel`` over ranks of
    tp (DTensor's ``loss_parallel``, tensor/parallel/loss.py) it is operators with one fp32 tensor more at
    either end: logits less their largest; the softmax and its sum with the targets' part. ``megatron``:
    vocab-parallel cross entropy copies the logits to fp32, turns the copy into the softmax and that into the
    gradient in place, and casts this.
    """
    if kernels == "megatron":
        # In fp32 `.float()` copies nothing, and the gradient needs no cast.
        each = vocab * (compute + FP32 if compute < FP32 else FP32)
        return Logits(each, each)
    # An fp32 model's logits need no copy: `.float()` returns them.
    copy = compute if compute < FP32 else 0
    tanh = compute if capped else 0
    more = FP32 * parallel
    return Logits(vocab * (copy + tanh + 2 * FP32 + more), vocab * (tanh + 3 * FP32 + more))
