"""What a framework's own memory model answers for one pipeline stage."""

from __future__ import annotations

from typing import NamedTuple

from shardscope.memory.report import Term, no_bytes


class TrainingState(NamedTuple):
    """Bytes of one rank's training state, as one framework keeps it."""

    parameters: Term
    """What the module holds throughout the step."""
    gradients: Term
    """What is held once backward has passed, until the optimizer has used it."""
    optimizer: Term
    """Moments, and the fp32 main copies that the framework keeps beside the module."""
    gather_forward: Term
    """Gathered parameters and staging at the end of forward, when activations are fullest."""
    gather_backward: Term
    """Gathered parameters, unreduced gradients and staging at the end of backward."""
    gather_layer: Term | None = None
    """The same while backward is in its first layer; None: as at the end of backward."""
    optimizer_working: Term = no_bytes("this optimizer step updates in place")
    """Temporaries of the optimizer step, counted as ``optimizer``."""
    gradients_stay: bool = False
    """The gradients' buffer is never freed: it is there at rest and in forward too."""
    group_sizes: tuple[int, ...] = ()
    """Ranks in each communicator that a rank takes part in."""
    host_bytes: int = 0
    """Host memory of one rank when offloading."""
    nvme_bytes: int = 0
    """Bytes of one rank on NVMe when offloading."""
