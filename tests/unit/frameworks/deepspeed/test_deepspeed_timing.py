"""ZeRO's gradients and parameters in a step: what is copied, where to, and what waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.frameworks.deepspeed.memory.ipg_bucket import FlatGradient, count_buckets
from shardscope.frameworks.registry import frameworks
from shardscope.timing.report import StepReport
from shardscope.timing.traffic import StateTraffic

NODE = replace(ss.Cluster.parse("8xh100-sxm-80gb"), nvme_bytes=2**44, nvme_bandwidth_bytes_per_second=12e9)
MODEL = ss.models["llama-3.1-8b"]
WEIGHTS = MODEL.num_parameters


def plan(stage: int, micro_batches: int = 1, arch: ss.Architecture = MODEL, **options: Any) -> ss.Plan:
    recipe = ss.Recipe(global_batch_size=8 * micro_batches, recompute="full")
    return ss.Plan(arch, NODE, recipe, ss.Layout.zero(stage, **options))


def predict_step(stage: int, micro_batches: int = 1, **options: Any) -> StepReport:
    return plan(stage, micro_batches, **options).step()


def get_traffic(a_plan: ss.Plan) -> StateTraffic:
    framework = frameworks["deepspeed"]
    model = framework.memory_model()
    stage = model.count_weights(a_plan, model.find_shapes(a_plan).kinds[0])
    return framework.timing_model().state_traffic(a_plan, stage)


# ----------------------------------------------------------------- offloaded gradients of stages 1 and 2


def test_ranks_copy_their_gradients_to_the_host_one_after_another() -> None:
    """A bucket belongs to one or two of eight ranks, and the next all-reduce waits for their copies."""
    in_turn = get_traffic(plan(2, offload_optimizer="cpu")).returned_waiting
    # fp32; where a bucket belongs to two ranks, both copy at the same time.
    assert 4 * WEIGHTS / 2 < in_turn < 4 * WEIGHTS
    at_once = get_traffic(plan(2, offload_optimizer="cpu", reduce_bucket_size=2 * WEIGHTS)).returned_waiting
    assert at_once == pytest.approx(4 * WEIGHTS / 8, rel=0.01)


@given(
    tensors=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=8),
    partitions=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_busiest_rank_of_a_bucket_is_that_with_the_most_elements(
    tensors: list[tuple[bool, int]], partitions: tuple[int, int]
) -> None:
    ends, bucket = [0, 0], []
    for is_vector, size in tensors:
        bucket.append(FlatGradient(ends[is_vector], size, partitions[is_vector]))
        ends[is_vector] += size
    last_rank = max(end // partition for end, partition in zip(ends, partitions, strict=True))
    by_rank = [[one.count_owned_by(rank) for one in bucket] for rank in range(last_rank + 1)]
    counts = count_buckets(bucket, 2**40, finds_busiest=True)
    assert counts.owned == max(sum(owned) for owned in by_rank)
    assert counts.overlapping == max(
        sum(one.size for one, elements in zip(bucket, owned, strict=True) if elements) for owned in by_rank
    )


def test_stage_2_copies_sums_of_micro_batches_to_the_gpu_and_back() -> None:
    one, three = (get_traffic(plan(2, n, offload_optimizer="cpu")).returned_waiting for n in (1, 3))
    # Three copies in half precision to the host, two back, and then fp32 as for a single micro-batch.
    assert 2.4 < three / one < 4
    # Autograd adds stage 1's up on the GPU.
    first, more = (get_traffic(plan(1, n, offload_optimizer="cpu")).returned_waiting for n in (1, 3))
    assert first == more


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_comm_gains_nothing_with_offload(stage: int) -> None:
    gained = predict_step(stage).seconds / predict_step(stage, overlap_comm=True).seconds
    assert gained > 1.05
    without, overlapping = (
        predict_step(stage, offload_optimizer="cpu", overlap_comm=flag) for flag in (False, True)
    )
    assert overlapping.hidden["gradients"] == 0
    assert overlapping.seconds == pytest.approx(without.seconds, rel=0.01)


def test_busiest_rank_of_each_bucket() -> None:
    # Partitions of 10 elements: the second bucket has 5 of rank 1, and 10 of rank 2 and of rank 3.
    gradients = [FlatGradient(0, 15, 10), FlatGradient(15, 25, 10)]
    counts = count_buckets(gradients, 25, finds_busiest=True)
    assert (counts.number, counts.last) == (2, 25)
    assert counts.owned == 10 + 10
    assert counts.overlapping == 15 + 25
    assert count_buckets(gradients, 40, finds_busiest=True).number == 1


# -------------------------------------------------------------------------------------------- stage 3


def test_stage_3_copies_partitions_to_the_host_and_back() -> None:
    """Counted with DeepSpeed 0.19.8 on fake tensors: each micro-batch in half precision, then fp32."""
    owned = WEIGHTS / 8
    for micro_batches in (1, 2):
        traffic = get_traffic(plan(3, micro_batches, offload_optimizer="cpu"))
        assert traffic.fetched_backward == pytest.approx(2 * micro_batches * owned, rel=0.01)
        assert traffic.returned_backward == pytest.approx((4 * micro_batches + 4) * owned, rel=0.01)
    # Main copies on the GPU are sent in fp32 to offloaded parameters.
    assert get_traffic(plan(3, offload_params="cpu")).returned_after == pytest.approx(4 * owned, rel=0.01)


def test_host_scales_gradients_and_casts_weights_besides_the_update() -> None:
    traffic = get_traffic(plan(3, offload_optimizer="cpu"))
    # Adam moves 28 bytes per weight, scaling 8, and the cast 6.
    assert traffic.updated_on_host == pytest.approx((28 + 8 + 6) / 28 * WEIGHTS / 8, rel=0.01)


# ---------------------------------------------------------------------------------------------- NVMe


def test_weights_within_max_in_cpu_are_not_read_from_nvme() -> None:
    arch = ss.models["llama-3.2-3b"]
    offload: dict[str, Any] = {"offload_optimizer": "nvme", "offload_params": "nvme"}
    in_memory, in_files = (
        get_traffic(plan(3, 2, arch, **offload, **options))
        for options in ({}, {"offload_params_max_in_cpu": 0})
    )
    partition = arch.num_parameters / 8
    read = in_files.nvme_overlapped - in_memory.nvme_overlapped
    # Two micro-batches, whose forward and backward read half precision; the last layers stay all-gathered.
    assert 2 * 2 * partition < read < 2 * 2 * 2 * partition
    written = in_files.nvme_after - in_memory.nvme_after
    # Partitions of keys and values are too small for files.
    assert written == pytest.approx(2 * partition, rel=0.06)


def test_gradients_are_written_to_nvme_and_read_for_the_update() -> None:
    traffic = get_traffic(plan(3, offload_optimizer="nvme", sub_group_size=100_000_000))
    owned = WEIGHTS / 8
    both = traffic.nvme_overlapped + traffic.nvme_after
    assert both == pytest.approx((2 * 12 + 2 * 4) * owned, rel=0.01)
    # The writes but for a last buffer, the size of a sub-group, overlap with backward.
    assert 4 * (owned - 300_000_000) < traffic.nvme_overlapped < 4 * owned
    # The host waits for the copy of each bucket, and so for its reduction, in the last micro-batch.
    report = predict_step(3, 4, offload_optimizer="nvme")
    gradients = [one for one in report.communication if one.part == "gradients"]
    waited = sum(one.seconds for one in gradients if not one.hidden_seconds)
    assert waited == pytest.approx(sum(one.seconds for one in gradients) / 4)


# ------------------------------------------------------------------------------------------ on the GPU


@pytest.mark.parametrize(
    ("stage", "micro_batches", "per_weight", "per_owned"),
    [
        # Bytes counted with DeepSpeed 0.19.8 on fake tensors; ``per_owned`` without what a whole tensor adds.
        (0, 1, 12 + 22, 0),
        (1, 1, 12, 32 + 8),
        (2, 1, 12, 32 + 8),
        (2, 2, 24, 32 + 2 * 8 + 6),
        (3, 1, 12, 28 + 4),
        (3, 2, 24, 28 + 4 + 6),
    ],
)
def test_gradients_are_copied_as_often_as_deepspeed_does(
    stage: int, micro_batches: int, per_weight: int, per_owned: int
) -> None:
    copied = get_traffic(plan(stage, micro_batches)).copied_for_gradients
    assert copied == pytest.approx((per_weight + per_owned / 8) * WEIGHTS, rel=0.06)


def test_bf16_pipelines_add_each_micro_batch_to_a_flat_buffer() -> None:
    copied = [get_traffic(plan(0, n, pp=2)).copied_for_gradients for n in (1, 2)]
    framework = frameworks["deepspeed"].memory_model()
    a_plan = plan(0, pp=2)
    trained = framework.count_weights(a_plan, framework.find_shapes(a_plan).kinds[0]).trainable
    # On four data-parallel ranks these are two and four micro-batches. In half precision, the gradients of
    # each are set to zero, added by autograd, and added to the buffer.
    assert copied[1] - copied[0] == pytest.approx(2 * (2 + 6 + 6) * trained)


def test_stage_3_copies_parameters_out_of_flat_buffers() -> None:
    together = get_traffic(plan(3)).copied_for_gathers
    # Forward needs all parameters once, of two bytes that are read and written.
    assert 0 < together < 2 * 4 * WEIGHTS * (1 + 1 / 8)
    # Without prefetching each parameter is all-gathered alone, in place.
    alone = get_traffic(plan(3, stage3_prefetch_bucket_size=0)).copied_for_gathers
    assert alone < 0.01 * together


@pytest.mark.parametrize(
    # The embedding, the last gradient, does not fit into the bucket of 0.5 billion; 0.8 billion leave more.
    ("bucket", "exposed"),
    [(500_000_000, 128_256 * 2048), (800_000_000, 435_000_000)],
)
def test_last_bucket_of_backward_is_exposed(bucket: int, exposed: int) -> None:
    arch = ss.models["llama-3.2-1b"]
    report = plan(2, arch=arch, overlap_comm=True, reduce_bucket_size=bucket).step()
    (reduction,) = (one for one in report.communication if one.part == "gradients")
    share = reduction.exposed_seconds / reduction.seconds
    assert share == pytest.approx(exposed / arch.num_parameters, rel=0.05)


def test_updated_weights_are_all_gathered_in_one_call() -> None:
    sizes = (500_000_000, 1_000_000)
    few, many = (predict_step(1, allgather_bucket_size=size).parts["gathers"] for size in sizes)
    assert few == many > 0


def test_stage_0_partitions_the_update_in_a_bf16_pipeline() -> None:
    stage_0, stage_1 = (predict_step(stage, 4, pp=2).parts for stage in (0, 1))
    assert stage_0["optimizer"] == pytest.approx(stage_1["optimizer"])
    assert stage_0["gathers"] == pytest.approx(stage_1["gathers"]) and stage_0["gathers"] > 0
    assert predict_step(0, 4).parts["gathers"] == 0


# ----------------------------------------------------------------- adapters


def test_adapters_of_two_projections_of_one_name_have_their_own_sizes() -> None:
    """Attention and the MLP of GPT-2 both have a c_proj: a last bucket beyond all gradients had a negative
    overlap."""
    arch = ss.models["gpt2-xl"]
    adapted = ss.Plan(arch, NODE, ss.Recipe(method="lora", seq_len=1024), ss.Layout.zero(stage=3))
    (reduction,) = [one for one in get_traffic(adapted).transfers if one.part == "gradients"]
    assert reduction.exposed_share == 1, "all gradients are in one bucket, reduced after backward"
    assert min(adapted.step().hidden.values()) >= 0
