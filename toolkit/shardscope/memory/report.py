"""The answer of one tier about memory: bytes by component, stage and phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from shardscope.core.arrays.arithmetic import where
from shardscope.core.errors import one_of
from shardscope.core.number_format import gib, in_parts
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
    """Some bytes and, when somebody asks, the words for where they come from."""

    num_bytes: int
    words: Callable[[], str]

    def explain(self) -> str:
        """Where the bytes come from."""
        return self.words()


class Moment(NamedTuple):
    """What one rank holds at one instant of a step."""

    phase: Phase
    fraction: float
    """Place in the step, 0 to 1; not seconds, which only the step model knows."""
    total: int
    """Bytes over all components."""
    find_terms: Callable[[], Mapping[Component, Term]]
    """Names the bytes of :attr:`total`: of most moments nobody asks more than their sum."""

    @classmethod
    def of(cls, phase: Phase, fraction: float, terms: Mapping[Component, Term]) -> Moment:
        """A moment and its total."""
        return cls(phase, fraction, sum([term[0] for term in terms.values()]), lambda: terms)

    @property
    def terms(self) -> Mapping[Component, Term]:
        """Bytes by component, and where each comes from."""
        return self.find_terms()

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by name, every component of :data:`COMPONENTS` present."""
        terms = self.terms
        return MappingProxyType({name: terms[name].num_bytes if name in terms else 0 for name in COMPONENTS})


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One pipeline stage: every one of its ranks holds this."""

    stage: int
    """Index of the stage, from 0."""
    num_layers: int
    """Decoder layers that it runs."""
    find_moments: Callable[[], tuple[Moment, ...]]
    """Computes :attr:`moments`: most stages of a long pipeline are never looked at."""
    find_peak: Callable[[], Moment] | None = None
    """Computes :attr:`peak`, where that takes less than all moments; None: the fullest of these."""
    host_bytes: int = 0
    """Host memory that one rank of this stage takes when offloading."""
    nvme_bytes: int = 0
    """Bytes that one rank of this stage keeps on NVMe when offloading."""

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """In the order of a step, initialisation first."""
        return self.find_moments()

    @cached_property
    def peak(self) -> Moment:
        """The moment at which this stage holds most."""
        if self.find_peak is not None:
            return self.find_peak()
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by component at the peak."""
        return self.peak.components

    def at(self, phase: Phase) -> Moment:
        """The largest moment of a phase."""
        return max((m for m in self.moments if m.phase == phase), key=lambda m: m.total)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on the worst rank, by component and phase, with the band that cannot be known beforehand."""

    find_stages: Callable[[], tuple[StageMemory, ...]]
    """Computes :attr:`by_stage`: a search looks at the worst stage only."""
    worst_stage: StageMemory
    """The first stage whose peak is highest."""
    usable_bytes: int
    """What the driver leaves of the card to one rank."""
    find_band: Callable[[], tuple[int, int]]
    """Computes :attr:`low_bytes` and :attr:`high_bytes`: a search looks at peaks only."""
    tier: Literal["predicted", "rehearsed", "measured"] = "predicted"

    @cached_property
    def by_stage(self) -> tuple[StageMemory, ...]:
        """One entry for each pipeline stage."""
        return self.find_stages()

    @property
    def low_bytes(self) -> int:
        """The peak if library buffers and the allocator take their least."""
        return self._band[0]

    @property
    def high_bytes(self) -> int:
        """The peak if they take their most: on a GPU no more than is usable, while the peak itself fits."""
        return self._band[1]

    @cached_property
    def _band(self) -> tuple[int, int]:
        return self.find_band()

    @property
    def peak_phase(self) -> Phase:
        """The phase in which the worst rank reaches its peak."""
        return self.worst_stage.peak.phase

    @property
    def components(self) -> Mapping[str, int]:
        """Bytes by name on the worst rank at its peak; every name of ``COMPONENTS`` is there."""
        return self.worst_stage.components

    @property
    def peak_bytes(self) -> int:
        """The sum of :attr:`components`."""
        return self.worst_stage.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within what the driver leaves of the card."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def is_tight(self) -> bool:
        """Whether it fits, but of runs that need so much of their card some run out of memory.

        See :data:`~shardscope.memory.overheads.libraries.TIGHT_PERCENT`.
        """
        return self.fits and 100 * self.peak_bytes > TIGHT_PERCENT * self.usable_bytes

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """Whether the GPU's memory is enough; ``tight``: it may not be, see :attr:`is_tight` and
        :attr:`high_bytes`. Host memory and NVMe are for ``shardscope.planner.verdict``."""
        if not self.fits:
            return "does not fit"
        return "tight" if self.is_tight or self.high_bytes > self.usable_bytes else "fits"

    @property
    def host_bytes(self) -> int:
        """Host memory that the worst rank takes when offloading."""
        return max(stage.host_bytes for stage in self.by_stage)

    @property
    def nvme_bytes(self) -> int:
        """Bytes that the worst rank keeps on NVMe when offloading."""
        return max(stage.nvme_bytes for stage in self.by_stage)

    @property
    def timeline(self) -> tuple[tuple[str, float, Mapping[str, int]], ...]:
        """(phase, fraction of the step, bytes by component) on the worst rank, in order."""
        return tuple((m.phase, m.fraction, m.components) for m in self.worst_stage.moments)

    def at(self, phase: Phase) -> Mapping[str, int]:
        """Bytes by component on the worst rank at the largest moment of ``phase``.

        Raises ``ValueError`` for a name that is not in ``PHASES``.
        """
        one_of("phase", phase, PHASES)
        return self.worst_stage.at(phase).components

    def explain(self, name: str) -> str:
        """The formula of a component at the peak, with its numbers and its source.

        Raises ``ValueError`` for a name that is not in ``COMPONENTS``.
        """
        one_of("component", name, COMPONENTS)
        term = self.worst_stage.peak.terms.get(name)  # type: ignore[call-overload]
        if term is None or term.num_bytes == 0:
            reason = f": {term.explain()}" if term is not None else ""
            return f"{name}, 0 GiB at the peak ({self.peak_phase}){reason}"
        return f"{name}, {gib(term.num_bytes)} GiB = {term.explain()}"

    def to_frame(self) -> pd.DataFrame:
        """Bytes at each stage's peak: one row a stage, one column a component, and the total."""
        import pandas as pd

        rows = [
            {"stage": s.stage, "layers": s.num_layers, **s.components, "peak_bytes": s.peak_bytes}
            for s in self.by_stage
        ]
        return pd.DataFrame(rows).set_index("stage")

    def to_html(self) -> str:
        """The components at the peak as a plain HTML table, without scripts."""
        rows = "".join(
            f"<tr><th scope='row' style='text-align:left'>{name.replace('_', ' ')}</th>"
            f"<td style='text-align:right'>{gib(value)}</td>"
            f"<td style='text-align:right'>{100 * value / max(1, self.peak_bytes):.0f} %</td></tr>"
            for name, value in self.components.items()
        )
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"<table><caption>{self.tier} peak: {gib(self.peak_bytes)} of {gib(self.usable_bytes)} GiB, "
            f"{verdict}</caption><thead><tr><th>component</th><th>GiB</th><th>share</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"<MemoryReport {self.tier}: peak {gib(self.peak_bytes)} of {gib(self.usable_bytes)} GiB in "
            f"{self.peak_phase}, {verdict}>"
        )


def summed(*parts: tuple[int, str], source: Callable[[], str] | None = None) -> Term:
    """A term of several parts, each of which says what it is; ``source`` follows them all."""
    num_bytes = sum([part[0] for part in parts])

    def words() -> str:
        told = in_parts(parts) or parts[0][1]
        return told if source is None or not num_bytes else f"{told} · {source()}"

    return Term(num_bytes, words)


def no_bytes(why: str) -> Term:
    """A component that holds nothing, and why."""
    return Term(0, lambda: why)


def chosen(condition: Any, then: Term, otherwise: Term) -> Term:
    """One of two terms; over arrays of plans, the bytes of each one's."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    return Term(where(condition, then[0], otherwise[0]), otherwise.words)
