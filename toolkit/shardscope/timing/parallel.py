"""Tensor-, context-, expert- and pipeline-parallel collectives, common to all frameworks.

Rank order is tp, cp, data, pp, inner to outer. Numbers may be arrays of plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, largest_element, map_distinct, maximum, where
from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import get_attention_widths as attention_widths
from shardscope.memory.state.stages import count_layers_by_kind
from shardscope.timing.collective_sums import CollectiveSums, sum_collectives
from shardscope.timing.traffic import Collective, OverlappedWith, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.layers import LayerWork


class Repeated(NamedTuple):
    """Collectives of every stage, repeated per layer, pair or stage."""

    number: Callable[[LayerWork, Stage], float]
    """Returns the number of repetitions on a stage."""
    each: CollectiveSums
    """The collectives of one repetition, in one step."""


def list_parallel_collectives(work: LayerWork) -> list[Repeated]:
    """Return one rank's collectives per step besides its training state: the same for all stages."""
    degrees, call = work.plan.degrees, work.call_seconds
    collectives: list[Repeated] = []
    if _any_above_one(degrees.tp):
        hidden = work.arch.hidden_size
        collectives.append(
            Repeated(_count_reduction_pairs, sum_collectives(_list_tensor_parallel(work, hidden), call))
        )
        if _gathers_latents(work):
            width = _count_gathered_latents(work)
            collectives.append(
                Repeated(_count_layers, sum_collectives(_list_tensor_parallel(work, width), call))
            )
        elif _shares_heads(work):
            collectives.append(Repeated(_count_layers, sum_collectives(_list_shared_heads(work), call)))
    if _any_above_one(degrees.cp):
        collectives.append(Repeated(_count_layers, sum_collectives(_list_context_parallel(work), call)))
    if _any_above_one(degrees.ep) and work.arch.mixture_of_experts is not None:
        collectives.append(Repeated(_count_moe_layers, sum_collectives(_list_expert_parallel(work), call)))
    if _any_above_one(work.expert_tp) and _has_token_dispatcher(work):
        collectives.append(
            Repeated(_count_moe_layers, sum_collectives(_list_expert_tensor_parallel(work), call))
        )
    if _any_above_one(degrees.pp):
        collectives.append(Repeated(_count_one, sum_collectives(_list_pipeline_sends(work), call)))
    return collectives


def _has_token_dispatcher(work: LayerWork) -> bool:
    """Return whether Megatron-core's ``MoEAlltoAllTokenDispatcher`` routes tokens.

    Each tensor-parallel rank dispatches its own part of the split sequence, and routed experts have
    tensor-parallel collectives of their own (megatron/core/transformer/moe/token_dispatcher.py).
    """
    return work.arch.mixture_of_experts is not None and work.modules.kernels == "megatron"


def _gathers_latents(work: LayerWork) -> bool:
    """Return whether Megatron-core's latent attention gathers its latents, not the residual stream.

    Its down projections are replicated and work on the split sequence: the up projections all-gather their
    outputs (megatron/core/transformer/multi_latent_attention.py, ``linear_q_down_proj``: "duplicated").
    """
    return work.arch.latent_attention is not None and work.modules.kernels == "megatron"


def _count_gathered_latents(work: LayerWork) -> int:
    """Return the width of the inputs of latent attention's column-parallel projections."""
    latent = work.arch.latent_attention
    assert latent is not None
    # Without a down projection of the queries, their projection reads the residual stream.
    return (latent.q_lora_rank or work.arch.hidden_size) + latent.kv_lora_rank + latent.qk_rope_head_dim


def _count_reduction_pairs(work: LayerWork, stage: Stage) -> float:
    """Return the number of pairs of reductions: two per layer, one for the embedding and one for the head.

    With Megatron-core's dispatcher, an expert layer has the pair around its MLP for shared experts only: see
    :func:`_list_expert_tensor_parallel`. Its latent attention has a pair of its own.
    """
    experts = work.arch.mixture_of_experts
    has_pair_around_experts = (
        not _has_token_dispatcher(work) or experts is None or experts.shared_expert_intermediate_size > 0
    )
    pairs: float = stage.is_first + stage.is_last * 1
    around_attention = 0 if _gathers_latents(work) else 1
    for moe, layers in count_layers_by_kind(work.arch, stage):
        around_mlp = 1 if has_pair_around_experts or not moe else 0
        pairs = pairs + layers * (around_attention + around_mlp)
    return pairs


def _count_layers(_work: LayerWork, stage: Stage) -> float:
    return stage.num_layers


def _count_moe_layers(_work: LayerWork, stage: Stage) -> float:
    return stage.num_moe_layers


def _count_one(_work: LayerWork, _stage: Stage) -> float:
    return 1


def compute_recomputed_share(plan: Plan) -> float:
    """Return the mean share of layers whose forward runs twice (full recomputation).

    Of a stage's layers it is rounded up (``count_recomputed_by_kind``), which is left out here.
    """
    return 1 / plan.recipe.recompute_interval if plan.recipe.recompute == "full" else 0


def _any_above_one(degree: int) -> bool:
    return largest_element(degree) > 1


def _count_stream_bytes(work: LayerWork) -> int:
    """Return the bytes of a micro-batch's residual stream, unsharded, in the dtype in which it is sent."""
    return work.tokens * work.arch.hidden_size * work.modules.compute


def _list_tensor_parallel(work: LayerWork, column_width: int) -> list[Transfer]:
    """Return one reduction forward and one backward (Shoeybi et al. 2019, figure 4).

    With a split sequence, each is an all-gather and a reduce-scatter (Korthikanti et al. 2022, section
    4.2.2). ``column_width``: numbers per token in the input of the column-parallel matmul, which is the
    residual stream but for latent attention.
    """
    plan, overlap = work.plan, work.overlap
    tp, times, split = plan.degrees.tp, plan.num_micro_batches, plan.layout.splits_sequence
    # Recomputation runs the layer's forward again, its reductions included.
    recomputation = times * (1 + compute_recomputed_share(plan))
    stream = _count_stream_bytes(work)
    column = work.tokens * column_width * work.modules.compute
    collectives: list[Transfer] = []

    def add(
        collective: Collective,
        num_bytes: float,
        times: float,
        overlaps_with: OverlappedWith = "nothing",
        exposed_share: float = 1.0,
    ) -> None:
        collectives.append(
            Transfer(
                "tensor_parallel", collective, num_bytes, tp, 1, times, 1.0, overlaps_with, exposed_share
            )
        )

    # User buffers split a transfer into as many pieces as there are ranks.
    has_pieces = overlap.tensor_forward
    forward: OverlappedWith = "forward" if has_pieces else "nothing"
    backward: OverlappedWith = "backward" if has_pieces else "nothing"
    exposed = 1 / tp if has_pieces else 1.0
    # Otherwise backward can overlap the second of a pair's two collectives, after the column-parallel matmul,
    # with the gradient of its weights (megatron/core/tensor_parallel/layers.py); full all-reduces are such
    # ones.
    overlaps_second = overlap.tensor_backward and not has_pieces
    second: OverlappedWith = "backward" if overlaps_second else backward
    exposed_of_second = 0.0 if overlaps_second else exposed
    if split is not False:
        in_forward, in_backward = where(split, recomputation, 0), where(split, times, 0)
        add("all_gather", column, in_forward, forward, exposed)
        add("reduce_scatter", stream, in_forward, forward, exposed)
        add("all_gather", stream, in_backward, backward, exposed)
        add("reduce_scatter", column, in_backward, second, exposed_of_second)
        if overlaps_second and overlap.gathers_input_again:
            add("all_gather", column, in_backward, second, exposed_of_second)
    if split is not True:
        add("all_reduce", stream, where(split, 0, recomputation), forward, exposed)
        add("all_reduce", column, where(split, 0, times), second, exposed_of_second)
    return collectives


def _shares_heads(work: LayerWork) -> bool:
    """Return whether tensor-parallel ranks of Megatron-core share a key/value head."""
    heads = work.arch.num_key_value_heads
    return work.modules.kernels == "megatron" and largest_element(work.plan.degrees.tp) > heads


def _list_shared_heads(work: LayerWork) -> list[Transfer]:
    """Return the all-gather of queries, keys and values, and the reduce-scatter of their gradients.

    With more tensor-parallel ranks than key/value heads, Megatron-core's fused projection is sharded across
    heads: each rank all-gathers its whole output to take its own heads from it, and backward reduce-scatters
    the gradient (megatron/core/transformer/attention.py, ``get_query_key_value_tensors``). Nothing overlaps.
    """
    plan, width = work.plan, attention_widths(work.arch)
    tp, times = plan.degrees.tp, plan.num_micro_batches
    shares = tp > work.arch.num_key_value_heads
    num_bytes = work.tokens * (width.query + width.key + width.value) * work.modules.compute
    in_forward = shares * times * (1 + compute_recomputed_share(plan))
    gather = Transfer("tensor_parallel", "all_gather", num_bytes, tp, 1, in_forward)
    return [gather, gather._replace(collective="reduce_scatter", times=shares * times)]


def _list_context_parallel(work: LayerWork) -> list[Transfer]:
    """Return the exchange of a layer's keys and values, and their gradients in backward (Liu et al. 2023).

    In a ring, attention works on the current part while the next is sent; with an all-gather, it works on the
    local part meanwhile. Gradients go around the ring in both cases, each part's overlapped with the next
    part's attention.
    """
    plan = work.plan
    tp, cp = plan.degrees.tp, plan.degrees.cp
    width = attention_widths(work.arch)
    # Latent attention exchanges expanded keys and values, one for each query head.
    heads = work.arch.num_attention_heads if work.arch.latent_attention else work.arch.num_key_value_heads
    # Further tensor-parallel ranks hold the same heads again.
    cut = map_distinct(partial(min, heads), tp)
    keys = work.tokens * cp * (width.key + width.value) * work.modules.compute / cut
    times = plan.num_micro_batches
    # In a ring, attention on all but the last of cp parts overlaps the next part's transfer; else only the
    # first.
    exposed_share = 0.0 if work.overlap.context == "ring" else 1 - 1 / cp
    repeated = 1 if work.repeats_core_attention else compute_recomputed_share(plan)
    forward = Transfer(
        "context_parallel",
        "all_gather",
        keys,
        cp,
        tp,
        times * (1 + repeated),
        num_messages=1,
        overlaps_with="attention",
        exposed_share=exposed_share,
    )
    # Backward exchanges keys and values again, and returns their gradients.
    if not work.overlap.sends_gradients_home:
        return [forward, forward._replace(times=2 * times)]
    # In fp32, around the ring with attention on the next part; the last hop, to their own rank, is exposed.
    gradients = keys / cp * (FP32 / work.modules.compute)
    hop = Transfer("context_parallel", "send", gradients, cp, tp, times)
    covered = hop._replace(times=times * (cp - 1), overlaps_with="attention", exposed_share=0.0)
    return [forward, forward._replace(times=times), covered, hop]


def _list_expert_parallel(work: LayerWork) -> list[Transfer]:
    """Return the all-to-alls of the most loaded rank's tokens, forward and backward.

    Lepikhin et al. 2020.
    """
    plan, degrees = work.plan, work.plan.degrees
    sent = work.count_sent_tokens() * work.arch.hidden_size * work.modules.compute
    # Tokens go to their experts and back: in forward, in backward, and in a recomputed forward.
    times = plan.num_micro_batches * 2 * (2 + compute_recomputed_share(plan))
    # The ranks that share an expert are neighbours: their number is the stride.
    return [Transfer("expert_parallel", "all_to_all", sent, degrees.ep, work.expert_tp, times)]


def _list_expert_tensor_parallel(work: LayerWork) -> list[Transfer]:
    """Return the collectives of ranks that share an expert, around its matmuls.

    Each rank receives tokens of its part of the sequence: they all-gather these before the matmuls and
    reduce-scatter the results, and the other way round in backward (``MoEAlltoAllTokenDispatcher``,
    ``dispatch_postprocess`` and ``combine_preprocess``). Nothing overlaps.
    """
    routed = work.count_routed_tokens() * work.arch.hidden_size * work.modules.compute
    times = work.plan.num_micro_batches * (2 + compute_recomputed_share(work.plan))
    gather = Transfer("tensor_parallel", "all_gather", routed, work.expert_tp, 1, times)
    return [gather, gather._replace(collective="reduce_scatter")]


def list_tied_reductions(plan: Plan, stage: Stage, num_bytes: float) -> list[Transfer]:
    """Return the all-reduce of a tied embedding's gradient, once a step; empty if there is none.

    The head on the last of several stages is a copy of the embedding on the first. ``num_bytes`` is the size
    of its gradient on one rank. Nothing overlaps: it follows the last backward
    (megatron/core/distributed/finalize_model_grads.py, ``_allreduce_word_embedding_grads``;
    deepspeed/runtime/pipe/engine.py, ``_exec_reduce_tied_grads``; FSDP2's ``engine/pipeline.py``).
    """
    pp = plan.degrees.pp
    if not plan.architecture.tie_word_embeddings or plan.recipe.has_adapters or not _any_above_one(pp):
        return []
    times = (pp > 1) * (stage.is_first + stage.is_last * 1)
    # These groups do not fill the cluster: the ranks of the stages between have none. On several nodes the
    # distance is at least a node's size. An array may have plans of one stage, without a distance.
    distance = 0 if plan.cluster.num_nodes == 1 else maximum(1, plan.world_size // pp * (pp - 1))
    return [Transfer("gradients", "all_reduce", num_bytes, 2, distance, times)]


def _list_pipeline_sends(work: LayerWork) -> list[Transfer]:
    """Return sends of hidden states to the next stage and of gradients back, per micro-batch and chunk."""
    plan, degrees = work.plan, work.plan.degrees
    # With a split sequence, each tensor-parallel rank sends its own part.
    message_bytes = ceil_div(_count_stream_bytes(work), work.cut)
    inner = plan.world_size // degrees.pp
    times = plan.num_micro_batches * degrees.vpp
    sends = work.overlap.sends
    waited = Transfer(
        "pipeline_transfers", "send", message_bytes, degrees.pp, inner, where(sends, 0, 2 * times)
    )
    if sends is False:
        return [waited]
    covered = waited._replace(
        times=where(sends, times, 0), overlaps_with="forward", exposed_share=work.overlap.exposed_sends
    )
    return [waited, covered, covered._replace(overlaps_with="backward")]
