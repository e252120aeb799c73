"""Collectives with their seconds, by part of the step and by the arithmetic that can overlap them.

Numbers may be arrays of plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardscope.timing.report import Part
    from shardscope.timing.traffic import Beneath, Transfer


class Sent(NamedTuple):
    """Collectives of one rank, with the seconds of all their calls."""

    transfers: list[Transfer]
    took: list[Any]
    """Seconds of each transfer without overlap."""
    seconds: dict[Part, Any]
    """Sums of these seconds by part."""
    free: dict[tuple[Part, Beneath], Any]
    """Sums of the seconds that can overlap with arithmetic, by part and kind of arithmetic."""

    def added(self, number: Any, other: Sent) -> None:
        """Add ``number`` times the sums of ``other`` in place; the lists are unchanged."""
        for part, one in other.seconds.items():
            self.seconds[part] = self.seconds[part] + number * one if part in self.seconds else number * one
        for key, one in other.free.items():
            self.free[key] = self.free[key] + number * one if key in self.free else number * one


class Told(NamedTuple):
    """One kind of collective with its time."""

    transfer: Transfer
    times: Any
    """Number of calls per step."""
    seconds: Any
    hidden: Any


def sent(transfers: Iterable[Transfer], call_seconds: Callable[[Transfer], Any]) -> Sent:
    """Return ``transfers`` with their seconds, without those of a single rank and those without calls."""
    found = Sent([], [], {}, {})
    kept, took, seconds, free = found
    for transfer in transfers:
        part, _, _, ranks, _, times, _, beneath, _ = transfer
        if (ranks.__class__ is int and ranks == 1) or (times.__class__ is int and times == 0):
            continue
        one = times * call_seconds(transfer)
        kept.append(transfer)
        took.append(one)
        seconds[part] = seconds[part] + one if part in seconds else one
        if beneath != "nothing":
            key = part, beneath
            free[key] = free[key] + _free(transfer, one) if key in free else _free(transfer, one)
    return found


def told(parts: Sequence[tuple[Any, Sent]], shares: dict[Beneath, Any]) -> list[Told]:
    """Return each kind of collective, repeated per part, with the ``shares`` overlapped by arithmetic."""
    return [
        Told(
            transfer,
            number * transfer.times,
            number * one,
            0.0
            if transfer.beneath == "nothing"
            else number * _free(transfer, one) * shares[transfer.beneath],
        )
        for number, one_kind in parts
        for transfer, one in zip(one_kind.transfers, one_kind.took, strict=True)
    ]


def _free(transfer: Transfer, took: Any) -> Any:
    """Return the seconds of one kind of collective that can overlap with arithmetic."""
    return took * (1 - (1 / transfer.num_messages if transfer.bare is None else transfer.bare))
