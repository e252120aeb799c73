"""Megatron's schedules: the layers of a stage's model chunks, and what waits in them when it is fullest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import fullest as rows_fullest
from shardscope.core.arrays.arithmetic import is_array, largest, looked_up, smallest, where
from shardscope.frameworks.megatron.layout import counted_ends

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.frameworks.megatron.memory.layer import Layer


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
    numbers = (degrees.pp, degrees.vpp, number, micro_batches)
    if any(map(is_array, (*numbers, *dense, *moe))):
        return _told(_looked_up(arch, *numbers), dense, moe)
    return _of_one(arch, numbers, dense, moe)


@lru_cache(maxsize=4096)
def _of_one(arch: Architecture, numbers: tuple[int, ...], dense: Layer, moe: Layer) -> Fullest:
    return _told(_profile(arch, *numbers), dense, moe)


def _told(held: Profile, dense: Layer, moe: Layer) -> Fullest:
    # Layers with experts come last: they go backward first, and are gone when the others do.
    gone = where(moe.retained > 0, 0, moe.saved)

    def waiting(at: Held) -> Any:
        return at.dense * dense.saved + at.moe * moe.saved

    def in_forward(at: Held) -> Any:
        ending = where(at.moe_layers > 0, moe.ending, dense.ending * (at.dense_layers > 0))
        return waiting(at) + ending

    def in_backward(at: Held) -> tuple[Any, Any, Any]:
        in_experts = (at.moe_layers > 0) * (moe.working + (at.moe_layers - 1) * moe.retained)
        in_dense = dense.working - at.moe_layers * (gone - moe.retained)
        working = largest(in_experts, (at.dense_layers > 0) * in_dense)
        return waiting(at) + working, at.dense, at.moe

    backward, of_dense, of_moe = rows_fullest([in_backward(at) for at in held.backward])
    return Fullest(
        forward=largest(*map(in_forward, held.forward)),
        head=largest(*map(waiting, held.head)),
        backward=backward,
        last=largest(*(waiting(at) + at.moe_layers * 2 * moe.retained for at in held.last)),
        dense=of_dense,
        moe=of_moe,
        first=held.first,
        chunks=held.chunks,
    )


class Held(NamedTuple):
    """Layers whose activations wait at one step of a schedule, and those of the chunk that it is in."""

    dense: int
    """Without routed experts, once for each micro-batch that waits in one."""
    moe: int
    """With them."""
    dense_layers: int
    """Of the chunk."""
    moe_layers: int


class Profile(NamedTuple):
    """The steps of a stage's schedule that can be fullest, whatever a layer's bytes are."""

    forward: tuple[Held, ...]
    """As a chunk's forward ends."""
    head: tuple[Held, ...]
    """As the last chunk's does."""
    backward: tuple[Held, ...]
    """As a chunk's backward begins."""
    last: tuple[Held, ...]
    """As the first chunk's has ended."""
    first: int
    chunks: int


def _looked_up(arch: Architecture, *numbers: Any) -> Profile:
    """The profile of one schedule; of many, as many steps as the longest has, whose fields are arrays."""
    if not any(map(is_array, numbers)):
        return _profile(arch, *numbers)
    told = looked_up(partial(_lengths, arch), *numbers)
    lengths = tuple(int(length.max()) if is_array(length) else length for length in told)
    first, chunks, *fields = looked_up(partial(_flat, arch, lengths), *numbers)
    each = iter(fields)
    forward, head, backward, last = (
        tuple(Held(*islice(each, len(Held._fields))) for _ in range(length)) for length in lengths
    )
    return Profile(forward, head, backward, last, first, chunks)


def _lengths(arch: Architecture, *row: int) -> tuple[int, ...]:
    return tuple(map(len, _profile(arch, *row)[:4]))


@lru_cache(maxsize=65536)
def _flat(arch: Architecture, lengths: tuple[int, ...], *row: int) -> tuple[int, ...]:
    """A profile's numbers one after the other, the last step of each list told again up to its length."""
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
    """Those that no other outdoes: one of a chunk of as many layers, in which as many wait of either kind."""
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
