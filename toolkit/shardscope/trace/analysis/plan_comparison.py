"""Comparison of a plan's predicted step with the measured one, part by part."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np

from shardscope.timing.report import PARTS, format_part, format_seconds
from shardscope.trace.analysis.activity import RankActivity
from shardscope.trace.analysis.collectives import find_collectives
from shardscope.trace.analysis.diff import list_windows
from shardscope.trace.analysis.intervals import Int64s, Mask, find_exclusive_parts, measure_within
from shardscope.trace.analysis.kernels import find_kinds, list_kinds, measure_work_ns
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.trace.store import Trace

IDLE, UNKNOWN_COMMUNICATION, STEP = "idle", "other communication", "step"
"""Parts that only a measurement has, and the sum."""

_PART_OF_KIND = {
    "matmul": "matrices",
    "convolution": "matrices",
    "attention": "attention",
    "optimizer": "optimizer",
}
_PART_OF_AXIS = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "pp": "pipeline_transfers",
}
_NOT_APART = {
    "matrices": "recomputation",
    "attention": "recomputation",
    "elementwise": "recomputation",
    "pipeline_transfers": "bubble",
}
"""Part -> the predicted part that its measured time includes. A trace cannot tell recomputed kernels from
those of forward, nor a bubble from a receive."""
_LOSS = re.compile(r"log_?softmax|nll_loss|cross_?entropy", re.IGNORECASE)


class ComparisonRow(TypedDict):
    """One part of the step."""

    part: str
    """A part of ``plan.step().parts``, "idle", "other communication", or "step", the sum of all."""
    predicted_seconds: float | None
    """None: a plan predicts no such part."""
    measured_seconds: float | None
    """On the rank that computes most, averaged over steps. None: a trace cannot tell it from another part."""


class PlanComparison(Table[ComparisonRow]):
    """Predicted and measured seconds of each part of a step, and a sentence about the largest difference."""

    def __init__(self, rows: list[ComparisonRow], text: str) -> None:
        super().__init__(rows, tuple(get_type_hints(ComparisonRow)), text=text)

    def __repr__(self) -> str:
        return Table.__repr__(self._name_parts())

    def _repr_html_(self) -> str:
        return Table._repr_html_(self._name_parts())

    def _name_parts(self) -> Table[ComparisonRow]:
        """Return the rows with the names of parts that charts and :attr:`text` show, such as "matmuls"."""
        rows: list[ComparisonRow] = [{**row, "part": format_part(row["part"])} for row in self]
        return Table(rows, self.columns, text=self.text)


def compare_with_plan(trace: Trace, plan: Plan) -> PlanComparison:
    """Return the parts; see :meth:`Trace.compare`. Raises ``ValueError`` if the plan has no prediction."""
    report = plan.step()
    # A plan predicts the slowest pipeline stage. Others wait for it in their collectives, so that their time
    # with communication is as long: compute alone tells which it is.
    windows = list_windows(trace)

    def measure_compute(one: RankActivity) -> float:
        # In a step: ranks may have recorded different numbers of them.
        start, end, count = windows[one.rank]
        return int(measure_within(one.compute, np.array([start]), np.array([end]))[0]) / count

    rank = max(trace.activity.ranks, key=measure_compute, default=None)
    measured = _measure_parts(trace, plan, rank) if rank is not None else {}
    rows: list[ComparisonRow] = []
    for part in PARTS:
        predicted = report.parts[part]
        seconds = measured.get(part, 0.0) if part not in _NOT_APART.values() else None
        if predicted or seconds:
            rows.append({"part": part, "predicted_seconds": predicted, "measured_seconds": seconds})
    for extra in (UNKNOWN_COMMUNICATION, IDLE):
        if measured.get(extra):
            rows.append({"part": extra, "predicted_seconds": None, "measured_seconds": measured[extra]})
    total = sum(measured.values())
    rows.append({"part": STEP, "predicted_seconds": report.seconds, "measured_seconds": total})
    where = f" on rank {rank.rank}, which computes most" if len(trace.ranks) > 1 and rank is not None else ""
    text = _describe_difference(rows, where, "a step" if trace.activity.has_steps else "the recording")
    # A file that does not name its job has a world size of 1.
    if trace.world_size > 1 and trace.world_size != plan.world_size:
        text += f" The plan is for {plan.world_size:,} ranks, and the trace is of {trace.world_size:,}."
    return PlanComparison(rows, text)


def _measure_parts(trace: Trace, plan: Plan, rank: RankActivity) -> dict[str, float]:
    """Return one rank's seconds of each part, per step. They add up to the step."""
    activity = trace.activity
    start, end, count = list_windows(trace)[rank.rank]
    parts: dict[str, float] = {}

    def add(part: str, nanoseconds: int) -> None:
        parts[part] = parts.get(part, 0.0) + nanoseconds / count / 1e9

    # 1. Compute. Concurrent kernels share their time, so that the parts add up to the time with compute.
    kinds, kind_names = find_kinds(trace), list_kinds()
    if rank.on_gpu:
        works = np.flatnonzero(activity.is_compute[rank.index]) + rank.index.start
        begins, ends = find_exclusive_parts(trace.start_ns[works], activity.end_ns[works])
        own = np.minimum(ends, end) - np.maximum(begins, start)
    else:
        works = np.flatnonzero(activity.is_compute[rank.index]) + rank.index.start
        inside = (trace.start_ns[works] >= start) & (trace.start_ns[works] < end)
        own = np.where(inside, measure_work_ns(trace)[works], 0)
        # Threads that compute at the same time share the time: scale their sum to the union.
        (union,) = measure_within(rank.compute, np.array([start]), np.array([end])).tolist()
        own = own * (min(union / own.sum(), 1.0) if own.sum() else 1.0)
    is_loss = _mask_loss(trace, works)
    for index, nanoseconds, in_loss in zip(works.tolist(), own.tolist(), is_loss.tolist(), strict=True):
        if nanoseconds > 0:
            kind = kind_names[kinds[index]]
            # A fused loss has the matmul of the output layer inside, which a plan counts as a matmul.
            kind = "loss" if in_loss and kind != "matmul" else kind
            add("loss" if kind == "loss" else _PART_OF_KIND.get(kind, "elementwise"), nanoseconds)
    # 2. Exposed communication by the axis of its group, 3. exposed copies, 4. idle time.
    for row in find_collectives(trace, plan):
        begin = row["start_seconds"] * 1e9
        if row["rank"] == rank.rank and start <= begin < end:
            add(_find_part(row["axis"], row["kind"]), round(row["exposed_seconds"] * 1e9))
    busy = sum(parts.values())
    breakdown = trace.steps() if rank.steps else trace.breakdown()
    copies = sum(row["copy_seconds"] for row in breakdown if row["rank"] == rank.rank)
    if copies:
        add("offload", round(copies * 1e9))
    span = (end - start) / count / 1e9
    parts[IDLE] = max(span - busy - copies / count, 0.0)
    return parts


def _mask_loss(trace: Trace, works: Int64s) -> Mask:
    """Return which works are of the loss, by their own name or that of an operator around them.

    Megatron's ``_VocabParallelCrossEntropy`` consists of pointwise kernels whose names do not say so.
    """
    activity = trace.activity
    is_loss = activity.mask_names(_LOSS)
    origins = np.where(activity.on_gpu[works], activity.launches[works], works)
    is_inside = (origins >= 0) & (activity.find_around(np.maximum(origins, 0), is_loss) >= 0)
    return np.asarray(is_loss[works] | is_inside)


def _find_part(axis: str, kind: str) -> str:
    """Return the part of the step that a collective is in."""
    if axis in _PART_OF_AXIS:
        return _PART_OF_AXIS[axis]
    # Data parallelism, with or without another axis (dp+cp): parameters are gathered, gradients reduced.
    if "dp" in axis.split("+"):
        return "gathers" if kind in ("all_gather", "broadcast") else "gradients"
    return UNKNOWN_COMMUNICATION


def _describe_difference(rows: list[ComparisonRow], where: str, whole: str) -> str:
    """Return the step's seconds and the part that differs most.

    ``where`` says which rank was measured, ``whole`` what was: the recording, if no steps are marked.
    """
    *parts, step = rows
    predicted, measured = step["predicted_seconds"] or 0.0, step["measured_seconds"] or 0.0
    takes = "takes" if whole == "a step" else f"{whole}, in which no steps are marked, takes"
    seconds = f"{format_seconds(predicted)} and {takes} {format_seconds(measured)}"
    text = f"A step is predicted to take {seconds}{where}."
    known = [row for row in parts if row["measured_seconds"] is not None]
    if not known:
        return text
    included = {row["part"]: row["predicted_seconds"] or 0.0 for row in parts}

    def measure_difference(row: ComparisonRow) -> float:
        low, seconds = row["predicted_seconds"] or 0.0, row["measured_seconds"] or 0.0
        high = low + included.get(_NOT_APART.get(row["part"], ""), 0.0)
        return max(low - seconds, seconds - high, 0.0)

    worst = max(known, key=measure_difference)
    takes, expected = (format_seconds(worst[key] or 0.0) for key in ("measured_seconds", "predicted_seconds"))
    if worst["part"] == IDLE:
        return f"{text} Largest difference: {takes} idle, which a plan does not predict."
    other = _NOT_APART.get(worst["part"], "")
    more = (
        f", and {format_seconds(included[other])} of {other} that it includes" if included.get(other) else ""
    )
    part = format_part(worst["part"])
    return f"{text} Largest difference: {part}, {takes} where {expected} is predicted{more}."
