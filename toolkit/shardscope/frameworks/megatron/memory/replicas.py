"""Number of replicas of dense weights and of experts in Megatron-core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import group_equal, maximum, where

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


class Replicas(NamedTuple):
    """Ranks that reduce the same gradients; the distributed optimizer shards its state over them."""

    dense: Any
    experts: Any


def replicas_of(plan: Plan) -> Replicas:
    """Return the replicas of dense weights (data x context parallel ranks) and of experts.

    With ep > 1 an expert has fewer replicas than a dense weight: the other ranks hold other experts. With
    ep 1 experts are in the dense weights' buffers (tensor_parallel/layers.py, "allreduce").
    """
    degrees, layout = plan.degrees, plan.layout
    dense = group_equal(degrees.data_parallel * degrees.cp)
    fewer = maximum(1, dense * degrees.tp // (degrees.ep * layout.expert_tp))  # type: ignore[attr-defined]
    return Replicas(dense, where(degrees.ep > 1, fewer, dense))
