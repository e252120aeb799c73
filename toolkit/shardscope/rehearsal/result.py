"""Result of a rehearsal: bytes by component at the peaks of a step, as JSON and as a memory report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from shardscope.families.unknown import UnknownFamily, build_transformers_config
from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.overheads.band import TENSORS, compute_band
from shardscope.memory.report import Component, MemoryReport, Phase, PhaseMemory, StageMemory, Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TENSOR_COMPONENTS = TENSORS
"""Components that consist of tensors, which a rehearsal can measure."""
_TEMPORARY = ("activations", "logits", "gather_buffers")
_COMPUTE_PHASES = ("forward", "backward")
_COMMUNICATION_TEXT = "predicted: buffers of communicators are not tensors (NVIDIA/nccl#964)"
_RUNTIME_TEXT = "predicted: memory that a rank uses before its first tensor"
_LINEAR_ATTENTION_TEXT = (
    "linear attention is transformers' own PyTorch code; a run with the packages flash-linear-attention and "
    "causal-conv1d has other kernels, which save other tensors"
)


class PeakJson(TypedDict):
    """A :class:`RehearsedPeak` as JSON."""

    phase: Phase
    fraction: float
    components: dict[str, int]


class StageJson(TypedDict):
    """A :class:`RehearsedStage` as JSON."""

    stage: int
    num_layers: int
    moments: list[PeakJson]
    """The peaks; the name is that of stored rehearsals."""
    note: str
    host_bytes: int
    nvme_bytes: NotRequired[int]


@dataclass(frozen=True, kw_only=True)
class RehearsedPeak:
    """Peak of one part of the rehearsed step."""

    phase: Phase
    fraction: float
    """Position in the step, 0 to 1, by number of operators, not by time."""
    components: Mapping[str, int]
    """Bytes by name in ``TENSOR_COMPONENTS``, without components of 0 bytes."""

    @property
    def num_bytes(self) -> int:
        """Sum over all components, in bytes."""
        return sum(self.components.values())


@dataclass(frozen=True, kw_only=True)
class RehearsedStage:
    """Memory of the rehearsed rank of one pipeline stage."""

    stage: int
    num_layers: int
    peaks: tuple[RehearsedPeak, ...]
    """Peaks of all parts of the step, in the step's order."""
    note: str = ""
    """Description of differences from the plan; empty if there are none."""
    host_bytes: int = 0
    """Bytes of host memory of the rank with offloading."""
    nvme_bytes: int = 0
    """Bytes of the rank's files with NVMe offloading."""

    @property
    def peak(self) -> RehearsedPeak:
        """Peak with the most bytes."""
        return max(self.peaks, key=lambda peak: peak.num_bytes)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON-compatible values."""
        fields = asdict(self)
        peaks = fields.pop("peaks")
        return {**fields, "moments": peaks}

    @classmethod
    def from_dict(cls, data: StageJson) -> RehearsedStage:
        """Return the stage that :meth:`to_dict` wrote. Raises ``ValueError`` for other data."""
        try:
            peaks = tuple(
                RehearsedPeak(
                    phase=peak["phase"],
                    fraction=float(peak["fraction"]),
                    components={str(name): int(value) for name, value in peak["components"].items()},
                )
                for peak in data["moments"]
            )
            return cls(
                stage=int(data["stage"]),
                num_layers=int(data["num_layers"]),
                peaks=peaks,
                note=str(data["note"]),
                host_bytes=int(data["host_bytes"]),
                nvme_bytes=int(data.get("nvme_bytes", 0)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a rehearsed stage: {error!r}") from error


def build_report(plan: Plan, rehearsed: list[RehearsedStage]) -> MemoryReport:
    """Return the rehearsal as a memory report, with the predicted overheads that are not tensors.

    Raises ``ValueError`` for an empty list.
    """
    if not rehearsed:
        raise ValueError("the rehearsal has no stages")
    overheads_by_stage = _predict_overheads(plan, [stage.stage for stage in rehearsed])
    by_stage = tuple(_build_stage_memory(plan, stage, overheads_by_stage[stage.stage]) for stage in rehearsed)
    return MemoryReport(
        find_stages=lambda: by_stage,
        worst_stage=max(by_stage, key=lambda stage: stage.peak_bytes),
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        find_band=lambda: compute_band(
            plan, [(stage.phases, overheads_by_stage[stage.stage].communication) for stage in by_stage]
        ),
        tier="rehearsed",
    )


class _Overheads(NamedTuple):
    """Memory of one rank of a stage outside of tensors, constant over the step."""

    communication: overheads.Band
    runtime: overheads.Band


def _predict_overheads(plan: Plan, stages: list[int]) -> dict[int, _Overheads]:
    """Return communicators' and runtime memory by stage number, without formulas of activations.

    They depend on the layout only: a family without formulas uses those of a Llama of its sizes.
    """
    # Imported here because frameworks import this package.
    from shardscope.frameworks.registry import frameworks

    # Communicators do not depend on the layers' structure.
    if isinstance(plan.architecture, UnknownFamily):
        recipe = replace(plan.recipe, lora_targets=None)  # a Llama lacks some projections
        plan = replace(plan, architecture=plan.architecture.llama_of_same_sizes, recipe=recipe)
    model, gpu = frameworks[plan.layout.framework].memory_model(), plan.cluster.gpu
    shapes, runtime = model.find_shapes(plan), overheads.estimate_runtime(gpu.vendor, gpu.architecture)
    by_number = {}
    for number in stages:
        stage_kind = shapes.kinds[shapes.kind_of[min(number, len(shapes.kind_of) - 1)]]
        groups = model.compute_training_state(plan, model.count_weights(plan, stage_kind)).group_sizes
        by_number[number] = _Overheads(overheads.estimate_communication(groups, gpu.vendor), runtime)
    return by_number


def _build_stage_memory(plan: Plan, rehearsed: RehearsedStage, stage_overheads: _Overheads) -> StageMemory:
    notes = [note for note in (rehearsed.note, _describe_kernels(plan)) if note]
    note = f" · {'; '.join(notes)}" if notes else ""
    counted = f"counted storage by storage while {plan.layout.title}'s own code ran on fake tensors{note}"

    def build_phase_memory(peak: RehearsedPeak) -> PhaseMemory:
        terms: dict[Component, Term] = {
            "communication": Term(stage_overheads.communication.point, lambda: _COMMUNICATION_TEXT),
            "runtime": Term(stage_overheads.runtime.point, lambda: _RUNTIME_TEXT),
        }
        for name in TENSOR_COMPONENTS:
            if peak.components.get(name):
                terms[name] = Term(peak.components[name], lambda: counted)
        if peak.phase in _COMPUTE_PHASES:
            gaps = overheads.estimate_fragmentation(_sum_temporary(peak), plan.on_gpu)
            percent = overheads.FRAGMENTATION_PERCENT
            terms["fragmentation"] = Term(
                gaps.point, lambda: f"{percent} % of what a step allocates and frees"
            )
        return PhaseMemory.from_terms(peak.phase, peak.fraction, terms)

    return StageMemory(
        stage=rehearsed.stage,
        num_layers=rehearsed.num_layers,
        find_phases=lambda: tuple(build_phase_memory(peak) for peak in rehearsed.peaks),
        host_bytes=rehearsed.host_bytes,
        nvme_bytes=rehearsed.nvme_bytes,
    )


def _describe_kernels(plan: Plan) -> str:
    """Return which code stood for kernels of linear attention; empty without such layers."""
    if not isinstance(plan.architecture, UnknownFamily):
        return ""
    layer_types = getattr(build_transformers_config(plan.architecture).get_text_config(), "layer_types", None)
    return _LINEAR_ATTENTION_TEXT if "linear_attention" in (layer_types or ()) else ""


def _sum_temporary(peak: RehearsedPeak) -> int:
    return sum(peak.components.get(name, 0) for name in _TEMPORARY)
