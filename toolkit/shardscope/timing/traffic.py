"""What one rank sends in one step: the answer of a framework's own ``timing.py``.

Numbers may be arrays of plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.report import Part

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Beneath = Literal["nothing", "forward", "backward", "last_backward", "first_forward", "attention"]
"""Which arithmetic can run while a collective does: none, since the next operation waits for it; every
forward or backward; that of the last or first micro-batch; attention, while keys and values go round."""


NOTHING = 0.0
"""The very object: what is left as it is costs no arithmetic."""


class Transfer(NamedTuple):
    """One kind of collective of a step."""

    part: Part
    """Which part of the step it is in."""
    collective: Collective
    num_bytes: Any
    """The whole vector: what each rank has after a gather, or before a reduction. Of a send, what is sent."""
    ranks: Any
    """Ranks in the group."""
    stride: Any
    """Distance between neighbours of the group among all ranks: the product of the degrees inside of it."""
    times: Any
    """How often in one step."""
    num_messages: Any = 1.0
    """Into how many calls the vector is cut (layers, buckets): each has its latency."""
    beneath: Beneath = "nothing"
    bare: Any = None
    """The share that nothing can cover: the first message of a gather, the last of a reduction; None: one
    message of :attr:`num_messages`."""


class StateTraffic(NamedTuple):
    """What a framework moves for parameters, gradients and optimizer."""

    transfers: tuple[Transfer, ...] = ()
    copied_for_gathers: Any = 0.0
    """Bytes that one rank reads and writes in its own memory in one step to stage what is gathered."""
    copied_for_gradients: Any = 0.0
    """The same for gradients: accumulated, cast, staged for their reduction."""
    fetched_forward: Any = NOTHING
    """Bytes of one rank that come from the host in all forwards of a step."""
    fetched_backward: Any = NOTHING
    """The same in its backwards."""
    returned_backward: Any = NOTHING
    """Bytes of gradients that go to the host in them."""
    returned_after: Any = NOTHING
    """Bytes of updated weights that come back once the optimizer is done, while nothing else runs."""
    nvme_beneath: Any = NOTHING
    """Bytes of one rank read from NVMe while arithmetic runs."""
    nvme_after: Any = NOTHING
    """Bytes read and written around the optimizer's step."""
    updated: Any = 0.0
    """Weights that one rank's optimizer updates on its GPU."""
    updated_on_host: Any = NOTHING
    """Weights whose optimizer step one rank's host takes."""
    main_copies: bool = False
    """The optimizer updates fp32 main copies and casts them to the module's weights."""

    @property
    def leaves_the_host_alone(self) -> bool:
        """Whether nobody said anything of host memory, drives or the host's optimizer."""
        return (
            self.fetched_forward is self.fetched_backward is NOTHING
            and self.returned_backward is self.returned_after is NOTHING
            and self.nvme_beneath is self.nvme_after is NOTHING
            and self.updated_on_host is NOTHING
        )


class Overlap(NamedTuple):
    """What a framework lets run beneath arithmetic beside its training state's traffic, by its own source."""

    tensor_forward: bool = False
    """Forward's tensor-parallel collectives."""
    tensor_backward: bool = False
    """Those of backward that weights' gradients can cover."""
    gathers_input_again: bool = False
    """With the sequence split, backward gathers each column-parallel product's input once more."""
    context: Literal["ring", "gather"] = "gather"
    """Keys and values pass round from rank to rank while attention works on those that are there, or are
    gathered first."""
    merges: tuple[int, int] = (0, 0)
    """Bytes that are read and written for one number of attention's output where a further part of the keys
    joins those before, and for one of the queries' gradient."""
    gradients_home: bool = False
    """Gradients of keys and values travel in fp32, and once more than these do, beneath nothing: home."""
    sends: Any = False
    """What passes between pipeline stages; an array where plans differ in it."""
    stops_early: bool = True
    """Recomputation ends when autograd has all that it saves (torch.utils.checkpoint's early stop)."""


class TimingModel(Protocol):
    """What every framework's ``timing.py`` offers."""

    SCHEDULES: Mapping[str, str]
    """Its pipeline schedules by the names of ``timing/pipeline.py``, each with upstream's own."""

    def state_traffic(self, plan: Plan, stage: Stage) -> StateTraffic:
        """What one rank of a stage sends for parameters, gradients and optimizer in one step."""

    def overlap(self, plan: Plan) -> Overlap:
        """What runs beneath arithmetic beside that."""
