"""Suggested fixes for an out-of-memory error, from the plan's prediction and the planner's repairs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.planner.memory_needs import find_shortages
from shardscope.planner.repairs.make_it_fit import make_it_fit
from shardscope.planner.repairs.repairs import describe_repairs, find_repairs

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.explain.out_of_memory import Shortage

MAX_REPAIRS = 2
NEXT_TIME = "What would have prevented it: "


def format_memory_numbers(shortage: Shortage, plan: Plan | None) -> str:
    """Format the known numbers: ``requested 2.10 GiB, 0.40 free of 79.1; predicted peak 81.2``."""
    parts = []
    if shortage.requested_bytes is not None:
        parts.append(f"requested {format_gib(shortage.requested_bytes)} GiB")
    if shortage.free_bytes is not None:
        of = "" if shortage.total_bytes is None else f" of {format_gib(shortage.total_bytes)}"
        parts.append(f"{format_gib(shortage.free_bytes)} free{of}")
    numbers = ", ".join(parts)
    if plan is None:
        return numbers
    report = plan.memory()
    if shortage.memory_kind == "GPU memory":
        predicted = f"predicted peak {format_gib(report.peak_bytes)}"
    elif plan.cluster.gpu.memory_is_shared:
        predicted = f"predicted {format_gib(report.peak_bytes)} for each of {plan.world_size} ranks"
    else:
        predicted = f"predicted {format_gib(report.host_bytes)} of host memory for a rank"
    return f"{numbers}; {predicted}" if numbers else predicted


def suggest_fix(shortage: Shortage, plan: Plan, *, trains_the_plan: bool) -> str:
    """Return the suggested fix as one paragraph; empty if none is known."""
    if not trains_the_plan:
        return (
            f"{NEXT_TIME}the task is your own function, whose memory the plan does not predict. "
            "Smaller batches or recomputed activations need less."
        )
    report = plan.memory()
    on_gpu = shortage.memory_kind == "GPU memory" or plan.cluster.gpu.memory_is_shared
    # First case: the plan was predicted not to fit, so the planner's own repairs apply.
    short = [place for place in find_shortages(plan, report) if on_gpu or place.name != "GPU memory"]
    if short:
        # No single change may be enough: then suggest the combination that fits.
        fixes = describe_repairs(plan, find_repairs(plan)[:MAX_REPAIRS])
        if not fixes and (fit := make_it_fit(plan)) is not None:
            fixes = [fit.text]
        needed, room = format_gib(short[0].needed_bytes), format_gib(short[0].room_bytes or 0)
        capacity = f"{room} usable GiB" if short[0].name == "GPU memory" else f"{room} GiB of {short[0].name}"
        cause = f"the plan was predicted not to fit ({needed} of {capacity}). "
        return f"{NEXT_TIME}{cause}{'; or '.join(fixes)}." if fixes else ""
    if not on_gpu:  # Repairs save GPU memory; for host memory they may be useless or even cost some.
        return ""
    # Second case: other processes held GPU memory that the plan needs.
    if shortage.memory_kind == "GPU memory" and shortage.other_process_bytes:
        other_gib = format_gib(shortage.other_process_bytes)
        if shortage.other_process_bytes + report.peak_bytes > report.usable_bytes:
            return (
                f"{NEXT_TIME}other processes held {other_gib} GiB of the GPU, and with the predicted "
                f"{format_gib(report.peak_bytes)} that is more than its {format_gib(report.usable_bytes)} "
                "usable GiB. End them (nvidia-smi names them), or choose another GPU with "
                "CUDA_VISIBLE_DEVICES."
            )
    # Third case: the plan was predicted to fit and did not, so save at least the missing bytes.
    fixes = _find_repairs(plan, _find_missing_bytes(shortage))
    return f"{NEXT_TIME}{'; or '.join(fixes)}." if fixes else ""


def _find_missing_bytes(shortage: Shortage) -> int:
    """Return the bytes by which the allocation exceeded the free memory; 1 GiB if that is unknown."""
    if shortage.requested_bytes is None:
        return 2**30
    return max(1, shortage.requested_bytes - (shortage.free_bytes or 0))


def _find_repairs(plan: Plan, num_bytes: int) -> list[str]:
    """Return repairs that save at least ``num_bytes`` for a plan that was predicted to fit and did not."""
    peak = plan.memory().peak_bytes
    if num_bytes >= peak:
        return []
    # The planner repairs only plans that do not fit: let it repair this one for a GPU that is smaller.
    smaller_gpu = replace(plan.cluster.gpu, usable_bytes=peak - num_bytes)
    smaller = replace(plan, cluster=replace(plan.cluster, gpu=smaller_gpu))
    enough = [repair for repair in find_repairs(smaller) if repair.bytes_won >= num_bytes]
    return describe_repairs(smaller, enough[:MAX_REPAIRS])
