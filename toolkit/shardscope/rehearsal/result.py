"""Result of a rehearsal: bytes by component at the peaks of a step, as JSON and as a memory report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardscope.families.unknown import UnknownFamily
from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.overheads.band import TENSORS, compute_band
from shardscope.memory.report import Component, MemoryReport, Phase, PhaseMemory, StageMemory, Term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TENSOR_COMPONENTS = TENSORS
"""Components that consist of tensors, which a rehearsal can measure."""
_CHURNED = ("activations", "logits", "gather_buffers")
_BUSY = ("forward", "backward")
_COMMUNICATION_WORDS = "buffers of communicators as predicted, for no tensor shows them (NVIDIA/nccl#964)"
_RUNTIME_WORDS = "what a rank takes before its first tensor, as predicted, for no tensor shows it"


@dataclass(frozen=True, kw_only=True)
class RehearsedMoment:
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
    moments: tuple[RehearsedMoment, ...]
    """Peaks of all parts of the step, in the step's order."""
    note: str = ""
    """Description of differences from the plan; empty if there are none."""
    host_bytes: int = 0
    """Bytes of host memory of the rank with offloading."""
    nvme_bytes: int = 0
    """Bytes of the rank's files with NVMe offloading."""

    @property
    def peak(self) -> RehearsedMoment:
        """Peak with the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RehearsedStage:
        """Return the stage that :meth:`to_dict` wrote. Raises ``ValueError`` for other data."""
        try:
            moments = tuple(
                RehearsedMoment(
                    phase=cast(Phase, str(moment["phase"])),
                    fraction=float(moment["fraction"]),
                    components={str(name): int(value) for name, value in moment["components"].items()},
                )
                for moment in data["moments"]
            )
            return cls(
                stage=int(data["stage"]),
                num_layers=int(data["num_layers"]),
                moments=moments,
                note=str(data["note"]),
                host_bytes=int(data["host_bytes"]),
                nvme_bytes=int(data.get("nvme_bytes", 0)),
            )
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"this is no rehearsed stage: {problem!r}") from problem


def report_of(plan: Plan, rehearsed: list[RehearsedStage]) -> MemoryReport:
    """Return the rehearsal as a memory report, with the predicted overheads that are not tensors.

    Raises ``ValueError`` for an empty list.
    """
    if not rehearsed:
        raise ValueError("a rehearsal of no stage")
    beside = _overheads_of(plan, [stage.stage for stage in rehearsed])
    by_stage = tuple(_stage(plan, stage, beside[stage.stage]) for stage in rehearsed)
    return MemoryReport(
        find_stages=lambda: by_stage,
        worst_stage=max(by_stage, key=lambda stage: stage.peak_bytes),
        usable_bytes=plan.cluster.usable_bytes_per_gpu,
        find_band=lambda: compute_band(
            plan, [(stage.moments, beside[stage.stage].communication) for stage in by_stage]
        ),
        tier="rehearsed",
    )


class _Beside(NamedTuple):
    """Memory of one rank of a stage outside of tensors, constant over the step."""

    communication: overheads.Band
    runtime: overheads.Band


def _overheads_of(plan: Plan, stages: list[int]) -> dict[int, _Beside]:
    """Return communicators' and runtime memory by stage number, without formulas of activations.

    They depend on the layout only: a family without formulas uses those of a Llama of its sizes.
    """
    # Imported here because frameworks import this package.
    from shardscope.frameworks.registry import frameworks

    if isinstance(plan.architecture, UnknownFamily):
        plan = replace(plan, architecture=plan.architecture.look_alike)
    model, gpu = frameworks[plan.layout.framework].memory_model(), plan.cluster.gpu
    shapes, runtime = model.find_shapes(plan), overheads.estimate_runtime(gpu.vendor, gpu.architecture)
    found = {}
    for number in stages:
        kind = shapes.kinds[shapes.kind_of[min(number, len(shapes.kind_of) - 1)]]
        groups = model.compute_training_state(plan, model.count_weights(plan, kind)).group_sizes
        found[number] = _Beside(overheads.estimate_communication(groups, gpu.vendor), runtime)
    return found


def _stage(plan: Plan, stage: RehearsedStage, beside: _Beside) -> StageMemory:
    note = f" · {stage.note}" if stage.note else ""
    title = plan.layout.title

    def moment(seen: RehearsedMoment) -> PhaseMemory:
        terms: dict[Component, Term] = {
            "communication": Term(beside.communication.point, lambda: _COMMUNICATION_WORDS),
            "runtime": Term(beside.runtime.point, lambda: _RUNTIME_WORDS),
        }
        for name in TENSOR_COMPONENTS:
            if seen.components.get(name):
                words = f"counted storage by storage while {title}'s own code ran on fake tensors{note}"
                terms[name] = Term(seen.components[name], lambda words=words: words)  # type: ignore[misc]
        if seen.phase in _BUSY:
            gaps = overheads.estimate_fragmentation(_churned(seen), plan.on_gpu)
            percent = overheads.FRAGMENTATION_PERCENT
            terms["fragmentation"] = Term(
                gaps.point, lambda: f"{percent} % of what a step allocates and frees"
            )
        return PhaseMemory.of(seen.phase, seen.fraction, terms)

    return StageMemory(
        stage=stage.stage,
        num_layers=stage.num_layers,
        find_moments=lambda: tuple(moment(seen) for seen in stage.moments),
        host_bytes=stage.host_bytes,
        nvme_bytes=stage.nvme_bytes,
    )


def _churned(moment: RehearsedMoment) -> int:
    return sum(moment.components.get(name, 0) for name in _CHURNED)
