"""Training state and peak candidates of one pipeline stage: what a framework's memory model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.activations.stage_activations import StageBackward
from shardscope.memory.report import Component, Phase, Term, zero_term

if TYPE_CHECKING:
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.stage_activations import TransformersActivations
    from shardscope.memory.state.stages import Stage

_NOTHING: Mapping[Component, Term] = MappingProxyType({})


class PeakTerms(NamedTuple):
    """Terms of one peak candidate: bytes with their explanations."""

    activations: Term
    gather: Term
    gradients: Term


@dataclass(slots=True)
class PeakCandidate:
    """One peak candidate in forward or backward, with the framework's own state. Bytes on one rank.

    Bytes are plain numbers and terms are built lazily, because most candidates only need their sum. About two
    dozen are created per prediction, so this is a slotted dataclass, the fastest kind of object to create.
    """

    fraction: float
    activations: int
    gather: int
    gradients: int
    find_terms: Callable[[], PeakTerms]
    """Returns the same bytes as terms, with explanations."""
    logits: Term | None = None
    """Logits at the forward or backward of the loss."""
    phase: Phase = "backward"
    """``forward`` if a collective in forward needs more memory than the end of forward."""

    def keep_where(self, condition: bool) -> PeakCandidate:
        """Return this candidate with 0 bytes where ``condition`` is false, in an array of plans."""
        return replace(
            self,
            activations=condition * self.activations,
            gather=condition * self.gather,
            gradients=condition * self.gradients,
        )

    @classmethod
    def from_terms(
        cls,
        fraction: float,
        activations: Term,
        gather: Term,
        gradients: Term,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Build a candidate from terms."""
        terms = PeakTerms(activations, gather, gradients)
        return cls(fraction, activations[0], gather[0], gradients[0], lambda: terms, logits, phase)

    def replace_buffers(
        self, gather: int, gradients: int, find_terms: Callable[[], PeakTerms]
    ) -> PeakCandidate:
        """Return the candidate with other all-gathered parameters and gradients."""
        return PeakCandidate(
            self.fraction, self.activations, gather, gradients, find_terms, self.logits, self.phase
        )


class TrainingState(NamedTuple):
    """Bytes of one rank's training state in one framework."""

    parameters: Term
    """Parameters held throughout the step."""
    gradients: Term
    """Gradients after backward, until the optimizer has used them."""
    optimizer: Term
    """Moments, and the fp32 main copies that the framework keeps besides the module."""
    gather_forward: Term = zero_term("nothing is all-gathered")
    """All-gathered parameters and staging buffers at the end of forward, when activations are largest."""
    optimizer_working: Term = zero_term("this optimizer step updates in place")
    """Temporaries of the optimizer step, counted as ``optimizer``."""
    keeps_gradients: bool = False
    """Whether the gradient buffer is never freed, and so exists at rest and in forward too."""
    gradients_rest: Term | None = None
    """Gradients at rest, and in forward of a step with one micro-batch, if that is a part of them."""
    gradients_reduced: Term | None = None
    """Gradients left when the optimizer step starts; None: all of them."""
    gather_rest: Term | None = None
    """Staging buffers that are allocated once: present at rest and during the optimizer step."""
    gather_update: Term | None = None
    """Staging buffers during the optimizer step, if different from ``gather_rest``."""
    initialisation: Mapping[Component, Term] = _NOTHING
    """Terms at the peak of the framework's own set-up, if more than the parameters."""
    group_sizes: tuple[int, ...] = ()
    """Number of ranks in each of a rank's communicators."""
    host_bytes: int = 0
    """Host memory per rank with offloading."""
    nvme_bytes: int = 0
    """NVMe bytes per rank with offloading."""
    find_peaks: Callable[[Stage, Modules], list[PeakCandidate]] | None = None
    """Returns the peak candidates of forward and backward, if the framework has its own modules and
    schedule."""
    find_backward_peaks: Callable[[StageBackward], list[PeakCandidate]] | None = None
    """Otherwise: returns the peak candidates of backward for transformers' modules, from the framework's
    collectives."""
    find_logits: Callable[[TransformersActivations], tuple[Term, Term]] | None = None
    """Returns logits at the end of forward and the start of backward, if the framework shards the head
    itself."""
    gradients_accumulated: Term | None = None
    """Gradients of earlier micro-batches while later ones run; None: ``gradients``."""
