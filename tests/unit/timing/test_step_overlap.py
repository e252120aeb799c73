"""Tests of overlap: each second of arithmetic overlaps with at most one second of communication."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from random_plans import plans
from tests.requirements import examples

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.timing.report import StepReport
from shardscope.timing.traffic import OverlappedWith

SLOW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
ARITHMETIC = ("matrices", "attention", "elementwise", "loss", "recomputation")
WINDOWS: tuple[OverlappedWith, ...] = ("forward", "backward", "last_backward", "first_forward", "attention")


def sum_arithmetic(report: StepReport) -> float:
    return sum(report.parts[part] for part in ARITHMETIC)


def sum_overlapped(report: StepReport) -> float:
    """Return the overlapped seconds without offload, whose link is independent of the others."""
    return sum(seconds for part, seconds in report.hidden.items() if part != "offload")


@SLOW
@given(plan=plans())
def test_overlapped_communication_never_exceeds_arithmetic(plan: ss.Plan) -> None:
    try:
        report = plan.step()
    except FieldError as refusal:
        assume(not refusal.field.startswith(("Gpu.", "Cluster.nvme_")))
        raise
    assert sum_overlapped(report) <= sum_arithmetic(report) * (1 + 1e-9)


def test_slow_all_reduces_between_nodes_use_up_the_overlap() -> None:
    recipe = ss.Recipe(seq_len=512, global_batch_size=32)
    cluster = ss.Cluster.parse("8x4xa10-24gb")
    report = ss.Plan(ss.models["llama-3.2-1b"], cluster, recipe, ss.Layout.fsdp2(replicate=2)).step()
    assert sum_overlapped(report) == pytest.approx(sum_arithmetic(report))
    between = next(one for one in report.communication if one.collective == "all_reduce")
    within = next(one for one in report.communication if one.collective == "reduce_scatter")
    assert between.hidden_seconds > 0
    assert within.hidden_seconds == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_never_shortens_a_step_with_offloading(recompute: str) -> None:
    """Collectives and host transfers wait at the same time, each on a link of its own."""
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    layout = ss.Layout.zero(3, offload_optimizer="cpu", offload_params="cpu")
    plain, repeated = (
        ss.Plan(
            ss.models["qwen2.5-14b"],
            cluster,
            ss.Recipe(seq_len=256, global_batch_size=512, recompute=how),
            layout,
        ).step()
        for how in ("none", recompute)
    )
    # A recomputed layer's fetches have other neighbours: prefetching puts fewer of its parameters into flat
    # buffers, from which they are copied.
    assert repeated.seconds >= plain.seconds * 0.99


def test_a_faster_gpu_never_makes_the_exchange_of_keys_longer() -> None:
    """Where launches bound a layer, keys are exchanged while the GPU waits for them, too."""
    recipe = ss.Recipe(seq_len=8192, micro_batch_size=4, optimizer="sgd", attention="flash", loss="fused")
    cluster = ss.Cluster.parse("8x1xgb200-186gb")
    plan = ss.Plan(ss.Architecture.of_size("50m"), cluster, recipe, ss.Layout.fsdp2(pp=2, cp=2))
    seconds = []
    for factor in (1.0, 1.5, 2.0, 4.0):
        peaks = {name: factor * peak for name, peak in cluster.gpu.peak_flops.items() if peak is not None}
        faster = replace(cluster, gpu=replace(cluster.gpu, peak_flops=peaks))
        seconds.append(replace(plan, cluster=faster).step().seconds)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(seconds))
