"""Collectives between tensor, context, expert and pipeline ranks, which every framework needs alike.

Ranks lie tp, cp, data, pp, inner to outer. Numbers may be arrays of plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardscope.memory.arithmetic import ceil_div, looked_up, where
from shardscope.memory.modules.attention import widths as attention_widths
from shardscope.memory.precision import FP32
from shardscope.memory.stages import layers_by_kind
from shardscope.timing.traffic import Beneath, Collective, Transfer

if TYPE_CHECKING:
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan
    from shardscope.timing.layers import LayerWork


def parallel_transfers(work: LayerWork, stage: Stage) -> list[Transfer]:
    """What one rank of ``stage`` sends in one step beside its training state."""
    found: list[Transfer] = []
    plan = work.plan
    if _any_above_one(plan.degrees.tp):
        found += _tensor(work, stage)
    if _any_above_one(plan.degrees.cp):
        found += _context(work, stage)
    if _any_above_one(plan.degrees.ep) and plan.architecture.mixture_of_experts is not None:
        found += _experts(work, stage)
    if _any_above_one(plan.degrees.pp):
        found += _sends(work)
    return found


def recomputed_share(plan: Plan) -> Any:
    """Layers that go forward twice, as a share of all: those that recompute whole."""
    return 1 / plan.recipe.recompute_interval if plan.recipe.recompute == "full" else 0


def _any_above_one(degree: Any) -> bool:
    return degree > 1 if isinstance(degree, int) else degree.max() > 1


def _stream_bytes(work: LayerWork) -> Any:
    """The residual stream of a micro-batch, whole, in the type in which it is sent."""
    return work.tokens * work.arch.hidden_size * work.modules.compute


def _tensor(work: LayerWork, stage: Stage) -> list[Transfer]:
    """Two reductions a layer forward and two backward (Shoeybi et al. 2019, figure 4).

    With the sequence split each is a reduce-scatter with an all-gather (Korthikanti et al. 2022, section
    4.2.2): the same bytes on a ring. Embedding and head reduce once each. Where each rank of tp has experts
    of its own, a layer of them has none around its MLP.
    """
    plan, overlap = work.plan, work.overlap
    pairs: Any = stage.is_first + stage.is_last * 1
    for moe, layers in layers_by_kind(work.arch, stage):
        pairs = pairs + layers * (where(work.expert_tp > 1, 2, 1) if moe else 2)
    tp, stream, times = plan.degrees.tp, _stream_bytes(work), plan.num_micro_batches * pairs
    again = times * (1 + recomputed_share(plan))

    def calls(collective: Collective, times: Any, beneath: Beneath, bare: Any) -> Transfer:
        return Transfer("tensor_parallel", collective, stream, tp, 1, times, 1.0, beneath, bare)

    if overlap.tensor_forward:
        # User buffers send in as many pieces as there are ranks.
        return [
            calls("all_reduce", again, "forward", 1 / tp),
            calls("all_reduce", times, "backward", 1 / tp),
        ]
    forward = calls("all_reduce", again, "nothing", 1.0)
    if not overlap.tensor_backward:
        return [forward, calls("all_reduce", times, "nothing", 1.0)]
    # Of a pair's two collectives backward can hide the one behind the column-parallel product, beneath the
    # gradient of its weights (megatron/core/tensor_parallel/layers.py); whole reductions are such ones.
    split, found = plan.layout.splits_sequence, [forward]
    if split is not False:
        in_halves = where(split, times, 0)
        found.append(calls("all_gather", in_halves, "nothing", 1.0))
        found.append(calls("reduce_scatter", in_halves, "backward", 0.0))
        if overlap.gathers_input_again:
            found.append(calls("all_gather", in_halves, "backward", 0.0))
    if split is not True:
        found.append(calls("all_reduce", where(split, 0, times), "backward", 0.0))
    return found


def _context(work: LayerWork, stage: Stage) -> list[Transfer]:
    """Keys and values pass to all ranks forward, and with their gradients backward (Liu et al. 2023).

    On a ring attention works on what is there while the next part travels; gathered first, it works on its
    own part meanwhile. Gradients go round either way, each part's beneath the next one's attention.
    """
    plan = work.plan
    tp, cp = plan.degrees.tp, plan.degrees.cp
    width = attention_widths(work.arch)
    heads = work.arch.num_attention_heads if work.arch.latent_attention else work.arch.num_key_value_heads
    cut = looked_up(partial(min, heads), tp)
    keys = work.tokens * cp * (width.key + width.value) * work.modules.compute / cut
    layers = plan.num_micro_batches * stage.num_layers
    # Of attention all but the last of cp parts can cover the next one's way; or only the first of them.
    bare = 0.0 if work.overlap.context == "ring" else 1 - 1 / cp
    forward = Transfer(
        "context_parallel",
        "all_gather",
        keys,
        cp,
        tp,
        layers * (1 + recomputed_share(plan)),
        num_messages=1,
        beneath="attention",
        bare=bare,
    )
    if not work.overlap.gradients_home:
        return [forward, forward._replace(times=2 * layers)]
    gradients = keys / cp * (FP32 / work.modules.compute)
    hop = Transfer("context_parallel", "send", gradients, cp, tp, layers)
    covered = hop._replace(times=layers * (cp - 1), beneath="attention", bare=0.0)
    return [forward, forward._replace(times=layers), covered, hop]


def _experts(work: LayerWork, stage: Stage) -> list[Transfer]:
    """Tokens go out and come back, forward and backward (Lepikhin et al. 2020); the fullest rank's."""
    plan, degrees = work.plan, work.plan.degrees
    routed = work.routed_tokens() * work.arch.hidden_size * work.modules.compute
    # Experts are spread over tp first where each of its ranks has its own.
    stride = where(work.expert_tp < degrees.tp, 1, degrees.tp)
    times = plan.num_micro_batches * stage.num_moe_layers * 2 * (2 + recomputed_share(plan))
    return [Transfer("expert_parallel", "all_to_all", routed, degrees.ep, stride, times)]


def _sends(work: LayerWork) -> list[Transfer]:
    """Hidden states to the next stage, gradients to the one before, of every micro-batch and chunk."""
    plan, degrees = work.plan, work.plan.degrees
    each = ceil_div(_stream_bytes(work), work.cut)
    inner = plan.world_size // degrees.pp
    times = plan.num_micro_batches * degrees.vpp
    sends = work.overlap.sends
    waited = Transfer("pipeline_transfers", "send", each, degrees.pp, inner, where(sends, 0, 2 * times))
    if sends is False:
        return [waited]
    covered = waited._replace(times=where(sends, times, 0), beneath="forward", bare=0.0)
    return [waited, covered, covered._replace(beneath="backward")]
