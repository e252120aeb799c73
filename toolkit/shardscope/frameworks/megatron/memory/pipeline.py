"""Megatron's pipeline schedules: layers of a stage's model chunks, and activations in flight at peak.

Source: megatron/core/pipeline_parallel/schedules.py, core 0.16.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import (
    is_array,
    largest_element,
    map_distinct,
    maximum,
    minimum,
    pick_largest_row,
    where,
)
from shardscope.frameworks.megatron.pipeline_split import split_pipeline
from shardscope.timing.pipeline import Schedule, iterate_passes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.frameworks.megatron.memory.layer import Layer


class SchedulePeaks(NamedTuple):
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


def compute_schedule_peaks(plan: Plan, number: int, dense: Layer, moe: Layer) -> SchedulePeaks:
    """Compute the peaks of stage ``number`` from its layers' bytes per token.

    A batch of plans gives arrays.
    """
    arch, degrees = plan.architecture, plan.degrees
    # No schedule has more micro-batches of a chunk in flight, so further ones change no peak.
    micro_batches = minimum(plan.num_micro_batches, 2 * degrees.pp)
    numbers = (degrees.pp, degrees.vpp, number, micro_batches)
    if any(map(is_array, (*numbers, *dense, *moe))):
        return _compute_peaks(_find_profile(arch, *numbers), dense, moe)
    return _compute_plan_peaks(arch, numbers, dense, moe)


@lru_cache(maxsize=4096)
def _compute_plan_peaks(
    arch: Architecture, numbers: tuple[int, ...], dense: Layer, moe: Layer
) -> SchedulePeaks:
    return _compute_peaks(_build_profile(arch, *numbers), dense, moe)


def _compute_peaks(profile: ScheduleProfile, dense: Layer, moe: Layer) -> SchedulePeaks:
    # Layers with experts are the last ones: their backward is over, and their tensors are freed, when that of
    # the dense layers begins.
    freed = where(moe.retained > 0, 0, moe.saved)

    def sum_saved(step: InFlight) -> int:
        return step.dense * dense.saved + step.moe * moe.saved

    def sum_in_forward(step: InFlight) -> int:
        ending = where(step.moe_layers > 0, moe.ending, dense.ending * (step.dense_layers > 0))
        return sum_saved(step) + ending

    def sum_in_backward(step: InFlight) -> tuple[int, int, int]:
        in_experts = (step.moe_layers > 0) * (moe.working + (step.moe_layers - 1) * moe.retained)
        in_dense = dense.working - step.moe_layers * (freed - moe.retained)
        working = maximum(in_experts, (step.dense_layers > 0) * in_dense)
        return sum_saved(step) + working, step.dense, step.moe

    backward, dense_layers, moe_layers = pick_largest_row(
        [sum_in_backward(step) for step in profile.backward]
    )
    return SchedulePeaks(
        forward=maximum(*map(sum_in_forward, profile.forward)),
        head=maximum(*map(sum_saved, profile.head)),
        backward=backward,
        last=maximum(*(sum_saved(step) + step.moe_layers * 2 * moe.retained for step in profile.last)),
        dense=dense_layers,
        moe=moe_layers,
        first=profile.first,
        chunks=profile.chunks,
    )


class InFlight(NamedTuple):
    """Layers in flight at one step of a schedule, and layers of the chunk that the step runs."""

    dense: int
    """Layers in flight without routed experts, one for each micro-batch."""
    moe: int
    """Layers in flight with routed experts, one for each micro-batch."""
    dense_layers: int
    """Layers of the chunk without routed experts."""
    moe_layers: int
    """Layers of the chunk with routed experts."""


class ScheduleProfile(NamedTuple):
    """Peak candidates of a stage's schedule: the steps that can be the peak for some bytes per layer."""

    forward: tuple[InFlight, ...]
    """Ends of a chunk's forward."""
    head: tuple[InFlight, ...]
    """Ends of the last chunk's forward."""
    backward: tuple[InFlight, ...]
    """Starts of a chunk's backward."""
    last: tuple[InFlight, ...]
    """Ends of the first chunk's backward."""
    first: int
    """Micro-batches in flight in the first chunk when the first backward begins."""
    chunks: int
    """Micro-batches in flight in all chunks when the first backward begins."""


def _find_profile(arch: Architecture, *numbers: int) -> ScheduleProfile:
    """Return the profile of one schedule.

    For a batch of schedules the fields are arrays, and each list has as many steps as the longest one.
    """
    if not any(map(is_array, numbers)):
        return _build_profile(arch, *numbers)
    candidate_counts = map_distinct(partial(_count_candidates, arch), *numbers)
    lengths = tuple(map(largest_element, candidate_counts))
    first, chunks, *fields = map_distinct(partial(_flatten_profile, arch, lengths), *numbers)
    remaining = iter(fields)
    forward, head, backward, last = (
        tuple(InFlight(*islice(remaining, len(InFlight._fields))) for _ in range(length))
        for length in lengths
    )
    return ScheduleProfile(forward, head, backward, last, first, chunks)


def _count_candidates(arch: Architecture, *row: int) -> tuple[int, ...]:
    return tuple(map(len, _build_profile(arch, *row)[:4]))


@lru_cache(maxsize=65536)
def _flatten_profile(arch: Architecture, lengths: tuple[int, ...], *row: int) -> tuple[int, ...]:
    """Flatten a profile into integers, each list padded to its length by repeating the last step."""
    profile = _build_profile(arch, *row)
    # Repeated steps change no maximum.
    padded = (
        (*steps, *steps[-1:] * (length - len(steps)))
        for steps, length in zip(
            (profile.forward, profile.head, profile.backward, profile.last), lengths, strict=True
        )
    )
    return (profile.first, profile.chunks, *(field for steps in padded for step in steps for field in step))


@lru_cache(maxsize=65536)
def _build_profile(arch: Architecture, pp: int, vpp: int, number: int, micro_batches: int) -> ScheduleProfile:
    layers = count_chunk_layers(arch, pp, vpp, number)
    micro_batches_in_flight = [0] * vpp
    dense = moe = first = chunks = 0
    # Sets of plain tuples in the order of InFlight: most steps repeat, and few are kept.
    forward: set[tuple[int, int, int, int]] = set()
    head: set[tuple[int, int, int, int]] = set()
    backward: set[tuple[int, int, int, int]] = set()
    last: set[tuple[int, int, int, int]] = set()
    schedule: Schedule = "1f1b" if vpp == 1 else "interleaved"
    for is_forward, chunk, _ in iterate_passes(schedule, pp, vpp, number, micro_batches):
        chunk_dense, chunk_moe = layers[chunk]
        if is_forward:
            micro_batches_in_flight[chunk] += 1
            dense, moe = dense + chunk_dense, moe + chunk_moe
            (head if chunk == vpp - 1 else forward).add((dense, moe, chunk_dense, chunk_moe))
            continue
        if not chunks:
            first, chunks = micro_batches_in_flight[0], sum(micro_batches_in_flight)
        backward.add((dense, moe, chunk_dense, chunk_moe))
        micro_batches_in_flight[chunk] -= 1
        dense, moe = dense - chunk_dense, moe - chunk_moe
        if chunk == 0:
            last.add((dense, moe, 0, chunk_moe))
    return ScheduleProfile(
        _drop_dominated(forward | head),
        _drop_dominated(head),
        _drop_dominated(backward),
        _drop_dominated(last),
        first,
        chunks,
    )


def _drop_dominated(steps: set[tuple[int, int, int, int]]) -> tuple[InFlight, ...]:
    """Drop the steps that another step dominates. ``steps`` have the fields of :class:`InFlight`.

    A step dominates another if its chunk has the same layers and no fewer layers of either kind are in
    flight.
    """
    most_moe: dict[tuple[int, int], int] = {}
    dominant: list[InFlight] = []
    # In descending order a step is dominated if one before it has no fewer layers with experts.
    for step in sorted(steps, reverse=True):
        chunk, moe = step[2:], step[1]
        if moe > most_moe.get(chunk, -1):
            most_moe[chunk] = moe
            dominant.append(InFlight._make(step))
    return tuple(dominant)


@lru_cache(maxsize=4096)
def count_chunk_layers(arch: Architecture, pp: int, vpp: int, number: int) -> tuple[tuple[int, int], ...]:
    """Return (dense layers, layers with routed experts) of each model chunk of a stage, in order.

    Chunk c of stage s is the (c x pp + s)-th slice of the model (transformer_layer.py,
    get_transformer_layer_offset).
    """
    num_chunks = pp * vpp
    if pp == 1:
        return ((arch.num_hidden_layers - arch.num_moe_layers, arch.num_moe_layers),)
    split = split_pipeline(arch.num_hidden_layers, pp, vpp)
    layers_per_chunk = (arch.num_hidden_layers + split.embedding + split.loss) // num_chunks
    chunks = []
    for chunk in range(vpp):
        if vpp == 1:
            start, stop = sum(split.stages[:number]), sum(split.stages[: number + 1])
        else:
            position = chunk * pp + number
            start = position * layers_per_chunk - (split.embedding if position else 0)
            stop = (position + 1) * layers_per_chunk - split.embedding
            stop -= split.loss if position == num_chunks - 1 else 0
        moe = sum(arch.is_moe_layer(index) for index in range(start, stop)) if arch.num_moe_layers else 0
        chunks.append((stop - start - moe, moe))
    return tuple(chunks)
