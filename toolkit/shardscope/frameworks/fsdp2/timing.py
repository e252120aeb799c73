"""What FSDP2 sends in one step: each layer gathered for forward and backward, its gradients scattered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.precision import base_width, widths
from shardscope.timing.traffic import StateTraffic, Transfer, weights_of

if TYPE_CHECKING:
    from shardscope.plan import Plan


def state_traffic(plan: Plan) -> StateTraffic:
    """All-gathers and reduce-scatters of every micro-batch; HSDP's all-reduce once (Zhao et al. 2023).

    ``reshard_after_forward`` decides the second gather: none (False), over all ranks (True), or over the few
    that it resharded to. Prefetching lets the next layer's run beneath this layer's arithmetic.
    """
    layout: Any = plan.layout
    degrees, width = plan.degrees, widths[plan.recipe.precision]
    weights, micro_batches = weights_of(plan), plan.num_micro_batches
    ranks, stride, calls = degrees.shard * degrees.cp, degrees.tp, weights.num_layers + 1
    gathered, reduced = weights.base * width.compute, weights.trained * width.reduce
    reshard = layout.reshard_after_forward
    transfers = [
        Transfer("all_gather", gathered, ranks, stride, micro_batches, calls, 0.3),
        Transfer("reduce_scatter", reduced, ranks, stride, micro_batches, calls, 0.4, part="gradients"),
    ]
    if reshard:
        few = ranks if reshard is True else int(reshard)
        transfers.append(Transfer("all_gather", gathered, few, stride, micro_batches, calls, 0.3))
    if degrees.replicate > 1:
        each, outer = reduced / ranks, stride * ranks
        transfers.append(
            Transfer("all_reduce", each, degrees.replicate, outer, 1, calls, 0.0, part="gradients")
        )
    if layout.offload is None or not plan.on_gpu:
        return StateTraffic(tuple(transfers))
    gathers = 2 if reshard else 1
    down = micro_batches * gathers * weights.base / ranks * base_width(plan.recipe)
    up = micro_batches * weights.trained / ranks * width.reduce
    return StateTraffic(tuple(transfers), host_bytes=max(down, up), updated_on_host=weights.trained / ranks)
