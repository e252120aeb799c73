"""The stages of one plan's pipeline in one step, and what they wait for each other under every schedule.

A plan's own is in ``plan.step().parts["bubble"]``: 1F1B, interleaved where stages have chunks, or GPipe where
a layout asks for it. What others would make of the same stages is told beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import modules_of
from shardscope.timing.calibration.curves import rates_for
from shardscope.timing.pipeline import NAMES, Schedule, bubble_seconds, schedule_of
from shardscope.timing.report import seconds_words
from shardscope.timing.stages import StageSeconds, seconds_of, work_of

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.timing.rates import Rates

_WEIGHTS_SHARE = 1 / 3
"""Of a trained matrix's products, those that make weights' gradients: forward and inputs' gradients are as
many FLOPs each (Kaplan et al. 2020, section 2.1)."""
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
    framework = frameworks[plan.layout.framework]
    model = framework.memory_model()
    shapes = model.shapes(plan)
    work = work_of(plan, modules_of(plan), rates, framework.timing_model())
    kinds = [seconds_of(work, model.stage(plan, shape)) for shape in shapes.kinds]
    busy = [one.busy for one in kinds]
    most = ALIKE * max(busy)
    slowest = next(one for one, seconds in zip(kinds, busy, strict=True) if seconds >= most)
    return Pipeline(kinds, shapes.kind_of, slowest)


def bubbles(plan: Plan) -> dict[Schedule, float]:
    """Seconds of a step that the slowest stage waits, by schedule; empty of a single stage.

    GPipe waits as long as 1F1B, and holds all micro-batches' activations where 1F1B holds pp (Huang et al.
    2019, section 2; Narayanan et al. 2021, section 2.2). Interleaved is with the plan's vpp, or 2 chunks,
    where a stage has as many layers. Zero-bubble schedules make weights' gradients while they would wait:
    of F + B + W of the other stages ZB-H1 leaves F + B - W, with the memory of 1F1B, ZB-H2 F + B - 2 W with
    about twice its micro-batches in flight (Qi et al. 2023, arXiv:2401.10241, table 2). Frozen matrices
    have no W. Memory and transfers of the other schedules are not told here.

    Raises ``ValueError`` for a figure of the GPU that is not known.
    """
    if schedule_of(plan) is None:
        return {}
    found = pipeline_of(plan, rates_for(plan.cluster))
    micro_batches, pp = plan.num_micro_batches, plan.degrees.pp
    plain = found.waits(1, micro_batches)
    share = 0.0 if plan.recipe.has_adapters else _WEIGHTS_SHARE
    matrices = [kind.parts["matrices"] for kind in found.each]
    others = sum(matrices[kind] for kind in found.kind_of) - found.slowest.parts["matrices"]
    weights = share * others / micro_batches
    told: dict[Schedule, float] = {"gpipe": plain, "1f1b": plain}
    chunks = max(2, plan.degrees.vpp)
    if plan.degrees.vpp > 1 or plan.architecture.num_hidden_layers >= chunks * pp:
        told["interleaved"] = found.waits(chunks, micro_batches)
    return told | {"zb-h1": max(0.0, plain - 2 * weights), "zb-h2": max(0.0, plain - 3 * weights)}


def words(plan: Plan) -> str:
    """The schedule that runs, by its framework's own name, and the bubble of the others."""
    own = schedule_of(plan)
    if own is None:
        return ""
    upstream = frameworks[plan.layout.framework].timing_model().SCHEDULES[own]
    others = [f"{NAMES[name]} {seconds_words(waits)}" for name, waits in bubbles(plan).items() if name != own]
    return (
        f"; {NAMES[own]} runs ({upstream}), the same stages would wait with {', '.join(others)} "
        "(Huang et al. 2019; Qi et al. 2023, table 2)"
    )
