"""What one rank sends for its training state in one step: the answer of a framework's own ``timing.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shardscope.plan import Plan

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class Transfer(NamedTuple):
    """One kind of collective of a step."""

    collective: Collective
    num_bytes: float
    """The whole vector: what each rank has after a gather, or before a reduction."""
    ranks: int
    """Ranks in the group."""
    stride: int
    """Distance between neighbours of the group among all ranks: the product of the degrees inside of it."""
    times: float
    """How often in one step."""
    num_messages: float = 1.0
    """Into how many calls the vector is cut (layers, buckets): each has its latency."""
    hidden_by: float = 0.0
    """The share of the step's arithmetic that it may run beneath."""
    part: str = "gathers"
    """Which part of the step it is (:data:`shardscope.timing.report.PARTS`)."""


class StateTraffic(NamedTuple):
    """What a framework moves for parameters, gradients and optimizer."""

    transfers: tuple[Transfer, ...] = ()
    host_bytes: float = 0.0
    """Bytes of one rank over the link to its host in one step, the busier way."""
    nvme_bytes: float = 0.0
    """Bytes of one rank to and from NVMe in one step, both ways together."""
    updated_on_host: float = 0.0
    """Weights whose optimizer step one rank's host takes."""


class Weights(NamedTuple):
    """Weights on one rank of the fullest stage, before any sharding over data-parallel ranks."""

    base: float
    trained: float
    num_layers: int


def weights_of(plan: Plan) -> Weights:
    """The largest pipeline stage's weights on one rank."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plan.layout.framework].memory_model()
    stages = (model.stage(plan, shape) for shape in model.shapes(plan).kinds)
    fullest = max(stages, key=lambda stage: stage.base)
    return Weights(float(fullest.base), float(fullest.trainable), max(1, fullest.num_layers))
