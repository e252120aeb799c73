"""When stages 0 to 2 reduce gradients, and what that copies (deepspeed/runtime/zero/stage_1_and_2.py)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

ALL_REDUCE_ELEMENTS = 500_000_000
"""Gradients that stage 0 flattens at once (``MEMORY_OPT_ALLREDUCE_SIZE``, deepspeed/runtime/engine.py)."""


class Instant(NamedTuple):
    """Elements at one instant of backward, beside what is allocated once."""

    staging: int
    """Gathered parameters, gradients that wait to be reduced, and copies of them."""
    kept: int
    """Gradients that stay until the optimizer has used them."""

    @property
    def total(self) -> int:
        return self.staging + self.kept


class Part(NamedTuple):
    """One part of backward: the head and final norm, one decoder layer, the embedding, or its very end."""

    base: Instant
    """As its first gradient is made; of the head's part, as the norm's is."""
    peak: Instant
    """Where it holds most."""
    middle: Instant | None = None
    """Between the feed-forward's gradients and attention's, where these are told apart."""
    inner: tuple[Instant, ...] = ()
    """While each of the feed-forward's large matrices gets its gradient, where these are told apart."""
    behind: Instant = Instant(0, 0)
    """Where it holds most once the feed-forward is through, attention's first gradient included."""


class Piece(NamedTuple):
    """A gradient's place in the flat buffer of its group, matrices or vectors."""

    start: int
    size: int
    part: int
    """Elements of that buffer that each rank has."""

    @property
    def end(self) -> int:
        """Of the element behind its last."""
        return self.start + self.size

    def owned_by(self, rank: int) -> int:
        """How many of its elements lie in the part of ``rank``."""
        return max(0, min(self.end, (rank + 1) * self.part) - max(self.start, rank * self.part))


class Cut(NamedTuple):
    """Flat buffers of gradients over ranks."""

    parts: tuple[int, int]
    """Elements of each rank: of matrices, and of vectors."""
    rank: int
    """Whose memory is asked for."""
    whole: int
    """Elements of all tensors that its part touches."""
    bucket: int
    """``reduce_bucket_size``."""
    drops: bool = True
    """Whether gradients of other ranks' parts are dropped once reduced: stage 1 leaves them, and so those
    that fit into no bucket stay."""
    norm: int = 0
    """Where reduced gradients go to the host one by one: how many of their elements weigh as much as one in
    double precision, in which a norm is taken of each; 0: they stay on the device."""
    cast: int = 0
    """How many of their elements weigh as much as one cast to the type in which they are reduced; 0: none
    is cast."""

    def pieces(self, sizes: tuple[int, ...], vectors: tuple[bool, ...]) -> list[Piece]:
        """Where each of ``sizes`` lies."""
        ends = [0, 0]
        found: list[Piece] = []
        for size, is_vector in zip(sizes, vectors or (False,) * len(sizes), strict=True):
            found.append(Piece(ends[is_vector], size, self.parts[is_vector]))
            ends[is_vector] += size
        return found

    def touches(self, waiting: list[Piece]) -> bool:
        """Whether any of these is in the rank's parts."""
        rank = self.rank
        return any(
            piece.start < (rank + 1) * piece.part and rank * piece.part < piece.start + piece.size
            for piece in waiting
        )


def parts_of(num_before: int, per_layer: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Tensors in each part of backward: of the head, of each layer from the last, of the embedding."""
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
    """Parts of a backward that reduces as it goes; the last one is the reduction that ends it.

    A full bucket is cut where it goes to several ranks, and pieces for more than one rank are flattened, so
    copied, for the all-reduce. ``tied``: elements of a head whose gradient waits for the embedding's;
    ``attention``: tensors of a layer that come after its feed-forward's in backward; ``wide``: which are that
    one's large matrices; ``vectors``: which have a flat buffer of their own; ``order``: places in ``sizes``
    as gradients come, part by part as ``groups`` count them; ``accumulated``: all elements, where those of
    micro-batches before lie in place until the bucket takes them.
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
                # The final norm comes behind the head, whose gradient is tied or reduced, or waits for that.
                base = Instant(tied + oversized, kept + left_over)
            index = next(comes)
            size = sizes[index]
            now = Instant(waits + size + oversized, kept + left_over)
            if tied and not index:
                # Both gradients of a tied embedding and their sum, which alone is left.
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
                # Its last product's matrix, and what stands behind that.
                behind = max(behind, now, key=_total)
            waiting.append(pieces[index])
            elements += size
            left_over -= size * (accumulated > 0)
            if size > cut.bucket:
                oversized = stays + size
                # What goes to the host is no view of what autograd made.
                cloned = Instant(waits + oversized + (cut.norm > 0) * size, kept + left_over)
                peak = max(peak, cloned, key=_total)
        if not place and tied:
            peak = max(peak, base, key=_total)
        found.append(Part(base, peak, middle, tuple(inner), behind))
    last = Instant(oversized + (reduced(waiting, cut) if waiting else 0), kept)
    # What is larger than a bucket is there until it has been copied.
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
    """Parts of a backward that leaves all gradients; the last one is what all of them take."""
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
                # What was there is added to; what was not is kept as it was made.
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
    """Elements by which stage 1's reduction after backward exceeds all gradients and the bucket."""
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
    """Elements beside a full bucket: a flattened copy, then norms of what goes to the host
    (``set_norm_for_param_grad_in_gpu``)."""
    flattened = copied(waiting, cut)
    if not cut.norm:
        return flattened
    return max(flattened, cut.norm * max((piece.owned_by(cut.rank) for piece in waiting), default=0))


def copied(waiting: list[Piece], cut: Cut) -> int:
    """Elements of the largest flattened copy: ``allreduce_and_scatter`` over pieces by rank."""
    elements = sum([piece.size for piece in waiting])
    if elements <= cut.bucket:
        # All at once, or where they lie if all are one rank's.
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
            # Only the last part of those before it is that rank's: the other buffer starts again at rank 0.
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
    """Elements of stage 0's largest flattened copy, and of what is cast of it."""
    return _largest_flat([(size, 1) for size in sizes], elements, cast)


def _flattened(elements: int, number: int, cast: int) -> int:
    """Elements beside ``number`` pieces that are reduced together: one alone lies flat already. What is cast
    stands beside what was flattened (``allreduce_bucket``)."""
    return elements * ((number > 1) + cast)


def _largest_flat(runs: list[tuple[int, int]], elements: int, cast: int) -> int:
    """The largest run of pieces that is flattened: it ends with the one that overfills it.

    ``runs`` are sizes of pieces and how many of that size follow one another.
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
                # As many again overfill the next ones too, and these are as large as each other.
                again = elements // size + 1
                if left >= again:
                    largest, left = max(largest, _flattened(again * size, again, cast)), left % again
    return max(largest, _flattened(group, number, cast))


def _total(instant: Instant) -> int:
    return instant.total
