"""The first-order time of one step: arithmetic, memory, collectives, offload, the pipeline's bubble.

It is there to compare two plans of one model (``plan.repairs()``), not to promise tokens a second: kernels
reach one stated share of the datasheet's peak (catalog/efficiency.toml), collectives are rings at one stated
share of their link, and what overlaps overlaps perfectly. What is not known (a GPU's peak in this precision,
the speed of an NVMe) makes the answer NaN, never a guess.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardscope.catalog import entries
from shardscope.memory.precision import widths
from shardscope.memory.step import in_flight
from shardscope.timing.collectives import seconds
from shardscope.timing.paging import paged_bytes, travelling_bytes
from shardscope.timing.parallel import parallel_transfers

if TYPE_CHECKING:
    from shardscope.memory.report import MemoryReport
    from shardscope.plan import Plan
    from shardscope.timing.traffic import StateTraffic


class Estimate(NamedTuple):
    """Seconds of one optimizer step, by what they go to; NaN where something of it is not known."""

    matrices: float
    """Matrix products and attention scores, recomputed ones included."""
    memory: float
    """What is bound by the GPU's memory: activations written and read, logits, the optimizer's update."""
    parallel: float
    """Collectives of tensor, context and expert parallelism, which the next operation waits for."""
    bubble: float
    """Pipeline stages that wait for their first or after their last micro-batch."""
    state: float
    """Gathers and reductions of the training state, as far as arithmetic does not hide them."""
    offload: float
    """Host link, NVMe, paged moments and the optimizer's step on the host, as far as arithmetic does not hide
    them."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self)


def estimate(plan: Plan, report: MemoryReport | None = None) -> Estimate:
    """The first-order step time of ``plan``; see this module's own words for what that is worth.

    ``report`` is the plan's predicted memory, and saves asking the plan again.
    """
    from shardscope.frameworks.registry import frameworks

    report = report or plan.memory()
    traffic = frameworks[plan.layout.framework].timing_model().state_traffic(plan)
    matrices = _matrices(plan)
    held = _HeldBytes.of(plan, report)
    memory = _memory(plan, held)
    parallel = sum(seconds(transfer, plan.cluster) for transfer in parallel_transfers(plan))
    degrees = plan.degrees
    # Narayanan et al. 2021, section 2.2: (pp - 1) / (vpp x micro-batches) of the ideal time.
    share = (degrees.pp - 1) / (degrees.vpp * max(1, plan.num_micro_batches))
    busy = matrices + memory + parallel
    state = 0.0
    for transfer in traffic.transfers:
        state += max(0.0, seconds(transfer, plan.cluster) - transfer.hidden_by * (matrices + memory))
    return Estimate(
        matrices=matrices,
        memory=memory,
        parallel=parallel,
        bubble=share * busy,
        state=state,
        offload=_offload(plan, report, traffic, held, matrices),
    )


def flops_per_rank(plan: Plan) -> float:
    """FLOPs that one GPU executes in one optimizer step: the model's, recomputation added, evenly spread.

    A frozen base (adapters) needs no weight gradients: two thirds of its matrices' FLOPs remain.
    """
    arch, recipe = plan.architecture, plan.recipe
    matrices = 6.0 * arch.matrix_parameters_per_token
    attention = arch.flops_per_token(recipe.seq_len) - matrices
    head = 6.0 * arch.vocab_size * arch.hidden_size
    trained = matrices if recipe.method == "full" else matrices * 2 / 3
    again = 0.0
    if recipe.recompute == "full":
        again = (matrices - head + attention) / 3
    elif recipe.recompute == "selective" and plan.kernels == "megatron":
        # Korthikanti et al. 2022, section 5: attention's core alone is run again.
        again = attention / 3
    tokens = recipe.global_batch_size * recipe.seq_len
    return (trained + attention + again / recipe.recompute_interval) * tokens / plan.world_size


def _matrices(plan: Plan) -> float:
    """Seconds at the stated share of the peak; fp8 products only where the card's fp8 peak is known."""
    precision = plan.recipe.precision.removesuffix("-mixed")
    peak = plan.cluster.gpu.peak_flops.get(precision)
    if peak is None:
        return math.nan
    table = entries("efficiency")["matrices"]
    share = table["by_architecture"].get(plan.cluster.gpu.architecture, table["share_of_peak"])
    found: float = flops_per_rank(plan) / (peak * share)
    return found


class _HeldBytes(NamedTuple):
    """Bytes of one micro-batch's activations on one rank, from the memory model."""

    everything: float
    """Without recomputation."""
    kept: float
    """With the plan's own."""
    logits: float
    updated: float
    """Parameters, gradients and moments, paged ones too, that the optimizer's step reads and writes."""

    @classmethod
    def of(cls, plan: Plan, report: MemoryReport) -> _HeldBytes:
        kept = everything = _activations(plan, report)
        if plan.recipe.recompute != "none":
            recipe = replace(plan.recipe, recompute="none", recompute_interval=1)
            open_plan = replace(plan, recipe=recipe)
            everything = _activations(open_plan, open_plan.memory())
        last = report.at("optimizer")
        moments = last["optimizer"] + paged_bytes(plan, report)
        return cls(
            everything=everything,
            kept=kept,
            logits=report.by_stage[-1].at("backward").components["logits"],
            updated=last["gradients"] + moments + (last["parameters"] if moments else 0),
        )


def _activations(plan: Plan, report: MemoryReport) -> float:
    chunks, held = in_flight(plan, 0)
    return float(report.by_stage[0].at("forward").components["activations"] * chunks / held)


def _memory(plan: Plan, held: _HeldBytes) -> float:
    """Seconds of what the GPU's memory bounds.

    Every saved byte is written in forward and read in backward, and its gradient once each; what was dropped
    is written again. Logits likewise. The update reads and writes what it works on.
    """
    bandwidth = plan.cluster.gpu.memory_bandwidth_bytes_per_second
    if bandwidth is None:
        return math.nan
    dropped = 0.0 if plan.recipe.recompute == "offload" else max(0.0, held.everything - held.kept)
    each = 4 * held.everything + dropped + 2 * held.logits
    each += _dequantised(plan)
    moved = plan.num_micro_batches * each + 2 * held.updated
    return moved / (bandwidth * _share("memory"))


def _dequantised(plan: Plan) -> float:
    """Bytes a micro-batch moves to unpack a quantised base: written and read, forward and backward."""
    if plan.recipe.quantization is None and plan.recipe.method != "qlora":
        return 0.0
    weights = plan.architecture.num_parameters / (plan.degrees.tp * plan.degrees.pp)
    passes = 3 if plan.recipe.recompute == "full" else 2
    return passes * 2 * widths[plan.recipe.precision].compute * weights


def _offload(
    plan: Plan, report: MemoryReport, traffic: StateTraffic, held: _HeldBytes, matrices: float
) -> float:
    """Seconds that the host link, the NVMe and the host's own optimizer add."""
    cluster = plan.cluster
    link = cluster.host_link.bandwidth_bytes_per_second * _share("link")
    activations = 0.0
    if plan.recipe.recompute == "offload":
        activations = plan.num_micro_batches * max(0.0, held.everything - held.kept)
    # Out in forward, back in backward: each way has its own half of the step to hide in.
    spilled = max(0.0, 2 * activations / link - matrices) if activations else 0.0
    on_host = traffic.updated_on_host * cluster.gpus_per_node
    updating = on_host / entries("efficiency")["host_update"]["parameters_per_second"]
    drives = 0.0
    if traffic.nvme_bytes:
        speed = cluster.nvme_bandwidth_bytes_per_second
        drives = math.nan if speed is None else traffic.nvme_bytes * cluster.gpus_per_node / speed
    # A page leaves before another has its place: out and in, one after the other, and nothing runs beneath.
    paging = 2 * travelling_bytes(plan, report) / link
    return float(spilled + traffic.host_bytes / link + paging + updating + drives)


def _share(what: str) -> float:
    found: float = entries("efficiency")[what]["share_of_peak"]
    return found
