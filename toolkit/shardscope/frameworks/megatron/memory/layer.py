"""Memory of one megatron-core layer on one rank: tensors saved for backward, and working memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div
from shardscope.frameworks.megatron.memory.eager_attention import compute_eager_attention
from shardscope.memory.activations.modules.attention import get_attention_widths
from shardscope.memory.activations.modules.megatron import (
    compute_latent_angles,
    copies_query,
    count_branches,
    list_core_attention,
    list_fused_projection,
    list_megatron_selective,
    list_megatron_tensors,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor


class ShardCounts(NamedTuple):
    """Number of shards of each tensor, and the batch that one layer works on."""

    tp: int
    sequence: int
    """tp with sequence parallelism, else 1."""
    expert_tp: int
    ep: int
    plain_rows: int = 0
    """Micro-batch size x heads of a rank where eager attention uses torch's softmax in fp32, else 0
    (:func:`~shardscope.frameworks.megatron.memory.eager_attention.takes_plain_softmax`)."""
    micro_batch: int = 1
    """Sequences of a micro-batch, which share one set of rotary angles."""
    gradient_copies: int = 0
    """8-bit copies of the output gradient in a matmul's backward (``fp8.py``); 0 without fp8."""


class Layer(NamedTuple):
    """Bytes per token of one layer on one rank."""

    saved: int
    """Tensors kept until this layer's backward, after recomputation."""
    working: int
    """Peak working memory of this layer's backward, in addition to ``saved``."""
    ending: int
    """Working memory at the end of this layer's forward, in addition to ``saved``."""
    retained: int = 0
    """Memory that stays after this layer's backward: the gradient of a recomputed layer's input. The token
    dispatcher keeps the routing probabilities, and so the graph that ends in that input
    (token_dispatcher.py, ``self.probs``)."""


@lru_cache(maxsize=4096)
def compute_layer(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, shards: ShardCounts
) -> Layer:
    """Compute the saved and working bytes per token of one layer."""
    tensors = list_megatron_tensors(arch, moe, modules, shards.tp)
    angles = ceil_div(compute_latent_angles(arch, modules), shards.micro_batch)
    all_saved = _sum_on_rank(tensors, arch, shards) + angles
    stream = ceil_div(arch.hidden_size * modules.compute, shards.sequence)
    if moe:
        working, ending = _compute_expert_working(arch, modules, shards, stream)
    else:
        # The MLP's output and its sum with the residual stream. With sequence parallelism: the second
        # matmul's output for all tokens, and its reduce-scattered shard.
        ending = stream + (arch.hidden_size * modules.compute if shards.sequence > 1 else stream)
        working = _compute_dense_working(arch, modules, shards, stream)
    if modules.attention == "eager":
        return _add_eager_attention(arch, moe, modules, recompute, shards, Layer(all_saved, working, ending))
    if recompute == "full":
        # Backward runs the forward again: the input is the saved tensor, the output is new.
        recomputed = all_saved + max(working, ending - stream)
        no_grad_peak = _compute_without_gradient(arch, moe, modules, shards, stream, ending)
        return Layer(stream, recomputed, no_grad_peak, moe * stream)
    if recompute == "selective":
        selective_saved = (
            _sum_on_rank(list_megatron_selective(arch, moe, modules, shards.tp), arch, shards) + angles
        )
        return Layer(selective_saved, max(working, all_saved - selective_saved), ending)
    return Layer(all_saved, working, ending)


def _add_eager_attention(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, shards: ShardCounts, rest: Layer
) -> Layer:
    """Return the layer with eager attention, whose peak may exceed the MLP's.

    ``rest`` is the same layer without the core attention's working memory.
    """
    tensors, width, c = (
        list_megatron_tensors(arch, moe, modules, shards.tp),
        get_attention_widths(arch),
        modules.compute,
    )
    core = compute_eager_attention(arch, modules, shards.tp, shards.plain_rows)
    stream = ceil_div(arch.hidden_size * c, shards.sequence)
    norms: int = _sum_on_rank([tensor for tensor in tensors if tensor.operator == "norms"], arch, shards)
    mlp = _sum_on_rank([tensor for tensor in tensors if tensor.operator in ("mlp", "experts")], arch, shards)
    output = ceil_div(width.output * c, shards.tp)
    # While attention runs, the tensors of later operators are not there: not yet in forward, already freed in
    # backward.
    later_saved = mlp + norms // 2 + output
    angles = ceil_div(compute_latent_angles(arch, modules), shards.micro_batch)
    earlier_saved = norms // 2 + angles + _count_attention_inputs(arch, modules, shards)
    all_saved = (
        rest.saved - _sum_on_rank(list_core_attention(arch, modules, shards.tp), arch, shards) + core.saved
    )
    working = max(rest.working, core.gradients + stream - later_saved)
    ending = max(rest.ending, earlier_saved + core.forward - all_saved)
    if recompute == "full":
        recomputed = all_saved + max(working, ending - stream)
        no_grad_peak = _compute_without_gradient(arch, moe, modules, shards, stream, rest.ending)
        return Layer(
            stream,
            recomputed,
            max(no_grad_peak, earlier_saved + core.without_gradient - stream),
            moe * stream,
        )
    if recompute == "selective":
        selective_saved = (
            _sum_on_rank(list_megatron_selective(arch, moe, modules, shards.tp), arch, shards) + angles
        )
        recomputed = core.recomputed + output + stream - later_saved
        return Layer(
            selective_saved,
            max(rest.working, recomputed),
            max(rest.ending, earlier_saved + core.without_gradient - selective_saved),
        )
    return Layer(all_saved, working, ending)


def _count_attention_inputs(arch: Architecture, modules: Modules, shards: ShardCounts) -> int:
    """Return the bytes per token of queries, keys and values that are alive while attention runs.

    The caller's local variables also keep the tensors from before rotary embedding and norms (attention.py,
    qkv_output).
    """
    width, c = get_attention_widths(arch), modules.compute
    query: int = ceil_div(width.query * c, shards.tp)
    key: int = ceil_div(width.key * c, _count_shards(arch, shards)["key_value_heads"])
    if arch.latent_attention is not None:
        value: int = ceil_div(width.value * c, shards.tp)
        return 2 * (query + key) + value
    total: int = _sum_on_rank(list_fused_projection(arch, modules, shards.tp), arch, shards)
    total += copies_query(arch, shards.tp) * query
    return total + ((arch.position_embedding == "rope") + arch.qk_norm) * (query + key)


def _sum_on_rank(tensors: list[SavedTensor], arch: Architecture, shards: ShardCounts) -> int:
    counts = _count_shards(arch, shards)
    total: int = sum(ceil_div(tensor.bytes_per_token, counts[tensor.cut_by]) for tensor in tensors)
    return total


def _count_shards(arch: Architecture, shards: ShardCounts) -> dict[str, int]:
    """Return the number of shards of each kind of tensor."""
    counts = {
        "tp": shards.tp,
        "key_value_heads": min(shards.tp, arch.num_key_value_heads),
        "sequence": shards.sequence,
        "expert_tokens": ceil_div(shards.tp, shards.expert_tp),
        "whole": 1,
    }
    if arch.latent_attention is not None:
        counts["key_value_heads"] = shards.tp
    return counts


def _compute_dense_working(arch: Architecture, modules: Modules, shards: ShardCounts, stream: int) -> int:
    """Return the peak bytes per token of the MLP's backward.

    The gradient of the second matmul's input comes first, then those of the gate and up branches. Each is
    freed once it has been used.
    """
    inner: int = ceil_div(arch.intermediate_size * modules.compute, shards.tp)
    # With sequence parallelism the second matmul's backward all-gathers the residual stream's gradient.
    gathered = arch.hidden_size * modules.compute if shards.sequence > 1 else 0
    masked = stream if modules.dropout else 0
    if modules.eight_bit_inputs:
        numbers: int = ceil_div(arch.intermediate_size, shards.tp)
        # Three candidates (linear.py, backward): 8-bit casts of the output gradient with the second matmul's
        # input gradient; the activation function's backward, after its 8-bit output was freed; 8-bit casts of
        # its gradient with the first matmul's input gradient.
        second = shards.gradient_copies * arch.hidden_size + inner
        activation = (count_branches(arch) + 1) * inner - numbers
        first = (
            shards.gradient_copies * count_branches(arch) - 1
        ) * numbers + arch.hidden_size * modules.compute
        return stream + masked + max(second, activation, first)
    return stream + masked + max(gathered + inner, count_branches(arch) * inner)


def _compute_expert_working(
    arch: Architecture, modules: Modules, shards: ShardCounts, stream: int
) -> tuple[int, int]:
    """Return the working bytes per token of the experts' backward, and of the end of their forward.

    Tokens are copied several times on their way back from the experts. The copies were counted in rehearsals.
    """
    experts = arch.mixture_of_experts
    assert experts is not None
    rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
    local_rows: int = ceil_div(rows, shards.sequence)
    gathered: int = ceil_div(rows, ceil_div(shards.tp, shards.expert_tp))
    inner = rows * experts.moe_intermediate_size // arch.hidden_size // shards.tp
    # Tokens are sorted by rank, reduce-scattered over tp, sent over ep and unpermuted: each step has an input
    # and an output. The shared experts' output is alive meanwhile (moe_layer.py).
    shared = stream if experts.shared_expert_intermediate_size else 0
    ending = shared + 2 * gathered + local_rows * (1 + (gathered > local_rows) + (shards.ep > 1))
    if modules.eight_bit_inputs:
        # As in a dense MLP: 8-bit casts with the second matmul's input gradient, or the activation function's
        # backward.
        casts = gathered * shards.gradient_copies // modules.compute
        activation = (count_branches(arch) + 1) * inner - inner // modules.compute
        working = stream + max(gathered + casts + inner, activation)
        if shards.ep * shards.expert_tp == 1:
            return working, shared + local_rows + stream
        return max(working, stream + 2 * gathered), ending
    if shards.ep * shards.expert_tp == 1:
        # This rank has all experts: no tokens are sorted or sent.
        return stream + max(local_rows + inner, count_branches(arch) * inner), shared + local_rows + stream
    return stream + max(2 * gathered, count_branches(arch) * inner), ending


def _compute_without_gradient(
    arch: Architecture, moe: bool, modules: Modules, shards: ShardCounts, stream: int, ending: int
) -> int:
    """Return the peak bytes per token of a forward under ``no_grad``, without the layer's input."""
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = round(experts.num_experts_per_tok * modules.expert_load * arch.hidden_size * modules.compute)
        gathered: int = ceil_div(rows, ceil_div(shards.tp, shards.expert_tp))
        return ending + gathered + stream
    inner: int = ceil_div(arch.intermediate_size * modules.compute, shards.tp)
    # The residual stream and its norm, with the fused activation or the second matmul.
    return 2 * stream + inner + max(count_branches(arch) * inner, ending)
