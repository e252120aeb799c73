"""``plan.step()``: the seconds of one optimizer step, from closed formulas."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.memory.activations.forward import modules_of
from shardscope.timing.calibration.finished_runs import residual
from shardscope.timing.collectives import bounding_link
from shardscope.timing.flops import hardware_flops_per_token, model_flops_per_token
from shardscope.timing.layers import PEAKS
from shardscope.timing.paging import travelling_bytes
from shardscope.timing.report import PARTS, Communication, StepReport
from shardscope.timing.stages import StageSeconds, seconds_of, work_of
from shardscope.timing.words import told

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import Part
    from shardscope.timing.sent import Told


ALIKE = 1 - 1e-12
"""Stages as slow as that share of the slowest are as slow: where a link bounds them all, sums differ by their
rounding only, and the first of them is looked at."""


class Pipeline(NamedTuple):
    """The stages of one plan in one step."""

    each: list[StageSeconds]
    """One of every kind of stage."""
    kind_of: tuple[int, ...]
    """Of each stage which of them it is."""
    slowest: StageSeconds

    def waits(self, vpp: int, micro_batches: int) -> float:
        """The bubble of 1F1B, or interleaved with ``vpp`` chunks a stage; 0 of one stage."""
        if len(self.kind_of) == 1:
            return 0.0
        flowing = [kind.flowing for kind in self.each]
        every: float = sum([flowing[kind] for kind in self.kind_of])
        found: float = bubble_seconds(every, self.slowest.flowing, vpp, micro_batches)
        return found


def pipeline_of(plan: Plan, rates: Rates) -> Pipeline:
    """The seconds of all stages. Raises ``ValueError`` naming the figure that is not known."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].memory_model()
    shapes = model.shapes(plan)
    work = work_of(plan, modules_of(plan), rates)
    kinds = [seconds_of(work, model.stage(plan, shape)) for shape in shapes.kinds]
    busy = [one.busy for one in kinds]
    most = ALIKE * max(busy)
    slowest = next(one for one, seconds in zip(kinds, busy, strict=True) if seconds >= most)
    return Pipeline(kinds, shapes.kind_of, slowest)


def step(plan: Plan, rates: Rates) -> StepReport:
    """The step of ``plan`` at these speeds. Raises ``ValueError`` naming the figure that is not known."""
    pipeline = pipeline_of(plan, rates)
    slowest, bubble = pipeline.slowest, pipeline.waits(plan.degrees.vpp, plan.num_micro_batches)
    parts: dict[Part, float] = {part: slowest.parts.get(part, bubble) for part in PARTS}
    if plan.recipe.optimizer.startswith("paged"):
        # A page leaves before another has its place: out and in in turn, and nothing runs beneath.
        paged = travelling_bytes(plan, plan.memory())
        parts["offload"] += 2 * paged / rates.host.bytes_per_second
    return _report(plan, rates, parts, slowest)


def bubble_seconds(all_stages: Any, slowest: Any, vpp: Any, micro_batches: Any) -> Any:
    """What the slowest stage waits: for one micro-batch to pass all the others, forward and backward.

    Arguments are seconds of all micro-batches of a step. Of equal stages that is (pp - 1) / (vpp x
    micro-batches) of one stage's own (Narayanan et al. 2021, section 2.2), with 1F1B as with GPipe;
    interleaved, a micro-batch waits for a vpp-th of each.
    """
    return (all_stages - slowest) / (vpp * micro_batches)


def _report(plan: Plan, rates: Rates, parts: dict[Part, float], slowest: StageSeconds) -> StepReport:
    recipe, gpu = plan.recipe, plan.cluster.gpu
    tokens = recipe.global_batch_size * recipe.seq_len
    hidden: dict[Part, float] = dict.fromkeys(PARTS, 0.0) | slowest.find_hidden()
    hidden["offload"] = slowest.hidden_offload
    return StepReport(
        parts=MappingProxyType(parts),
        hidden=MappingProxyType(hidden),
        find_communication=lambda: _communication(plan, rates, slowest.find_told()),
        num_gpus=plan.world_size,
        num_tokens=tokens,
        model_flops=model_flops_per_token(plan, causal=True) * tokens,
        model_flops_full_attention=model_flops_per_token(plan, causal=False) * tokens,
        hardware_flops=hardware_flops_per_token(plan) * tokens,
        peak_flops=gpu.peak_flops.get(PEAKS[recipe.precision]),
        watts=gpu.tdp_watts,
        price_per_hour_usd=plan.cluster.price_per_hour_usd,
        calibration=rates.source,
        words=lambda part: told(part, plan, rates),
        find_residual=lambda: residual(plan),
    )


def _communication(plan: Plan, rates: Rates, collectives: list[Told]) -> tuple[Communication, ...]:
    per_node = plan.cluster.gpus_per_node
    return tuple(
        Communication(
            part=transfer.part,
            collective=transfer.collective,
            link=bounding_link(transfer, per_node, rates).name,
            ranks=transfer.ranks,
            num_bytes=transfer.num_bytes * times,
            seconds=took,
            hidden_seconds=hidden,
        )
        for transfer, times, took, hidden in collectives
        if took
    )
