"""The output head's own memory: logits, their fp32 copies, the loss and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardscope.memory.precision import FP32


class Logits(NamedTuple):
    """Bytes for one token at the end of forward and at the start of backward."""

    forward: Any
    backward: Any


def logits_per_token(vocab: Any, kernels: str, compute: Any) -> Logits:
    """Bytes that one token's row of the vocabulary takes on the rank that has the head.

    ``transformers``: the half-precision logits stay referenced by the model's output; they are upcast, the
    log-softmax is a second fp32 tensor, and backward makes the gradients of both (``ForCausalLMLoss``,
    ``F.cross_entropy``). ``megatron``: vocab-parallel cross entropy keeps the fp32 softmax, and backward
    turns it into the gradient in place.
    """
    if kernels == "megatron":
        return Logits(vocab * (compute + FP32), vocab * (2 * compute + FP32))
    # An fp32 model's logits need no copy: `.float()` returns them.
    copy = compute if compute < FP32 else 0
    return Logits(vocab * (copy + 2 * FP32), vocab * (copy + 3 * FP32))
