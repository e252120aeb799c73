"""Comparison of a row with the single process: losses, gradient norms and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.parity.table import Row

    from shardscope import Plan

LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-3
"""Relative. AdamW's update hardly depends on the length of a gradient, so a wrong one shows only here."""
HELD = ("parameters", "gradients", "optimizer")
FILES_TOLERANCE = 1e-3
"""Relative. Prediction and rehearsals have one group of weights in stage 3; the engine's vectors are a group
apart, which does not decay and is too small for files."""

Verdict = Literal["same", "differs", "failed", "refused", "not here"]
HOLDS: tuple[Verdict, ...] = ("same", "refused", "not here")
"""Verdicts that are no failure: ``refused`` if the table expects it, ``not here`` if a library is missing."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss and gradient norm of each step on each rank: ``[rank][step]``."""

    losses: Sequence[Sequence[float]]
    norms: Sequence[Sequence[float]]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], num_ranks: int) -> Curve:
        """From the metrics of a run: dicts with rank, step, loss and grad_norm."""
        ranks = [
            sorted(
                (line for line in lines if line["rank"] == rank and "loss" in line), key=lambda n: n["step"]
            )
            for rank in range(num_ranks)
        ]
        return cls(
            losses=[[float(line["loss"]) for line in own] for own in ranks],
            norms=[[float(line["grad_norm"]) for line in own] for own in ranks],
        )


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one pipeline stage's ranks at the optimizer step, and the planned ones."""

    stage: int
    held: Mapping[str, int]
    planned: Mapping[str, int]

    tolerance: float = 0.0

    @property
    def is_as_planned(self) -> bool:
        """Component by component, to the byte unless there is a ``tolerance``."""
        return all(
            abs(self.held[name] - planned) <= self.tolerance * planned
            for name, planned in self.planned.items()
        )

    @property
    def words(self) -> str:
        """Format the error of each component."""
        off = [
            f"{name} {self.held[name]:,} held, {planned:,} planned"
            for name, planned in self.planned.items()
            if self.held[name] != planned
        ]
        return f"stage {self.stage}: " + "; ".join(off) if off else "exact"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a row."""

    row: Row
    verdict: Verdict
    why: str = ""
    """Of a verdict other than ``same``."""
    sentence: str = ""
    """Setup that the engine recorded."""
    loss_difference: float = math.nan
    """The largest over all steps and ranks."""
    at_step: int = 0
    """Step of the largest difference."""
    norm_difference: float = math.nan
    """The largest relative one."""
    first_loss: float = math.nan
    last_loss: float = math.nan
    bytes_by_stage: tuple[Bytes, ...] = ()
    seconds: float = field(default=math.nan, compare=False)

    @property
    def holds(self) -> bool:
        """Return whether the row passes: everything compared is equal, bytes included."""
        return self.verdict in HOLDS and all(stage.is_as_planned for stage in self.bytes_by_stage)


def compare(
    row: Row, plan: Plan, reference: Curve, own: Curve, records: Mapping[int, Mapping[str, Any]]
) -> Outcome:
    """Compare a row's curve on every rank with the single process's."""
    (expected,), (norms,) = reference.losses, reference.norms
    short = [rank for rank, losses in enumerate(own.losses) if len(losses) != len(expected)]
    if short or len(own.losses) != row.num_ranks:
        why = f"ranks {short} did not log {len(expected)} losses"
        return Outcome(row=row, verdict="failed", why=why)
    loss, step = _find_largest_difference(own.losses, expected, relative=False)
    norm, norm_step = _find_largest_difference(own.norms, norms, relative=True)
    why = []
    if not loss <= LOSS_TOLERANCE:
        why.append(f"loss {loss:.1e} off at step {step + 1}")
    if not norm <= NORM_TOLERANCE:
        why.append(f"gradient norm {norm:.1e} off at step {norm_step + 1}")
    if not expected[-1] < expected[0] - 0.1:
        why.append("the single process learns nothing, so the comparison proves nothing")
    return Outcome(
        row=row,
        verdict="differs" if why else "same",
        why="; ".join(why),
        sentence=str(records[0].get("engine", {}).get("sentence", "")),
        loss_difference=loss,
        at_step=step,
        norm_difference=norm,
        first_loss=own.losses[0][0],
        last_loss=own.losses[0][-1],
        bytes_by_stage=_compare_bytes(plan, [records[rank]["parity"] for rank in range(row.num_ranks)]),
    )


def _compare_bytes(plan: Plan, records: Sequence[Mapping[str, Any]]) -> tuple[Bytes, ...]:
    """Compare bytes with the plan: of state on NVMe the files, else each component of each stage."""
    if planned := plan.memory().nvme_bytes:
        held = max(int(record["files"]) for record in records)
        return (Bytes(stage=0, held={"files": held}, planned={"files": planned}, tolerance=FILES_TOLERANCE),)
    return bytes_by_stage(plan, [record["held"] for record in records])


def bytes_by_stage(plan: Plan, held: Sequence[Mapping[str, int]]) -> tuple[Bytes, ...]:
    """Return measured and predicted bytes of each stage's largest rank; stages are consecutive ranks.

    Gradients as they are when the optimizer steps; of parameters and optimizer what stays. For all but ZeRO
    that is ``at("optimizer")`` altogether: DeepSpeed's update makes copies beside its state and frees them.
    """
    stages = plan.memory().by_stage
    ranks = len(held) // len(stages)
    results = []
    for number, stage in enumerate(stages):
        own = held[number * ranks : (number + 1) * ranks]
        stays, planned = stage.at("rest").components, stage.at("optimizer").components
        results.append(
            Bytes(
                stage=number,
                held={name: max(int(rank[name]) for rank in own) for name in HELD},
                planned={
                    "parameters": int(stays["parameters"]),
                    "gradients": int(planned["gradients"]),
                    "optimizer": int(stays["optimizer"]),
                },
            )
        )
    return tuple(results)


def _find_largest_difference(
    ranks: Sequence[Sequence[float]], expected: Sequence[float], *, relative: bool
) -> tuple[float, int]:
    """Return the largest difference and its step; a value that is not a number counts as infinite."""
    largest, at = 0.0, 0
    for own in ranks:
        for step, (value, target) in enumerate(zip(own, expected, strict=True)):
            difference = abs(value - target) / (abs(target) if relative else 1.0)
            if not math.isfinite(difference):
                difference = math.inf
            if difference > largest:
                largest, at = difference, step
    return largest, at
