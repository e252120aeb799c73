"""Uncertainty band of a plan's peak, due to library buffers and the allocator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.report import COMPONENTS, Component, PhaseMemory

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NOT_TENSORS: tuple[Component, ...] = ("communication", "runtime", "fragmentation")
"""Components that are no torch tensors: predicted only as a band, and so excluded from a run's error."""
TENSORS: tuple[Component, ...] = tuple(name for name in COMPONENTS if name not in NOT_TENSORS)


def compute_allocated_and_freed(phases: Sequence[PhaseMemory]) -> int:
    """Return the bytes that one step of a stage allocates and frees, summed over components.

    The allocator keeps the blocks of freed tensors, and reuses them only for matching sizes, so each
    component counts at its own maximum. Initialisation is not part of a step.
    """
    step = [phase.components for phase in phases if phase.phase != "initialisation"]
    if not step:
        return 0
    num_bytes = 0
    for name in TENSORS:
        sizes = [components[name] for components in step]
        num_bytes += max(sizes) - min(sizes)
    return num_bytes


def compute_band(
    plan: Plan, stages: Iterable[tuple[Sequence[PhaseMemory], overheads.Band]]
) -> tuple[int, int]:
    """Return the peak with the smallest and with the largest library buffers and allocator loss, in bytes.

    ``stages`` are each stage's phases and its communicators' buffers. The minimum may be at another phase
    than the peak: in backward, the point estimate includes fragmentation; in the optimizer step, it does not.
    """
    low = high = peak = 0
    gpu = plan.cluster.gpu
    runtime = overheads.estimate_runtime(gpu.vendor, gpu.architecture)
    for phases, communication in stages:
        unusable = overheads.estimate_fragmentation(compute_allocated_and_freed(phases), plan.on_gpu).high
        for phase in phases:
            # Take the point estimates out of the phase's total, then add the band's ends.
            terms = phase.terms
            fragmentation = terms["fragmentation"].num_bytes if "fragmentation" in terms else 0
            tensors = phase.total - communication.point - runtime.point - fragmentation
            # Before the first step nothing of a step was freed yet.
            gaps = 0 if phase.phase == "initialisation" else max(fragmentation, unusable)
            low = max(low, tensors + communication.low + runtime.low)
            high = max(high, tensors + communication.high + runtime.high + gaps)
            peak = max(peak, phase.total)
    # The smallest end has no fragmentation at all.
    return low, overheads.limit_to_usable(high, peak, plan.cluster.usable_bytes_per_gpu, plan.on_gpu)
