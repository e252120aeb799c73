"""Megatron's pipeline schedules: layers of a stage's model chunks, and activations in flight at peak."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import (
    is_array,
    largest_element,
    map_distinct,
    maximum,
    minimum,
    pick_largest_row,
    where,
)
from shardscope.frameworks.megatron.layout import counted_ends

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.frameworks.megatron.memory.layer import Layer


class Fullest(NamedTuple):
    """Peak activation bytes per token of a stage in each phase of a step, and counts in flight."""

    forward: int
    """Bytes at the end of a model chunk's forward."""
    head: int
    """Saved bytes at the end of the last chunk's forward."""
    backward: int
    """Bytes at the start of a chunk's backward."""
    last: int
    """Bytes at the end of the first chunk's backward, those of the micro-batches still in flight."""
    dense: int
    """Layers without routed experts in flight at ``backward``, one for each micro-batch."""
    moe: int
    """Layers with routed experts in flight at ``backward``, one for each micro-batch."""
    first: int
    """Micro-batches in flight in the first chunk when the first backward begins."""
    chunks: int
    """Micro-batches in flight in all chunks when the first backward begins."""


def fullest(plan: Plan, number: Any, dense: Layer, moe: Layer) -> Fullest:
    """Compute the peaks of stage ``number`` from its layers' bytes per token.

    A batch of plans gives arrays.
    """
    arch, degrees = plan.architecture, plan.degrees
    # No schedule has more micro-batches of a chunk in flight, so further ones change no peak.
    micro_batches = minimum(plan.num_micro_batches, 2 * degrees.pp)
    numbers = (degrees.pp, degrees.vpp, number, micro_batches)
    if any(map(is_array, (*numbers, *dense, *moe))):
        return _told(_looked_up(arch, *numbers), dense, moe)
    return _of_one(arch, numbers, dense, moe)


@lru_cache(maxsize=4096)
def _of_one(arch: Architecture, numbers: tuple[int, ...], dense: Layer, moe: Layer) -> Fullest:
    return _told(_profile(arch, *numbers), dense, moe)


def _told(held: Profile, dense: Layer, moe: Layer) -> Fullest:
    # Layers with experts are the last ones: their backward is over, and their tensors are freed, when that of
    # the dense layers begins.
    gone = where(moe.retained > 0, 0, moe.saved)

    def waiting(at: Held) -> Any:
        return at.dense * dense.saved + at.moe * moe.saved

    def in_forward(at: Held) -> Any:
        ending = where(at.moe_layers > 0, moe.ending, dense.ending * (at.dense_layers > 0))
        return waiting(at) + ending

    def in_backward(at: Held) -> tuple[Any, Any, Any]:
        in_experts = (at.moe_layers > 0) * (moe.working + (at.moe_layers - 1) * moe.retained)
        in_dense = dense.working - at.moe_layers * (gone - moe.retained)
        working = maximum(in_experts, (at.dense_layers > 0) * in_dense)
        return waiting(at) + working, at.dense, at.moe

    backward, of_dense, of_moe = pick_largest_row([in_backward(at) for at in held.backward])
    return Fullest(
        forward=maximum(*map(in_forward, held.forward)),
        head=maximum(*map(waiting, held.head)),
        backward=backward,
        last=maximum(*(waiting(at) + at.moe_layers * 2 * moe.retained for at in held.last)),
        dense=of_dense,
        moe=of_moe,
        first=held.first,
        chunks=held.chunks,
    )


class Held(NamedTuple):
    """Layers in flight at one step of a schedule, and layers of the chunk that the step runs."""

    dense: int
    """Layers in flight without routed experts, one for each micro-batch."""
    moe: int
    """Layers in flight with routed experts, one for each micro-batch."""
    dense_layers: int
    """Layers of the chunk without routed experts."""
    moe_layers: int
    """Layers of the chunk with routed experts."""


class Profile(NamedTuple):
    """Peak candidates of a stage's schedule: the steps that can be the peak for some bytes per layer."""

    forward: tuple[Held, ...]
    """Ends of a chunk's forward."""
    head: tuple[Held, ...]
    """Ends of the last chunk's forward."""
    backward: tuple[Held, ...]
    """Starts of a chunk's backward."""
    last: tuple[Held, ...]
    """Ends of the first chunk's backward."""
    first: int
    """Micro-batches in flight in the first chunk when the first backward begins."""
    chunks: int
    """Micro-batches in flight in all chunks when the first backward begins."""


def _looked_up(arch: Architecture, *numbers: Any) -> Profile:
    """Return the profile of one schedule.

    For a batch of schedules the fields are arrays, and each list has as many steps as the longest one.
    """
    if not any(map(is_array, numbers)):
        return _profile(arch, *numbers)
    told = map_distinct(partial(_lengths, arch), *numbers)
    lengths = tuple(map(largest_element, told))
    first, chunks, *fields = map_distinct(partial(_flat, arch, lengths), *numbers)
    each = iter(fields)
    forward, head, backward, last = (
        tuple(Held(*islice(each, len(Held._fields))) for _ in range(length)) for length in lengths
    )
    return Profile(forward, head, backward, last, first, chunks)


def _lengths(arch: Architecture, *row: int) -> tuple[int, ...]:
    return tuple(map(len, _profile(arch, *row)[:4]))


@lru_cache(maxsize=65536)
def _flat(arch: Architecture, lengths: tuple[int, ...], *row: int) -> tuple[int, ...]:
    """Flatten a profile into integers, each list padded to its length by repeating the last step."""
    found = _profile(arch, *row)
    padded = (
        (*steps, *steps[-1:] * (length - len(steps)))
        for steps, length in zip(
            (found.forward, found.head, found.backward, found.last), lengths, strict=True
        )
    )
    return (found.first, found.chunks, *(field for steps in padded for step in steps for field in step))


@lru_cache(maxsize=65536)
def _profile(arch: Architecture, pp: int, vpp: int, number: int, micro_batches: int) -> Profile:
    layers = chunk_layers(arch, pp, vpp, number)
    held = [0] * vpp
    dense = moe = first = chunks = 0
    forward: list[Held] = []
    head: list[Held] = []
    backward: list[Held] = []
    last: list[Held] = []
    for is_forward, chunk in _steps(pp, vpp, number, micro_batches):
        own_dense, own_moe = layers[chunk]
        if is_forward:
            held[chunk] += 1
            dense, moe = dense + own_dense, moe + own_moe
            forward.append(Held(dense, moe, own_dense, own_moe))
            if chunk == vpp - 1:
                head.append(forward[-1])
            continue
        if not chunks:
            first, chunks = held[0], sum(held)
        backward.append(Held(dense, moe, own_dense, own_moe))
        held[chunk] -= 1
        dense, moe = dense - own_dense, moe - own_moe
        if chunk == 0:
            last.append(Held(dense, moe, 0, own_moe))
    return Profile(
        _outermost(forward), _outermost(head), _outermost(backward), _outermost(last), first, chunks
    )


def _outermost(steps: list[Held]) -> tuple[Held, ...]:
    """Drop the steps that another step dominates.

    A step dominates another if its chunk has the same layers and no fewer layers of either kind are in
    flight.
    """
    found: list[Held] = []
    for step in dict.fromkeys(steps):
        if any(_outdoes(other, step) for other in found):
            continue
        found = [other for other in found if not _outdoes(step, other)]
        found.append(step)
    return tuple(found)


def _outdoes(one: Held, other: Held) -> bool:
    return one[2:] == other[2:] and one.dense >= other.dense and one.moe >= other.moe


def _steps(pp: int, vpp: int, number: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """Yield (is forward, chunk) in the order of the schedule.

    1F1B warms up with pp - 1 - stage micro-batches. The interleaved schedule warms up with
    2 (pp - 1 - stage) + (vpp - 1) pp: pp micro-batches of one chunk, then pp of the next. Backward starts
    with the last chunk (schedules.py, get_pp_rank_microbatches and get_schedule_table).
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
    """Return (dense layers, layers with routed experts) of each model chunk of a stage, in order.

    Chunk c of stage s is the (c x pp + s)-th slice of the model (transformer_layer.py,
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
