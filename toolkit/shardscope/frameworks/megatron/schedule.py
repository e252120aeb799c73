"""Megatron's schedules: the layers of a stage's model chunks, and how many micro-batches wait in each."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.frameworks.megatron.layout import counted_ends
from shardscope.memory.arithmetic import looked_up, smallest

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.plan import Plan


class InFlight(NamedTuple):
    """What a stage holds when its first backward begins."""

    first: int
    """Micro-batches of its first model chunk."""
    chunks: int
    """Micro-batches of all its model chunks together."""
    dense: int
    """Layers without routed experts, once for each micro-batch that waits in one."""
    moe: int
    """The same of layers with routed experts."""
    last_dense: int
    """Layers without routed experts in the last model chunk, which goes backward first."""
    last_moe: int
    """Layers with routed experts in it."""


def in_flight(plan: Plan, number: Any) -> InFlight:
    """What stage ``number`` holds; arrays of plans give arrays."""
    arch, degrees = plan.architecture, plan.degrees
    # No schedule holds more micro-batches of a chunk than that.
    micro_batches = smallest(plan.num_micro_batches, 2 * degrees.pp)
    found: InFlight = looked_up(
        lambda *numbers: _in_flight(arch, *numbers), degrees.pp, degrees.vpp, number, micro_batches
    )
    return found


@lru_cache(maxsize=4096)
def _in_flight(arch: Architecture, pp: int, vpp: int, number: int, micro_batches: int) -> InFlight:
    waiting, layers = _chunks_in_flight(pp, vpp, number, micro_batches), chunk_layers(arch, pp, vpp, number)
    dense = sum(times * each for times, (each, _) in zip(waiting, layers, strict=True))
    moe = sum(times * each for times, (_, each) in zip(waiting, layers, strict=True))
    return InFlight(waiting[0], sum(waiting), dense, moe, *layers[-1])


@lru_cache(maxsize=4096)
def chunk_layers(arch: Architecture, pp: int, vpp: int, number: int) -> tuple[tuple[int, int], ...]:
    """(dense layers, layers with routed experts) of each model chunk of a stage, first chunk first.

    Chunk c of stage s is the (c x pp + s)-th part of the model (transformer_layer.py,
    get_transformer_layer_offset).
    """
    num_chunks = pp * vpp
    if pp == 1:
        return ((arch.num_hidden_layers - arch.num_moe_layers, arch.num_moe_layers),)
    embedding, loss = counted_ends(arch.num_hidden_layers, pp, vpp)
    each = (arch.num_hidden_layers + embedding + loss) // num_chunks
    found = []
    for chunk in range(vpp):
        place = chunk * pp + number
        start = place * each - (embedding if place else 0)
        stop = (place + 1) * each - embedding - (loss if place == num_chunks - 1 else 0)
        moe = sum(arch.is_moe_layer(index) for index in range(start, stop)) if arch.num_moe_layers else 0
        found.append((stop - start - moe, moe))
    return tuple(found)


def _chunks_in_flight(pp: int, vpp: int, number: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of each model chunk that a stage holds when its first backward begins.

    1F1B warms up with pp - 1 - stage of them. Interleaving takes 2 (pp - 1 - stage) + (vpp - 1) pp, pp of one
    chunk before the next chunk's (schedules.py, get_pp_rank_microbatches and get_schedule_table).
    """
    if vpp == 1:
        return (min(pp - number, micro_batches),)
    held = min(2 * (pp - number - 1) + (vpp - 1) * pp + 1, micro_batches * vpp)
    rounds, rest = divmod(held, pp * vpp)
    return tuple(rounds * pp + min(pp, max(0, rest - chunk * pp)) for chunk in range(vpp))
