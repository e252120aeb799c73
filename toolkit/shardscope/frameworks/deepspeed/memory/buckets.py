"""Gradient buckets of ZeRO stages 0 to 2: when they are reduced, and the copies that reductions make.

Source: ``deepspeed/runtime/zero/stage_1_and_2.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

ALL_REDUCE_ELEMENTS = 500_000_000
"""Elements that stage 0 flattens at once (``MEMORY_OPT_ALLREDUCE_SIZE``, deepspeed/runtime/engine.py)."""


class Instant(NamedTuple):
    """Elements in one phase of backward, without permanent buffers."""

    staging: int
    """All-gathered parameters, unreduced gradients and copies of them."""
    kept: int
    """Gradients that stay until the optimizer step."""

    @property
    def total(self) -> int:
        return self.staging + self.kept


class Part(NamedTuple):
    """Part of backward: the head and final norm, one decoder layer, the embedding, or the final reduction."""

    base: Instant
    """At its first gradient; in the head's part, at the norm's gradient."""
    peak: Instant
    """At its maximum."""
    middle: Instant | None = None
    """Between the feed-forward's gradients and attention's, if they are distinguished."""
    inner: tuple[Instant, ...] = ()
    """At the gradient of each of the feed-forward's large matrices, if they are distinguished."""
    behind: Instant = Instant(0, 0)
    """At the maximum after the feed-forward, attention's first gradient included."""


class Piece(NamedTuple):
    """Position of a gradient in the flat buffer of its parameter group, matrices or vectors."""

    start: int
    size: int
    part: int
    """Elements of each rank's partition of that buffer."""

    @property
    def end(self) -> int:
        """Offset after its last element."""
        return self.start + self.size

    def owned_by(self, rank: int) -> int:
        """Return how many of its elements are in the partition of ``rank``."""
        return max(0, min(self.end, (rank + 1) * self.part) - max(self.start, rank * self.part))


class Cut(NamedTuple):
    """Partitioning of the flat gradient buffers over ranks."""

    parts: tuple[int, int]
    """Elements of each rank's partitions: of matrices, and of vectors."""
    rank: int
    """Rank whose memory is computed."""
    whole: int
    """Elements of all tensors that overlap this rank's partition."""
    bucket: int
    """``reduce_bucket_size``, in elements."""
    drops: bool = True
    """Whether gradients of other ranks' partitions are freed after the reduction (stage 2). Stage 1 keeps
    them, so gradients too large for the bucket stay allocated."""
    norm: int = 0
    """Size of an fp64 element in gradient elements, if reduced gradients are offloaded one by one with their
    norm in double precision; 0 if they stay on the device."""
    cast: int = 0
    """Size of an element of the reduction type in gradient elements; 0 if gradients are not cast."""

    def pieces(self, sizes: tuple[int, ...], vectors: tuple[bool, ...]) -> list[Piece]:
        """Return the position of each tensor of ``sizes`` in its flat buffer."""
        ends = [0, 0]
        found: list[Piece] = []
        for size, is_vector in zip(sizes, vectors or (False,) * len(sizes), strict=True):
            found.append(Piece(ends[is_vector], size, self.parts[is_vector]))
            ends[is_vector] += size
        return found

    def touches(self, waiting: list[Piece]) -> bool:
        """Return whether any of ``waiting`` overlaps the rank's partitions."""
        rank = self.rank
        return any(
            piece.start < (rank + 1) * piece.part and rank * piece.part < piece.start + piece.size
            for piece in waiting
        )


def parts_of(num_before: int, per_layer: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the number of tensors in each part of backward: head, each layer from the last, embedding."""
    return (number - num_before - sum(per_layer), *reversed(per_layer), num_before)


@lru_cache(maxsize=1024)
def early(
    sizes: tuple[int, ...],
    vectors: tuple[bool, ...],
    order: tuple[int, ...],
    groups: tuple[int, ...],
    cut: Cut,
    tied: int,
    attention: int = 0,
    wide: tuple[bool, ...] = (),
    accumulated: int = 0,
) -> tuple[Part, ...]:
    """Return the parts of a backward that reduces full buckets on the way; the last is the final reduction.

    A full bucket is sliced by destination rank, and slices for more than one rank are flattened, so copied,
    for the reduction. ``sizes`` are the elements of each tensor; ``order`` has indices into ``sizes`` in the
    order of gradients, ``groups`` the number of them in each part of backward. ``vectors`` marks the tensors
    in the vectors' own flat buffer, ``wide`` the feed-forward's large matrices. ``tied`` is the number of
    elements of a tied head, whose gradient stays until the embedding's exists. ``attention`` is the number of
    a layer's tensors after its feed-forward's in backward. ``accumulated`` is the number of all elements if
    earlier micro-batches' gradients stay in place until the bucket takes them, else 0.
    """
    waiting: list[Piece] = []
    pieces, left_over = cut.pieces(sizes, vectors), accumulated
    kept = oversized = elements = stays = 0
    whole = 0 if cut.norm else cut.whole
    found: list[Part] = []
    comes = iter(order)
    for place, count in enumerate(groups):
        waits = tied if place else 0
        base = peak = middle = Instant(waits + oversized, kept + left_over)
        inner: list[Instant] = []
        behind = Instant(0, 0)
        for left in range(count, 0, -1):
            if left == attention:
                middle = Instant(waits + oversized, kept + left_over)
            if not place and left == 1:
                # The final norm comes after the head, whose gradient is tied, reduced or in the bucket.
                base = Instant(tied + oversized, kept + left_over)
            index = next(comes)
            size = sizes[index]
            now = Instant(waits + size + oversized, kept + left_over)
            if tied and not index:
                # Both gradients of a tied embedding and their sum are alive; then only the sum is.
                now, waits = Instant(waits + 2 * size + oversized, kept + left_over), 0
            if waiting and elements + size > cut.bucket:
                held = waits + size + oversized
                now = max(now, Instant(held + reduced(waiting, cut), kept + left_over), key=_total)
                kept = whole if kept or cut.touches(waiting) else 0
                now = max(now, Instant(held, kept + left_over), key=_total)
                stays = oversized if not (cut.drops or cut.touches(waiting)) else stays
                waiting, elements, oversized = [], 0, stays
            peak = max(peak, now, key=_total)
            if wide and wide[index]:
                inner.append(now)
            if attention - 1 <= left <= attention:
                # Attention's last two tensors in forward, with its output projection's matrix.
                behind = max(behind, now, key=_total)
            waiting.append(pieces[index])
            elements += size
            left_over -= size * (accumulated > 0)
            if size > cut.bucket:
                oversized = stays + size
                # A gradient for the host is a copy, not a view of autograd's tensor.
                cloned = Instant(waits + oversized + (cut.norm > 0) * size, kept + left_over)
                peak = max(peak, cloned, key=_total)
        if not place and tied:
            peak = max(peak, base, key=_total)
        found.append(Part(base, peak, middle, tuple(inner), behind))
    last = Instant(oversized + (reduced(waiting, cut) if waiting else 0), kept)
    # A gradient larger than the bucket stays until it has been copied.
    done = Instant(oversized, whole)
    return (*found, Part(last, max(last, done, key=_total)))


@lru_cache(maxsize=1024)
def late(
    sizes: tuple[int, ...],
    order: tuple[int, ...],
    groups: tuple[int, ...],
    tied: int,
    accumulates: bool,
    attention: int = 0,
    wide: tuple[bool, ...] = (),
) -> tuple[Part, ...]:
    """Return the parts of a backward that keeps all gradients; the last one is the total of them.

    The arguments are those of :func:`early`; ``accumulates``: earlier micro-batches left gradients.
    """
    total, done = sum(sizes), 0
    found: list[Part] = []
    comes, index = iter(order), len(sizes)
    for place, count in enumerate(groups):
        waits = tied if place else 0
        base = middle = Instant(waits, total if accumulates else done)
        inner: list[Instant] = []
        behind = Instant(0, 0)
        largest = 0
        for left in range(count, 0, -1):
            if left == attention:
                middle = Instant(waits, total if accumulates else done)
            if not place and left == 1:
                base = Instant(tied, total if accumulates else done)
            index = next(comes)
            done += sizes[index]
            is_wide, is_behind = wide and wide[index], attention - 1 <= left <= attention
            if is_wide or is_behind:
                # With accumulation a new gradient is added to the existing one; without, it is kept.
                now = Instant(waits + sizes[index], total) if accumulates else Instant(waits, done)
                if is_wide:
                    inner.append(now)
                if is_behind:
                    behind = max(behind, now, key=_total)
            largest = max(largest, 2 * sizes[index] if tied and not index else sizes[index])
        new = waits + (largest if accumulates else (tied if place and index == 0 and tied else 0))
        most = Instant(new, total if accumulates else done)
        found.append(Part(base, most, middle, tuple(inner), behind))
    return (*found, Part(Instant(0, total), Instant(0, total)))


@lru_cache(maxsize=1024)
def beyond(sizes: tuple[int, ...], vectors: tuple[bool, ...], cut: Cut) -> int:
    """Return the elements stage 1's reduction after backward needs above all gradients and the bucket."""
    whole = 0 if cut.norm else cut.whole
    waiting: list[Piece] = []
    removed = found = kept = elements = 0
    for piece in (*cut.pieces(sizes, vectors), None):
        if waiting and (piece is None or elements + piece.size > cut.bucket):
            moved = elements if elements <= cut.bucket else 0
            cloned = (cut.norm > 0) * (elements - moved)
            found = max(found, max(cloned, reduced(waiting, cut)) - removed - moved + kept)
            kept = whole if kept or cut.touches(waiting) else 0
            found = max(found, kept - removed - moved)
            removed += elements
            waiting, elements = [], 0
        if piece is not None:
            waiting.append(piece)
            elements += piece.size
    return found


def reduced(waiting: list[Piece], cut: Cut) -> int:
    """Return the temporary elements of reducing a full bucket.

    They are a flattened copy, then the norms of offloaded gradients (``set_norm_for_param_grad_in_gpu``).
    """
    flattened = copied(waiting, cut)
    if not cut.norm:
        return flattened
    return max(flattened, cut.norm * max((piece.owned_by(cut.rank) for piece in waiting), default=0))


def copied(waiting: list[Piece], cut: Cut) -> int:
    """Return the elements of the largest flattened copy in ``allreduce_and_scatter``, over slices by rank."""
    elements = sum([piece.size for piece in waiting])
    if elements <= cut.bucket:
        # All are flattened together, or reduced in place if they belong to one rank.
        owners = {
            owner
            for start, size, part in waiting
            if size
            for owner in (start // part, (start + size - 1) // part)
        }
        return _flattened(elements, len(owners), cut.cast)
    runs: list[tuple[int, int]] = []
    owner = -1
    for piece in waiting:
        if not piece.size:
            continue
        first = piece.start // piece.part
        head = min(piece.end, (first + 1) * piece.part) - piece.start
        if first == owner:
            # Merge with the previous run's last slice only: the vectors' buffer starts again at rank 0.
            before, times = runs.pop()
            if times > 1:
                runs.append((before, times - 1))
            runs.append((before + head, 1))
        else:
            runs.append((head, 1))
        whole, tail = divmod(piece.size - head, piece.part)
        if whole:
            runs.append((piece.part, whole))
        if tail:
            runs.append((tail, 1))
        owner = first + whole + (tail > 0)
    return _largest_flat(runs, cut.bucket, cut.cast)


@lru_cache(maxsize=1024)
def all_reduce_bucket(sizes: tuple[int, ...], elements: int = ALL_REDUCE_ELEMENTS, cast: int = 0) -> int:
    """Return the elements of stage 0's largest flattened copy and of its cast."""
    return _largest_flat([(size, 1) for size in sizes], elements, cast)


def _flattened(elements: int, number: int, cast: int) -> int:
    """Return the elements copied to reduce ``number`` slices together.

    A single slice is flat already; a cast is allocated besides the flattened copy (``allreduce_bucket``).
    """
    return elements * ((number > 1) + cast)


def _largest_flat(runs: list[tuple[int, int]], elements: int, cast: int) -> int:
    """Return the elements of the largest flattened copy, which ends with the slice that exceeds ``elements``.

    ``runs`` are (size of a slice, number of consecutive slices of that size).
    """
    largest = group = number = 0
    for size, times in runs:
        left = times
        while left:
            needed = (elements - group) // size + 1 if size else left + 1
            taken = min(needed, left)
            group, number, left = group + taken * size, number + taken, left - taken
            if group > elements:
                largest, group, number = max(largest, _flattened(group, number, cast)), 0, 0
                # The following copies have equally many slices, so they are all of one size: skip them.
                again = elements // size + 1
                if left >= again:
                    largest, left = max(largest, _flattened(again * size, again, cast)), left % again
    return max(largest, _flattened(group, number, cast))


def _total(instant: Instant) -> int:
    return instant.total
