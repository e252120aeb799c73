"""``plan.step()``: the seconds of one optimizer step, from closed formulas."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardscope.memory.precision import widths
from shardscope.memory.step import in_flight
from shardscope.timing.calibration import rates_for
from shardscope.timing.collectives import bounding_link, seconds
from shardscope.timing.paging import paged_bytes, travelling_bytes
from shardscope.timing.parallel import parallel_transfers
from shardscope.timing.rates import Rates
from shardscope.timing.report import PARTS, Communication, StepReport
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.memory.report import MemoryReport
    from shardscope.plan import Plan
    from shardscope.timing.traffic import StateTraffic, Transfer

PEAKS = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8-mixed": "fp8", "bf16": "bf16", "fp32": "fp32"}
"""Of each precision of a recipe, the matrix products'."""


def step(plan: Plan, report: MemoryReport | None = None) -> StepReport:
    """The step of ``plan``. Raises ``ValueError`` naming the figure that is not known.

    ``report`` is the plan's predicted memory, and saves asking the plan again.
    """
    from shardscope.frameworks.registry import frameworks

    report = report or plan.memory()
    rates = rates_for(plan.cluster)
    traffic = frameworks[plan.layout.framework].timing_model().state_traffic(plan)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    hidden: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    _arithmetic(plan, rates, parts)
    everything = _moved(plan, report, rates, parts)
    arithmetic = sum(parts.values()) - parts["optimizer"]
    told: list[Communication] = []
    for transfer in parallel_transfers(plan):
        told.append(_told(transfer, plan, 0.0))
    busy = arithmetic + sum(one.seconds for one in told)
    degrees = plan.degrees
    # Narayanan et al. 2021, section 2.2: (pp - 1) / (vpp x micro-batches) of the ideal time.
    parts["bubble"] = (degrees.pp - 1) / (degrees.vpp * max(1, plan.num_micro_batches)) * busy
    told += [_told(transfer, plan, transfer.hidden_by * arithmetic) for transfer in traffic.transfers]
    for one in told:
        parts[one.part] += one.exposed_seconds
        hidden[one.part] += one.hidden_seconds
    parts["offload"] = _offload(plan, report, traffic, everything, arithmetic, rates)
    return _report(plan, rates, parts, hidden, tuple(told))


def _report(
    plan: Plan,
    rates: Rates,
    parts: dict[str, float],
    hidden: dict[str, float],
    communication: tuple[Communication, ...],
) -> StepReport:
    arch, recipe, gpu = plan.architecture, plan.recipe, plan.cluster.gpu
    tokens = recipe.global_batch_size * recipe.seq_len
    trained, attention, again = flops(plan)
    return StepReport(
        parts=MappingProxyType(parts),
        hidden=MappingProxyType(hidden),
        communication=communication,
        num_gpus=plan.world_size,
        num_tokens=tokens,
        model_flops=arch.flops_per_token(recipe.seq_len) * tokens,
        model_flops_full_attention=arch.flops_per_token(recipe.seq_len, causal=False) * tokens,
        hardware_flops=(trained + attention + again) * tokens,
        peak_flops=gpu.peak_flops.get(PEAKS[recipe.precision]),
        watts=gpu.tdp_watts,
        price_per_hour_usd=plan.cluster.price_per_hour_usd,
        calibration=rates.source,
    )


def flops(plan: Plan) -> tuple[float, float, float]:
    """FLOPs of one token: matrices, attention scores, and what is computed again of both.

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
    return trained, attention, again / recipe.recompute_interval


def _arithmetic(plan: Plan, rates: Rates, parts: dict[str, float]) -> None:
    rate = rates.matrix(PEAKS[plan.recipe.precision]).flops_per_second
    tokens = plan.recipe.global_batch_size * plan.recipe.seq_len / plan.world_size
    matrices, attention, again = flops(plan)
    parts["matrices"] = matrices * tokens / rate
    parts["attention"] = attention * tokens / rate
    parts["recomputation"] = again * tokens / rate


def _moved(plan: Plan, report: MemoryReport, rates: Rates, parts: dict[str, float]) -> float:
    """Seconds of what the GPU's memory bounds; tells the bytes of activations that a micro-batch drops.

    Every saved byte is written in forward and read in backward, and its gradient once each; what was dropped
    is written again. Logits likewise. The update reads and writes what it works on.
    """
    speed = rates.memory() / plan.num_micro_batches
    kept = everything = _activations(plan, report)
    if plan.recipe.recompute != "none":
        recipe = replace(plan.recipe, recompute="none", recompute_interval=1)
        open_plan = replace(plan, recipe=recipe)
        everything = _activations(open_plan, open_plan.memory())
    dropped = max(0.0, everything - kept)
    parts["elementwise"] = (4 * everything + _dequantised(plan)) / speed
    if plan.recipe.recompute != "offload":
        parts["recomputation"] += dropped / speed
    parts["loss"] = 2 * report.by_stage[-1].at("backward").components["logits"] / speed
    last = report.at("optimizer")
    moments = last["optimizer"] + paged_bytes(plan, report)
    updated = last["gradients"] + moments + (last["parameters"] if moments else 0)
    parts["optimizer"] = 2 * updated / rates.memory()
    return dropped


def _activations(plan: Plan, report: MemoryReport) -> float:
    chunks, held = in_flight(plan, 0)
    return float(report.by_stage[0].at("forward").components["activations"] * chunks / held)


def _dequantised(plan: Plan) -> float:
    """Bytes a micro-batch moves to unpack a quantised base: written and read, forward and backward."""
    if plan.recipe.base_quantization is None:
        return 0.0
    weights = plan.architecture.num_parameters / (plan.degrees.tp * plan.degrees.pp)
    passes = 3 if plan.recipe.recompute == "full" else 2
    return passes * 2 * widths[plan.recipe.precision].compute * weights


def _told(transfer: Transfer, plan: Plan, cover: Any) -> Communication:
    took = seconds(transfer, plan.cluster)
    return Communication(
        part=transfer.part,
        collective=transfer.collective,
        link=bounding_link(transfer, plan.cluster),
        ranks=transfer.ranks,
        num_bytes=transfer.num_bytes * transfer.times,
        seconds=took,
        hidden_seconds=min(took, cover),
    )


def _offload(
    plan: Plan,
    report: MemoryReport,
    traffic: StateTraffic,
    dropped: float,
    arithmetic: float,
    rates: Rates,
) -> float:
    """Seconds that the host link, the NVMe and the host's own optimizer add."""
    cluster, link = plan.cluster, rates.host.bytes_per_second
    activations = plan.num_micro_batches * dropped if plan.recipe.recompute == "offload" else 0.0
    # Out in forward, back in backward: each way has its own half of the step to hide in.
    spilled = max(0.0, 2 * activations / link - arithmetic) if activations else 0.0
    updating = traffic.updated_on_host * cluster.gpus_per_node / rates.host_updates_per_second
    drives = 0.0
    if traffic.nvme_bytes:
        speed = cluster.nvme_bandwidth_bytes_per_second
        if speed is None:
            refuse(
                "Cluster.nvme_bandwidth_bytes_per_second",
                None,
                "bytes a second that one node reads from its NVMe, for this layout keeps state there",
                "nvme_bandwidth_bytes_per_second=6e9 if `fio` says so, or ss.calibrate()",
            )
        drives = traffic.nvme_bytes * cluster.gpus_per_node / speed
    # A page leaves before another has its place: out and in, one after the other, and nothing runs beneath.
    paging = 2 * travelling_bytes(plan, report) / link
    return float(spilled + traffic.host_bytes / link + paging + updating + drives)
