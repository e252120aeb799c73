"""Memory of the output head: logits, their fp32 copies, the loss and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardscope.core.precision import FP32


class Logits(NamedTuple):
    """Bytes at the end of forward and at the start of backward."""

    forward: Any
    backward: Any


def compute_logits_per_token(
    vocab: Any, kernels: str, compute: Any, capped: bool = False, parallel: Any = False
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
        each = vocab * (compute + FP32 if compute < FP32 else FP32)
        return Logits(each, each)
    # An fp32 model's logits need no copy: `.float()` returns them.
    copy = compute if compute < FP32 else 0
    tanh = compute if capped else 0
    more = FP32 * parallel
    return Logits(vocab * (copy + tanh + 2 * FP32 + more), vocab * (tanh + 3 * FP32 + more))
