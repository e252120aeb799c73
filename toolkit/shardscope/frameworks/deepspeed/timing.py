"""What DeepSpeed sends in one step, by ZeRO stage (Rajbhandari et al. 2020, section 7) and by offload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.precision import FP32, num_moments, widths
from shardscope.timing.traffic import StateTraffic, Transfer, weights_of

if TYPE_CHECKING:
    from shardscope.plan import Plan


def state_traffic(plan: Plan) -> StateTraffic:
    """Stage 0 averages gradients, 1 and 2 scatter them and gather parameters, 3 gathers them at every use."""
    layout: Any = plan.layout
    half, ranks, stride = widths[plan.recipe.precision].compute, plan.degrees.data_parallel, plan.degrees.tp
    weights, micro_batches = weights_of(plan), plan.num_micro_batches
    gathered, reduced, calls = weights.base * half, weights.trained * half, weights.num_layers
    gradients = "all_reduce" if layout.stage == 0 else "reduce_scatter"
    # Below stage 2 gradients are reduced at the boundary of accumulation, else with every micro-batch.
    times = micro_batches if layout.stage >= 2 else 1
    hidden = 0.4 if layout.stage >= 2 else 0.4 / max(1, micro_batches)
    transfers = [
        Transfer(gradients, reduced, ranks, stride, times, calls, hidden, part="gradients")  # type: ignore[arg-type]
    ]
    if layout.stage in (1, 2):
        transfers.append(Transfer("all_gather", weights.trained * half, ranks, stride, 1, calls))
    elif layout.stage == 3:
        transfers.append(Transfer("all_gather", gathered, ranks, stride, 2 * micro_batches, calls, 0.6))

    host = nvme = updated = 0.0
    owned = weights.trained / ranks
    if layout.offload_optimizer and plan.on_gpu:
        updated = owned
        host += owned * half * (times + 1)
        if layout.offload_optimizer == "nvme":
            # Main copy and moments are read and written back (Rajbhandari et al. 2021, section 5.2.2).
            kept = FP32 * (1 + num_moments.get(plan.recipe.optimizer, 2))
            nvme += 2 * kept * owned
    if layout.offload_params and plan.on_gpu:
        read = 2 * micro_batches * gathered / ranks
        host += read
        if layout.offload_params == "nvme":
            nvme += read + owned * half
    return StateTraffic(tuple(transfers), host_bytes=host, nvme_bytes=nvme, updated_on_host=updated)
