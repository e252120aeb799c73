"""Each finding of a plan comes with its fix: a plan, a task or a question."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from random_plans import plans
from tests.requirements import examples, few, sample

import shardscope as ss
from shardscope.planner.checks import Finding

LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "fsdp2-cpu": ss.Layout.fsdp2(offload="cpu"),
    "zero-2": ss.Layout.zero(stage=2),
    "zero-3": ss.Layout.zero(stage=3),
    "zero-cpu": ss.Layout.zero(offload_optimizer="cpu", offload_params="cpu"),
    "zero-nvme": ss.Layout.zero(offload_optimizer="nvme", offload_params="nvme"),
    "megatron-tp": ss.Layout.megatron(tp=8),
    "megatron-across": ss.Layout.megatron(tp=16),
    "megatron-pp": ss.Layout.megatron(tp=4, pp=8),
}
RECIPES: list[dict[str, Any]] = [
    {},
    {"precision": "bf16", "seq_len": 1001},
    {"precision": "fp16-mixed", "global_batch_size": 8},
    {"micro_batch_size": 16, "global_batch_size": 1024},
]
BEYOND_MENDING = {
    *("checkpoint-tied-to-ranks", "reductions-in-half-precision"),
    *("out-of-gpu-memory", "out-of-host-memory-at-start", "gpu-nearly-full"),
    *("data-loading", "updates-round-away"),
    # One micro-batch a step cannot grow without a larger global batch.
    "launch-bound",
}
"""What of an odd plan no framework, no more nodes and no other model mends: words are left."""
CLUSTERS = ("rtx-4090-24gb", "8xv100-sxm-32gb", "8xh100-sxm-80gb", "4x8xh100-sxm-80gb")


def without_a_click(found: list[Finding]) -> list[str]:
    looked = [one.run_search() for one in found]
    return [one.name for one in looked if one.plan is None and one.task is None and one.question is None]


@sample(1)
@pytest.mark.parametrize("name", few(LAYOUTS, ["fsdp2", "megatron-tp"]))
def test_findings_of_common_plans_have_a_fix(name: str) -> None:
    layout = LAYOUTS[name]
    number = 0
    for cluster, recipe in itertools.product(CLUSTERS, RECIPES):
        try:
            plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)
        except ValueError:  # Refused in words: nothing to find.
            continue
        findings = plan.findings()
        number += len(findings)
        assert not without_a_click(findings), (str(plan.cluster), recipe)
        for one in findings:
            if one.search is not None:
                mended = one.run_search().plan
                assert mended is not None and one.name not in [each.name for each in mended.findings()]
    assert number


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(plan=plans())
def test_findings_of_any_plan_have_a_fix(plan: ss.Plan) -> None:
    assert set(without_a_click(plan.findings())) <= BEYOND_MENDING
