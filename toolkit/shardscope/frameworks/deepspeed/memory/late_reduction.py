"""ZeRO-0, and ZeRO-1 without ``overlap_comm``: a backward that keeps all gradients, reduced after it."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from shardscope.frameworks.deepspeed.memory.ipg_bucket import ReductionOptions, list_reductions
from shardscope.frameworks.deepspeed.memory.partition_parameters import RankTensors
from shardscope.frameworks.deepspeed.memory.phases import (
    BackwardPart,
    BackwardPhases,
    PhaseElements,
    choose_layers,
    choose_phases,
)


@lru_cache(maxsize=1024)
def keep_gradients(
    tensors: RankTensors, tied_head: int, accumulates: bool, full_attention: int | None
) -> BackwardPhases:
    """Return the phases of a backward that keeps all gradients, which no number of ranks changes.

    ``tied_head`` is as in ``reduce_in_backward``; ``accumulates``: earlier micro-batches left gradients;
    ``full_attention`` is as in :func:`choose_layers`.
    """
    return choose_phases(list_kept_parts(tensors, tied_head, accumulates, full_attention), full_attention)


def list_kept_parts(
    tensors: RankTensors, tied_head: int, accumulates: bool, full_attention: int | None
) -> list[BackwardPart]:
    """Return the parts of such a backward, without the reduction after it.

    Layers that :func:`choose_layers` does not choose have their first gradient and maximum only: a search has
    hundreds of stages with a hundred layers each.
    """
    backward = _KeptGradients(tensors, tied_head, accumulates)
    last = len(tensors.trained_per_part) - 1
    layers = [backward.build_layer(number) for number in range(1, last)]
    for index in set(choose_layers(layers, full_attention)):
        layers[index] = backward.build_part(index + 1)
    return [backward.build_part(0), *layers, backward.build_part(last)]


class _KeptGradients:
    """Gradients of one rank during a backward that keeps all of them."""

    def __init__(self, tensors: RankTensors, tied_head: int, accumulates: bool) -> None:
        self._tensors, self._tied_head, self._accumulates = tensors, tied_head, accumulates
        sizes = tensors.trained
        self._sizes = [sizes[index] for index in tensors.gradient_order]
        """Sizes in the order of backward."""
        self._starts = list(accumulate(tensors.trained_per_part, initial=0))
        """First gradient of each part."""
        # With accumulation a new gradient is added to the existing one; without, it is kept.
        total = sizes.total
        self._kept = [total] * (len(sizes) + 1) if accumulates else list(accumulate(self._sizes, initial=0))
        """Elements of gradients before each one, and after the last one."""

    def build_layer(self, number: int) -> BackwardPart:
        """Return the first gradient and the maximum of a decoder layer's part."""
        start, end = self._starts[number : number + 2]
        largest = max(self._sizes[start:end], default=0) if self._accumulates else 0
        first = PhaseElements(self._tied_head, self._kept[start])
        return BackwardPart(first, PhaseElements(self._tied_head + largest, self._kept[end]))

    def build_part(self, number: int) -> BackwardPart:
        """Return all phases of one part: head and norm, one layer, or the embedding."""
        tensors, kept, (start, end) = self._tensors, self._kept, self._starts[number : number + 2]
        tied_gradient = self._tied_head if number else 0
        first = before_attention = PhaseElements(tied_gradient, kept[start])
        feed_forward: list[PhaseElements] = []
        attention_output = PhaseElements(0, 0)
        largest = both = 0
        for place in range(start, end):
            index, size, remaining = tensors.gradient_order[place], self._sizes[place], end - place
            if remaining == tensors.num_attention:
                before_attention = PhaseElements(tied_gradient, kept[place])
            if not number and remaining == 1:
                first = PhaseElements(self._tied_head, kept[place])
            new = size if self._accumulates else 0
            phase = PhaseElements(tied_gradient + new, kept[place + 1])
            if tensors.is_feed_forward and tensors.is_feed_forward[index]:
                feed_forward.append(phase)
            if tensors.num_attention - 1 <= remaining <= tensors.num_attention:
                attention_output = max(attention_output, phase, key=_get_total)
            # Both gradients of a tied embedding and their sum are alive.
            is_tied = bool(self._tied_head) and not index
            largest = max(largest, 2 * new if is_tied else new)
            both = self._tied_head if number and is_tied and not self._accumulates else 0
        peak = PhaseElements(tied_gradient + largest + both, kept[end])
        return BackwardPart(first, peak, before_attention, tuple(feed_forward), attention_output)


@lru_cache(maxsize=1024)
def count_late_reduction(
    sizes: tuple[int, ...], is_vector: tuple[bool, ...], options: ReductionOptions
) -> int:
    """Return the elements stage 1's reduction after backward needs above all gradients and the bucket."""
    removed = most = accumulated = 0
    for elements, has_own, copies in list_reductions(sizes, is_vector, options):
        if not options.is_contiguous:
            # Gradients stay where they are: nothing is copied out of them, and nothing freed.
            most = max(most, copies)
            continue
        in_bucket = elements if elements <= options.bucket_size else 0
        cloned = (options.norm_width > 0) * (elements - in_bucket)
        most = max(most, max(cloned, copies) - removed - in_bucket + accumulated)
        accumulated = options.accumulated if accumulated or has_own else 0
        most = max(most, accumulated - removed - in_bucket)
        # Gradients too large for the bucket stay autograd's tensors, if of other ranks' partitions.
        removed += elements if has_own else in_bucket
    return most


def _get_total(phase: PhaseElements) -> int:
    return phase.total
