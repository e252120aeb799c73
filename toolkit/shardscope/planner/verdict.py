"""The verdict on a plan: whether its GPU memory, host memory and NVMe are sufficient.

All views and "Make it fit" use this verdict. ``MemoryReport.verdict`` covers GPU memory only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib, join_list
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.planner.memory_needs import WHILE_BUILT, MemoryNeed, list_memory_needs

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport

State = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """State of a plan, from "fits" to "does not fit", with the reason."""

    state: State
    """``tight``: the plan fits, but such runs may run out of memory. ``unknown``: GPU memory is sufficient,
    but the plan needs host memory or NVMe of unknown size."""
    reason: str
    """The reason in one sentence, with the numbers."""
    shortages: tuple[MemoryNeed, ...] = ()
    """Kinds of memory that are too small, the GPU first."""
    unknown: tuple[MemoryNeed, ...] = ()
    """Kinds of memory that the plan needs and whose size the cluster leaves unset."""

    @property
    def runs(self) -> bool:
        """Return whether the plan can be launched, as far as sizes are known."""
        return self.state != "does not fit"


def assess_plan(plan: Plan, report: MemoryReport | None = None) -> Verdict:
    """Return the verdict on ``plan``, from ``report`` (None: the predicted report)."""
    report = report or plan.memory()
    needed = list_memory_needs(plan, report)
    short = tuple(need for need in needed if need.short_bytes)
    unknown = tuple(need for need in needed if need.room_bytes is None and need.needed_bytes)
    place = describe_place(plan, report)
    # Too little of a known size decides, whatever is unknown beside it.
    if short:
        return Verdict(
            state="does not fit",
            reason=f"Needs {join_list(describe_shortage(need, place) for need in short)}.",
            shortages=short,
            unknown=unknown,
        )
    is_tight = report.verdict == "tight"
    tight = _why_tight(report, place) if is_tight else ""
    # Memory of unknown size is reported before a tight fit: such a plan may not start at all.
    if unknown:
        amounts = join_list(_describe_amount(need, place) for need in unknown)
        reason = f"Needs {amounts}; how much a node has is not known."
        return Verdict(state="unknown", reason=f"{reason} {tight}".strip(), unknown=unknown)
    if is_tight:
        return Verdict(state="tight", reason=tight)
    peak = f"{format_gib(report.peak_bytes)} of {format_gib(report.usable_bytes)} GiB"
    return Verdict(state="fits", reason=f"Needs {peak} on {place}.")


def describe_place(plan: Plan, report: MemoryReport) -> str:
    """Return where the peak is: ``each GPU``, ``the GPU`` of one, or ``the fullest GPU, stage 0``."""
    unit = name_device(plan.cluster)
    if plan.degrees.pp > 1:
        return f"the fullest {unit}, stage {report.worst_stage.stage}"
    return f"each {unit}" if plan.world_size > 1 else f"the {unit}"


def describe_shortage(need: MemoryNeed, place: str = "each GPU") -> str:
    """Return the required and available amounts:
    ``1,240 GiB of host memory on each node, which has 1,000``. ``place`` is where the GPU's memory is."""
    room = "" if need.room_bytes is None else format_gib(need.room_bytes)
    needed = format_gib(need.needed_bytes)
    if needed == room:  # The difference is smaller than the displayed precision.
        return (
            f"{format_gib(need.short_bytes)} GiB more than the {room} GiB that "
            f"{_describe_owner(need, place)} has"
        )
    return f"{_describe_amount(need, place)}, which has {room}"


def _describe_amount(need: MemoryNeed, place: str) -> str:
    of = {"GPU memory": "", "NVMe": " on NVMe"}.get(need.name, " of host memory")
    while_built = " while the model is built" if need.name == WHILE_BUILT else ""
    return f"{format_gib(need.needed_bytes)} GiB{of}{while_built} on {_describe_owner(need, place)}"


def _describe_owner(need: MemoryNeed, place: str) -> str:
    return place if need.name == "GPU memory" else "each node"


def _why_tight(report: MemoryReport, place: str) -> str:
    usable = format_gib(report.usable_bytes)
    # Two reasons for "tight": the peak is over the share at which measured runs began to fail, or the upper
    # end of the prediction's band is over the GPU's memory.
    if report.is_tight:
        share = f"{100 * report.peak_bytes / report.usable_bytes:.0f} %"
        return (
            f"May run out of memory: it needs {format_gib(report.peak_bytes)} of {usable} GiB on {place} "
            f"({share}), and some runs that need over {TIGHT_PERCENT} % do."
        )
    return (
        f"May run out of memory: likely {format_gib(report.low_bytes)} to {format_gib(report.high_bytes)} "
        f"GiB on {place}, which has {usable}."
    )
