"""Property tests of predicted memory on random plans: monotonicity, phases and JSON round trips."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from tests.accuracy.sampling import sample_plans as sampled
from tests.requirements import examples
from tests.unit.random_plans import plans

from shardscope.core.plan import Plan
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.layout import find_largest_tensor
from shardscope.memory.report import PHASES
from shardscope.rehearsal.result import TENSOR_COMPONENTS


def compute_tensor_peak(a_plan: Plan) -> int:
    """Return the bytes of all tensors at the peak, without libraries and allocator."""
    moments = [moment for stage in a_plan.memory().by_stage for moment in stage.phases]
    return max(sum(moment.components[name] for name in TENSOR_COMPONENTS) for moment in moments)


def needs_at_least_as_much(more: Plan, less: Plan) -> bool:
    """Return whether ``more`` needs at least as much as ``less``, in tensors and in total."""
    return (
        compute_tensor_peak(more) >= compute_tensor_peak(less)
        and more.memory().peak_bytes >= less.memory().peak_bytes
    )


def has_shape_dependent_softmax(a_plan: Plan) -> bool:
    """Return whether the plan uses Megatron's fused softmax, which supports some score shapes only."""
    return a_plan.layout.framework == "megatron" and a_plan.recipe.attention == "eager"


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_fault_37_memory_never_falls_with_the_sequence_length(a_plan: Plan) -> None:
    assume(not has_shape_dependent_softmax(a_plan))
    # With documents kept apart, a sequence as long as a sliding window is refused.
    assume(not a_plan.recipe.packing or not a_plan.architecture.sliding_window_layers)
    longer = replace(a_plan, recipe=replace(a_plan.recipe, seq_len=2 * a_plan.recipe.seq_len))
    assert needs_at_least_as_much(longer, a_plan)


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_fault_37_memory_never_falls_with_the_micro_batch_size(a_plan: Plan) -> None:
    assume(not has_shape_dependent_softmax(a_plan))
    recipe = a_plan.recipe
    larger = replace(
        recipe,
        micro_batch_size=2 * recipe.micro_batch_size,
        global_batch_size=2 * recipe.global_batch_size,
    )
    assert needs_at_least_as_much(replace(a_plan, recipe=larger), a_plan)


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_fault_37_memory_never_falls_with_the_number_of_layers(a_plan: Plan) -> None:
    arch, degrees = a_plan.architecture, a_plan.degrees
    # One recomputation interval for each chunk.
    more = arch.num_hidden_layers + degrees.pp * degrees.vpp * a_plan.recipe.recompute_interval
    if getattr(a_plan.layout, "stage", 0) > 0:
        # A single layer shifts the borders of ranks' partitions, and thereby which tensors they touch or
        # which are used again too late for stage 3 to keep them; twice as many layers outweigh that.
        more = 2 * arch.num_hidden_layers
    # Sliding-window and dense layers are given by index: the deeper model has as many of those.
    deeper = replace(a_plan, architecture=replace(arch, num_hidden_layers=more))
    assert needs_at_least_as_much(deeper, a_plan)


# Most random plans are skipped; the comment of each assume() says why.
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(plans())
def test_fault_37_memory_never_rises_with_shards_except_for_padding(a_plan: Plan) -> None:
    degrees, cluster, recipe = a_plan.degrees, a_plan.cluster, a_plan.recipe
    # A single rank all-gathers and reduces nothing, so it has no staging buffers. With ZeRO these show only
    # where nothing outweighs them: if the optimizer is offloaded.
    is_single_rank = degrees.shard * degrees.cp == 1
    is_offloaded = getattr(a_plan.layout, "offload_optimizer", None) is not None
    assume(not is_single_rank or not (a_plan.layout.framework == "fsdp2" or is_offloaded))
    # Resharding to all ranks keeps only the shards; to as many of more ranks, a second copy.
    assume(getattr(a_plan.layout, "reshard_after_forward", True) != degrees.shard * degrees.cp)
    # Shards of less than 4,096 elements or of partial blocks have 32-bit moments (torchao).
    assume(recipe.optimizer != "adamw_8bit" or a_plan.layout.framework != "fsdp2")
    # With more ranks, partitions are too small for files, and others are prefetched.
    assume(getattr(a_plan.layout, "offload_params", None) != "nvme")
    wider = replace(
        a_plan,
        cluster=replace(cluster, num_nodes=2 * cluster.num_nodes),
        recipe=replace(recipe, global_batch_size=2 * recipe.global_batch_size),
    )
    assert wider.degrees.data_parallel == 2 * degrees.data_parallel
    assert wider.num_micro_batches == a_plan.num_micro_batches
    assert compute_tensor_peak(wider) <= compute_tensor_peak(a_plan) + compute_padding_bytes(
        wider
    ) + compute_bucket_copy_bytes(wider)
    for few, many in zip(a_plan.memory().by_stage, wider.memory().by_stage, strict=True):
        for name in ("parameters", "gradients", "optimizer"):
            num_bytes = few.at("rest").components[name]
            assert many.at("rest").components[name] <= num_bytes + compute_padding_bytes(wider), name


def compute_bucket_copy_bytes(a_plan: Plan) -> int:
    """Return the bytes of the copy that ZeRO 1 and 2 reduce if a bucket belongs to several ranks."""
    layout: Any = a_plan.layout
    if layout.framework != "deepspeed" or layout.stage not in (1, 2):
        return 0
    return FP32 * int(layout.reduce_bucket_size + find_largest_tensor(a_plan.architecture))


def compute_padding_bytes(a_plan: Plan) -> int:
    """Return the padding of weights and gradients in bytes: whole rows of each tensor with FSDP2; otherwise
    two elements per rank of flat buffers, and one per tensor (ZeRO-3)."""
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
def test_predictions_survive_a_json_round_trip(a_plan: Plan) -> None:
    again = Plan.from_json(a_plan.to_json())
    for phase in PHASES:
        assert again.memory().at(phase) == a_plan.memory().at(phase)
    assert again.memory().peak_bytes == a_plan.memory().peak_bytes


@settings(max_examples=examples(100), deadline=None)
@given(plans())
def test_phases_are_ordered_in_time_with_explained_bytes(a_plan: Plan) -> None:
    for stage in a_plan.memory().by_stage:
        fractions = [moment.fraction for moment in stage.phases]
        assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] <= 1
        for moment in stage.phases:
            assert all(size >= 0 for size in moment.components.values())
            assert all(term.explain() for term in moment.terms.values() if term.num_bytes)


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed", "megatron"])
def test_the_worst_stage_has_the_largest_peak(framework: str) -> None:
    """The search for the worst stage skips stages that an earlier one exceeds."""
    reports = [a_plan.memory() for a_plan in sampled(framework, 7, 60)]
    assert any(len(report.by_stage) > 1 for report in reports) or framework != "megatron"
    for report in reports:
        assert report.peak_bytes == max(stage.peak_bytes for stage in report.by_stage)
