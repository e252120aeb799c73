"""What a framework's own memory model answers for one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.activations.backward import Backward, Peak
from shardscope.memory.report import Component, Term, no_bytes

if TYPE_CHECKING:
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.activations.step import StageStep
    from shardscope.memory.state.stages import Stage

_NOTHING: Mapping[Component, Term] = MappingProxyType({})


class TrainingState(NamedTuple):
    """Bytes of one rank's training state, as one framework keeps it."""

    parameters: Term
    """What the module holds throughout the step."""
    gradients: Term
    """What is held once backward has passed, until the optimizer has used it."""
    optimizer: Term
    """Moments, and the fp32 main copies that the framework keeps beside the module."""
    gather_forward: Term = no_bytes("nothing is gathered")
    """Gathered parameters and staging at the end of forward, when activations are fullest."""
    optimizer_working: Term = no_bytes("this optimizer step updates in place")
    """Temporaries of the optimizer step, counted as ``optimizer``."""
    gradients_stay: bool = False
    """The gradients' buffer is never freed: it is there at rest and in forward too."""
    gradients_rest: Term | None = None
    """Those at rest, and in the forward of a step's only micro-batch, where that is a part of them."""
    gradients_reduced: Term | None = None
    """What is left of the gradients when the optimizer begins; None: all of them."""
    gather_rest: Term | None = None
    """Staging that is allocated once and kept: there at rest and while the optimizer runs."""
    gather_update: Term | None = None
    """Staging while the optimizer runs, where it is not ``gather_rest``."""
    initialisation: Mapping[Component, Term] = _NOTHING
    """What the framework's own set-up holds at its peak, where it is not just the parameters."""
    group_sizes: tuple[int, ...] = ()
    """Ranks in each communicator that a rank takes part in."""
    host_bytes: int = 0
    """Host memory of one rank when offloading."""
    nvme_bytes: int = 0
    """Bytes of one rank on NVMe when offloading."""
    find_peaks: Callable[[Stage, Modules], list[Peak]] | None = None
    """The instants of forward and backward, where the framework's own modules and schedule decide all."""
    find_backward: Callable[[Backward], list[Peak]] | None = None
    """Otherwise: the instants of backward, in which its collectives meet what transformers' modules hold."""
    find_logits: Callable[[StageStep], tuple[Term, Term]] | None = None
    """Logits at the end of forward and as backward starts, where a framework cuts the head itself."""
    gradients_waiting: Term | None = None
    """What earlier micro-batches have left while later ones run; None: ``gradients``."""
