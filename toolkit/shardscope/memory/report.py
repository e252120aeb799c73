"""Memory report of one tier (predicted, rehearsed or measured): bytes by component, stage and phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from shardscope.core.errors import check_choice
from shardscope.core.number_format import format_count, format_gib, format_sum
from shardscope.core.ops import where
from shardscope.memory.overheads.libraries import TIGHT_PERCENT

if TYPE_CHECKING:
    import pandas as pd

Component = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gather_buffers",
    "communication",
    "runtime",
    "fragmentation",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)
Phase = Literal["rest", "forward", "backward", "optimizer", "initialisation"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Term(NamedTuple):
    """Bytes of one component, and a callable that returns their explanation on request."""

    num_bytes: int
    find_explanation: Callable[[], str]

    def explain(self) -> str:
        """Return the formula and source of the bytes."""
        return self.find_explanation()


class PhaseMemory(NamedTuple):
    """Memory of one rank at one phase of a step."""

    phase: Phase
    fraction: float
    """Position in the step, 0 to 1; not seconds, which only the step-time model has."""
    total: int
    """Bytes, summed over all components."""
    find_terms: Callable[[], Mapping[Component, Term]]
    """Computes the bytes by component; lazy, because most phases only need their sum."""

    @classmethod
    def from_terms(cls, phase: Phase, fraction: float, terms: Mapping[Component, Term]) -> PhaseMemory:
        """Build a phase from its terms, and compute the total."""
        return cls(phase, fraction, sum([term.num_bytes for term in terms.values()]), lambda: terms)

    @property
    def terms(self) -> Mapping[Component, Term]:
        """Terms by component."""
        return self.find_terms()

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by component name; every component of :data:`COMPONENTS` is present."""
        terms = self.terms
        return MappingProxyType({name: terms[name].num_bytes if name in terms else 0 for name in COMPONENTS})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.phase}: {format_gib(self.total)} GiB>"


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one pipeline stage, the same on each of its ranks."""

    stage: int
    """Index of the stage, from 0."""
    num_layers: int
    """Number of decoder layers on the stage."""
    find_phases: Callable[[], tuple[PhaseMemory, ...]]
    """Computes :attr:`phases`; lazy, because most stages of a long pipeline are never inspected."""
    find_peak: Callable[[], PhaseMemory] | None = None
    """Computes :attr:`peak` where that is cheaper than all phases; None: the largest phase."""
    host_bytes: int = 0
    """Host memory per rank of this stage with offloading."""
    nvme_bytes: int = 0
    """NVMe bytes per rank of this stage with offloading."""

    @cached_property
    def phases(self) -> tuple[PhaseMemory, ...]:
        """Phases of a step in order, initialisation first; backward has several."""
        return self.find_phases()

    @cached_property
    def peak(self) -> PhaseMemory:
        """The phase with the most bytes."""
        if self.find_peak is not None:
            return self.find_peak()
        # max returns the earliest phase on ties.
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by component at the peak."""
        return self.peak.components

    def at(self, phase: Phase) -> PhaseMemory:
        """Return the entry of :attr:`phases` with the most bytes among those of ``phase``."""
        return max((entry for entry in self.phases if entry.phase == phase), key=lambda entry: entry.total)

    def __repr__(self) -> str:
        layers = format_count(self.num_layers, "layer")
        peak = f"{format_gib(self.peak_bytes)} GiB in {self.peak.phase}"
        return f"<StageMemory of stage {self.stage}: {layers}, peak {peak}>"


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on the worst rank, by component and phase, with the band of library and allocator overheads."""

    find_stages: Callable[[], tuple[StageMemory, ...]]
    """Computes :attr:`by_stage`; lazy, because a search reads the worst stage only."""
    worst_stage: StageMemory
    """The stage with the highest peak (the first one on ties)."""
    usable_bytes: int
    """Bytes of one GPU that are usable by one rank, the driver's reserve excluded."""
    find_band: Callable[[], tuple[int, int]]
    """Computes :attr:`low_bytes` and :attr:`high_bytes`; lazy, because a search reads peaks only."""
    tier: Literal["predicted", "rehearsed", "measured"] = "predicted"

    @cached_property
    def by_stage(self) -> tuple[StageMemory, ...]:
        """One entry for each pipeline stage."""
        return self.find_stages()

    @property
    def low_bytes(self) -> int:
        """Peak bytes with the smallest library buffers and no allocator loss."""
        return self._band[0]

    @property
    def high_bytes(self) -> int:
        """Peak bytes with the largest library buffers and allocator loss.

        On a GPU at most the usable bytes, as long as the peak itself fits.
        """
        return self._band[1]

    @cached_property
    def _band(self) -> tuple[int, int]:
        return self.find_band()

    @property
    def peak_phase(self) -> Phase:
        """Phase of the peak on the worst rank."""
        return self.worst_stage.peak.phase

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by component on the worst rank at its peak; every name of ``COMPONENTS`` is present."""
        return self.worst_stage.components

    @property
    def peak_bytes(self) -> int:
        """Sum of :attr:`components`."""
        return self.worst_stage.peak_bytes

    @property
    def fits(self) -> bool:
        """Return whether the peak is at most the usable bytes of the GPU."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def is_tight(self) -> bool:
        """Return whether the peak fits, but needs over 80 % of the usable memory.

        Of such runs some run out of memory: :data:`~shardscope.memory.overheads.libraries.TIGHT_PERCENT`.
        """
        return self.fits and 100 * self.peak_bytes > TIGHT_PERCENT * self.usable_bytes

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """Return whether the peak fits the GPU's memory; ``tight``: it may not.

        See :attr:`is_tight` and :attr:`high_bytes`. ``shardscope.planner.verdict`` judges host memory and
        NVMe.
        """
        if not self.fits:
            return "does not fit"
        return "tight" if self.is_tight or self.high_bytes > self.usable_bytes else "fits"

    @property
    def host_bytes(self) -> int:
        """Host memory of the worst rank with offloading, in bytes."""
        return max(stage.host_bytes for stage in self.by_stage)

    @property
    def nvme_bytes(self) -> int:
        """NVMe bytes of the worst rank with offloading."""
        return max(stage.nvme_bytes for stage in self.by_stage)

    @property
    def timeline(self) -> tuple[tuple[str, float, Mapping[str, int]], ...]:
        """(phase, fraction of the step, bytes by component) on the worst rank, in order."""
        return tuple((entry.phase, entry.fraction, entry.components) for entry in self.worst_stage.phases)

    def at(self, phase: Phase) -> Mapping[str, int]:
        """Return bytes by component on the worst rank where ``phase`` has the most.

        Raises ``ValueError`` for a name that is not in ``PHASES``.
        """
        check_choice("phase", phase, PHASES)
        return self.worst_stage.at(phase).components

    def explain(self, name: str) -> str:
        """Return the formula of a component at the peak, with its numbers and its source.

        Raises ``ValueError`` for a name that is not in ``COMPONENTS``.
        """
        check_choice("component", name, COMPONENTS)
        # A component without a term has no bytes in this phase; one with a term of 0 bytes has a reason.
        term = self.worst_stage.peak.terms.get(name)  # type: ignore[call-overload]
        if term is None or term.num_bytes == 0:
            reason = f": {term.explain()}" if term is not None else ""
            return f"{name}, 0 GiB at the peak ({self.peak_phase}){reason}"
        return f"{name}, {format_gib(term.num_bytes)} GiB = {term.explain()}"

    def to_frame(self) -> pd.DataFrame:
        """Return bytes at each stage's peak: a row per stage, a column per component, and the total."""
        import pandas as pd

        rows = [
            {"stage": s.stage, "layers": s.num_layers, **s.components, "peak_bytes": s.peak_bytes}
            for s in self.by_stage
        ]
        return pd.DataFrame(rows).set_index("stage")

    def to_html(self) -> str:
        """Return the components at the peak as a plain HTML table, without scripts."""
        rows = "".join(
            f"<tr><th scope='row' style='text-align:left'>{name.replace('_', ' ')}</th>"
            f"<td style='text-align:right'>{format_gib(value)}</td>"
            f"<td style='text-align:right'>{100 * value / max(1, self.peak_bytes):.0f} %</td></tr>"
            for name, value in self.components.items()
        )
        left, right = (f"<th style='text-align:{side}'>" for side in ("left", "right"))
        return (
            f"<table><caption style='text-align:left;white-space:nowrap'>{self._summary()}</caption><thead>"
            f"<tr>{left}component</th>{right}GiB</th>{right}share</th></tr></thead><tbody>{rows}</tbody></table>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return f"<MemoryReport {self._summary()}>"

    def _summary(self) -> str:
        # A run that was measured did fit, however little was left.
        is_tight = self.tier != "measured" and self.verdict == "tight"
        verdict = "tight" if is_tight else "fits" if self.fits else "does not fit"
        places = (("host memory", self.host_bytes), ("NVMe", self.nvme_bytes))
        offloaded = "".join(
            f"; {format_gib(num_bytes)} GiB of {place} per rank" for place, num_bytes in places if num_bytes
        )
        return (
            f"{self.tier}: peak {format_gib(self.peak_bytes)} of {format_gib(self.usable_bytes)} GiB"
            f"{self._describe_peak_phase()}, {verdict}{offloaded}"
        )

    def _describe_peak_phase(self) -> str:
        return " at rest" if self.peak_phase == "rest" else f" in {self.peak_phase}"


def sum_parts(*parts: tuple[int, str], source: Callable[[], str] | None = None) -> Term:
    """Return the sum of several (bytes, explanation) parts as one term.

    ``source`` is appended to the explanation.
    """
    num_bytes = sum([part[0] for part in parts])

    # Formatting is slow compared to the sum, and a search never asks for it.
    def explain() -> str:
        explanation = format_sum(parts) or parts[0][1]
        return explanation if source is None or not num_bytes else f"{explanation} · {source()}"

    return Term(num_bytes, explain)


def zero_term(reason: str) -> Term:
    """Return a term of 0 bytes with the reason."""
    return Term(0, lambda: reason)


def choose_term(condition: bool, then: Term, otherwise: Term) -> Term:
    """Return ``then`` if ``condition`` is true, else ``otherwise``; elementwise over arrays of plans."""
    # Arrays of plans are for searches, which read bytes only: one of the two explanations is enough.
    if isinstance(condition, bool):
        return then if condition else otherwise
    return Term(where(condition, then.num_bytes, otherwise.num_bytes), otherwise.find_explanation)
