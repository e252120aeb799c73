"""Measured memory of a run, with the same component names as a prediction.

A rank records the tensors of one early step by component and phase (training/accounting/census.py) and, on a
GPU, the numbers of the caching allocator and the driver. Nothing is estimated: a component that could not be
measured separately is absent, and bytes without an attribution are ``other``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from shardscope.core.errors import FieldError, Value, check_choice, refuse
from shardscope.core.number_format import format_gib
from shardscope.memory.overheads.band import NOT_TENSORS
from shardscope.memory.report import (
    COMPONENTS,
    PHASES,
    MemoryReport,
    Phase,
    PhaseMemory,
    StageMemory,
    Term,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardscope.core.plan import Plan
    from shardscope.runs.watch.logged_memory import LoggedPeak
    from shardscope.trace.memory_snapshot import MemorySnapshot

OTHER = "other"
"""Component of measured bytes that could not be attributed."""

_PHASE_STARTS: dict[Phase, float] = {
    "initialisation": 0.0,
    "rest": 0.0,
    "forward": 0.33,
    "backward": 0.66,
    "optimizer": 0.98,
}

_DESCRIPTIONS = {
    "parameters": "storages of the module's parameters",
    "gradients": "storages of the parameters' gradients",
    "optimizer": "storages of the optimizer's state",
    "gather_buffers": "tensors that the framework's collectives fill or read, full parameters included",
    "activations": "all other live tensors: saved for backward, or temporaries of an operator",
    "logits": "tensors as wide as the vocabulary",
    "communication": "copies made by the communication library (gloo copies the tensors that it reduces)",
}


NO_OPTIMIZER = (
    "It was measured in the first step, which begins without the optimizer's state; from three steps on, the "
    "third is measured."
)


class MeasuredPhase(PhaseMemory):
    """The peak of one phase. ``components`` has only the separately measured ones and ``other``."""

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by component; those that could not be measured separately are absent."""
        return MappingProxyType({str(name): term.num_bytes for name, term in self.terms.items()})


# repr=False keeps the base class's __repr__; the generated one would print the function fields.
@dataclass(frozen=True, kw_only=True, repr=False)
class MeasuredMemory(MemoryReport):
    """Measured memory of a run. Iterating over it yields each rank's latest logged numbers."""

    tier: Literal["predicted", "rehearsed", "measured"] = "measured"
    ranks: Sequence[LoggedPeak] = field(default=())
    """One record per rank that logged memory."""
    predicted: MemoryReport | None = None
    """Prediction for the run's plan; None if the plan cannot be read."""
    missing: str = ""
    """Which components could not be measured, and why."""
    is_resident: bool = False
    """Whether only the resident memory of each rank's process is known: code without an engine on CPU ranks.
    Libraries are most of it, so it is not compared with the predicted tensors."""
    snapshot_files: Mapping[int, Path] = field(default_factory=dict)
    """Requested memory snapshots by rank, in torch's own format."""

    def __iter__(self) -> Iterator[LoggedPeak]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: int) -> LoggedPeak:
        return self.ranks[index]

    def at(self, phase: Phase) -> Mapping[str, int]:
        """Return bytes by component on the worst rank. Raises ``ValueError`` for an unmeasured ``phase``."""
        check_choice("phase", phase, PHASES)
        measured = [phase_memory.phase for phase_memory in self.worst_stage.phases]
        if phase not in measured:
            refuse("phase", phase, f"what was measured: {', '.join(measured) or 'nothing'}", Value("rest"))
        return self.worst_stage.at(phase).components

    def snapshot(self, rank: int | None = None) -> MemorySnapshot:
        """Load a rank's memory snapshot: live tensors at the peak and allocator segments.

        ``rank`` defaults to the first one with a snapshot. Raises ``ValueError`` if the rank took none, or if
        its file is damaged or its pickle would run code.
        """
        from shardscope.trace.memory_snapshot import load_memory_snapshot

        if rank is None:
            rank = min(self.snapshot_files, default=0)
        if rank not in self.snapshot_files:
            recorded = ", ".join(map(str, sorted(self.snapshot_files)))
            refuse(
                "rank",
                rank,
                f"ranks that took a memory snapshot: {recorded or 'none did'}",
                recorded.split(",")[0] or "Pretrain(memory_snapshot=True), on a GPU",
            )
        return load_memory_snapshot(self.snapshot_files[rank])

    @property
    def tensor_bytes(self) -> int:
        """Return the peak bytes of tensors, with which a prediction is compared; 0 if they are not known."""
        if self.is_resident:
            return 0
        return max((sum_tensor_bytes(phase.components) for phase in self.worst_stage.phases), default=0)

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of the tensors at the peak; None if one is missing."""
        if self.predicted is None or not self.tensor_bytes:
            return None
        return sum_predicted_tensors(self.predicted) / self.tensor_bytes - 1

    def _describe_peak_phase(self) -> str:
        # A logged total has no phase.
        is_total = _is_total(self.worst_stage)
        return " (a total, of no known phase)" if is_total else super()._describe_peak_phase()

    @property
    def lacks_optimizer(self) -> bool:
        """Return whether the measured step, the first of its run, began without optimizer state."""
        if self.predicted is None or not self.predicted.components.get("optimizer"):
            return False
        before = [
            phase for phase in self.worst_stage.phases if phase.phase in ("rest", "forward", "backward")
        ]
        # A component that was not measured is absent.
        return bool(before) and all(phase.components.get("optimizer") == 0 for phase in before)

    @property
    def sentence(self) -> str:
        """The measured peak and the error of the prediction, as one sentence."""
        if self.is_resident:
            return (
                f"Measured {format_amount(self.peak_bytes)} of resident memory at most, libraries included: "
                "the tensors in it are not known, so no prediction is compared with it."
            )
        if not self.tensor_bytes:
            return "No rank has recorded its memory yet."
        peak = f"Measured {format_amount(self.tensor_bytes)} of tensors at the peak ({self._tensor_phase})"
        if self.predicted is None or self.error is None:
            return f"{peak}; the plan of this run cannot be read, so it has no prediction."
        comparison = f"{peak}; predicted {format_amount(sum_predicted_tensors(self.predicted))}"
        if abs(self.error) < 0.0005:
            return f"{comparison}, the same to 0.1 %."
        side = "above" if self.error > 0 else "below"
        sentence = f"{comparison}, {100 * abs(self.error):.1f} % {side} it."
        if self.lacks_optimizer:
            sentence += f" {NO_OPTIMIZER}"
        return sentence

    @property
    def _tensor_phase(self) -> str:
        fullest = max(self.worst_stage.phases, key=lambda phase: sum_tensor_bytes(phase.components))
        return fullest.phase

    def explain(self, name: str) -> str:
        """Describe how a component was measured at the peak. Raises ``ValueError`` for an unknown name."""
        check_choice("component", name, (*COMPONENTS, OTHER))
        term = self.worst_stage.peak.terms.get(name)  # type: ignore[call-overload]
        if term is None:
            return f"{name} was not measured separately: {self.missing or 'no rank recorded it'}"
        return f"{name}, {format_gib(term.num_bytes)} GiB = {term.explain()}"


def _is_total(stage: StageMemory) -> bool:
    """Return whether nothing but a rank's logged total is known."""
    return all({*phase.terms} <= {OTHER} for phase in stage.phases)


def sum_tensor_bytes(components: Mapping[str, int]) -> int:
    """Return the sum of the components that are torch tensors, in bytes."""
    return sum(value for name, value in components.items() if name not in NOT_TENSORS)


def sum_predicted_tensors(report: MemoryReport) -> int:
    """Return the predicted peak of tensor bytes within a step, initialization excluded."""
    phases = (phase for stage in report.by_stage for phase in stage.phases if phase.phase != "initialisation")
    return max(sum_tensor_bytes(phase.components) for phase in phases)


def build_measured_memory(
    plan: Plan | None,
    records: Mapping[int, Mapping[str, object]],
    ranks: Sequence[LoggedPeak],
    snapshot_files: Mapping[int, Path] | None = None,
) -> MeasuredMemory:
    """Build the report from the ranks' records (``run.engine_reports()``) and logged peaks."""
    # Ranks of a pipeline stage are adjacent. Each stage is represented by its rank with the highest peak.
    by_number: dict[int, list[StageMemory]] = {}
    num_stages = plan.degrees.pp if plan else 1
    per_stage = max(1, plan.world_size // num_stages) if plan else 1
    logged = {rank["rank"]: rank for rank in ranks}
    for rank in sorted({*records, *logged}):
        stage = min(num_stages - 1, rank // per_stage) if plan else 0
        phases = _read_phases(records.get(rank, {}).get("memory"), logged.get(rank))
        if phases:
            layers = plan.stage_layers[stage] if plan else 0
            by_number.setdefault(stage, []).append(_make_stage(stage, layers, phases))
    fullest = [max(by_number[stage], key=lambda rank: rank.peak_bytes) for stage in sorted(by_number)]
    # A report has at least one stage: an empty one, if no rank has recorded anything yet.
    by_stage = tuple(fullest) or (_make_stage(0, 0, (MeasuredPhase.from_terms("rest", 0.0, {}),)),)
    worst = max(by_stage, key=lambda stage: stage.peak_bytes)
    return MeasuredMemory(
        find_stages=lambda: by_stage,
        worst_stage=worst,
        usable_bytes=plan.cluster.usable_bytes_per_gpu if plan else 0,
        find_band=lambda: (worst.peak_bytes, worst.peak_bytes),
        ranks=tuple(ranks),
        predicted=_predict(plan) if plan else None,
        missing=_explain_missing(worst),
        # ``ctx.memory_metrics`` logs allocated bytes on a GPU and resident ones on a CPU.
        is_resident=plan is not None and not plan.on_gpu and bool(fullest) and _is_total(worst),
        snapshot_files=snapshot_files or {},
    )


def _make_stage(number: int, num_layers: int, phases: tuple[PhaseMemory, ...]) -> StageMemory:
    return StageMemory(stage=number, num_layers=num_layers, find_phases=lambda: phases)


def _predict(plan: Plan) -> MemoryReport | None:
    """Return the plan's prediction; None if it has an option without a memory formula."""
    try:
        return plan.memory()
    except FieldError:
        return None


def _explain_missing(stage: StageMemory) -> str:
    named = {name for phase in stage.phases for name in phase.terms}
    if named <= {OTHER}:
        return "the task does not use ctx.engine, so only a total is known"
    if "communication" not in named and "runtime" in named:
        return "communicators are part of runtime: the driver reports only memory outside torch's allocator"
    return ""


def _read_phases(record: object, logged: LoggedPeak | None) -> tuple[PhaseMemory, ...]:
    """Return the phases of one rank; for a task without an engine only its logged total."""
    if not isinstance(record, Mapping):
        num_bytes = 0 if logged is None else logged["peak_memory_bytes"]
        if num_bytes <= 0:
            return ()
        total = Term(num_bytes, lambda: "the highest peak_memory_bytes that this rank logged")
        return (MeasuredPhase.from_terms("rest", 0.0, {OTHER: total}),)  # type: ignore[dict-item]
    # ``phases`` are tensors by component (census.py), ``allocated_peaks`` the CUDA allocator's peaks.
    phases = record.get("phases")
    phases = phases if isinstance(phases, Mapping) else {}
    peaks = record.get("allocated_peaks")
    peaks = peaks if isinstance(peaks, Mapping) else {}
    # Only what was measured: a phase without any number is left out.
    measured = []
    for phase, start in _PHASE_STARTS.items():
        sizes, peak = _read_numbers(phases.get(phase)), peaks.get(phase)
        if not sizes and not isinstance(peak, int):
            continue
        terms = {name: Term(value, _make_explanation(name, record)) for name, value in sizes.items()}
        terms |= _read_other_terms(record, sum(sizes.values()), peak if isinstance(peak, int) else None)
        measured.append(MeasuredPhase.from_terms(phase, start, terms))  # type: ignore[arg-type]
    return tuple(measured)


def _read_other_terms(record: Mapping[str, object], counted: int, peak: int | None) -> dict[str, Term]:
    """Return the terms outside the counted tensors, from the allocator's and the driver's numbers."""
    terms: dict[str, Term] = {}
    # On a GPU: what the census did not see of the allocator's peak, such as temporaries inside an operator.
    if peak is not None:
        rest = max(0, peak - counted)
        terms[OTHER] = Term(
            rest,
            lambda: (
                f"{format_gib(peak)} GiB allocated (torch.cuda), less {format_gib(counted)} GiB of counted "
                "tensors"
            ),
        )
        # Fragmentation: reserved memory at its peak less allocated memory at its (torch.cuda.memory_stats).
        highest = max(_read_numbers(record.get("allocated_peaks")).values(), default=peak)
        if isinstance(reserved := record.get("reserved"), int):
            gaps = max(0, reserved - highest)
            terms["fragmentation"] = Term(
                gaps,
                lambda: (
                    f"{format_gib(reserved)} GiB peak reserved, less {format_gib(highest)} GiB peak allocated"
                ),
            )
        if isinstance(outside := record.get("outside_allocator"), int):
            terms["runtime"] = Term(
                outside,
                lambda: (
                    "in use on the GPU outside torch's allocator (cudaMemGetInfo): CUDA context, "
                    "libraries, communicators, and any other process there"
                ),
            )
    # On a CPU: the process before its first step, mostly libraries. There is no allocator to ask.
    elif isinstance(resident := record.get("rss_before_steps"), int):
        phases = record.get("phases")
        at_rest = phases.get("rest") if isinstance(phases, Mapping) else None
        parameter_bytes = _read_numbers(at_rest).get("parameters", 0)
        terms["runtime"] = Term(
            max(0, resident - parameter_bytes),
            lambda: "resident memory of this process before its first step, less its parameters",
        )
    return terms


def _make_explanation(name: str, record: Mapping[str, object]) -> Callable[[], str]:
    text = f"{_DESCRIPTIONS.get(name, name)}, counted in step {record.get('step')}"
    return lambda: text


def _read_numbers(mapping: object) -> dict[str, int]:
    if not isinstance(mapping, Mapping):
        return {}
    known = {*COMPONENTS, *PHASES}
    return {
        name: value
        for name, value in mapping.items()
        if name in known and isinstance(value, int) and not isinstance(value, bool) and value >= 0
    }


def format_amount(num_bytes: float) -> str:
    """Format bytes as GiB, or as MiB for the tiny models of rehearsals."""
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes < 2**28 else f"{format_gib(num_bytes)} GiB"
