"""``plan.step()``: predicted seconds of one optimizer step, from closed formulas."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from shardscope.prediction.pipeline import compute_pipeline, explain_schedule
from shardscope.timing.calibration.finished_runs import find_residual
from shardscope.timing.collectives import find_bounding_link
from shardscope.timing.explanations import explain_part
from shardscope.timing.flops import count_hardware_flops_per_token, count_model_flops_per_token
from shardscope.timing.layers import PEAKS
from shardscope.timing.paging import count_page_transfer_bytes
from shardscope.timing.report import PARTS, Communication, StepReport
from shardscope.timing.stages import StageSeconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.timing.collective_sums import CollectiveCalls
    from shardscope.timing.rates import Rates
    from shardscope.timing.report import Part


def predict_step(plan: Plan, rates: Rates) -> StepReport:
    """Return the step report of ``plan`` at ``rates``. Raises ``ValueError`` that names an unknown figure."""
    pipeline = compute_pipeline(plan, rates)
    slowest, bubble = pipeline.slowest, pipeline.compute_bubble(plan.degrees.vpp, plan.num_micro_batches)
    # A stage has the seconds of every part but the bubble, which depends on the other stages.
    parts: dict[Part, float] = {part: slowest.parts.get(part, bubble) for part in PARTS}
    if plan.recipe.optimizer.startswith("paged"):
        # A page is evicted before the next one is fetched: transfers alternate and overlap with nothing.
        paged = count_page_transfer_bytes(plan, plan.memory())
        parts["offload"] += 2 * paged / rates.host.bytes_per_second
    return _build_report(plan, rates, parts, slowest)


def _build_report(plan: Plan, rates: Rates, parts: dict[Part, float], slowest: StageSeconds) -> StepReport:
    recipe, gpu = plan.recipe, plan.cluster.gpu
    # All that takes more than arithmetic is a callable: suggested fixes and pickers read seconds only.
    tokens = recipe.global_batch_size * recipe.seq_len
    hidden: dict[Part, float] = dict.fromkeys(PARTS, 0.0) | slowest.sum_hidden_seconds()
    hidden["offload"] = slowest.hidden_offload
    return StepReport(
        parts=MappingProxyType(parts),
        hidden=MappingProxyType(hidden),
        find_communication=lambda: _build_communication(plan, rates, slowest.list_collectives()),
        num_gpus=plan.world_size,
        num_tokens=tokens,
        model_flops=count_model_flops_per_token(plan, causal=True) * tokens,
        model_flops_full_attention=count_model_flops_per_token(plan, causal=False) * tokens,
        hardware_flops=count_hardware_flops_per_token(plan) * tokens,
        peak_flops=gpu.peak_flops.get(PEAKS[recipe.precision]),
        watts=gpu.tdp_watts,
        price_per_hour_usd=plan.cluster.price_per_hour_usd,
        calibration=rates.source,
        words=lambda part: explain_part(
            part, plan, rates, explain_schedule(plan) if part == "bubble" else ""
        ),
        find_residual=lambda: find_residual(plan),
        on_gpu=plan.on_gpu,
    )


def _build_communication(
    plan: Plan, rates: Rates, collectives: list[CollectiveCalls]
) -> tuple[Communication, ...]:
    per_node = plan.cluster.gpus_per_node
    return tuple(
        Communication(
            part=transfer.part,
            collective=transfer.collective,
            link=find_bounding_link(transfer, per_node, rates).name,
            ranks=transfer.ranks,
            num_bytes=transfer.num_bytes * times,
            seconds=took,
            hidden_seconds=hidden,
        )
        for transfer, times, took, hidden in collectives
        if took
    )
