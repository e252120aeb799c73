"""Phases of one stage's step: the framework's training state plus activations, runtime and fragmentation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import count, gib
from shardscope.core.ops import map_distinct, maximum
from shardscope.memory.activations.backward import PeakCandidate
from shardscope.memory.activations.step import TransformersActivations
from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.report import Component, PhaseMemory, Term, choose_term, zero_term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState

_NO_GRADIENTS = zero_term("none before backward: freed after the last optimizer step")
_NOTHING = zero_term("nothing is held at this moment")


def compute_phases(plan: Plan, modules: Modules, stage: Stage, state: TrainingState) -> list[PhaseMemory]:
    """Return all phases of one stage; peak candidates between rest and optimizer step are unordered."""
    resident = _StagePhases(plan, state)
    peaks = [resident.busy(peak) for peak in _find_candidates(plan, modules, stage, state)]
    return [*resident.idle(), *peaks]


def find_peak_phase(plan: Plan, modules: Modules, stage: Stage, state: TrainingState) -> PhaseMemory:
    """Return the stage's peak phase (the earliest one on ties) in full, and only totals for the rest."""
    resident = _StagePhases(plan, state)
    found = max(resident.idle(), key=lambda moment: moment.total)
    most, at, peak = found.total, found.fraction, None
    for one in _find_candidates(plan, modules, stage, state):
        total = resident.total_at(one)
        if total > most or (total == most and one.fraction < at):
            most, at, peak = total, one.fraction, one
    return found if peak is None else resident.busy(peak)


def compute_peak_bytes(plan: Plan, modules: Modules, stage: Stage, state: TrainingState) -> Any:
    """Return the bytes of the stage's peak phase; they may be columns of many plans.

    For candidates with the same gradients, the maximum of the other bytes is taken first: fragmentation grows
    with these bytes only.
    """
    resident = _StagePhases(plan, state)
    beside: dict[int, tuple[Any, list[Any]]] = {}
    for peak in _find_candidates(plan, modules, stage, state):
        beside.setdefault(id(peak.gradients), (peak.gradients, []))[1].append(_compute_step_bytes(peak))
    busy = maximum(*(gradients + resident.with_gaps(maximum(*most)) for gradients, most in beside.values()))
    return maximum(*(moment.total for moment in resident.idle()), resident.busy_total + busy)


def _find_candidates(plan: Plan, modules: Modules, stage: Stage, state: TrainingState) -> list[PeakCandidate]:
    if state.find_peaks is not None:
        return state.find_peaks(stage, modules)
    return _find_transformers_candidates(plan, modules, stage, state)


def _find_transformers_candidates(
    plan: Plan, modules: Modules, stage: Stage, state: TrainingState
) -> list[PeakCandidate]:
    """Return the end of forward and the peak candidates of backward, for transformers' modules."""
    step = TransformersActivations(plan, modules, stage)
    at_end, at_start = state.find_logits(step) if state.find_logits is not None else step.logits()
    once = state.gradients_rest or (state.gradients if state.gradients_stay else _NO_GRADIENTS)
    gradients = choose_term(plan.num_micro_batches > 1, state.gradients_waiting or state.gradients, once)
    forward = PeakCandidate.of(0.33, step.forward(), state.gather_forward, gradients, at_end, phase="forward")
    assert state.find_backward is not None
    return [forward, *state.find_backward(step.backward(at_start))]


class _StagePhases:
    """Bytes that a stage holds throughout the step, and the phases built on top of them."""

    def __init__(self, plan: Plan, state: TrainingState) -> None:
        self.on_gpu, self.state = plan.on_gpu, state
        gpu = self.gpu = plan.cluster.gpu
        self.communication = map_distinct(partial(_compute_communication, gpu.vendor), *state.group_sizes)
        self.runtime = overheads.estimate_runtime(gpu.vendor, gpu.architecture).point
        self.gradients = state.gradients_rest or (state.gradients if state.gradients_stay else None)
        self.gather = state.gather_rest
        self.total = state.parameters[0] + self.communication + self.runtime
        self.busy_total = self.total + state.optimizer[0]

    def idle(self) -> list[PhaseMemory]:
        """Return the phases without activations: initialisation, rest and optimizer step."""
        state = self.state
        return [
            self.initialisation(),
            self.moment("rest", 0.0, state.optimizer, self.gradients, self.gather),
            self.updating(state.gradients_reduced or state.gradients),
        ]

    def initialisation(self) -> PhaseMemory:
        """Return the framework's initialisation phase, with its own terms if it declares any."""
        return PhaseMemory.of(
            "initialisation",
            0.0,
            {**self._terms(None, self.gradients, self.gather), **self.state.initialisation},
        )

    def moment(
        self, phase: Any, fraction: float, optimizer: Term, gradients: Term | None, gather: Term | None
    ) -> PhaseMemory:
        """Return a phase without activations, and so without fragmentation."""
        total = self.total + optimizer[0]
        if gradients is not None:
            total = total + gradients[0]
        if gather is not None:
            total = total + gather[0]
        return PhaseMemory(phase, fraction, total, lambda: self._terms(optimizer, gradients, gather))

    def updating(self, gradients: Term) -> PhaseMemory:
        """Return the phase of the optimizer step."""
        state, working = self.state, self.state.optimizer_working

        def words() -> str:
            return " + ".join(term.explain() for term in (state.optimizer, working) if term.num_bytes)

        optimizer = Term(state.optimizer[0] + working[0], words)
        gather = self.gather if state.gather_update is None else state.gather_update
        return self.moment("optimizer", 0.98, optimizer, gradients, gather)

    def busy(self, peak: PeakCandidate) -> PhaseMemory:
        """Return a phase of forward or backward, fragmentation included."""
        return PhaseMemory(peak.phase, peak.fraction, self.total_at(peak), partial(self._busy_terms, peak))

    def total_at(self, peak: PeakCandidate) -> Any:
        """Return the total bytes of a phase of forward or backward."""
        return self.busy_total + peak.gradients + self.with_gaps(_compute_step_bytes(peak))

    def with_gaps(self, churned: Any) -> Any:
        """Return the bytes that a step allocates and frees, plus fragmentation on a GPU."""
        return churned + overheads.compute_fragmentation(churned) if self.on_gpu else churned

    def _busy_terms(self, peak: PeakCandidate) -> dict[Component, Term]:
        churned = _compute_step_bytes(peak)
        lost = overheads.compute_fragmentation(churned) if self.on_gpu else 0
        terms = peak.find_terms()
        found = self._terms(self.state.optimizer, terms.gradients, terms.gather)
        found["activations"] = terms.activations
        if peak.logits is not None:
            found["logits"] = peak.logits
        found["fragmentation"] = Term(lost, lambda: _explain_fragmentation(churned))
        return found

    def _terms(
        self, optimizer: Term | None, gradients: Term | None, gather: Term | None
    ) -> dict[Component, Term]:
        sizes = self.state.group_sizes
        found: dict[Component, Term] = {
            "parameters": self.state.parameters,
            "communication": Term(self.communication, lambda: _explain_communication(sizes, self.gpu.vendor)),
            "runtime": Term(self.runtime, self._runtime_words),
        }
        held: tuple[tuple[Component, Term | None], ...] = (
            ("optimizer", optimizer),
            ("gradients", gradients),
            ("gather_buffers", gather),
        )
        return found | {name: term for name, term in held if term is not None}

    def _runtime_words(self) -> str:
        if self.on_gpu:
            space = overheads.WORKSPACES.get(self.gpu.architecture or "", overheads.WORKSPACE)
            library = "hipBLAS" if self.gpu.vendor == "amd" else "cuBLAS"
            return (
                "context and kernels, 256 to 1,008 MiB seen (pytorch#86509, #28394), and "
                f"{space / 2**20:.1f} MiB of {library} workspace (CublasHandlePool.cpp)"
            )
        return "resident Python, torch and transformers of one CPU rank, measured by our own runs"


def _compute_communication(vendor: str, *group_sizes: int) -> int:
    return overheads.estimate_communication(group_sizes, vendor).point


def _compute_step_bytes(peak: PeakCandidate) -> Any:
    """Return the bytes that a step allocates and frees.

    Activations and logits are added first: they depend on fewer columns than the gather buffers, so the sum
    over arrays of plans is cheaper (``prediction/batch/column.py``).
    """
    held = peak.activations if peak.logits is None else peak.activations + peak.logits[0]
    return held + peak.gather


def _explain_fragmentation(churned: int) -> str:
    return (
        f"{overheads.FRAGMENTATION_PERCENT} % of the {gib(churned)} GiB that come and go at this moment; the "
        f"band's top has {overheads.FRAGMENTATION_HIGH_PERCENT} % of all that a step allocates and frees "
        "(assumption, PyTorch caching allocator; docs/accuracy.md)"
    )


def _explain_communication(group_sizes: tuple[int, ...], vendor: str) -> str:
    groups = [size for size in group_sizes if size > 1]
    if not groups:
        return "one rank needs no communicator"
    sizes = ", ".join(str(size) for size in groups)
    world = " and one of all" if overheads.has_world_group(group_sizes) else ""
    return (
        f"{count(len(groups), 'communicator')} of {sizes} ranks{world}, {_EACH.get(vendor, 'nothing beside')}"
    )


_EACH = {
    "nvidia": "544 or 688 MiB each (NVIDIA/nccl#964)",
    "amd": "1 GiB for the first and 0.65 GiB for each other (LUMI-AI-Guide#111)",
}
