"""On how many ranks Megatron-core keeps the same weight: experts on fewer than all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import by_value, largest, where

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


class Replicas(NamedTuple):
    """Ranks that reduce the same gradients, and share out their update with the distributed optimizer."""

    dense: Any
    experts: Any


def replicas_of(plan: Plan) -> Replicas:
    """Data times context parallel ranks; of experts those that ep and tp leave.

    An expert has fewer replicas than a dense weight: ranks were spent on other experts. With ep 1 it is in
    the dense weights' own buffers (tensor_parallel/layers.py, "allreduce").
    """
    degrees, layout = plan.degrees, plan.layout
    dense = by_value(degrees.data_parallel * degrees.cp)
    fewer = largest(1, dense * degrees.tp // (degrees.ep * layout.expert_tp))  # type: ignore[attr-defined]
    return Replicas(dense, where(degrees.ep > 1, fewer, dense))
