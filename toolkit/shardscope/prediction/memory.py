"""``plan.memory()``: the predicted memory of every pipeline stage, phase by phase, from closed formulas.

The framework's memory model returns a stage's training state (parameters, gradients, optimizer) and its peak
candidates in forward and backward. Communicators, the CUDA context and fragmentation are added here.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import ge
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count, format_gib
from shardscope.core.ops import compute_at_once, largest_sum, map_distinct, maximum
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.rank_activations import RankActivations
from shardscope.memory.activations.stage_activations import TransformersActivations
from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.overheads.band import compute_band
from shardscope.memory.report import (
    Component,
    MemoryReport,
    Phase,
    PhaseMemory,
    StageMemory,
    Term,
    choose_term,
    zero_term,
)
from shardscope.memory.state.training_state import PeakCandidate

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState

_NO_GRADIENTS = zero_term("none before backward: freed after the last optimizer step")


def predict_memory(plan: Plan) -> MemoryReport:
    """Return the plan's memory report, computed from closed formulas for every pipeline stage."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].memory_model()
    shapes, rank = model.find_shapes(plan), RankActivations(plan, find_modules(plan))
    stages = [model.count_weights(plan, shape) for shape in shapes.kinds]
    # With receive buffers for adjacent stages, an inner stage may need more memory than the first.
    depends_on_neighbours = model.counts_neighbours
    num_kept = 1 if depends_on_neighbours else 0
    # Only stages that can have the largest peak are computed now; all others when ``by_stage`` is read.
    candidates = {
        stage.number: (_build_stage(rank, stage, state), state)
        for stage in (*stages[:num_kept], *_find_peak_stages(stages[num_kept:]))
        for state in (model.compute_training_state(plan, stage),)
    }

    def find_stages() -> tuple[StageMemory, ...]:
        # Stages of one kind have equal weights, and so one training state, unless neighbours count.
        states = [] if depends_on_neighbours else [model.compute_training_state(plan, s) for s in stages]

        def find_stage(number: int, kind: int) -> StageMemory:
            if number in candidates:
                return candidates[number][0]
            stage = stages[kind]._replace(number=number)
            if depends_on_neighbours:
                return _build_stage(rank, stage, model.compute_training_state(plan, stage))
            return _build_stage(rank, stage, states[kind])

        return tuple(find_stage(number, kind) for number, kind in enumerate(shapes.kind_of))

    def find_band() -> tuple[int, int]:
        vendor = plan.cluster.gpu.vendor
        return compute_band(
            plan,
            [
                (stage.phases, overheads.estimate_communication(state.group_sizes, vendor))
                for stage, state in candidates.values()
            ],
        )

    return MemoryReport(
        find_stages=find_stages,
        worst_stage=max((stage for stage, _ in candidates.values()), key=lambda stage: stage.peak_bytes),
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        find_band=find_band,
    )


def _find_peak_stages(stages: list[Stage]) -> list[Stage]:
    """Return the stages that can have the largest peak.

    A later stage is dropped if an earlier one has at least as many layers and weights of every kind, head
    included: the earlier one also has at least as many micro-batches in flight.
    """
    peak_stages: list[Stage] = []
    for stage in stages:
        if not any(all(map(ge, earlier[1:], stage[1:])) for earlier in peak_stages):
            peak_stages.append(stage)
    return peak_stages


def _build_stage(rank: RankActivations, stage: Stage, state: TrainingState) -> StageMemory:
    """Return the memory of one stage; its phases are computed lazily."""
    host_bytes = state.host_bytes
    # Offloaded activations are on the host from the end of a layer's forward to its backward.
    if rank.plan.recipe.recompute == "offload":
        host_bytes += TransformersActivations(rank, stage).compute_offloaded()
    return StageMemory(
        stage=stage.number,
        num_layers=stage.num_layers,
        find_phases=lambda: tuple(
            sorted(compute_phases(rank, stage, state), key=lambda phase: phase.fraction)
        ),
        find_peak=lambda: find_peak_phase(rank, stage, state),
        host_bytes=host_bytes,
        nvme_bytes=state.nvme_bytes,
    )


# ---- Phases of one stage ----


def compute_phases(rank: RankActivations, stage: Stage, state: TrainingState) -> list[PhaseMemory]:
    """Return all phases of one stage; peak candidates between rest and optimizer step are unordered."""
    phases = _StagePhases(rank.plan, state)
    candidates = _find_candidates(rank, stage, state)
    return [*phases.list_idle_phases(), *(phases.build_phase(candidate) for candidate in candidates)]


def find_peak_phase(rank: RankActivations, stage: Stage, state: TrainingState) -> PhaseMemory:
    """Return the stage's peak phase (the earliest one on ties) in full, and only totals for the rest."""
    phases = _StagePhases(rank.plan, state)
    # Totals of all candidates, and terms with their explanations for the largest only.
    idle = max(phases.list_idle_phases(), key=lambda phase: phase.total)
    total, fraction, peak = idle.total, idle.fraction, None
    for candidate in _find_candidates(rank, stage, state):
        candidate_total = phases.compute_total(candidate)
        if candidate_total > total or (candidate_total == total and candidate.fraction < fraction):
            total, fraction, peak = candidate_total, candidate.fraction, candidate
    return idle if peak is None else phases.build_phase(peak)


def compute_peak_bytes(rank: RankActivations, stage: Stage, state: TrainingState) -> int:
    """Return the bytes of the stage's peak phase; a column, if the numbers are those of many plans.

    For candidates with the same gradients, the maximum of the other bytes is taken first: fragmentation grows
    with these bytes only.
    """
    phases = _StagePhases(rank.plan, state)
    by_gradients: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
    for candidate in _find_candidates(rank, stage, state):
        _, step_bytes = by_gradients.setdefault(id(candidate.gradients), (candidate.gradients, []))
        logits = 0 if candidate.logits is None else candidate.logits[0]
        step_bytes.append((candidate.activations, logits, candidate.gather))
    # Gradients are the same object for many candidates, so ``id`` groups them without comparing arrays.
    largest = [(gradients, largest_sum(step_bytes)) for gradients, step_bytes in by_gradients.values()]
    busy = compute_at_once(
        _compute_busy_bytes,
        phases.total_with_optimizer,
        phases.percent_with_fragmentation,
        *chain.from_iterable(largest),
    )
    idle_totals = (phase.total for phase in phases.list_idle_phases())
    return maximum(*idle_totals, busy)


def _compute_busy_bytes(total: int, percent: int, *gradients_and_step_bytes: int) -> int:
    """Return ``total`` plus the largest sum of gradients and of the bytes that a step allocates and frees.

    ``percent`` is :attr:`_StagePhases.percent_with_fragmentation`.
    """
    pairs = zip(gradients_and_step_bytes[::2], gradients_and_step_bytes[1::2], strict=True)
    return total + maximum(*(gradients + step_bytes * percent // 100 for gradients, step_bytes in pairs))


def _find_candidates(rank: RankActivations, stage: Stage, state: TrainingState) -> list[PeakCandidate]:
    """Return the end of forward and the peak candidates of backward, in the framework's own order."""
    if state.find_peaks is not None:
        return state.find_peaks(stage, rank.modules)
    activations = TransformersActivations(rank, stage)
    find_logits = state.find_logits or TransformersActivations.compute_logits
    logits_in_forward, logits_in_backward = find_logits(activations)
    # At the end of a forward, gradients are those of earlier micro-batches; of the first, those that the
    # framework keeps from step to step, if any.
    with_one_micro_batch = state.gradients_rest or (
        state.gradients if state.keeps_gradients else _NO_GRADIENTS
    )
    gradients = choose_term(
        rank.plan.num_micro_batches > 1, state.gradients_accumulated or state.gradients, with_one_micro_batch
    )
    end_of_forward = PeakCandidate.from_terms(
        0.33,
        activations.compute_forward(),
        state.gather_forward,
        gradients,
        logits_in_forward,
        phase="forward",
    )
    assert state.find_backward_peaks is not None
    return [end_of_forward, *state.find_backward_peaks(activations.compute_backward(logits_in_backward))]


class _StagePhases:
    """Bytes that a stage holds throughout the step, and the phases built on top of them."""

    def __init__(self, plan: Plan, state: TrainingState) -> None:
        self.on_gpu, self.state = plan.on_gpu, state
        gpu = self.gpu = plan.cluster.gpu
        # Communicators and the context are created before the first step and live as long as the process.
        estimate_point = partial(_estimate_communication, gpu.vendor)
        self.communication = map_distinct(estimate_point, *state.group_sizes)
        self.runtime = overheads.estimate_runtime(gpu.vendor, gpu.architecture).point
        self.gradients_at_rest = state.gradients_rest or (state.gradients if state.keeps_gradients else None)
        self.total = state.parameters.num_bytes + self.communication + self.runtime
        """Bytes of every phase: parameters, communicators and runtime."""
        self.total_with_optimizer = self.total + state.optimizer.num_bytes
        self.percent_with_fragmentation = 100 + (overheads.FRAGMENTATION_PERCENT if plan.on_gpu else 0)
        """The allocator's memory for 100 bytes that a step allocates and frees."""

    def list_idle_phases(self) -> list[PhaseMemory]:
        """Return the phases without activations: initialisation, rest and optimizer step."""
        state = self.state
        initialisation = self._list_terms(None, self.gradients_at_rest, state.gather_rest)
        return [
            PhaseMemory.from_terms("initialisation", 0.0, {**initialisation, **state.initialisation}),
            self._build_idle_phase("rest", 0.0, state.optimizer, self.gradients_at_rest, state.gather_rest),
            self._build_optimizer_step(),
        ]

    def _build_idle_phase(
        self, phase: Phase, fraction: float, optimizer: Term, gradients: Term | None, gather: Term | None
    ) -> PhaseMemory:
        """Return a phase without activations, and so without fragmentation."""
        total = self.total + optimizer.num_bytes
        if gradients is not None:
            total = total + gradients.num_bytes
        if gather is not None:
            total = total + gather.num_bytes
        return PhaseMemory(phase, fraction, total, lambda: self._list_terms(optimizer, gradients, gather))

    def _build_optimizer_step(self) -> PhaseMemory:
        state, working = self.state, self.state.optimizer_working

        def explain() -> str:
            return " + ".join(term.explain() for term in (state.optimizer, working) if term.num_bytes)

        optimizer = Term(state.optimizer.num_bytes + working.num_bytes, explain)
        gradients = state.gradients_reduced or state.gradients
        gather = state.gather_rest if state.gather_update is None else state.gather_update
        return self._build_idle_phase("optimizer", 0.98, optimizer, gradients, gather)

    def build_phase(self, candidate: PeakCandidate) -> PhaseMemory:
        """Return a phase of forward or backward, fragmentation included."""
        total = self.compute_total(candidate)
        return PhaseMemory(
            candidate.phase, candidate.fraction, total, partial(self._list_candidate_terms, candidate)
        )

    def compute_total(self, candidate: PeakCandidate) -> int:
        """Return the total bytes of a phase of forward or backward."""
        step_bytes = _compute_step_bytes(candidate)
        return self.total_with_optimizer + candidate.gradients + self.add_fragmentation(step_bytes)

    def add_fragmentation(self, step_bytes: int) -> int:
        """Return the bytes that a step allocates and frees, plus fragmentation on a GPU."""
        return step_bytes * self.percent_with_fragmentation // 100

    def _list_candidate_terms(self, candidate: PeakCandidate) -> dict[Component, Term]:
        step_bytes = _compute_step_bytes(candidate)
        fragmentation = self.add_fragmentation(step_bytes) - step_bytes
        terms = candidate.find_terms()
        by_component = self._list_terms(self.state.optimizer, terms.gradients, terms.gather)
        by_component["activations"] = terms.activations
        if candidate.logits is not None:
            by_component["logits"] = candidate.logits
        by_component["fragmentation"] = Term(fragmentation, lambda: _explain_fragmentation(step_bytes))
        return by_component

    def _list_terms(
        self, optimizer: Term | None, gradients: Term | None, gather: Term | None
    ) -> dict[Component, Term]:
        sizes = self.state.group_sizes
        by_component: dict[Component, Term] = {
            "parameters": self.state.parameters,
            "communication": Term(self.communication, lambda: _explain_communication(sizes, self.gpu.vendor)),
            "runtime": Term(self.runtime, self._explain_runtime),
        }
        if optimizer is not None:
            by_component["optimizer"] = optimizer
        if gradients is not None:
            by_component["gradients"] = gradients
        if gather is not None:
            by_component["gather_buffers"] = gather
        return by_component

    def _explain_runtime(self) -> str:
        if self.on_gpu:
            space = overheads.WORKSPACES.get(self.gpu.architecture or "", overheads.WORKSPACE)
            library = "hipBLAS" if self.gpu.vendor == "amd" else "cuBLAS"
            return (
                "context and kernels, 256 to 1,008 MiB reported (pytorch#86509, #28394), and "
                f"{space / 2**20:.1f} MiB of {library} workspace (CublasHandlePool.cpp)"
            )
        return "resident Python, torch and transformers of one CPU rank, measured by our own runs"


def _compute_step_bytes(candidate: PeakCandidate) -> int:
    """Return the bytes that a step allocates and frees."""
    step_bytes = candidate.activations + candidate.gather
    return step_bytes if candidate.logits is None else step_bytes + candidate.logits.num_bytes


def _compute_saved_bytes(candidate: PeakCandidate) -> int:
    """Return the bytes of activations and logits."""
    return candidate.activations if candidate.logits is None else candidate.activations + candidate.logits[0]


def _estimate_communication(vendor: str, *group_sizes: int) -> int:
    return overheads.estimate_communication(group_sizes, vendor).point


def _explain_fragmentation(step_bytes: int) -> str:
    return (
        f"{overheads.FRAGMENTATION_PERCENT} % of the {format_gib(step_bytes)} GiB allocated and freed by "
        f"then; the band's upper end has {overheads.FRAGMENTATION_HIGH_PERCENT} % of all that a step "
        "allocates and frees (assumption, PyTorch caching allocator; docs/accuracy.md)"
    )


def _explain_communication(group_sizes: tuple[int, ...], vendor: str) -> str:
    groups = [size for size in group_sizes if size > 1]
    if not groups:
        return "one rank needs no communicator"
    sizes = ", ".join(str(size) for size in groups)
    world = " and one of all" if overheads.has_world_group(group_sizes) else ""
    buffers = _COMMUNICATOR_BUFFERS.get(vendor, "without buffers of their own")
    return f"{format_count(len(groups), 'communicator')} of {sizes} ranks{world}, {buffers}"


_COMMUNICATOR_BUFFERS = {
    "nvidia": "544 or 688 MiB each (NVIDIA/nccl#964)",
    "amd": "1 GiB for the first and 0.65 GiB for each other (LUMI-AI-Guide#111)",
}
