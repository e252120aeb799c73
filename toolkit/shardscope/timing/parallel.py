"""Collectives between tensor, context, expert and pipeline ranks, which every framework needs alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.precision import widths
from shardscope.timing.traffic import Transfer

if TYPE_CHECKING:
    from shardscope.plan import Plan


def parallel_transfers(plan: Plan) -> list[Transfer]:
    """What one rank sends in one step beside its training state. Ranks lie tp, cp, data, pp, inner to outer.

    Tensor parallel: two all-reduces a layer forward and two backward (Shoeybi et al. 2019, figure 4), or an
    all-gather and a reduce-scatter in place of each with the sequence split (Korthikanti et al. 2022,
    section 4.2.2: the same bytes). Context parallel: keys and values pass around forward, and with their
    gradients backward (Liu et al. 2023). Experts: tokens go out and come back, forward and backward
    (Lepikhin et al. 2020). Full recomputation repeats the forward's.
    """
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    micro_batches = plan.num_micro_batches
    layers = max(plan.stage_layers)
    width = widths[recipe.precision].compute
    tokens = recipe.micro_batch_size * recipe.seq_len / degrees.cp
    stream = tokens * arch.hidden_size * width
    forwards = 1 + (1 / recipe.recompute_interval if recipe.recompute == "full" else 0)
    found = []
    if degrees.tp > 1:
        times = micro_batches * layers * 2 * (forwards + 1)
        found.append(Transfer("all_reduce", stream, degrees.tp, 1, times, part="tensor_parallel"))
    if degrees.cp > 1:
        latent = arch.latent_attention
        heads = arch.num_attention_heads if latent else arch.num_key_value_heads
        each = latent.qk_head_dim + latent.v_head_dim if latent else 2 * arch.head_dim
        keys = tokens * degrees.cp * heads * each * width / min(degrees.tp, heads)
        times = micro_batches * layers * (forwards + 2)
        found.append(Transfer("all_gather", keys, degrees.cp, degrees.tp, times, part="context_parallel"))
    moe = arch.mixture_of_experts
    if degrees.ep > 1 and moe is not None:
        share = arch.num_moe_layers / arch.num_hidden_layers
        routed = stream * moe.num_experts_per_tok / (degrees.tp if plan.layout.splits_sequence else 1)
        times = micro_batches * layers * share * 2 * (forwards + 1)
        stride = degrees.tp * degrees.cp
        found.append(Transfer("all_to_all", routed, degrees.ep, stride, times, part="expert_parallel"))
    if degrees.pp > 1:
        inner = plan.world_size // degrees.pp
        cut = degrees.tp if plan.layout.splits_sequence else 1
        # Point to point, twice a micro-batch and chunk: written as the half of a two-rank gather that it is.
        times = 2 * micro_batches * degrees.vpp
        found.append(Transfer("all_gather", 2 * stream / cut, 2, inner, times, part="pipeline_transfers"))
    return found
