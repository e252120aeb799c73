"""Tests of one layer's sharding: its bytes are those of memory and step, its parts cover the layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.requirements import sample

import shardscope as ss
from shardscope.frameworks.fsdp2.memory.groups import compute_groups
from shardscope.frameworks.registry import frameworks
from shardscope.memory.state.layer_sharding import join_intervals
from shardscope.prediction.layer_sharding import LayerSharding, shard_layer

LLAMA, MIXTRAL = ss.models["llama-3.1-8b"], ss.models["mixtral-8x7b"]
NUM_LAYERS = LLAMA.num_hidden_layers
LAYER = 218_112_000
EDGES = LLAMA.num_parameters - NUM_LAYERS * LAYER
EMBEDDING = LLAMA.vocab_size * LLAMA.hidden_size
LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "zero-0": ss.Layout.zero(0),
    "zero-1": ss.Layout.zero(1),
    "zero-2": ss.Layout.zero(2),
    "zero-3": ss.Layout.zero(3),
    "zero-3 hpz": ss.Layout.zero(3, zero_hpz_partition_size=4),
    "fsdp2": ss.Layout.fsdp2(),
    "hsdp": ss.Layout.fsdp2(replicate=2),
    "not resharded": ss.Layout.fsdp2(reshard_after_forward=False),
    "resharded to 4": ss.Layout.fsdp2(reshard_after_forward=4),
    "fsdp2 tp": ss.Layout.fsdp2(tp=2),
    "fsdp2 cp": ss.Layout.fsdp2(cp=2),
    "fsdp2 pp": ss.Layout.fsdp2(pp=2, vpp=2),
    "fsdp2 offload": ss.Layout.fsdp2(offload="cpu"),
    "megatron": ss.Layout.megatron(),
    "megatron buckets": ss.Layout.megatron(overlap_grad_reduce=True),
    "megatron plain": ss.Layout.megatron(distributed_optimizer=False),
    "megatron tp": ss.Layout.megatron(tp=8),
    "megatron tp pp": ss.Layout.megatron(tp=2, pp=2),
    "megatron interleaved": ss.Layout.megatron(pp=4, vpp=2),
}


def build_plan(name: str, **recipe: Any) -> ss.Plan:
    options = {"global_batch_size": 16, "recompute": "selective", **recipe}
    return ss.Plan(LLAMA, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(**options), LAYOUTS[name])


@cache
def shard_all_layers(name: str) -> list[LayerSharding]:
    plan = build_plan(name)
    return [shard_layer(plan, layer) for layer in range(NUM_LAYERS)]


def read_rest(plan: ss.Plan, component: str, stage: int = 0) -> int:
    return plan.memory().by_stage[stage].at("rest").components[component]


@pytest.mark.parametrize(
    ("name", "width", "ranks"),
    [("ddp", 4, 1), ("zero-1", 2, 1), ("zero-2", 2, 1), ("zero-3", 2, 8), ("fsdp2", 4, 8), ("hsdp", 4, 4)],
)
def test_layers_and_edges_are_the_parameters_in_memory(name: str, width: int, ranks: int) -> None:
    plan = build_plan(name)
    (size,) = {slices.own_bytes for slices in shard_layer(plan, 3).get_phase("rest").slices["parameters"]}
    assert size == LAYER * width // ranks
    assert NUM_LAYERS * size + EDGES * width // ranks == read_rest(plan, "parameters")


@pytest.mark.parametrize("name", ["megatron tp pp", "fsdp2 pp", "megatron interleaved"])
def test_layers_of_an_inner_stage_are_all_of_its_state(name: str) -> None:
    """A stage between the first and the last holds nothing but layers."""
    pp = build_plan(name).degrees.pp
    layers = shard_all_layers(name)
    stages = [layer.stage for layer in layers]
    assert [stages.count(stage) for stage in range(pp)] == list(build_plan(name).stage_layers)
    for stage in range(1, pp - 1):
        memory = layers[0].plan.memory().by_stage[stage]
        for kind, phase in (("parameters", "rest"), ("gradients", "optimizer")):
            total = sum(
                layer.get_phase(phase).slices[kind][0].own_bytes for layer in layers if layer.stage == stage
            )
            assert total == memory.at(phase).components[kind]
    if name == "megatron interleaved":
        assert [layer.stage for layer in layers][:16] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero-3", "megatron plain"])
def test_optimizer_state_and_gradients_are_those_in_memory(name: str) -> None:
    plan, shown = build_plan(name), shard_layer(build_plan(name), 5)
    for kind in ("optimizer", "gradients"):
        slices = shown.get_phase("optimizer").slices[kind][0].own_bytes
        whole = plan.memory().by_stage[0]
        total = whole.at("rest").components["optimizer"]
        if kind == "gradients":
            total = whole.at("optimizer").components["gradients"]
        assert slices == total * LAYER // LLAMA.num_parameters


@pytest.mark.parametrize("name", ["zero-1", "zero-2", "megatron", "megatron buckets"])
def test_flat_buffers_put_a_layer_on_few_ranks_and_fill_every_rank(name: str) -> None:
    layers = shard_all_layers(name)
    for layer in layers:
        sizes = [slices.own_bytes for slices in layer.get_phase("rest").slices["optimizer"]]
        assert sum(sizes) == pytest.approx(12 * LAYER, abs=16)
        if "buckets" not in name:
            assert sum(size > 0 for size in sizes) <= 2
    # Embedding and head fill the rest of the first and of the last ranks.
    by_rank = [
        sum(layer.get_phase("rest").slices["optimizer"][rank].own_bytes for layer in layers)
        for rank in range(8)
    ]
    on_rank = read_rest(layers[0].plan, "optimizer")
    if "buckets" not in name:
        assert by_rank[2:6] == pytest.approx([on_rank] * 4, rel=1e-6)
    assert sum(by_rank) + 12 * EDGES == pytest.approx(8 * on_rank, rel=1e-6)
    assert all(size <= on_rank * 1.000001 for size in by_rank)


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
def test_zero_keeps_the_gradients_of_whole_tensors(name: str) -> None:
    layers = shard_all_layers(name)
    kept = [
        sum(layer.get_phase("reduced").slices["gradients"][rank].own_bytes for layer in layers)
        for rank in range(8)
    ]
    kept[0] += 2 * EMBEDDING
    kept[7] += 2 * (EDGES - EMBEDDING)
    assert layers[0].plan.memory().by_stage[0].at("optimizer").components["gradients"] in kept


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "not resharded", "resharded to 4", "fsdp2 tp"])
def test_gathered_and_unreduced_bytes_are_those_of_the_memory_model(name: str) -> None:
    plan = build_plan(name)
    shown = shard_layer(plan)
    model = frameworks["fsdp2"].memory_model()
    stage = model.count_weights(plan, model.find_shapes(plan).kinds[0])
    group = compute_groups(plan, stage).dense
    assert shown.get_phase("forward").slices["parameters"][0].temporary_bytes == group.all_gather_output
    assert shown.get_phase("between").slices["parameters"][0].temporary_bytes == group.kept_after_forward
    assert shown.get_phase("backward").slices["gradients"][0].temporary_bytes == group.reduce_scatter_input
    assert shown.get_phase("reduced").slices["gradients"][0].own_bytes == group.gradient_shard


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if getattr(layout, "pp", 1) == 1])
def test_collectives_are_the_step_reports(name: str) -> None:
    """Calls of one kind: the layers' bytes are their share of what the step report has for all weights."""
    plan = build_plan(name)
    is_stage_3 = getattr(plan.layout, "stage", 0) == 3
    if is_stage_3:
        # Otherwise backward finds the last layers' parameters, and the layers differ.
        none_kept = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
        plan = replace(plan, layout=replace(plan.layout, **none_kept))  # type: ignore[arg-type]
    shown = shard_layer(plan, 7)
    for part in ("gathers", "gradients", "tensor_parallel", "context_parallel"):
        # An all-reduce sends twice its bytes: an all-gather and a reduce-scatter are one.
        sends = {"all_reduce": 2}
        sent = sum(
            one.num_bytes * one.times * sends.get(one.collective, 1)
            for one in shown.exchanges
            if one.part == part
        )
        total = sum(
            one.num_bytes * sends.get(one.collective, 1)
            for one in plan.step().communication
            if one.part == part
        )
        share = LAYER / LLAMA.num_parameters
        if part == "tensor_parallel":
            share = 2 / (2 * NUM_LAYERS + 2)
        if part == "context_parallel":
            share = 1 / NUM_LAYERS
        if part == "gathers" and is_stage_3:
            # Norms persist. Embedding and head, which are not recomputed, are all-gathered in forward and in
            # backward of both micro-batches; a layer once more for its recomputation.
            total -= 2 * 2 * 2 * EMBEDDING * 2
            share = 1 / NUM_LAYERS
        if part == "gathers" and plan.layout.framework == "fsdp2":
            # The root group is all-gathered in each forward, and stays for its backward.
            root = 2 * plan.num_micro_batches * EDGES / plan.degrees.tp
            total, share = total - root, 1 / NUM_LAYERS
        # With tp, every rank has whole norms.
        assert sent == pytest.approx(total * share, rel=1e-3 if plan.degrees.tp > 1 else 1e-9), part


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_ranks_together_hold_the_whole_layer_in_every_phase(name: str) -> None:
    shown = shard_layer(build_plan(name), 9)
    for phase in shown.phases:
        for kind in ("parameters", "optimizer"):
            parts = [part for slices in phase.slices[kind] for part in slices.own]  # type: ignore[index]
            assert join_intervals(parts) == (pytest.approx((0, 1)),)
        temporary = [part for slices in phase.slices["parameters"] for part in slices.temporary]
        if phase.name in ("forward", "backward") and shown.sharding.gathers_for_passes:
            assert join_intervals(temporary) == (pytest.approx((0, 1)),)
    gradients = [part for slices in shown.get_phase("reduced").slices["gradients"] for part in slices.own]
    assert join_intervals(gradients) == (pytest.approx((0, 1)),)


def test_experts_are_spread_over_expert_parallel_ranks() -> None:
    plan = ss.Plan(
        MIXTRAL,
        ss.Cluster.parse("8x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=128),
        ss.Layout.megatron(ep=8, tp=2),
    )
    shown = shard_layer(plan, 0)
    assert shown.has_experts and shown.sharding.experts is not None
    rest = shown.get_phase("rest").slices
    # Eight experts in 16 parts, and half of everything else.
    share = sum(end - start for start, end in rest["parameters"][0].own)
    assert share * shown.num_weights == pytest.approx(rest["parameters"][0].own_bytes / 2, rel=2e-3)
    assert join_intervals([part for slices in rest["optimizer"] for part in slices.own]) == (
        pytest.approx((0, 1)),
    )
    stage = plan.memory().by_stage[0]
    num_layers = MIXTRAL.num_hidden_layers
    assert num_layers * rest["parameters"][0].own_bytes < stage.at("rest").components["parameters"]
    assert {one.collective for one in shown.exchanges if one.part == "expert_parallel"} == {"all_to_all"}


def test_offloaded_state_is_counted_on_the_host() -> None:
    shown = shard_layer(build_plan("fsdp2 offload"))
    assert shown.host_bytes == 16 * LAYER // 8
    assert not any(slices.own_bytes for slices in shown.get_phase("rest").slices["optimizer"])


@pytest.mark.parametrize("gpu", sorted(ss.gpus))
@sample(3)
def test_every_gpu_has_a_picture(gpu: str) -> None:
    shown = shard_layer(ss.Plan(LLAMA, ss.Cluster.parse(f"8x{gpu}"), ss.Recipe(), ss.Layout.fsdp2(tp=2)))
    assert shown.phases and (shown.unknown or any(one.part == "tensor_parallel" for one in shown.exchanges))


@pytest.mark.parametrize("layer", [-1, 32, 1.5, "first"])
def test_layer_that_the_model_lacks_is_refused(layer: Any) -> None:
    with pytest.raises(ValueError, match="layer"):
        shard_layer(build_plan("ddp"), layer)
