"""Laws that DDP's and FSDP2's bytes obey whatever the plan: what grows, what may not, and what JSON keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.accuracy.sampling import plans as sampled
from tests.unit.planning import LLAMA, plans

import shardscope as ss
from shardscope.memory.report import PHASES, MemoryReport
from shardscope.plan import Plan
from shardscope.rehearsal.result import TENSOR_COMPONENTS

TORCH = ("ddp", "fsdp2")
PADDING_BYTES = 64 * 2**20
"""Rows are cut whole: with more ranks a rank may hold a row more of some tensor, gathered buffers a few."""

some_plans = st.sampled_from(TORCH).flatmap(plans)


def tensors(a_plan: Plan) -> int:
    """Bytes of all tensors at the peak; what libraries and the allocator add follows the same."""
    moments = [moment for stage in a_plan.memory().by_stage for moment in stage.moments]
    return max(sum(moment.components[name] for name in TENSOR_COMPONENTS) for moment in moments)


@settings(max_examples=60, deadline=None)
@given(some_plans)
def test_a_longer_sequence_never_takes_less(a_plan: Plan) -> None:
    longer = replace(a_plan, recipe=replace(a_plan.recipe, seq_len=2 * a_plan.recipe.seq_len))
    assert tensors(a_plan) <= tensors(longer)


@settings(max_examples=60, deadline=None)
@given(some_plans)
def test_a_larger_micro_batch_never_takes_less(a_plan: Plan) -> None:
    recipe = a_plan.recipe
    larger = replace(
        recipe,
        micro_batch_size=2 * recipe.micro_batch_size,
        global_batch_size=2 * recipe.global_batch_size,
    )
    assert tensors(a_plan) <= tensors(replace(a_plan, recipe=larger))


@settings(max_examples=60, deadline=None)
@given(some_plans)
def test_more_layers_never_take_less(a_plan: Plan) -> None:
    assume(a_plan.degrees.pp == 1)
    arch, degrees = a_plan.architecture, a_plan.degrees
    more = arch.num_hidden_layers + degrees.pp * degrees.vpp
    # Which layers slide or are dense is told by number: the deeper model has as many of those.
    deeper = replace(a_plan, architecture=replace(arch, num_hidden_layers=more))
    assert tensors(a_plan) <= tensors(deeper)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(("1x", "2x", "4x", "8x")),
    st.sampled_from(("bf16-mixed", "bf16", "fp32")),
    st.sampled_from(("none", "selective", "full")),
    st.sampled_from((True, False)),
)
def test_more_shards_never_take_more_beyond_padding(
    size: str, precision: str, recompute: str, reshard: bool
) -> None:
    def sharded(num_ranks: int) -> Plan:
        return Plan(
            LLAMA,
            ss.Cluster.parse(f"{num_ranks}xh100-sxm-80gb"),
            ss.Recipe(seq_len=512, global_batch_size=16, precision=precision, recompute=recompute),  # type: ignore[arg-type]
            ss.Layout.fsdp2(reshard_after_forward=reshard),
        )

    few = int(size[:-1])
    fewer, more = sharded(few).memory(), sharded(2 * few).memory()
    for name in ("parameters", "gradients", "optimizer"):
        assert more.at("optimizer")[name] <= fewer.at("optimizer")[name] + PADDING_BYTES
    if few > 1:
        # One rank alone needs no all-gather output, and so is no measure for staging.
        assert more.peak_bytes <= fewer.peak_bytes + PADDING_BYTES + _communicators(more, fewer)


def _communicators(more: MemoryReport, fewer: MemoryReport) -> int:
    return max(0, more.components["communication"] - fewer.components["communication"])


@settings(max_examples=60, deadline=None)
@given(some_plans)
def test_json_keeps_the_bytes(a_plan: Plan) -> None:
    again = Plan.from_json(a_plan.to_json())
    for phase in PHASES:
        assert again.memory().at(phase) == a_plan.memory().at(phase)
    assert again.memory().peak_bytes == a_plan.memory().peak_bytes


@settings(max_examples=60, deadline=None)
@given(some_plans)
def test_every_instant_has_its_place(a_plan: Plan) -> None:
    for stage in a_plan.memory().by_stage:
        fractions = [moment.fraction for moment in stage.moments]
        assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] <= 1
        for moment in stage.moments:
            assert all(size >= 0 for size in moment.components.values())
            assert all(term.explain() for term in moment.terms.values() if term.num_bytes)


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed", "megatron"])
def test_no_stage_holds_more_than_the_worst(framework: str) -> None:
    """Not every stage is looked at to find the worst: those that an earlier one outdoes are not."""
    found = [a_plan.memory() for a_plan in sampled(framework, 7, 60)]
    assert any(len(report.by_stage) > 1 for report in found) or framework != "megatron"
    for report in found:
        assert report.peak_bytes == max(stage.peak_bytes for stage in report.by_stage)
