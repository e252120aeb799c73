"""Check before a launch that the GPUs (or the host of CPU ranks) have the predicted peak free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardscope.core.errors import FieldError
from shardscope.core.number_format import count, gib
from shardscope.records.folder import FINAL

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.machine.detection import GpuNow
    from shardscope.runs.run import Run

MAX_NAMED_PROCESSES = 3


class TooLittleFreeError(FieldError):
    """Error of a launch that needs more memory than a GPU, or the host of CPU ranks, has free.

    ``ss.launch(..., force=True)`` launches anyway.
    """


def check_free_memory(plan: Plan, cards: Sequence[GpuNow], *, needs_peak: bool, holding: str = "") -> str:
    """Return a warning if a GPU has less memory free than its rank's predicted peak; "" if all have enough.

    ``cards`` are the GPUs in rank order; ``holding`` describes the user's own runs on them. With
    ``needs_peak`` (the task trains the plan's model, and the user did not force the launch) raise
    ``TooLittleFreeError`` instead of warning.
    """
    if not cards:  # The free memory is unknown.
        return ""
    try:
        report = plan.memory()
    except FieldError as refusal:  # An option without a memory formula: only the run can measure it.
        return f"what this plan takes of memory is not predicted: {refusal}"
    # The pipeline is the outermost mesh dimension: the ranks of a stage are adjacent.
    by_rank = [stage for stage in report.by_stage for _ in range(plan.world_size // len(report.by_stage))]
    beside = zip(cards, by_rank, strict=False)
    card, stage = min(beside, key=lambda pair: pair[0].free_bytes - pair[1].peak_bytes)
    if card.free_bytes >= stage.peak_bytes:
        return ""
    whose = "the plan's" if len(report.by_stage) == 1 else f"pipeline stage {stage.stage}'s"
    free = f"{gib(card.free_bytes)} of {gib(card.total_bytes)} GiB free"
    peak = gib(stage.peak_bytes)
    if needs_peak:
        is_worst = stage.peak_bytes == report.peak_bytes
        least = f" (its least: {gib(report.low_bytes)})" if is_worst else ""
        room = "; ".join(filter(None, (_make_room(card, plan), holding)))
        raise TooLittleFreeError(
            f"launch.plan on GPU {card.index}",
            free,
            f"at least {peak} GiB free, {whose} predicted peak{least}",
            f"{room}; or force=True, to go on all the same",
        )
    return f"GPU {card.index} has {free}, and {whose} predicted peak is {peak} GiB{_users(card)}"


def check_free_host(plan: Plan, *, needs_peak: bool) -> str:
    """Check like :func:`check_free_memory` for CPU ranks, which share the host's memory."""
    # Imported lazily: psutil belongs to the extra "train".
    from shardscope.runs.watch.host_monitor import read_free_host_memory

    try:
        report = plan.memory()
    except FieldError as refusal:
        return f"what this plan takes of memory is not predicted: {refusal}"
    each = plan.world_size // len(report.by_stage)
    needed = each * sum(stage.peak_bytes + stage.host_bytes for stage in report.by_stage)
    free_bytes, total_bytes = read_free_host_memory()
    if free_bytes >= needed:
        return ""
    free = f"{gib(free_bytes)} of {gib(total_bytes)} GiB free"
    ranks = count(plan.world_size, "CPU rank")
    if needs_peak:
        found = plan.repairs()
        room = found[0].change if found else "end what else runs here, or fewer ranks"
        raise TooLittleFreeError(
            "launch.plan on this host",
            free,
            f"at least {gib(needed)} GiB free, the predicted peak of {ranks}",
            f"{room}; or force=True, to go on all the same",
        )
    return f"this host has {free}, and the predicted peak of {ranks} is {gib(needed)} GiB"


def describe_runs_on_gpus(others: Sequence[Run], cards: Sequence[GpuNow]) -> str:
    """Describe the live runs among ``others`` that use any of ``cards`` on this machine; "" if none does."""
    wanted = {card.index for card in cards}
    told = [
        f"the run {run.name} is {run.status} on GPU {', '.join(map(str, sorted(shared)))}: run.stop() ends it"
        for run in others
        if run.is_here and (shared := wanted & set(run.gpus)) and run.status not in FINAL
    ]
    return "; ".join(told)


def _make_room(card: GpuNow, plan: Plan) -> str:
    """Return a suggested fix: end the other processes on the GPU or, if there are none, change the plan."""
    if card.processes:
        return f"end what is on it{_users(card)}, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    found = plan.repairs()
    return found[0].change if found else "plan.repairs()[0].plan"


def _users(card: GpuNow) -> str:
    if not card.processes:
        return ""
    told = [
        f"process {pid}" if num_bytes is None else f"process {pid} with {gib(num_bytes)} GiB"
        for pid, num_bytes in card.processes[:MAX_NAMED_PROCESSES]
    ]
    more = len(card.processes) - len(told)
    return f" ({', '.join(told)}{f' and {more} more' if more else ''})"
