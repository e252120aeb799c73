"""Check before a launch that the GPUs (or the host of CPU ranks) have the predicted peak free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardscope.core.errors import FieldError, OverridableError
from shardscope.core.number_format import format_count, format_gib
from shardscope.records.folder import FINAL

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.machine.detection import GpuState
    from shardscope.runs.run import Run

MAX_NAMED_PROCESSES = 3


class TooLittleFreeError(OverridableError):
    """Error of a launch that needs more memory than a GPU, or the host of CPU ranks, has free."""


def check_free_memory(plan: Plan, gpus: Sequence[GpuState], *, needs_peak: bool, other_runs: str = "") -> str:
    """Return a warning if a GPU has less memory free than its rank's predicted peak; "" if all have enough.

    ``gpus`` are the GPUs in rank order; ``other_runs`` describes the user's own runs on them. With
    ``needs_peak`` (the task trains the plan's model, and the user did not force the launch) raise
    ``TooLittleFreeError`` instead of warning.
    """
    if not gpus:  # The free memory is unknown.
        return ""
    try:
        report = plan.memory()
    except FieldError as error:  # An option without a memory formula: only the run can measure it.
        return f"this plan's memory is not predicted: {error}"
    # The pipeline is the outermost mesh dimension: the ranks of a stage are adjacent.
    by_rank = [stage for stage in report.by_stage for _ in range(plan.world_size // len(report.by_stage))]
    # Report the GPU that lacks the most.
    gpus_and_stages = zip(gpus, by_rank, strict=False)
    gpu, stage = min(gpus_and_stages, key=lambda pair: pair[0].free_bytes - pair[1].peak_bytes)
    if gpu.free_bytes >= stage.peak_bytes:
        return ""
    whose = "the plan's" if len(report.by_stage) == 1 else f"pipeline stage {stage.stage}'s"
    free = f"{format_gib(gpu.free_bytes)} of {format_gib(gpu.total_bytes)} GiB free"
    peak = format_gib(stage.peak_bytes)
    if needs_peak:
        # The low estimate is the worst stage's: it says nothing about another one.
        is_worst = stage.peak_bytes == report.peak_bytes
        least = f" (low estimate: {format_gib(report.low_bytes)})" if is_worst else ""
        fix = "; ".join(filter(None, (_suggest_fix(gpu, plan), other_runs)))
        raise TooLittleFreeError(
            f"launch.plan on GPU {gpu.index}",
            free,
            f"at least {peak} GiB free, {whose} predicted peak{least}",
            f"{fix}; or force=True to launch anyway",
        )
    return f"GPU {gpu.index} has {free}, and {whose} predicted peak is {peak} GiB{_describe_users(gpu)}"


def check_free_host(plan: Plan, *, needs_peak: bool) -> str:
    """Check like :func:`check_free_memory` for CPU ranks, which share the host's memory."""
    # Imported lazily: psutil belongs to the extra "train".
    from shardscope.runs.watch.host_monitor import read_free_host_memory

    try:
        report = plan.memory()
    except FieldError as error:
        return f"this plan's memory is not predicted: {error}"
    # All ranks share one memory, so their peaks add up, offloaded tensors included.
    ranks_per_stage = plan.world_size // len(report.by_stage)
    needed = ranks_per_stage * sum(stage.peak_bytes + stage.host_bytes for stage in report.by_stage)
    free_bytes, total_bytes = read_free_host_memory()
    if free_bytes >= needed:
        return ""
    free = f"{format_gib(free_bytes)} of {format_gib(total_bytes)} GiB free"
    ranks = format_count(plan.world_size, "CPU rank")
    if needs_peak:
        repairs = plan.repairs()
        fix = repairs[0].change if repairs else "end other processes, or use fewer ranks"
        raise TooLittleFreeError(
            "launch.plan on this host",
            free,
            f"at least {format_gib(needed)} GiB free, the predicted peak of {ranks}",
            f"{fix}; or force=True to launch anyway",
        )
    return f"this host has {free}, and the predicted peak of {ranks} is {format_gib(needed)} GiB"


def describe_runs_on_gpus(runs: Sequence[Run], gpus: Sequence[GpuState]) -> str:
    """Describe the live runs among ``runs`` that use any of ``gpus`` on this machine; "" if none does."""
    wanted = {gpu.index for gpu in gpus}
    descriptions = [
        f"the run {run.name} is {run.status} on GPU {', '.join(map(str, sorted(shared)))}: run.stop() ends it"
        for run in runs
        if run.is_on_this_machine and (shared := wanted & set(run.gpus)) and run.status not in FINAL
    ]
    return "; ".join(descriptions)


def _suggest_fix(gpu: GpuState, plan: Plan) -> str:
    """Return a suggested fix: end the other processes on the GPU or, if there are none, change the plan."""
    if gpu.processes:
        return (
            f"end the processes on it{_describe_users(gpu)}, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        )
    repairs = plan.repairs()
    return repairs[0].change if repairs else "plan.repairs()[0].plan"


def _describe_users(gpu: GpuState) -> str:
    if not gpu.processes:
        return ""
    descriptions = [
        f"process {pid}" if num_bytes is None else f"process {pid} with {format_gib(num_bytes)} GiB"
        for pid, num_bytes in gpu.processes[:MAX_NAMED_PROCESSES]
    ]
    more = len(gpu.processes) - len(descriptions)
    return f" ({', '.join(descriptions)}{f' and {more} more' if more else ''})"
