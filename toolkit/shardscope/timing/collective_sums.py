"""Collectives with their seconds, by part of the step and by the arithmetic that can overlap them.

Numbers may be arrays of plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardscope.timing.report import Part
    from shardscope.timing.traffic import OverlappedWith, Transfer


class CollectiveSums(NamedTuple):
    """Collectives of one rank, with the seconds of all their calls."""

    transfers: list[Transfer]
    seconds_each: list[float]
    """Seconds of each transfer without overlap."""
    seconds: dict[Part, float]
    """Sums of these seconds by part."""
    overlappable: dict[tuple[Part, OverlappedWith], float]
    """Sums of the seconds that can overlap with arithmetic, by part and kind of arithmetic."""

    def add(self, number: float, other: CollectiveSums) -> None:
        """Add ``number`` times the sums of ``other`` in place; the lists are unchanged."""
        # No sum starts at 0.0: adding it to a column would cost a pass over all plans.
        for part, seconds in other.seconds.items():
            added = number * seconds
            self.seconds[part] = self.seconds[part] + added if part in self.seconds else added
        for key, seconds in other.overlappable.items():
            added = number * seconds
            self.overlappable[key] = self.overlappable[key] + added if key in self.overlappable else added


class CollectiveCalls(NamedTuple):
    """One kind of collective with its time."""

    transfer: Transfer
    times: float
    """Number of calls per step."""
    seconds: float
    hidden: float


def sum_collectives(
    transfers: Iterable[Transfer], call_seconds: Callable[[Transfer], float]
) -> CollectiveSums:
    """Return ``transfers`` with their seconds, without those of a single rank and those without calls."""
    sums = CollectiveSums([], [], {}, {})
    transfers_kept, seconds_each, seconds, overlappable = sums
    for transfer in transfers:
        part, _, _, ranks, _, times, _, overlaps_with, _ = transfer
        # Checks of the class, because a comparison of an array gives an array: an array of degrees is never
        # left out, and its plans with one rank get 0 seconds.
        if (ranks.__class__ is int and ranks == 1) or (times.__class__ is int and times == 0):
            continue
        one = times * call_seconds(transfer)
        transfers_kept.append(transfer)
        seconds_each.append(one)
        seconds[part] = seconds[part] + one if part in seconds else one
        if overlaps_with != "nothing":
            key = part, overlaps_with
            overlappable[key] = (
                overlappable[key] + _get_overlappable(transfer, one)
                if key in overlappable
                else _get_overlappable(transfer, one)
            )
    return sums


def repeat_collectives(
    parts: Sequence[tuple[float, CollectiveSums]], shares: dict[OverlappedWith, float]
) -> list[CollectiveCalls]:
    """Return each kind of collective, repeated per part, with the ``shares`` overlapped by arithmetic."""
    return [
        CollectiveCalls(
            transfer,
            number * transfer.times,
            number * one,
            0.0
            if transfer.overlaps_with == "nothing"
            else number * _get_overlappable(transfer, one) * shares[transfer.overlaps_with],
        )
        for number, one_kind in parts
        for transfer, one in zip(one_kind.transfers, one_kind.seconds_each, strict=True)
    ]


def _get_overlappable(transfer: Transfer, seconds_each: float) -> float:
    """Return the seconds of one kind of collective that can overlap with arithmetic."""
    return seconds_each * (
        1 - (1 / transfer.num_messages if transfer.exposed_share is None else transfer.exposed_share)
    )
