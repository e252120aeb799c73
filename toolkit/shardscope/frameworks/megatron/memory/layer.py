"""One layer of megatron-core on one rank: what it saves for backward, and what backward needs beside it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div
from shardscope.frameworks.megatron.memory.eager import eager_attention
from shardscope.memory.activations.modules.attention import widths
from shardscope.memory.activations.modules.megatron import (
    branches,
    copies_query,
    core_attention,
    fused_product,
    latent_angles,
    megatron_layer,
    megatron_selective,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved import Modules, Saved


class Cuts(NamedTuple):
    """Into how many parts tensors are cut."""

    tp: int
    sequence: int
    """tp with sequence parallelism, else 1."""
    expert_tp: int
    ep: int
    plain_rows: int = 0
    """Micro-batch x heads of a rank, where eager attention's softmax is torch's own, in fp32
    (:func:`~shardscope.frameworks.megatron.memory.eager.takes_plain_softmax`)."""
    micro_batch: int = 1
    """Sequences, which have their positions' angles in common."""
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
    retained: int = 0
    """What stays of it when it has gone backward, beside what it saved: the input's gradient, where a
    dispatcher of experts keeps the probabilities of a layer that was played again, and so the graph that ends
    in its input (token_dispatcher.py, ``self.probs``)."""


@lru_cache(maxsize=4096)
def layer(arch: Architecture, moe: bool, modules: Modules, recompute: str, cuts: Cuts) -> Layer:
    """Bytes one token leaves in one layer, and what its backward needs beside them."""
    tensors = megatron_layer(arch, moe, modules, cuts.tp)
    angles = ceil_div(latent_angles(arch, modules), cuts.micro_batch)
    everything = _on_rank(tensors, arch, cuts) + angles
    stream = ceil_div(arch.hidden_size * modules.compute, cuts.sequence)
    if moe:
        working, ending = _expert_working(arch, modules, cuts, stream)
    else:
        # What the MLP returns, and its sum with the residual stream; or its product of all tokens beside the
        # part of them that stays here.
        ending = stream + (arch.hidden_size * modules.compute if cuts.sequence > 1 else stream)
        working = _dense_working(arch, modules, cuts, stream)
    if modules.attention == "eager":
        return _with_scores(arch, moe, modules, recompute, cuts, Layer(everything, working, ending))
    if recompute == "full":
        # The layer is played again; its input is what was kept, its output is new.
        again = everything + max(working, ending - stream)
        without = _without_gradient(arch, moe, modules, cuts, stream, ending)
        return Layer(stream, again, without, moe * stream)
    if recompute == "selective":
        kept = _on_rank(megatron_selective(arch, moe, modules, cuts.tp), arch, cuts) + angles
        return Layer(kept, max(working, everything - kept), ending)
    return Layer(everything, working, ending)


def _with_scores(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, cuts: Cuts, rest: Layer
) -> Layer:
    """The layer with attention written out, which may be fuller than the MLP; ``rest`` is without that."""
    tensors, width, c = megatron_layer(arch, moe, modules, cuts.tp), widths(arch), modules.compute
    core = eager_attention(arch, modules, cuts.tp, cuts.plain_rows)
    stream = ceil_div(arch.hidden_size * c, cuts.sequence)
    norms: int = _on_rank([tensor for tensor in tensors if tensor.operator == "norms"], arch, cuts)
    mlp = _on_rank([tensor for tensor in tensors if tensor.operator in ("mlp", "experts")], arch, cuts)
    output = ceil_div(width.output * c, cuts.tp)
    # Nothing behind attention is there while it runs: not yet in forward, not any more in backward.
    behind = mlp + norms // 2 + output
    angles = ceil_div(latent_angles(arch, modules), cuts.micro_batch)
    before = norms // 2 + angles + _operands(arch, modules, cuts)
    everything = rest.saved - _on_rank(core_attention(arch, modules, cuts.tp), arch, cuts) + core.saved
    working = max(rest.working, core.gradients + stream - behind)
    ending = max(rest.ending, before + core.forward - everything)
    if recompute == "full":
        again = everything + max(working, ending - stream)
        without = _without_gradient(arch, moe, modules, cuts, stream, rest.ending)
        return Layer(stream, again, max(without, before + core.without_gradient - stream), moe * stream)
    if recompute == "selective":
        kept = _on_rank(megatron_selective(arch, moe, modules, cuts.tp), arch, cuts) + angles
        again = core.recomputed + output + stream - behind
        return Layer(kept, max(rest.working, again), max(rest.ending, before + core.without_gradient - kept))
    return Layer(everything, working, ending)


def _operands(arch: Architecture, modules: Modules, cuts: Cuts) -> int:
    """What is there of queries, keys and values while attention runs.

    The caller's locals hold what rotary angles or norms were applied to (attention.py, qkv_output).
    """
    width, c = widths(arch), modules.compute
    query: int = ceil_div(width.query * c, cuts.tp)
    key: int = ceil_div(width.key * c, _parts(arch, cuts)["key_value_heads"])
    if arch.latent_attention is not None:
        value: int = ceil_div(width.value * c, cuts.tp)
        return 2 * (query + key) + value
    found: int = _on_rank(fused_product(arch, modules, cuts.tp), arch, cuts)
    found += copies_query(arch, cuts.tp) * query
    return found + ((arch.position_embedding == "rope") + arch.qk_norm) * (query + key)


def _on_rank(tensors: list[Saved], arch: Architecture, cuts: Cuts) -> int:
    parts = _parts(arch, cuts)
    found: int = sum(ceil_div(tensor.bytes_per_token, parts[tensor.cut_by]) for tensor in tensors)
    return found


def _parts(arch: Architecture, cuts: Cuts) -> dict[str, int]:
    """Into how many parts each kind of tensor is cut."""
    parts = {
        "tp": cuts.tp,
        "key_value_heads": min(cuts.tp, arch.num_key_value_heads),
        "sequence": cuts.sequence,
        "expert_tokens": ceil_div(cuts.tp, cuts.expert_tp),
        "whole": 1,
    }
    if arch.latent_attention is not None:
        parts["key_value_heads"] = cuts.tp
    return parts


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
    # Copies before and after they are sorted by rank, scattered over tp, sent over ep, and put back in order;
    # meanwhile the shared experts' output waits (moe_layer.py).
    shared = stream if experts.shared_expert_intermediate_size else 0
    ending = shared + 2 * gathered + own * (1 + (gathered > own) + (cuts.ep > 1))
    if modules.eight_bit_inputs:
        # As with a dense MLP: casts beside the second product's gradient, or the activation's.
        casts = gathered * cuts.gradient_copies // modules.compute
        activation = (branches(arch) + 1) * inner - inner // modules.compute
        working = stream + max(gathered + casts + inner, activation)
        if cuts.ep * cuts.expert_tp == 1:
            return working, shared + own + stream
        return max(working, stream + 2 * gathered), ending
    if cuts.ep * cuts.expert_tp == 1:
        # All experts are here: nothing is sorted or sent.
        return stream + max(own + inner, branches(arch) * inner), shared + own + stream
    return stream + max(2 * gathered, branches(arch) * inner), ending


def _without_gradient(
    arch: Architecture, moe: bool, modules: Modules, cuts: Cuts, stream: int, ending: int
) -> int:
    """What a forward that saves nothing needs at its fullest beside the layer's input."""
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
        gathered: int = ceil_div(rows, ceil_div(cuts.tp, cuts.expert_tp))
        return ending + gathered + stream
    inner: int = ceil_div(arch.intermediate_size * modules.compute, cuts.tp)
    # The residual stream and its norm, beside the fused activation or the second product.
    return 2 * stream + inner + max(branches(arch) * inner, ending)
