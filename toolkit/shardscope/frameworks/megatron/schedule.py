"""Megatron's schedules: the layers of a stage's model chunks, and what waits in them when it is fullest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.frameworks.megatron.layout import counted_ends
from shardscope.memory.arithmetic import looked_up, smallest

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.frameworks.megatron.layer import Layer
    from shardscope.plan import Plan


class Fullest(NamedTuple):
    """What a stage holds where each moment of a step is fullest: bytes for one token, and counts."""

    forward: int
    """At the end of a model chunk's forward."""
    head: int
    """At the end of the last chunk's, of what is saved alone."""
    backward: int
    """While backward begins in a chunk."""
    last: int
    """When the first chunk has gone backward: the others' micro-batches."""
    dense: int
    """Layers without routed experts at ``backward``, once for each micro-batch that waits in one."""
    moe: int
    """The same of layers with routed experts."""
    first: int
    """Micro-batches in the first chunk when the first backward begins."""
    chunks: int
    """Micro-batches in all chunks then."""


def fullest(plan: Plan, number: Any, dense: Layer, moe: Layer) -> Fullest:
    """What stage ``number`` holds, of layers of these bytes; arrays of plans give arrays."""
    arch, degrees = plan.architecture, plan.degrees
    # No schedule holds more micro-batches of a chunk than that.
    micro_batches = smallest(plan.num_micro_batches, 2 * degrees.pp)
    found: Fullest = looked_up(
        lambda *numbers: _fullest(arch, *numbers),
        *(degrees.pp, degrees.vpp, number, micro_batches),
        *dense,
        *moe,
    )
    return found


@lru_cache(maxsize=4096)
def _fullest(
    arch: Architecture, pp: int, vpp: int, number: int, micro_batches: int, *layer_bytes: int
) -> Fullest:
    half = len(layer_bytes) // 2
    dense, moe = layer_bytes[:half], layer_bytes[half:]
    layers = chunk_layers(arch, pp, vpp, number)
    saved = [a * dense[0] + b * moe[0] for a, b in layers]
    # Layers with experts come last: they go backward first, and are gone when the others do.
    gone = 0 if moe[3] else moe[0]
    working = [
        max((b > 0) * (moe[1] + (b - 1) * moe[3]), (a > 0) * (dense[1] - b * (gone - moe[3])))
        for a, b in layers
    ]
    ending = [moe[2] if b else dense[2] * (a > 0) for a, b in layers]
    held = [0] * vpp
    waiting = forward = head = backward = last = first = chunks = 0
    fullest_held = tuple(held)
    for is_forward, chunk in _steps(pp, vpp, number, micro_batches):
        if is_forward:
            held[chunk] += 1
            waiting += saved[chunk]
            forward = max(forward, waiting + ending[chunk])
            if chunk == vpp - 1:
                head = max(head, waiting)
            continue
        if not chunks:
            first, chunks = held[0], sum(held)
        if waiting + working[chunk] > backward:
            backward, fullest_held = waiting + working[chunk], tuple(held)
        held[chunk] -= 1
        waiting -= saved[chunk]
        if chunk == 0:
            last = max(last, waiting + layers[chunk][1] * 2 * moe[3])
    counts = [sum(n * each[kind] for n, each in zip(fullest_held, layers, strict=True)) for kind in (0, 1)]
    return Fullest(forward, head, backward, last, counts[0], counts[1], first, chunks)


def _steps(pp: int, vpp: int, number: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """Forward or backward, and the chunk that goes it, in the order of the schedule.

    1F1B warms up with pp - 1 - stage micro-batches. Interleaving takes 2 (pp - 1 - stage) + (vpp - 1) pp, pp
    of one chunk before the next chunk's, and the last chunk first backward (schedules.py,
    get_pp_rank_microbatches and get_schedule_table).
    """
    total = micro_batches * vpp
    warm_up = pp - number - 1 if vpp == 1 else 2 * (pp - number - 1) + (vpp - 1) * pp
    warm_up = min(warm_up, total)
    chunks = [index % (pp * vpp) // pp for index in range(total)]
    for index, chunk in enumerate(chunks):
        yield True, chunk
        if index >= warm_up:
            yield False, vpp - 1 - chunks[index - warm_up]
    for index in range(total - warm_up, total):
        yield False, vpp - 1 - chunks[index]


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
