"""Tests of communication and updates of routed experts, which have fewer replicas than other weights."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from random_plans import plans
from tests.requirements import examples

import shardscope as ss
from shardscope.core.precision import FP32, num_moments, widths
from shardscope.frameworks.deepspeed.memory.element_counts import count_elements
from shardscope.frameworks.registry import frameworks
from shardscope.memory.state.stages import Stage
from shardscope.timing.report import StepReport
from shardscope.timing.traffic import StateTraffic

SLOW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
EXPERTS = 32 * 8 * 3 * 4096 * 14336
"""Routed weights of Mixtral 8x7B."""
DENSE = 46_702_792_704 - EXPERTS


def build_mixtral_plan(layout: ss.Layout, cluster: str = "8xh100-sxm-80gb") -> ss.Plan:
    recipe = ss.Recipe(global_batch_size=16)
    return ss.Plan(ss.models["mixtral-8x7b"], ss.Cluster.parse(cluster), recipe, layout)


def count_sent_bytes(report: StepReport, collective: str) -> dict[int, float]:
    """Return the bytes of the training state's collectives by group size."""
    return {
        one.ranks: one.num_bytes
        for one in report.communication
        if one.part in ("gathers", "gradients") and one.collective == collective
    }


def list_stage_traffic(plan: ss.Plan) -> list[tuple[Stage, StateTraffic]]:
    framework = frameworks[plan.layout.framework]
    model, timing = framework.memory_model(), framework.timing_model()
    stages = [model.count_weights(plan, shape) for shape in model.find_shapes(plan).kinds]
    return [(stage, timing.state_traffic(plan, stage)) for stage in stages]


def test_experts_without_replicas_cause_no_communication() -> None:
    report = build_mixtral_plan(ss.Layout.megatron(ep=8)).step()
    assert count_sent_bytes(report, "reduce_scatter") == {8: pytest.approx(4 * DENSE, rel=1e-3)}
    assert count_sent_bytes(report, "all_gather") == {8: pytest.approx(2 * DENSE, rel=1e-3)}
    two = build_mixtral_plan(ss.Layout.zero(stage=2, ep=8)).step()
    per_batch = {ranks: size / 2 for ranks, size in count_sent_bytes(two, "all_reduce").items()}
    assert per_batch == {8: pytest.approx(2 * DENSE, rel=1e-3)}


@pytest.mark.parametrize("distributed", [True, False])
def test_experts_are_reduced_among_their_own_replicas(distributed: bool) -> None:
    layout = ss.Layout.megatron(ep=8, distributed_optimizer=distributed)
    report = build_mixtral_plan(layout, "2x8xh100-sxm-80gb").step()
    expected = {16: pytest.approx(4 * DENSE, rel=1e-3), 2: pytest.approx(4 * EXPERTS / 8, rel=1e-3)}
    assert count_sent_bytes(report, "reduce_scatter" if distributed else "all_reduce") == expected
    (pair,) = (one for one in report.communication if one.part == "gradients" and one.ranks == 2)
    assert pair.link == "infiniband-ndr"  # the ranks of one node have all experts between them
    one = count_sent_bytes(
        build_mixtral_plan(ss.Layout.zero(stage=0, ep=8), "2x8xh100-sxm-80gb").step(), "all_reduce"
    )
    assert one == {16: pytest.approx(2 * DENSE, rel=1e-3), 2: pytest.approx(2 * EXPERTS / 8, rel=1e-3)}


def test_experts_not_sharded_by_tp_are_sent_whole() -> None:
    layout = ss.Layout.megatron(tp=2, ep=4, etp=1)
    report = build_mixtral_plan(layout).step()
    assert count_sent_bytes(report, "reduce_scatter")[2] == pytest.approx(4 * EXPERTS / 4, rel=1e-3)


def test_without_expert_parallelism_all_weights_share_one_group() -> None:
    for layout, reduction in (
        (ss.Layout.megatron(), "reduce_scatter"),
        (ss.Layout.zero(stage=1), "all_reduce"),
    ):
        assert set(count_sent_bytes(build_mixtral_plan(layout).step(), reduction)) == {8}


def test_the_host_update_time_does_not_depend_on_ep() -> None:
    """All weights are updated once on a node's processors."""
    whole, spread = (
        list_stage_traffic(build_mixtral_plan(ss.Layout.zero(stage=2, ep=ep, offload_optimizer="cpu")))
        for ep in (1, 8)
    )
    assert spread[0][1].updated_on_host == pytest.approx(whole[0][1].updated_on_host, rel=0.03)


@SLOW
@given(plan=plans(framework="megatron"))
def test_megatron_updates_the_elements_of_its_memory_model(plan: ss.Plan) -> None:
    assume(plan.recipe.optimizer in num_moments)
    bytes_per_element = FP32 * (
        num_moments[plan.recipe.optimizer] + (widths[plan.recipe.precision].compute < FP32)
    )
    model = frameworks["megatron"].memory_model()
    for stage, traffic in list_stage_traffic(plan):
        state = model.compute_training_state(plan, stage)
        if plan.layout.use_precision_aware_optimizer:  # type: ignore[attr-defined]
            continue
        # Buffers are padded to whole shards.
        assert traffic.updated * bytes_per_element == pytest.approx(state.optimizer.num_bytes, rel=1e-3)


@SLOW
@given(plan=plans(framework="deepspeed"))
def test_deepspeed_updates_the_elements_of_its_memory_model(plan: ss.Plan) -> None:
    # AutoTP does not shard the head, which the counts of the step time ignore.
    assume(plan.layout.stage > 0 and plan.degrees.tp == 1)  # type: ignore[attr-defined]
    # On the host: Adam's 28 bytes, 8 to scale the gradient, and those of the cast to the compute type.
    passes = (28 + 8 + 4 + widths[plan.recipe.precision].compute) / 28
    for stage, traffic in list_stage_traffic(plan):
        updated = traffic.updated + traffic.updated_on_host / passes
        # Partitions are padded; stage 3 cuts each tensor, small ones too.
        assert updated == pytest.approx(count_elements(plan, stage).partition, rel=0.02)


STREAM = 4096 * 4096 * 2
"""Bytes of a micro-batch's hidden states of Mixtral 8x7B in bf16, with one sequence of 4096 tokens."""


def sum_layer_bytes(plan: ss.Plan, part: str, collective: str, ranks: int) -> float:
    """Return the bytes of collectives for one layer and one micro-batch, without recomputation."""
    num_bytes = sum(
        one.num_bytes
        for one in plan.step().communication
        if (one.part, one.collective, one.ranks) == (part, collective, ranks)
    )
    return num_bytes / plan.architecture.num_hidden_layers / plan.num_micro_batches


@pytest.mark.parametrize(
    ("tp", "etp", "ep"), [(1, None, 4), (2, None, 4), (4, None, 2), (2, 1, 4), (4, 2, 2), (4, 1, 8)]
)
def test_tensor_parallel_ranks_exchange_their_own_part_of_the_sequence(
    tp: int, etp: int | None, ep: int
) -> None:
    """Two experts a token, there and back, forward and backward (megatron-core, token_dispatcher.py)."""
    plan = build_mixtral_plan(ss.Layout.megatron(tp=tp, ep=ep, etp=etp))
    assert plan.recipe.recompute == "none"
    assert sum_layer_bytes(plan, "expert_parallel", "all_to_all", ep) == pytest.approx(4 * 2 * STREAM / tp)


@pytest.mark.parametrize(("etp", "ep"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2)])
def test_ranks_that_share_an_expert_gather_its_tokens(etp: int, ep: int) -> None:
    """After the all-to-all they all-gather, and reduce-scatter the results: both in forward and backward."""
    tp = 4
    plan = build_mixtral_plan(ss.Layout.megatron(tp=tp, ep=ep, etp=etp), "2x8xh100-sxm-80gb")
    # Of the four tensor-parallel ranks, each ``etp`` share the tokens of their part of the sequence.
    gathered = 2 * 2 * STREAM * etp / tp if etp > 1 else 0.0
    around_attention = 0.0
    if etp == tp:
        # Attention's pair in forward is an all-reduce; in backward one reduce-scatter and two all-gathers.
        dense = build_mixtral_plan(ss.Layout.megatron(tp=tp, etp=1), "2x8xh100-sxm-80gb")
        around_attention = sum_layer_bytes(dense, "tensor_parallel", "reduce_scatter", tp)
    sent = sum_layer_bytes(plan, "tensor_parallel", "reduce_scatter", etp)
    assert sent == pytest.approx(gathered + around_attention)


def test_ranks_of_a_shared_expert_are_neighbours() -> None:
    """Experts on 8 ranks that are 2 apart span two nodes; with a stride of 1 they would share one."""
    layout = ss.Layout.megatron(tp=8, etp=2, ep=8)
    plan = build_mixtral_plan(layout, "2x8xh100-sxm-80gb")
    (exchange,) = (one for one in plan.step().communication if one.part == "expert_parallel")
    assert exchange.link == "infiniband-ndr"


def test_tokens_are_sorted_by_local_expert_without_expert_parallelism_too() -> None:
    """A rank with one expert sorts twice less (megatron-core, sort_chunks_by_idxs)."""

    def predict_elementwise(ep: int) -> float:
        return build_mixtral_plan(ss.Layout.megatron(ep=ep)).step().parts["elementwise"]

    assert predict_elementwise(1) == pytest.approx(predict_elementwise(4), rel=0.01)
    assert predict_elementwise(8) < 0.97 * predict_elementwise(4)
