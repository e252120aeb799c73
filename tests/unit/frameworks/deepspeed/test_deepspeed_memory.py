"""ZeRO's memory: well-known identities, options, offloading, and comparisons with DeepSpeed's own engine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_plans import LLAMA, plans
from tests.accuracy.measurement_kinds import tensor_bytes
from tests.in_process_rehearsal import list_stages, rehearse_in_this_process
from tests.requirements import examples, few, needs, needs_installed, sample, thorough

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.plan import Plan
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.deepspeed.memory.element_counts import find_swap_failure
from shardscope.frameworks.deepspeed.memory.fp16_optimizer import count_all_reduce_copy
from shardscope.frameworks.deepspeed.memory.ipg_bucket import (
    FlatGradient,
    ReductionOptions,
    count_flattened_copy,
    count_reduction_copies,
    find_largest_copy,
    list_reductions,
    place_gradients,
)
from shardscope.frameworks.deepspeed.memory.late_reduction import count_late_reduction
from shardscope.frameworks.deepspeed.memory.parameter_offload import TracedModel, build_traced_model
from shardscope.frameworks.deepspeed.memory.partition_parameters import (
    Many,
    RankTensors,
    create_sub_groups,
    find_largest_sub_group,
    list_stage_tensors,
    sum_partitions,
)
from shardscope.frameworks.deepspeed.memory.partitioned_param_coordinator import (
    Stage3Options,
    find_first_failure,
)
from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import NvmeOptions
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage3 import simulate_step
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import (
    partition_flat_buffers,
    reduce_in_backward,
)
from shardscope.memory.state.lora import find_adapters
from shardscope.memory.state.stages import Stage, count_stage_weights, find_stage_shapes

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
P = LLAMA.num_parameters


def first_stage(a_plan: Plan) -> Stage:
    return count_stage_weights(a_plan, find_stage_shapes(a_plan.architecture, a_plan.stage_layers).kinds[0])


def make_plan(stage: int, cluster: ss.Cluster = EIGHT, arch: ss.Architecture = LLAMA, **rest: Any) -> Plan:
    known = ss.Layout.zero().__dataclass_fields__
    options = {name: rest.pop(name) for name in list(rest) if name in known}
    rest.setdefault("global_batch_size", cluster.num_gpus)
    return Plan(arch, cluster, ss.Recipe(**rest), ss.Layout.zero(stage, **options))


def test_zero_0_needs_16_bytes_per_parameter_and_24_in_the_optimizer_step() -> None:
    """bf16 runs FP16_Optimizer, not BF16_Optimizer (deepspeed/runtime/engine.py)."""
    report = make_plan(0).memory()
    rest, update = report.at("rest"), report.at("optimizer")
    assert (rest["parameters"], rest["gradients"], rest["optimizer"]) == (2 * P, 0, 12 * P)
    assert update["gradients"] == 2 * P
    # Every gradient in fp32, and all of them flattened, before the bf16 ones are freed.
    assert update["optimizer"] == 12 * P + 2 * 4 * P
    assert sum(update[name] for name in ("parameters", "gradients", "optimizer")) == 24 * P


def test_fp32_needs_no_main_copy_in_stage_0_only() -> None:
    assert make_plan(0, precision="fp32").memory().at("rest")["optimizer"] == 8 * P
    # ZeRO clones its partition of the weights even if they are fp32.
    assert make_plan(1, precision="fp32").memory().at("rest")["optimizer"] == pytest.approx(
        12 * P / 8, rel=1e-6
    )


@pytest.mark.parametrize("stage", few([0, 1, 2, 3], [1]))
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_an_update_needs_no_more_on_cpu_ranks(stage: int, precision: str) -> None:
    """The engine's AdamW is fused on both, and needs nothing besides its moments."""
    on_cpu, on_gpu = (
        make_plan(stage, ss.Cluster.parse(cluster), precision=precision, kernels="transformers").memory()
        for cluster in ("2xcpu", "2xh100-sxm-80gb")
    )
    # DeepSpeed's own FusedAdam runs on GPUs only; stage 0 has all gradients in fp32 twice with it.
    twice = 4 * P if (stage, precision) == (0, "bf16-mixed") else 0
    assert on_cpu.at("optimizer")["optimizer"] == on_gpu.at("optimizer")["optimizer"] - twice


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zero_partitions_over_the_ranks(ranks: int) -> None:
    cluster = ss.Cluster.parse(f"{ranks}xh100-sxm-80gb")
    rest = {stage: make_plan(stage, cluster).memory().at("rest") for stage in (1, 2, 3)}
    for stage in (1, 2, 3):
        assert rest[stage]["optimizer"] == pytest.approx(12 * P / ranks, rel=1e-4)
    assert rest[1]["parameters"] == rest[2]["parameters"] == pytest.approx(2 * P, rel=1e-6)
    assert rest[3]["parameters"] == rest[3]["gradients"] == pytest.approx(2 * P / ranks, rel=1e-4)


def test_figure_1_of_the_zero_paper() -> None:
    """7.5B parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB of state (Rajbhandari et al. 2020, figure 1)."""
    arch = ss.Architecture.of_size("7.5b")
    scale = 7.5e9 / arch.num_parameters
    cluster = ss.Cluster.parse("8x8xh100-sxm-80gb")
    whole = 2 * arch.vocab_size * arch.hidden_size
    for stage, gigabytes in ((0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)):
        report = make_plan(stage, cluster, arch).memory()
        rest = report.at("rest")
        gradients = 2 * arch.num_parameters if stage < 2 else report.at("optimizer")["gradients"]
        predicted = (rest["parameters"] + rest["optimizer"] + gradients) * scale / 1e9
        # Stage 2 keeps the gradients of all tensors that overlap a partition, the embedding among them.
        slack = whole / 1e9 if stage == 2 else 0
        # The paper rounds to a tenth.
        assert gigabytes * 0.995 - 0.05 < predicted < gigabytes * 1.005 + 0.05 + slack


@given(plans("deepspeed"))
@settings(max_examples=examples(100), deadline=None)
def test_a_higher_stage_needs_less_memory(a_plan: Plan) -> None:
    # Stage 0 supports no other optimizers than these and Lion.
    assume(a_plan.world_size > 1 and a_plan.recipe.optimizer in ("adamw", "sgd"))
    data_parallel = {"tp": 1, "pp": 1, "ep": 1, "offload_optimizer": None, "offload_params": None}
    a_plan = replace(a_plan, layout=replace(a_plan.layout, **data_parallel))
    # Flat buffers are padded to twice the ranks, and stage 3 rounds every tensor up.
    arch = a_plan.architecture
    in_layers = sum(
        len(arch.layer_shapes(layer)) + 2 * len(arch.layer_linears(layer))
        for layer in range(arch.num_hidden_layers)
    )
    slack = 16 * 2 * (a_plan.world_size + len(arch.outer_shapes) + in_layers)
    states: list[tuple[int, int, int]] = []
    for stage in range(4):
        try:
            report = replace(a_plan, layout=replace(a_plan.layout, stage=stage)).memory()  # type: ignore[call-arg]
        except FieldError:
            continue  # Some optimizers run on flat partitions only.
        rest, update = report.at("rest"), report.at("optimizer")
        states.append((rest["parameters"], update["gradients"], rest["optimizer"]))
    for fewer, more in pairwise(states):
        assert all(b <= a + slack for a, b in zip(fewer, more, strict=True))


def test_a_partition_keeps_the_gradients_of_all_tensors_that_overlap_it() -> None:
    partition = partition_flat_buffers((100, 10, 10, 10), 4, 2)
    # 130 are padded to 136; ranks 0 to 2 overlap the first tensor, which ends in rank 2's partition.
    assert (partition.flat_buffers, partition.elements) == (136, 34)
    assert partition.overlapping == 100 + 10 and partition.rank == 2
    assert partition_flat_buffers((), 4, 2).flat_buffers == 0
    assert sum_partitions((5, 8), 4) == 2 + 2
    assert find_largest_sub_group((40, 40, 40), 4, 15) == 20
    assert find_largest_sub_group((40, 40, 40), 4, 10**9) == 30


def build_tensors(
    sizes: tuple[int, ...], per_layer: tuple[int, ...], is_vector: tuple[bool, ...] = ()
) -> RankTensors:
    """Return tensors of which the first are layers' and the last is the head's, without an embedding."""
    return RankTensors(
        trained=Many(sizes),
        experts=Many(),
        frozen=Many(),
        used=Many(sizes),
        trained_before=0,
        trained_per_layer=per_layer,
        num_attention=0,
        is_vector=Many(is_vector),
        gradient_order=Many(reversed(range(len(sizes)))),
    )


def test_a_bucket_is_copied_if_it_goes_to_several_ranks() -> None:
    options = ReductionOptions(partitions=(50, 0), rank=0, overlapping=60, bucket_size=100)
    same_rank = [FlatGradient(0, 20, 50), FlatGradient(20, 20, 50)]
    two_ranks = [FlatGradient(0, 40, 50), FlatGradient(40, 40, 50)]
    assert count_flattened_copy(same_rank, options) == 0
    assert count_flattened_copy(two_ranks, options) == 80
    parts = reduce_in_backward(build_tensors((30, 30, 40), (1, 1)), options, 0)
    assert parts[0].peak.total == 40
    # All fits into one bucket, so it is reduced, flattened, when backward has ended; then 60 are kept.
    assert (parts[-1].first_gradient.total, parts[-1].peak.total) == (100, 100)
    late = ReductionOptions(partitions=(90, 0), rank=0, overlapping=120, bucket_size=100)
    assert count_late_reduction((60, 60, 60), (), late) == 60
    assert count_all_reduce_copy((10, 10, 10), 15) == 20


@settings(max_examples=examples(400))
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 5),
    st.integers(1, 150),
)
def test_the_largest_copy_equals_that_of_slicing_element_by_element(
    tensors: list[tuple[int, bool]], ranks: int, bucket: int
) -> None:
    """``average_tensor`` makes one slice for each rank's partition, merging adjacent slices of one rank, and
    flattens slices until they exceed a bucket."""
    sizes = tuple(size for size, _ in tensors)
    is_vector = tuple(flag for _, flag in tensors)
    matrices, vectors = (
        max(1, -(-sum(size for size, flag in tensors if flag is kind) // ranks)) for kind in (False, True)
    )
    options = ReductionOptions(partitions=(matrices, vectors), rank=0, overlapping=0, bucket_size=bucket)
    gradients = place_gradients(sizes, is_vector, options.partitions)
    slices: list[tuple[int, int]] = []
    for gradient in gradients:
        for element in range(gradient.start, gradient.end):
            owner = element // gradient.partition
            length = slices.pop()[1] if slices and slices[-1][0] == owner else 0
            slices.append((owner, length + 1))
    groups: list[list[int]] = [[]]
    for _, length in slices:
        groups[-1].append(length)
        if sum(groups[-1]) > bucket:
            groups.append([])
    largest = max((sum(group) for group in groups if len(group) > 1), default=0)
    assert count_flattened_copy(gradients, options) == largest


@settings(max_examples=examples(400))
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 5),
    st.integers(1, 150),
    st.sampled_from((0, 2)),
    st.sampled_from((0, 1, 2)),
    st.booleans(),
)
def test_reductions_over_arrays_equal_those_of_single_buckets(
    tensors: list[tuple[int, bool]], ranks: int, bucket: int, norm: int, cast: int, is_contiguous: bool
) -> None:
    sizes = tuple(size for size, _ in tensors)
    is_vector = tuple(flag for _, flag in tensors)
    matrices, vectors = (
        max(1, -(-sum(size for size, flag in tensors if flag is kind) // ranks)) for kind in (False, True)
    )
    for rank in range(ranks):
        options = ReductionOptions(
            partitions=(matrices, vectors),
            rank=rank,
            overlapping=0,
            bucket_size=bucket,
            norm_width=norm,
            cast_width=cast,
            is_contiguous=is_contiguous,
        )
        buckets: list[list[FlatGradient]] = [[]]
        placed = place_gradients(sizes, is_vector, options.partitions)
        # Matrices are a parameter group, and vectors the next one.
        by_group = [
            one for kind in (False, True) for one, flag in zip(placed, is_vector, strict=True) if flag is kind
        ]
        for gradient in by_group:
            if buckets[-1] and sum(one.size for one in buckets[-1]) + gradient.size > bucket:
                buckets.append([])
            buckets[-1].append(gradient)
        assert list_reductions(sizes, is_vector, options) == [
            (sum(one.size for one in group), options.has_own(group), count_reduction_copies(group, options))
            for group in buckets
        ]


@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4), st.integers(1, 40))
def test_the_largest_copy_of_repeated_slices_is_that_of_single_ones(
    slices: list[tuple[int, int]], bucket: int
) -> None:
    alone = [(size, 1) for size, count in slices for _ in range(count)]
    for cast in (0, 2):
        assert find_largest_copy(slices, bucket, cast) == find_largest_copy(alone, bucket, cast)
    # A second copy of equal slices, and a later one, may be larger than the first.
    assert find_largest_copy([(5, 1), (4, 5)], 6, 0) == 9
    assert find_largest_copy([(2, 1), (4, 5)], 5, 0) == 8


def test_vectors_have_a_flat_buffer_and_sub_groups_of_their_own() -> None:
    sizes, is_vector = (40, 8, 40, 8), (False, True, False, True)
    assert partition_flat_buffers(sizes, 2, 2, is_vector).sizes == (40, 8)
    assert create_sub_groups(sizes, 2, 10**9, is_vector) == [[40, 40], [8, 8]]
    # The second rank's partition of the vectors starts with the last one, so the first reduction keeps
    # gradients.
    options = ReductionOptions(partitions=(40, 8), rank=1, overlapping=48, bucket_size=50)
    first = reduce_in_backward(build_tensors(sizes, (2,), is_vector), options, 0)[0]
    assert (first.peak.gradients, first.peak.staging) == (0, 40)
    first_rank = options._replace(rank=0)
    last_gradient = place_gradients(sizes, is_vector, options.partitions)[3:]
    assert not first_rank.has_own(last_gradient)
    assert options.has_own(last_gradient)


def test_stage_3_keeps_parameters_that_are_reused_soon() -> None:
    """Two layers of a Llama without persistent parameters: the elements between two uses decide."""
    arch = replace(LLAMA, num_hidden_layers=2)
    embedding = head = arch.embedding_parameters
    norm = arch.hidden_size
    model = TracedModel(arch, None, 2, 0, (embedding,), (norm,), (head,))
    free = Stage3Options(0, 0, 10**12, 0, 10**12)
    nothing = simulate_step(model, 2, 0, free)
    assert (nothing.persistent, nothing.after_forward) == (0, 0)
    # Nothing is used between the head's forward and backward; between the norm's, the head is, twice.
    some = simulate_step(model, 2, 0, free._replace(max_reuse_distance=1))
    assert some.after_forward == head
    some = simulate_step(model, 2, 0, free._replace(max_reuse_distance=2 * head + 1))
    assert some.after_forward == head + norm
    everything = simulate_step(model, 2, 0, free._replace(max_reuse_distance=10**12))
    assert everything.after_forward == arch.num_parameters
    small = simulate_step(model, 2, 0, free._replace(param_persistence_threshold=10**12))
    assert small.persistent == small.after_forward == arch.num_parameters
    # A single rank has all parameters, and all-gathers nothing.
    assert simulate_step(model, 1, 0, free).after_forward == 0


def test_stage_3_prefetches_into_a_flat_buffer() -> None:
    """Coalesced parameters exist twice while they are copied; a single one is all-gathered in place."""
    arch = replace(LLAMA, num_hidden_layers=2)
    model = TracedModel(arch, None, 2, 0, (arch.embedding_parameters,), (arch.hidden_size,), (8,))
    free = Stage3Options(arch.hidden_size, 0, 10**12, 0, 10**12)
    plain = simulate_step(model, 2, 0, free)
    ahead = simulate_step(model, 2, 0, free._replace(prefetch_bucket_size=10**12))
    most = [max(elements for _, elements in one.in_forward) for one in (plain, ahead)]
    assert most[1] > most[0]


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_saved_views_keep_released_experts_allocated(name: str) -> None:
    """Autograd keeps the memory behind a transposed view, so experts exist twice in backward.

    Mixtral's experts are all-gathered with their router, as a leaf; DeepSeek's one module at a time.
    """
    arch = replace(ss.models[name], num_hidden_layers=2)
    arch = replace(arch, mixture_of_experts=replace(arch.mixture_of_experts, first_k_dense_replace=0))  # type: ignore[type-var]
    model = TracedModel(arch, None, 0, 2, (8,), (8,), (8,))
    free = Stage3Options(arch.hidden_size, 0, 10**12, 0, 10**12)
    unrecomputed = simulate_step(model, 2, 0, free)
    recomputed = simulate_step(model, 2, 1, free)
    one = sum(size for group, size in arch.layer_parameters(0).items() if group == "experts")
    # Recomputation saves no view in forward.
    assert unrecomputed.after_forward - recomputed.after_forward == 2 * one
    assert recomputed.after_forward == recomputed.persistent


def test_buckets_and_thresholds_change_memory() -> None:
    def predict_staging_bytes(stage: int, phase: str, **options: Any) -> int:
        return make_plan(stage, **options).memory().at(phase)["gather_buffers"]  # type: ignore[arg-type]

    tiny = {"reduce_bucket_size": 1_000_000}
    assert predict_staging_bytes(3, "rest") - predict_staging_bytes(3, "rest", **tiny) == 2 * (
        500_000_000 - 1_000_000
    )
    end = {True: make_plan(2, overlap_comm=True, **tiny), False: make_plan(2, overlap_comm=False, **tiny)}
    more, less = (end[x].memory().timeline[-2][2]["gather_buffers"] for x in (True, False))
    assert more - less == 2 * 1_000_000
    # A short distance alone releases nothing more: DeepSpeed keeps parameters that prefetching has skipped.
    no_reuse = predict_staging_bytes(3, "forward", stage3_max_reuse_distance=0)
    assert no_reuse == predict_staging_bytes(3, "forward")
    assert (
        predict_staging_bytes(3, "forward", stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
        < no_reuse / 2
    )
    update = [
        make_plan(3, sub_group_size=size).memory().at("optimizer")["optimizer"] for size in (10**9, 10**6)
    ]
    assert update[0] > update[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reduce_bucket_size", 0), ("reduce_bucket_size", "auto"), ("reduce_bucket_size", 5e8),
        ("allgather_bucket_size", 3), ("stage3_prefetch_bucket_size", -1), ("overlap_comm", 1),
        ("contiguous_gradients", None), ("pin_memory", "yes"), ("offload_optimizer_buffer_count", 3),
        ("stage3_max_live_parameters", 2**60),
    ],
)  # fmt: skip
def test_options_outside_of_deepspeeds_ranges_raise(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        ss.Layout.zero(3, **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"Layout.{field}"


def test_options_survive_json_and_reach_deepspeed() -> None:
    layout = {"stage3_prefetch_bucket_size": 7, "offload_params": "nvme", "offload_params_max_in_cpu": 9}
    plan = make_plan(3, **layout, offload_params_buffer_count=80)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    config = build_deepspeed_config(again)["zero_optimization"]
    assert config["stage3_prefetch_bucket_size"] == 7
    assert config["offload_param"]["max_in_cpu"] == 9


def test_offload_moves_bytes_to_the_host() -> None:
    part = P / 8
    here = make_plan(3).memory()
    assert (here.host_bytes, here.nvme_bytes) == (0, 0)
    there = make_plan(3, offload_optimizer="cpu").memory()
    assert there.at("rest")["optimizer"] == there.at("rest")["gradients"] == 0
    # fp32 main copies, two moments and fp32 gradients, and the reduced gradients in bf16.
    assert there.host_bytes == pytest.approx((16 + 2) * part, rel=1e-4)
    both = make_plan(3, offload_optimizer="cpu", offload_params="cpu").memory()
    assert both.at("rest")["parameters"] == 0
    assert both.host_bytes - there.host_bytes == here.at("rest")["parameters"]
    two = make_plan(2, offload_optimizer="cpu").memory()
    largest = LLAMA.vocab_size * LLAMA.hidden_size
    # Stages 1 and 2: main copies, moments, fp32 gradients, updated bf16 weights, one staging tensor.
    assert two.host_bytes == pytest.approx((16 + 2) * part + 2 * largest, rel=1e-4)
    assert two.at("rest")["gather_buffers"] == 2 * largest


def test_weights_are_flattened_on_the_host_if_two_copies_do_not_fit() -> None:
    """deepspeed/runtime/zero/stage_1_and_2.py: flatten_on_accelerator."""
    llama = ss.models["llama-3.1-8b"]
    there, here = (
        make_plan(1, ss.Cluster.parse(f"8x{gpu}"), llama).memory().at("initialisation")["parameters"]
        for gpu in ("h100-sxm-80gb", "l4-24gb")
    )
    assert there == 2 * here


def test_offloaded_gradients_need_no_gpu_memory_in_backward() -> None:
    for stage in (2, 3):
        report = make_plan(stage, offload_optimizer="cpu", global_batch_size=16).memory()
        assert {moment.components["gradients"] for moment in report.worst_stage.phases} == {0}


def test_offload_to_nvme_keeps_buffers_on_the_host() -> None:
    report = make_plan(3, offload_optimizer="nvme", sub_group_size=10_000_000).memory()
    sizes = list_stage_tensors(make_plan(3), first_stage(make_plan(3))).trained
    part = sum_partitions(sizes, 8)
    # Main copies, moments, and the gradients that have at least a mebibyte in fp32.
    large = sum(size // 8 for size in sizes if 4 * size // 8 >= 2**20)
    assert report.nvme_bytes == pytest.approx(12 * part + 4 * large, rel=1e-4)
    assert report.host_bytes < 6 * part
    # Vectors are a separate group, too small for files: all of their state stays on the host.
    assert report.at("optimizer")["gradients"] == 0


def test_weights_on_nvme_have_files_even_if_they_stay_in_memory() -> None:
    """DeepSpeed writes what ``zero.Init`` partitions, and reads it back once if it fits (stage3.py)."""
    sizes = list_stage_tensors(make_plan(3), first_stage(make_plan(3))).trained
    part = sum_partitions(sizes, 8)
    large = sum(size // 8 for size in sizes if 2 * size // 8 >= 2**20)
    room = make_plan(3, offload_params="nvme").memory()
    assert room.nvme_bytes == 2 * large
    assert room.host_bytes == pytest.approx(2 * part + 5 * 2 * 100_000_000, rel=1e-5)
    enough = {"stage3_prefetch_bucket_size": 0, "offload_params_buffer_count": 80}
    files = make_plan(3, offload_params="nvme", offload_params_max_in_cpu=0, **enough).memory()
    assert files.nvme_bytes == room.nvme_bytes
    # Partitions under a mebibyte stay in memory; the buffer has a sub-group's unpartitioned tensors.
    whole = 2 * sum(sizes)
    assert files.host_bytes == pytest.approx(2 * (part - large) + whole + 160 * 100_000_000, rel=1e-4)


def test_every_parameter_that_stays_all_gathered_needs_a_buffer() -> None:
    """A small model fails DeepSpeed's assertion at the sixth; a large one keeps few (test_nvme_ranks.py)."""
    eight = ss.models["llama-3.1-8b"]
    assert make_plan(3, arch=eight, offload_params="nvme", offload_params_max_in_cpu=0).layout
    with pytest.raises(FieldError, match="holds a buffer") as caught:
        make_plan(3, offload_params="nvme", offload_params_max_in_cpu=0, offload_params_buffer_count=5)
    assert caught.value.field == "Layout.offload_params_buffer_count"
    fixed = dict(change.split("=") for change in caught.value.fix.split(", "))
    options = {name: int(value) for name, value in fixed.items()}
    assert make_plan(3, offload_params="nvme", offload_params_max_in_cpu=0, **options).layout
    # Parameters that fit into host memory need none.
    assert make_plan(3, offload_params="nvme").layout.offload_params_buffer_count == 5


def test_stage_0_in_a_pipeline_partitions_main_copies_of_bf16() -> None:
    """BF16_Optimizer: 2 bytes of weights, 2 + 2 of gradients, and 12 over the data-parallel ranks."""
    arch = ss.models["llama-3.1-8b"]
    node, recipe = ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(global_batch_size=64)
    report = Plan(arch, node, recipe, ss.Layout.zero(0, pp=2)).memory()
    numbers = arch.num_parameters / 2
    assert report.components["parameters"] == pytest.approx(2 * numbers, rel=1e-3)
    assert report.components["gradients"] == pytest.approx(4 * numbers, rel=1e-3)
    assert report.components["optimizer"] == pytest.approx(12 * numbers / 4, rel=1e-3)
    assert report.at("rest")["gradients"] == pytest.approx(2 * numbers, rel=1e-3)
    # fp16 has FP16_Optimizer, in a pipeline too.
    whole = Plan(arch, node, replace(recipe, precision="fp16-mixed"), ss.Layout.zero(0, pp=2)).memory()
    assert whole.at("rest")["optimizer"] == pytest.approx(12 * numbers, rel=1e-3)


@pytest.mark.parametrize("name", ["llama-3.1-405b", "mixtral-8x7b", "deepseek-v3", "llama-3.1-8b"])
def test_defaults_of_nvme_swapping_are_chosen_so_that_it_runs(name: str) -> None:
    """DeepSpeed's defaults where they work; otherwise more buffers, or no prefetching."""
    open_plan = make_plan(3, arch=ss.models[name], offload_params="nvme")
    settled = open_plan.layout
    assert isinstance(settled, ZeroLayout)
    assert settled.offload_params_buffer_count is not None
    assert find_swap_failure(open_plan.architecture, open_plan.recipe, settled, 8) is None
    assert Plan.from_json(open_plan.to_json()) == open_plan
    config = build_deepspeed_config(open_plan)["zero_optimization"]
    assert config["offload_param"]["buffer_count"] == settled.offload_params_buffer_count
    assert config["stage3_prefetch_bucket_size"] == settled.stage3_prefetch_bucket_size
    if name == "llama-3.1-8b":
        assert (settled.offload_params_buffer_count, settled.stage3_prefetch_bucket_size) == (5, 50_000_000)


@settings(max_examples=examples(200), deadline=None)
@given(
    name=st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2-xl"]),
    method=st.sampled_from(["full", "lora"]),
    recompute_interval=st.integers(0, 2),
    prefetch_bucket_size=st.sampled_from([0, 10**6, 5 * 10**7, 10**9]),
    max_live_parameters=st.sampled_from([10**8, 10**12]),
    max_reuse_distance=st.sampled_from([0, 10**8, 10**12]),
    num_buffers=st.integers(1, 60),
    ranks=st.sampled_from([1, 2, 8]),
)
def test_swaps_alone_fail_as_they_do_in_the_whole_step(
    name: str,
    method: str,
    recompute_interval: int,
    prefetch_bucket_size: int,
    max_live_parameters: int,
    max_reuse_distance: int,
    num_buffers: int,
    ranks: int,
) -> None:
    """The question for one number of buffers stops at the first failure, and counts no memory."""
    arch = replace(ss.models[name], num_hidden_layers=4)
    adapters = find_adapters(arch, ss.Recipe(method=method))  # type: ignore[arg-type]
    moe_layers = arch.num_moe_layers
    model = build_traced_model(arch, adapters, 4 - moe_layers, moe_layers)
    options = Stage3Options(
        param_persistence_threshold=10**5,
        prefetch_bucket_size=prefetch_bucket_size,
        max_live_parameters=max_live_parameters,
        max_reuse_distance=max_reuse_distance,
        reduce_bucket_size=5 * 10**8,
        offloads_partitions=True,
        nvme=NvmeOptions(
            swaps_params=True,
            swaps_optimizer=True,
            half=2,
            sub_group_size=10**9,
            max_in_cpu=0,
            num_buffers=num_buffers,
        ),
    )
    failure = find_first_failure(model, ranks, recompute_interval, options)
    assert failure == simulate_step(model, ranks, recompute_interval, options).failure


def test_experts_are_partitioned_over_their_replicas_only() -> None:
    mixtral = ss.models["mixtral-8x7b"]
    experts = mixtral.parameter_groups["experts"]
    dense = mixtral.num_parameters - experts
    for stage in (1, 2):
        rest = make_plan(stage, arch=mixtral, ep=8).memory().at("rest")
        assert rest["optimizer"] == pytest.approx(12 * (dense / 8 + experts / 8), rel=1e-5)


# ------------------------------------------------------------------------------- DeepSpeed's own engine


LEVELS = {
    "deepspeed": (1.0, 1.0, 60),
    "deepspeed-offload": (1.0, 1.0, 30),
    "deepspeed-nvme": (1.0, 1.0, 30),
    "deepspeed-held-out": (0.95, 1.0, 40),
    "deepspeed-tp": (0.85, 1.0, 15),
    "deepspeed-held-out-3": (1.0, 1.0, 30),
    "deepspeed-nvme-held-out-3": (1.0, 1.0, 30),
    "deepspeed-offload-held-out-3": (0.96, 1.0, 30),
    "deepspeed-tp-held-out-3": (1.0, 1.0, 30),
    "deepspeed-recipes-held-out-3": (0.93, 1.0, 30),
    "deepspeed-held-out-4": (1.0, 1.0, 30),
    "deepspeed-nvme-held-out-4": (0.96, 1.0, 26),
    "deepspeed-offload-held-out-4": (1.0, 1.0, 18),
    "deepspeed-tp-held-out-4": (1.0, 1.0, 30),
    "deepspeed-recipes-held-out-4": (1.0, 1.0, 30),
}
"""Shares within 1 % and within 3 % that are reached, and stored plans; the goal is 0.95 and 1.

Before any formula had seen them, of the first held-out sample 68 % and 89 % were as close, of the third (seed
78801 of ``tests/accuracy/wide_sampling.py`` and ``recipe_sampling.py``) 74 % and 79 %, of the fourth (seed
78802, drawn after the formulas had been fixed by the third) 96 % and 97 %, its worst -12.9 %. Rows in
which all weights are trained were rehearsed again with the engine's two groups, matrices and vectors:
reducing a norm allocates the gradients that ZeRO-2 keeps, which one group had hidden (up to 7 %)."""


@sample(5)
@pytest.mark.parametrize("name", LEVELS)
def test_stored_rehearsals_are_predicted(name: str) -> None:
    from tests.accuracy.rehearsals import STORED, read_rehearsals

    rows, failures = read_rehearsals([STORED / f"{name}.jsonl"])
    close, near, number = LEVELS[name]
    assert len(rows) >= number and not failures
    errors = sorted(abs(row.error) for row in rows)
    within = {limit: sum(error < limit for error in errors) / len(errors) for limit in (0.01, 0.03)}
    assert within[0.01] >= close and within[0.03] >= near, within


needs_deepspeed = needs_installed("deepspeed")


@needs_deepspeed
@thorough()
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_allocates_the_predicted_bytes(stage: int) -> None:
    arch = replace(LLAMA, num_hidden_layers=2, vocab_size=32_003)
    plan = make_plan(stage, ss.Cluster.parse("2x8xh100-sxm-80gb"), arch, seq_len=512, global_batch_size=32)
    # Stage 3 as users call it, in a separate process.
    report = plan.rehearse() if stage == 3 else rehearse_in_this_process(plan)
    predicted = plan.memory()
    assert report.tier == "rehearsed"
    for name in ("parameters", "gradients", "optimizer", "gather_buffers"):
        # Rotary frequencies and DeepSpeed's own flags are a few hundred bytes.
        assert 0 <= report.at("rest")[name] - predicted.at("rest")[name] < 4096, name
    assert report.at("optimizer")["gradients"] == predicted.at("optimizer")["gradients"]
    assert report.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01)


@thorough()
@needs_deepspeed
def test_stored_rehearsals_equal_those_of_the_installed_deepspeed() -> None:
    from tests.accuracy.rehearsals import STORED

    file = STORED / "deepspeed.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in sorted(rows, key=lambda row: row["seconds"])[:3]:
        again = list_stages(Plan.from_dict(row["plan"]))
        # Which vectors share a flat buffer moves its padding by kilobytes.
        assert [stage.peak.num_bytes for stage in again] == pytest.approx(
            [max(sum(m["components"].values()) for m in stage["moments"]) for stage in row["stages"]],
            rel=1e-4,
        )


@needs_deepspeed
def test_unsupported_rehearsals_raise_with_the_field() -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import check_plan

    with pytest.raises(FieldError, match=r"Layout\.tp"):
        check_plan(make_plan(1, pp=2, tp=2))


@given(st.integers(0, 3), st.sampled_from(("none", "full")))
@settings(max_examples=examples(10), deadline=None)
def test_every_term_has_an_explanation(stage: int, recompute: str) -> None:
    report = make_plan(stage, recompute=recompute).memory()
    for moment in report.worst_stage.phases:
        for term in moment.terms.values():
            assert term.explain()


@thorough()
@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "recipe"),
    few(
        [
            (0, {"optimizer": "lion"}),
            (1, {"optimizer": "adafactor"}),
            (2, {"optimizer": "adamw_8bit"}),
            (3, {"optimizer": "lion"}),
            (3, {"optimizer": "adamw_8bit"}),
            (2, {"loss": "chunked"}),
            (1, {"recompute": "offload"}),
        ],
        [(1, {"optimizer": "adafactor"})],
    ),
)
def test_other_optimizers_losses_and_offloaded_activations(stage: int, recipe: dict[str, Any]) -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import rehearse
    from shardscope.rehearsal.result import TENSOR_COMPONENTS

    if recipe.get("optimizer") == "adamw_8bit":
        needs("bitsandbytes")
    plan = make_plan(stage, arch=ss.Architecture.of_size("60m"), seq_len=512, **recipe)
    predicted = plan.memory()
    (rehearsed,) = rehearse(plan, lambda message, fraction: None)
    peak_bytes = sum(predicted.components[name] for name in TENSOR_COMPONENTS)
    assert peak_bytes == pytest.approx(rehearsed.peak.num_bytes, rel=2e-3)
    assert rehearsed.host_bytes == pytest.approx(predicted.host_bytes, rel=0.01)


@needs_deepspeed
def test_a_chunked_loss_needs_a_head_that_is_not_partitioned() -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import check_plan

    with pytest.raises(FieldError, match=r"Recipe\.loss.*all-gathers a weight when its module runs"):
        check_plan(make_plan(3, loss="chunked"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_phase_of_offloaded_layers_has_less_than_no_memory(stage: int) -> None:
    """A gradient that the bucket has no room for is not copied, and so no copy of it is freed."""
    recipe = ss.Recipe(recompute="offload", seq_len=512, global_batch_size=8)
    layout = ss.Layout.zero(stage=stage, reduce_bucket_size=50_000_000)
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, layout)
    for report in plan.memory().by_stage:
        assert all(min(phase.components.values()) >= 0 for phase in report.phases)


def test_the_bucket_of_stages_1_and_2_is_allocated_in_backward() -> None:
    recipe = ss.Recipe(recompute="offload", method="lora", seq_len=512, global_batch_size=8)
    plan = ss.Plan(
        ss.models["qwen3-30b-a3b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.zero(stage=2)
    )
    (report,) = plan.memory().by_stage
    in_forward = [phase for phase in report.phases if phase.phase == "forward"]
    assert in_forward and all(phase.components["gather_buffers"] == 0 for phase in in_forward)


def test_experts_larger_than_the_bucket_are_reduced_before_biases_and_norms() -> None:
    """Reduced in model order, a bias of the first bucket would add a copy of all gradients: 10 % too high."""
    glm = ss.models["glm-4.5-air"]
    experts = replace(glm.mixture_of_experts, first_k_dense_replace=1)
    arch = replace(glm, num_hidden_layers=2, vocab_size=8003, mixture_of_experts=experts)
    recipe = ss.Recipe(seq_len=2048, global_batch_size=4, precision="fp32")
    report = ss.Plan(arch, ss.Cluster.parse("4xh100-sxm-80gb"), recipe, ss.Layout.zero(1)).memory()
    rehearsed = 35.831 * 2**30
    assert max(map(tensor_bytes, report.worst_stage.phases)) == pytest.approx(rehearsed, rel=0.001)


def test_the_layer_with_the_most_elements_counts_in_models_that_mix_windows() -> None:
    """It may be any layer, as ZeRO's reductions fall: 1.6 % of this Gemma 3 was missing without it."""
    recipe = ss.Recipe(seq_len=512, global_batch_size=8, precision="fp32")
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    report = ss.Plan(ss.models["gemma-3-1b"], cluster, recipe, ss.Layout.zero(2)).memory()
    assert max(map(tensor_bytes, report.worst_stage.phases)) == pytest.approx(11_419_302_732, rel=0.005)
    # Eager attention has the same tensors with a window and without.
    olmo = replace(ss.models["olmo-3-7b"], num_hidden_layers=4, sliding_window_layers=3, vocab_size=8003)
    batch = {"seq_len": 1024, "micro_batch_size": 3, "global_batch_size": 24}
    eager = replace(recipe, **batch, precision="bf16", recompute="full", attention="eager")
    four = ss.Cluster.parse("4xh100-sxm-80gb")
    report = ss.Plan(
        olmo, four, eager, ss.Layout.zero(3, overlap_comm=False, contiguous_gradients=False)
    ).memory()
    assert max(map(tensor_bytes, report.worst_stage.phases)) == pytest.approx(7_714_173_469, rel=0.02)
