"""Speeds that a run's trace measured: of matmuls, and of collectives by size and mesh axis.

A calibration measures kernels alone; a trace measures them inside of real steps. ``trace.measured_rates()``
reads them from a trace, ``store.py`` stores them beside the calibrations, and predictions take them from
there until the machine is calibrated again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from shardscope.core.cluster import PRECISIONS
from shardscope.core.errors import check_choice, check_integer, check_number, refuse
from shardscope.core.number_format import format_number
from shardscope.core.serialization import Serializable
from shardscope.timing.calibration.curves import COLLECTIVES, MAX_BYTES, MAX_RANKS, Collective, CollectiveCall
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.timing.rates import Rates

FIX = "trace.measured_rates()"
MAX_CALLS = 1_000
MAX_FACTOR = 1e4
"""Largest ratio of a measured speed to the predicted one, in both directions."""


@dataclass(frozen=True, kw_only=True)
class TracedCall(Serializable):
    """Calls of one collective, size and group on one node."""

    axis: str
    """Axis of the mesh: "tp", "dp", ...; empty if unknown."""
    collective: Collective
    """"send" is a message to another rank."""
    num_bytes: int
    """Bytes of the full vector, as in ``CollectiveCall``."""
    num_ranks: int
    """Ranks of the group."""
    num_calls: int
    """Calls that were recorded."""
    seconds: float
    """Median transfer time: the shortest duration across ranks, without waiting for the last one."""

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or len(self.axis) > 40:
            refuse("TracedCall.axis", self.axis, "a name of up to 40 characters", FIX)
        check_choice("TracedCall.collective", self.collective, COLLECTIVES)
        check_integer("TracedCall.num_bytes", self.num_bytes, low=1, high=MAX_BYTES)
        check_integer("TracedCall.num_ranks", self.num_ranks, low=2, high=MAX_RANKS)
        check_integer("TracedCall.num_calls", self.num_calls, low=1, high=10**12)
        check_number("TracedCall.seconds", self.seconds, low=1e-9, high=3_600.0)


@dataclass(frozen=True, kw_only=True)
class TracedRates(Serializable):
    """Speeds of one machine's ranks, measured by the trace of a run. Raises ``ValueError`` for bad values."""

    gpu: str
    """Name of the GPU type; "cpu" for CPU ranks."""
    base: str
    """``Rates.source`` of the rates that the trace was compared with; others are not changed."""
    precision: str
    """Precision of the matmuls."""
    matmul_speed: float | None
    """Measured over predicted speed of the plan's matmuls; None: the trace cannot tell."""
    calls: tuple[TracedCall, ...] = ()
    """Collectives inside of a node."""
    notes: tuple[str, ...] = ()
    """Sentences about what the trace cannot tell, so that its rate stays as it was."""

    def __post_init__(self) -> None:
        for name in ("gpu", "base"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 1 <= len(value) <= 400:
                refuse(f"TracedRates.{name}", value, "1 to 400 characters", FIX)
        check_choice("TracedRates.precision", self.precision, PRECISIONS)
        if self.matmul_speed is not None:
            check_number("TracedRates.matmul_speed", self.matmul_speed, low=1 / MAX_FACTOR, high=MAX_FACTOR)
        for name, kind in (("calls", TracedCall), ("notes", str)):
            entries = getattr(self, name)
            if not isinstance(entries, tuple) or not all(isinstance(entry, kind) for entry in entries):
                refuse(f"TracedRates.{name}", entries, f"a tuple of {kind.__name__}", FIX)
        if len(self.calls) > MAX_CALLS:
            refuse("TracedRates.calls", len(self.calls), f"at most {MAX_CALLS}", FIX)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return the rates from their ``to_dict``. Raise ``ValueError`` for unknown or bad values."""
        calls, notes = data.get("calls", []), data.get("notes", [])
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            refuse("TracedRates.calls", calls, "a list of TracedCall", FIX)
        if not isinstance(notes, list | tuple):
            refuse("TracedRates.notes", notes, "a list of text", FIX)
        known = {"calls": tuple(TracedCall.from_dict(call) for call in calls), "notes": tuple(notes)}
        return super().from_dict({**data, **known})

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences for the user: the measured speeds, and those that could not be measured."""
        sentences = []
        if self.matmul_speed is not None:
            sentences.append(
                f"Matmuls in {self.precision} run at {self.matmul_speed:.3g} times the predicted speed."
            )
        largest: dict[tuple[str, str], TracedCall] = {}
        for call in self.calls:
            key = call.axis, call.collective
            if key not in largest or call.num_bytes > largest[key].num_bytes:
                largest[key] = call
        for (axis, collective), call in largest.items():
            of_axis = f" of {axis}" if axis else ""
            # Algorithm bandwidth, which needs no assumption about the algorithm.
            rate = f"{format_number(call.num_bytes / call.seconds / 1e9)} GB/s"
            sentences.append(
                f"{collective.replace('_', '-').capitalize()}{of_axis}, {call.num_ranks} ranks: "
                f"{format_seconds(call.seconds)} for {call.num_bytes:,} bytes, {rate}."
            )
        return (*sentences, *self.notes)

    def store(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Make predictions use these speeds; return the file. ``folder`` is that of ``ss.calibrate``.

        Raises ``OSError`` if it cannot be written, ``ValueError`` for a damaged file.
        """
        from shardscope.timing.calibration.store import store_traced_rates

        return store_traced_rates(self, folder)

    def __str__(self) -> str:
        return " ".join(self.sentences)


def apply_traced_rates(rates: Rates, traced: TracedRates) -> Rates:
    """Return ``rates`` with the speeds of ``traced`` in their place; unchanged if others were measured."""
    from shardscope.timing.calibration.fit import STATE, build_measured_calls, fit_link

    if rates.source != traced.base:
        return rates
    matrices = dict(rates.matrices)
    known = matrices.get(traced.precision)
    if traced.matmul_speed is not None and known is not None:
        speed = known.flops_per_second * traced.matmul_speed
        matrices[traced.precision] = known._replace(flops_per_second=speed)
    # A measured curve is of groups of one size: of each collective, the size that moved most bytes.
    inside, curves = rates.inside, dict(rates.collectives)
    by_size: dict[int, list[CollectiveCall]] = {}
    for call in traced.calls:
        plain = CollectiveCall(collective=call.collective, num_bytes=call.num_bytes, seconds=call.seconds)
        by_size.setdefault(call.num_ranks, []).append(plain)
    for ranks, calls in sorted(by_size.items(), key=lambda item: sum(one.num_bytes for one in item[1])):
        curves |= build_measured_calls(calls, ranks)
        if state := [call for call in calls if call.collective in STATE]:
            inside = fit_link(replace(rates, collectives=MappingProxyType({})), state, ranks)
    return replace(
        rates,
        matrices=MappingProxyType(matrices),
        inside=inside,
        collectives=MappingProxyType(curves),
        source=f"{rates.source}, with speeds that a trace measured",
    )
