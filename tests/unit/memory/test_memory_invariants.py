"""Laws that bytes obey whatever the plan: what grows, what may not, and what JSON keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from tests.accuracy.sampling import plans as sampled
from tests.requirements import examples
from tests.unit.random_plans import plans

from shardscope.core.plan import Plan
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.layout import find_largest_tensor
from shardscope.memory.report import PHASES
from shardscope.rehearsal.result import TENSOR_COMPONENTS


def tensors(a_plan: Plan) -> int:
    """Bytes of all tensors at the peak; what libraries and the allocator add follows the same."""
    moments = [moment for stage in a_plan.memory().by_stage for moment in stage.phases]
    return max(sum(moment.components[name] for name in TENSOR_COMPONENTS) for moment in moments)


def takes_no_less(more: Plan, less: Plan) -> bool:
    """In tensors and with what libraries and the allocator add."""
    return tensors(more) >= tensors(less) and more.memory().peak_bytes >= less.memory().peak_bytes


def picks_its_softmax(a_plan: Plan) -> bool:
    """Megatron's fused softmax takes scores of some sizes only, and torch's own holds more for others."""
    return a_plan.layout.framework == "megatron" and a_plan.recipe.attention == "eager"


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_fault_37_a_longer_sequence_never_takes_less(a_plan: Plan) -> None:
    assume(not picks_its_softmax(a_plan))
    longer = replace(a_plan, recipe=replace(a_plan.recipe, seq_len=2 * a_plan.recipe.seq_len))
    assert takes_no_less(longer, a_plan)


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_fault_37_a_larger_micro_batch_never_takes_less(a_plan: Plan) -> None:
    assume(not picks_its_softmax(a_plan))
    recipe = a_plan.recipe
    larger = replace(
        recipe,
        micro_batch_size=2 * recipe.micro_batch_size,
        global_batch_size=2 * recipe.global_batch_size,
    )
    assert takes_no_less(replace(a_plan, recipe=larger), a_plan)


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_fault_37_more_layers_never_take_less(a_plan: Plan) -> None:
    arch, degrees = a_plan.architecture, a_plan.degrees
    # As many as come between two that are recomputed, for each chunk.
    more = arch.num_hidden_layers + degrees.pp * degrees.vpp * a_plan.recipe.recompute_interval
    if getattr(a_plan.layout, "stage", 0) > 0:
        # One layer moves the borders of ranks' parts, and which tensors those touch, or what is used again
        # too late for stage 3 to keep it; as many again outweigh that.
        more = 2 * arch.num_hidden_layers
    # Which layers slide or are dense is told by number: the deeper model has as many of those.
    deeper = replace(a_plan, architecture=replace(arch, num_hidden_layers=more))
    assert takes_no_less(deeper, a_plan)


# Most plans that are drawn are no measure, each for a reason that is given with it.
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(plans())
def test_fault_37_more_shards_never_take_more_beyond_padding(a_plan: Plan) -> None:
    degrees, cluster, recipe = a_plan.degrees, a_plan.cluster, a_plan.recipe
    # One rank alone gathers and reduces nothing, and so is no measure for what more of them stage. With ZeRO
    # it shows where nothing outweighs that: where the optimizer is somewhere else.
    alone = degrees.shard * degrees.cp == 1
    away = getattr(a_plan.layout, "offload_optimizer", None) is not None
    assume(not alone or not (a_plan.layout.framework == "fsdp2" or away))
    # Resharded to all its ranks keeps nothing beside the shards; to as many of more ranks, a second copy.
    assume(getattr(a_plan.layout, "reshard_after_forward", True) != degrees.shard * degrees.cp)
    # Shards of less than 4,096 elements, or no whole blocks, have moments of 32 bits (torchao).
    assume(recipe.optimizer != "adamw_8bit" or a_plan.layout.framework != "fsdp2")
    # Of more ranks parts are too small for files, and others are gathered ahead.
    assume(getattr(a_plan.layout, "offload_params", None) != "nvme")
    wider = replace(
        a_plan,
        cluster=replace(cluster, num_nodes=2 * cluster.num_nodes),
        recipe=replace(recipe, global_batch_size=2 * recipe.global_batch_size),
    )
    assert wider.degrees.data_parallel == 2 * degrees.data_parallel
    assert wider.num_micro_batches == a_plan.num_micro_batches
    assert tensors(wider) <= tensors(a_plan) + padding(wider) + copied_bucket(wider)
    for few, many in zip(a_plan.memory().by_stage, wider.memory().by_stage, strict=True):
        for name in ("parameters", "gradients", "optimizer"):
            held = few.at("rest").components[name]
            assert many.at("rest").components[name] <= held + padding(wider), name


def copied_bucket(a_plan: Plan) -> int:
    """ZeRO 1 and 2 copy what they reduce where a bucket goes to several ranks, which it does not with few."""
    layout: Any = a_plan.layout
    if layout.framework != "deepspeed" or layout.stage not in (1, 2):
        return 0
    return FP32 * int(layout.reduce_bucket_size + find_largest_tensor(a_plan.architecture))


def padding(a_plan: Plan) -> int:
    """Bytes that dealing out evenly adds to weights and gradients: whole rows of each tensor with FSDP2; with
    others two elements a rank to flat buffers, and to each tensor one (ZeRO-3)."""
    arch, degrees, recipe = a_plan.architecture, a_plan.degrees, a_plan.recipe
    ranks = degrees.shard * degrees.cp
    shapes = [shape for _, _, shape in arch.outer_shapes]
    for layer in range(arch.num_hidden_layers):
        shapes += [shape for _, _, shape in arch.layer_shapes(layer)]
        for _, (out, inner) in arch.layer_linears(layer) if recipe.has_adapters else ():
            shapes += [(recipe.adapter_rank, inner), (out, recipe.adapter_rank)]
    if a_plan.layout.framework != "fsdp2":
        return 2 * FP32 * (2 * ranks + sum(-math.prod(shape) % ranks for shape in shapes))
    added = 0
    for rows, *rest in shapes:
        cut = {rows, -(-rows // degrees.tp)}
        added += max(-part % ranks for part in cut) * math.prod(rest)
    return 2 * FP32 * added


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_json_keeps_the_bytes(a_plan: Plan) -> None:
    again = Plan.from_json(a_plan.to_json())
    for phase in PHASES:
        assert again.memory().at(phase) == a_plan.memory().at(phase)
    assert again.memory().peak_bytes == a_plan.memory().peak_bytes


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_every_instant_has_its_place(a_plan: Plan) -> None:
    for stage in a_plan.memory().by_stage:
        fractions = [moment.fraction for moment in stage.phases]
        assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] <= 1
        for moment in stage.phases:
            assert all(size >= 0 for size in moment.components.values())
            assert all(term.explain() for term in moment.terms.values() if term.num_bytes)


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed", "megatron"])
def test_no_stage_holds_more_than_the_worst(framework: str) -> None:
    """Not every stage is looked at to find the worst: those that an earlier one outdoes are not."""
    found = [a_plan.memory() for a_plan in sampled(framework, 7, 60)]
    assert any(len(report.by_stage) > 1 for report in found) or framework != "megatron"
    for report in found:
        assert report.peak_bytes == max(stage.peak_bytes for stage in report.by_stage)
