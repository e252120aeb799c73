"""Communication of one rank in one step: the result of a framework's ``timing.py``.

Numbers may be arrays of plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.report import Part

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
OverlappedWith = Literal["nothing", "forward", "backward", "last_backward", "first_forward", "attention"]
"""Arithmetic that can overlap with a collective: none, because the next operator waits for it; all forwards
or backwards; those of the last or first micro-batch; attention, while keys and values are exchanged."""


NOTHING = 0.0
"""Sentinel default, compared by identity: fields left at it cost no arithmetic."""


class Transfer(NamedTuple):
    """One kind of collective in a step."""

    part: Part
    """Part of the step that its seconds belong to."""
    collective: Collective
    num_bytes: float
    """Bytes of the full vector: each rank's output of an all-gather, or its input to a reduction; of a send,
    the message."""
    ranks: int
    """Number of ranks in the group."""
    stride: int
    """Distance in global ranks between consecutive ranks of the group: the product of the inner degrees;
    0: all on one node, at any distance."""
    times: float
    """Number of repetitions per step."""
    num_messages: float = 1.0
    """Number of calls (layers, buckets) that the vector is split into; each has its latency."""
    overlaps_with: OverlappedWith = "nothing"
    exposed_share: float | None = None
    """The share that cannot overlap: the first message of an all-gather, the last of a reduction; None: one
    message of :attr:`num_messages`."""


class StateTraffic(NamedTuple):
    """Communication of a framework for parameters, gradients and optimizer state."""

    transfers: tuple[Transfer, ...] = ()
    copied_for_gathers: float = 0.0
    """Bytes that one rank reads and writes locally per step to stage all-gathers."""
    copied_for_gradients: float = 0.0
    """The same for gradients: accumulated, cast, staged for reduction."""
    fetched_forward: float = NOTHING
    """Bytes per rank fetched from the host in all forwards of a step."""
    fetched_backward: float = NOTHING
    """The same in all backwards."""
    returned_backward: float = NOTHING
    """Bytes of gradients offloaded to the host in all backwards, and of those that the same stream reads
    back, one copy after another."""
    returned_waiting: float = NOTHING
    """Bytes of gradients copied to the host and back while backward waits for them, not overlapped."""
    returned_after: float = NOTHING
    """Bytes of updated weights copied back after the optimizer step, not overlapped."""
    nvme_overlapped: float = NOTHING
    """Bytes per rank read from NVMe, overlapped with arithmetic."""
    nvme_after: float = NOTHING
    """Bytes read and written around the optimizer step."""
    updated: float = 0.0
    """Number of weights updated by one rank's optimizer on its GPU."""
    updated_on_host: float = NOTHING
    """Number of weights updated on the host for one rank; other passes over host memory count as the share
    of an update that they take."""
    main_copies: bool = False
    """Whether the optimizer updates fp32 main copies and casts them to the module's weights."""
    first_micro_batch_waits: bool = False
    """Whether each stage of a pipeline all-gathers its weights only when the first micro-batch arrives, so
    that this one waits on all stages, one after another."""

    @property
    def uses_no_host(self) -> bool:
        """Return whether no field for host memory, NVMe or the CPU optimizer is set."""
        return (
            self.fetched_forward is self.fetched_backward is NOTHING
            and self.returned_backward is self.returned_waiting is self.returned_after is NOTHING
            and self.nvme_overlapped is self.nvme_after is NOTHING
            and self.updated_on_host is NOTHING
        )


class Overlap(NamedTuple):
    """A framework's overlap of arithmetic with communication besides its training state's.

    Read from the framework's own source.
    """

    tensor_forward: bool = False
    """Forward's tensor-parallel collectives overlap."""
    tensor_backward: bool = False
    """Backward's tensor-parallel collectives overlap with the weights' gradients."""
    gathers_input_again: bool = False
    """With a split sequence, backward all-gathers each column-parallel matmul's input again."""
    context: Literal["ring", "gather"] = "gather"
    """``ring``: keys and values are sent around the ring while attention works on the current part;
    ``gather``: they are all-gathered first."""
    merge_bytes: tuple[int, int] = (0, 0)
    """Bytes read and written per element to merge a further part of the keys: of attention's output, and of
    the queries' gradient."""
    sends_gradients_home: bool = False
    """Gradients of keys and values are sent in fp32, with one more hop, back to their own rank, that does not
    overlap."""
    sends: bool = False
    """Pipeline sends overlap; an array if plans differ."""
    exposed_sends: float = 0.0
    """The share of such sends that is waited for."""
    spans_chunks: bool = False
    """Interleaved, the collectives of one chunk's weights and gradients overlap with other chunks' passes."""
    stops_early: bool = True
    """Recomputation stops when autograd has all saved tensors (torch.utils.checkpoint's early stop)."""
    kernels: tuple[float, float] = (0.0, 0.0)
    """Kernels that the framework adds to a layer's forward and backward, collectives apart."""


class TimingModel(Protocol):
    """Interface of every framework's ``timing.py``."""

    SCHEDULES: Mapping[str, str]
    """Pipeline schedules by the names of ``timing/pipeline.py``, each with upstream's name."""

    def state_traffic(self, plan: Plan, stage: Stage) -> StateTraffic:
        """Return one stage rank's communication for parameters, gradients and optimizer state in one step."""

    def overlap(self, plan: Plan) -> Overlap:
        """Return which other communication overlaps with arithmetic."""
