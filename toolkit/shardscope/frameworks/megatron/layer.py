"""One layer of megatron-core on one rank: what it saves for backward, and what backward needs beside it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.modules.megatron import (
    attention_scores,
    branches,
    megatron_layer,
    megatron_selective,
)
from shardscope.memory.precision import FP32

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.memory.modules.saved import Modules, Saved


class Cuts(NamedTuple):
    """Into how many parts tensors are cut."""

    tp: int
    sequence: int
    """tp with sequence parallelism, else 1."""
    expert_tp: int
    ep: int
    plain_softmax: bool = False
    """Eager attention's softmax is torch's own, in fp32 (:func:`takes_plain_softmax`)."""
    gradient_copies: int = 0
    """Copies in 8 bits of a gradient that a product goes backward with (``fp8.py``)."""


class Layer(NamedTuple):
    """Bytes for one token of one layer on one rank."""

    saved: int
    """All that stays until this layer's backward, recomputation considered."""
    working: int
    """What backward in this layer needs beside it, at its fullest."""
    ending: int
    """What the end of its forward needs beside it."""


@lru_cache(maxsize=4096)
def layer(arch: Architecture, moe: bool, modules: Modules, recompute: str, cuts: Cuts) -> Layer:
    """Bytes one token leaves in one layer, and what its backward needs beside them."""
    tensors = megatron_layer(arch, moe, modules)
    everything = _on_rank(tensors, arch, cuts)
    stream = ceil_div(arch.hidden_size * modules.compute, cuts.sequence)
    if moe:
        working, ending = _expert_working(arch, modules, cuts, stream)
    else:
        # What the MLP returns, and its sum with the residual stream.
        working, ending = _dense_working(arch, modules, cuts, stream), 2 * stream
    if modules.attention == "eager":
        # torch's softmax keeps what it puts out in fp32, beside the cast that the product keeps.
        copy = arch.num_attention_heads * modules.seq_len * FP32 * cuts.plain_softmax
        copied = ceil_div(copy, cuts.tp)
        everything += copied
        scores = _on_rank([attention_scores(arch, modules)], arch, cuts) + copied
        working = max(working, scores + stream)
    if recompute == "full":
        # The layer is played again; its input is what was kept, its output is new.
        again = everything + max(working, ending - stream)
        return Layer(stream, again, ending + _without_gradient(arch, moe, modules, cuts, stream))
    if recompute == "selective":
        kept = _on_rank(megatron_selective(arch, moe, modules), arch, cuts)
        return Layer(kept, max(working, everything - kept), ending)
    return Layer(everything, working, ending)


def takes_plain_softmax(modules: Modules, rows: Any) -> Any:
    """Whether the fused softmax refuses ``rows`` (micro-batch x heads of a rank) of attention's scores.

    megatron/core/fusions/fused_softmax.py, ``FusedScaleMaskSoftmax.is_kernel_available``.
    """
    length = modules.seq_len
    if modules.attention != "eager" or modules.compute == FP32:
        # In fp32 either one keeps the same.
        return False
    if not 16 < length <= 4096 or length % 4:
        return True
    return rows % 4 > 0


def _on_rank(tensors: list[Saved], arch: Architecture, cuts: Cuts) -> int:
    parts = {
        "tp": cuts.tp,
        "key_value_heads": min(cuts.tp, arch.num_key_value_heads),
        "sequence": cuts.sequence,
        "expert_tokens": ceil_div(cuts.tp, cuts.expert_tp),
        "whole": 1,
    }
    if arch.latent_attention is not None:
        parts["key_value_heads"] = cuts.tp
    found: int = sum(ceil_div(tensor.bytes_per_token, parts[tensor.cut_by]) for tensor in tensors)
    return found


def _dense_working(arch: Architecture, modules: Modules, cuts: Cuts, stream: int) -> int:
    """Backward in the MLP: the gradient of its product, then of its branches; what is done with goes."""
    inner: int = ceil_div(arch.intermediate_size * modules.compute, cuts.tp)
    # With sequence parallelism the gradient of the residual stream is gathered for the second product.
    gathered = arch.hidden_size * modules.compute if cuts.sequence > 1 else 0
    masked = stream if modules.dropout else 0
    if modules.eight_bit_inputs:
        numbers: int = ceil_div(arch.intermediate_size, cuts.tp)
        # Casts of what comes in beside the product's gradient; then the activation's, whose 8-bit output went
        # while its gradient takes more; then casts of that beside the first product's (linear.py, backward).
        second = cuts.gradient_copies * arch.hidden_size + inner
        activation = (branches(arch) + 1) * inner - numbers
        first = (cuts.gradient_copies * branches(arch) - 1) * numbers + arch.hidden_size * modules.compute
        return stream + masked + max(second, activation, first)
    return stream + masked + max(gathered + inner, branches(arch) * inner)


def _expert_working(arch: Architecture, modules: Modules, cuts: Cuts, stream: int) -> tuple[int, int]:
    """Backward in the experts, and the end of their forward: tokens return by way of several copies.

    Counted in rehearsals.
    """
    experts = arch.mixture_of_experts
    assert experts is not None
    rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
    own: int = ceil_div(rows, cuts.sequence)
    gathered: int = ceil_div(rows, ceil_div(cuts.tp, cuts.expert_tp))
    inner = rows * experts.moe_intermediate_size // arch.hidden_size // cuts.tp
    # Copies before and after they are sorted by rank, scattered over tp, sent over ep, and put back in order.
    ending = 2 * gathered + own * (1 + (gathered > own) + (cuts.ep > 1))
    if modules.eight_bit_inputs:
        # As with a dense MLP: casts beside the second product's gradient, or the activation's.
        casts = gathered * cuts.gradient_copies // modules.compute
        activation = (branches(arch) + 1) * inner - inner // modules.compute
        working = stream + max(gathered + casts + inner, activation)
        if cuts.ep * cuts.tp == 1:
            return working, own + stream
        return max(working, stream + 2 * gathered), ending
    if cuts.ep * cuts.tp == 1:
        # All experts are here: nothing is sorted or sent.
        return stream + max(own + inner, branches(arch) * inner), own + stream
    return stream + max(2 * gathered, branches(arch) * inner), ending


def _without_gradient(arch: Architecture, moe: bool, modules: Modules, cuts: Cuts, stream: int) -> int:
    """What a forward that saves nothing needs at its fullest beside what every layer's end needs."""
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
        found: int = ceil_div(rows, ceil_div(cuts.tp, cuts.expert_tp)) + stream
        return found
    inner: int = ceil_div(arch.intermediate_size * modules.compute, cuts.tp)
    return (branches(arch) + 1) * inner
