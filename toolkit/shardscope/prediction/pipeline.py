"""Pipeline stages of one plan in one step, and their bubble under every schedule.

The bubble of the plan's own schedule is ``plan.step().parts["bubble"]``: 1F1B, interleaved with virtual
stages, or GPipe if the layout configures it. The other schedules' bubbles are reported for comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.pipeline import NAMES, Schedule, compute_bubble_seconds, find_schedule
from shardscope.timing.report import format_seconds
from shardscope.timing.stages import StageSeconds, compute_stage_seconds, prepare_layers

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.timing.rates import Rates

_WEIGHTS_SHARE = 1 / 3
"""Fraction of a trained matrix's FLOPs that computes the weight gradient: forward and input gradient take
as many FLOPs each (Kaplan et al. 2020, section 2.1)."""
TIE_TOLERANCE = 1 - 1e-12
"""Relative tolerance of ties for the slowest stage, of which the first is used: where one link bounds all
stages, their sums differ by rounding only."""


class Pipeline(NamedTuple):
    """Times of the stages of one plan in one step."""

    kinds: list[StageSeconds]
    """Seconds of one stage of every kind."""
    kind_of: tuple[int, ...]
    """Index into ``kinds``, for every stage."""
    slowest: StageSeconds

    def compute_bubble(self, vpp: int, micro_batches: int) -> float:
        """Return the seconds of the bubble of 1F1B, or interleaved with ``vpp`` chunks; 0 for one stage."""
        if len(self.kind_of) == 1:
            return 0.0
        # Of the parts that run once per step, micro-batches wait at most for the first one's all-gather
        # (``timing/stages.py``). Interleaved, all stages all-gather at once.
        waits = micro_batches if vpp == 1 else 0
        flowing = [kind.repeated + waits * kind.first_wait for kind in self.kinds]
        all_stages = sum([flowing[kind] for kind in self.kind_of])
        slowest = self.slowest.repeated + waits * self.slowest.first_wait
        return compute_bubble_seconds(all_stages, slowest, vpp, micro_batches)


def compute_pipeline(plan: Plan, rates: Rates) -> Pipeline:
    """Return the seconds of all stages. Raises ``ValueError`` that names an unknown figure."""
    framework = frameworks[plan.layout.framework]
    model = framework.memory_model()
    shapes = model.find_shapes(plan)
    work = prepare_layers(plan, find_modules(plan), rates, framework.timing_model())
    # Only stages of different kinds are computed: equal ones take equal times.
    kinds = [compute_stage_seconds(work, model.count_weights(plan, shape)) for shape in shapes.kinds]
    busy = [kind.busy for kind in kinds]
    limit = TIE_TOLERANCE * max(busy)
    slowest = next(kind for kind, seconds in zip(kinds, busy, strict=True) if seconds >= limit)
    return Pipeline(kinds, shapes.kind_of, slowest)


def compute_bubbles(plan: Plan) -> dict[Schedule, float]:
    """Return the bubble of the slowest stage in seconds per step, by schedule; empty without a pipeline.

    GPipe has the bubble of 1F1B and holds the activations of all micro-batches where 1F1B holds pp (Huang et
    al. 2019, section 2; Narayanan et al. 2021, section 2.2). Interleaved uses the plan's vpp, or 2 chunks, if
    a stage has as many layers. Zero-bubble schedules compute weight gradients (W) in the bubble. Where 1F1B
    waits for F + B + W of the other stages, ZB-H1 waits for F + B - W with the memory of 1F1B, and ZB-H2 for
    F + B - 2 W with about twice the micro-batches in flight (Qi et al. 2023, arXiv:2401.10241, table 2).
    Frozen matrices have no W. Memory and transfers of the other schedules are not computed.

    Raises ``ValueError`` for a figure of the GPU that is not known.
    """
    if find_schedule(plan) is None:
        return {}
    pipeline = compute_pipeline(plan, select_rates(plan.cluster))
    micro_batches = plan.num_micro_batches
    plain = pipeline.compute_bubble(1, micro_batches)
    # W of the other stages, for one micro-batch. Adapters leave the matrices frozen, without a W.
    share = 0.0 if plan.recipe.has_adapters else _WEIGHTS_SHARE
    matrices = [kind.parts["matrices"] for kind in pipeline.kinds]
    other_stages = sum(matrices[kind] for kind in pipeline.kind_of) - pipeline.slowest.parts["matrices"]
    weights = share * other_stages / micro_batches
    bubbles: dict[Schedule, float] = {"gpipe": plain, "1f1b": plain}
    # Two chunks are the least that interleave; a chunk needs a layer.
    chunks = max(2, plan.degrees.vpp)
    if plan.degrees.vpp > 1 or min(plan.stage_layers) >= chunks:
        bubbles["interleaved"] = pipeline.compute_bubble(chunks, micro_batches)
    # ``plain`` is F + B + W: two W less give F + B - W, three give F + B - 2 W.
    return bubbles | {"zb-h1": max(0.0, plain - 2 * weights), "zb-h2": max(0.0, plain - 3 * weights)}


def explain_schedule(plan: Plan) -> str:
    """Return text with the plan's schedule, by its framework's own name, and the bubbles of the others."""
    schedule = find_schedule(plan)
    if schedule is None:
        return ""
    upstream = frameworks[plan.layout.framework].timing_model().SCHEDULES[schedule]
    alternatives = [
        f"{NAMES[name]} {format_seconds(bubble)}"
        for name, bubble in compute_bubbles(plan).items()
        if name != schedule
    ]
    pipeline = compute_pipeline(plan, select_rates(plan.cluster))
    waits = (
        ", and the first micro-batch for each stage's all-gather of its weights (overlap_param_gather)"
        if any(kind.first_wait for kind in pipeline.kinds)
        else ""
    )
    return (
        f"{waits}; {NAMES[schedule]} runs ({upstream}), the same stages would wait with "
        f"{', '.join(alternatives)} (Huang et al. 2019; Qi et al. 2023, table 2)"
    )
