"""Predicted tier of memory reports: closed formulas for every pipeline stage of a plan."""

from __future__ import annotations

from operator import ge
from typing import TYPE_CHECKING

from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.step import TransformersActivations
from shardscope.memory.moments import compute_phases, find_peak_phase
from shardscope.memory.overheads.band import compute_band
from shardscope.memory.overheads.libraries import estimate_communication
from shardscope.memory.report import MemoryReport, PhaseMemory, StageMemory

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState


def predict_memory(plan: Plan) -> MemoryReport:
    """Return the plan's memory report, computed from closed formulas for every pipeline stage."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].memory_model()
    shapes, modules = model.find_shapes(plan), find_modules(plan)
    stages = [model.count_weights(plan, shape) for shape in shapes.kinds]
    # With receive buffers for adjacent stages, an inner stage may need more memory than the first.
    by_place = getattr(model, "counts_neighbours", False)
    apart = 1 if by_place else 0
    candidates = {
        stage.number: (_build_stage(plan, modules, stage, state), state)
        for stage in (*stages[:apart], *_find_peak_stages(stages[apart:]))
        for state in (model.compute_training_state(plan, stage),)
    }

    def every_stage() -> tuple[StageMemory, ...]:
        states = [] if by_place else [model.compute_training_state(plan, stage) for stage in stages]

        def found(number: int, kind: int) -> StageMemory:
            if number in candidates:
                return candidates[number][0]
            stage = stages[kind]._replace(number=number)
            return _build_stage(
                plan, modules, stage, model.compute_training_state(plan, stage) if by_place else states[kind]
            )

        return tuple(found(number, kind) for number, kind in enumerate(shapes.kind_of))

    return MemoryReport(
        find_stages=every_stage,
        worst_stage=max((stage for stage, _ in candidates.values()), key=lambda stage: stage.peak_bytes),
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        find_band=lambda: compute_band(
            plan,
            [
                (stage.moments, estimate_communication(state.group_sizes, plan.cluster.gpu.vendor))
                for stage, state in candidates.values()
            ],
        ),
    )


def _find_peak_stages(kinds: list[Stage]) -> list[Stage]:
    """Return the stages that can have the largest peak.

    A later stage is dropped if an earlier one has at least as many layers and weights of every kind, head
    included: the earlier one also has at least as many micro-batches in flight.
    """
    found: list[Stage] = []
    for kind in kinds:
        if not any(all(map(ge, earlier[1:], kind[1:])) for earlier in found):
            found.append(kind)
    return found


def _build_stage(plan: Plan, modules: Modules, stage: Stage, state: TrainingState) -> StageMemory:
    """Return the memory of one stage; its moments are computed lazily."""
    offloads = plan.recipe.recompute == "offload"
    return StageMemory(
        stage=stage.number,
        num_layers=stage.num_layers,
        find_moments=lambda: _in_order(compute_phases(plan, modules, stage, state)),
        find_peak=lambda: find_peak_phase(plan, modules, stage, state),
        host_bytes=state.host_bytes
        + (TransformersActivations(plan, modules, stage).offloaded() if offloads else 0),
        nvme_bytes=state.nvme_bytes,
    )


def _in_order(found: list[PhaseMemory]) -> tuple[PhaseMemory, ...]:
    return tuple(sorted(found, key=lambda moment: moment.fraction))
