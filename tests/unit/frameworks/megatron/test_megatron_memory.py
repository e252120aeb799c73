"""Megatron's memory: the identities of its papers; vocabularies, chunks and experts as its code has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning import LATENT, LLAMA, MOE

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.core_config import compute_padded_vocab_size
from shardscope.frameworks.megatron.memory.layer import Layer, ShardCounts, compute_layer
from shardscope.frameworks.megatron.memory.pipeline import (
    SchedulePeaks,
    compute_schedule_peaks,
    count_chunk_layers,
)
from shardscope.memory.activations.modules.saved import Modules

GPT = ss.models["gpt-3-175b"]
H, A, S = 12_288, 96, 2048
STATISTICS = 2 * 2 * 4
"""Two layer norms' mean and 1 / deviation in fp32, which the papers leave out."""


def plan(
    arch: Any, cluster: str = "8xh100-sxm-80gb", recipe: dict[str, Any] | None = None, **layout: Any
) -> Plan:
    chosen = ss.Recipe(**{"global_batch_size": 64, **(recipe or {})})
    return Plan(arch, ss.Cluster.parse(cluster), chosen, ss.Layout.megatron(**layout))


def saved(
    tp: int, sequence_parallel: bool, recompute: str = "none", attention: str | None = "eager"
) -> float:
    modules = Modules("megatron", False, 2, S, dropout=0.1, attention=attention)
    return compute_layer(
        GPT, False, modules, recompute, ShardCounts(tp, tp if sequence_parallel else 1, tp, 1)
    ).saved


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_korthikanti_tables(tp: int) -> None:
    """Korthikanti et al. 2022, table 2: bytes of a layer over s b, with dropout and eager attention."""
    scores = 5 * A * S
    assert saved(1, False) - STATISTICS == 34 * H + scores
    assert saved(tp, False) - STATISTICS == 10 * H + 24 * H / tp + scores / tp
    assert saved(tp, True) - STATISTICS / tp == 34 * H / tp + scores / tp
    assert saved(tp, False, "selective") - STATISTICS == 10 * H + 24 * H / tp
    assert saved(tp, True, "selective") - STATISTICS / tp == 34 * H / tp
    assert saved(tp, False, "full") == 2 * H
    assert saved(tp, True, "full") == 2 * H / tp


def test_fused_attention_keeps_a_number_a_query_and_head() -> None:
    assert saved(1, False, attention=None) - STATISTICS == 34 * H + 4 * A


def test_selective_recomputation_with_fused_attention_wins_next_to_nothing() -> None:
    # Without rotary positions the statistics go; with them the values hold the whole fused product.
    none, some = (saved(1, False, how, None) for how in ("none", "selective"))
    assert none - some == 4 * A
    modules = Modules("megatron", False, 2, S)
    kept = [
        compute_layer(LLAMA, False, modules, how, ShardCounts(1, 1, 1, 1)).saved
        for how in ("none", "selective")
    ]
    query_and_key = 2 * LLAMA.head_dim * (LLAMA.num_attention_heads + LLAMA.num_key_value_heads)
    assert kept[1] - kept[0] == query_and_key - 4 * LLAMA.num_attention_heads


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(50_257, 1, 50_304), (50_257, 8, 51_200), (51_200, 8, 51_200)]
)
def test_the_vocabulary_is_padded(vocab: int, tp: int, padded: int) -> None:
    # 50,257 becomes 50,304 with tp 1 and 51,200 with tp 8: Megatron's own logs say so.
    assert compute_padded_vocab_size(vocab, tp) == padded


def test_logits_use_the_padded_vocabulary() -> None:
    odd = replace(LLAMA, vocab_size=32_001)
    at_head = plan(odd, tp=2).memory().by_stage[0].at("forward").components["logits"]
    # bf16 logits and their fp32 softmax.
    assert at_head == 4096 * compute_padded_vocab_size(32_001, 2) // 2 * 6


def test_each_chunk_has_its_layers() -> None:
    experts = replace(LATENT, num_hidden_layers=16)
    # Four chunks of four layers, of which the first two layers of the model are dense.
    assert count_chunk_layers(experts, 2, 2, 0) == ((2, 2), (0, 4))
    assert count_chunk_layers(experts, 2, 2, 1) == ((0, 4), (0, 4))
    fewer = replace(LLAMA, num_hidden_layers=14)
    uneven = plan(fewer, pp=2, vpp=2)
    assert count_chunk_layers(fewer, 2, 2, 0) == ((3, 0), (4, 0))
    assert count_chunk_layers(fewer, 2, 2, 1) == ((4, 0), (3, 0))
    assert sum(map(sum, count_chunk_layers(fewer, 2, 2, 0))) == uneven.stage_layers[0]


def held(one: Plan, stage: int) -> SchedulePeaks:
    """In layers: each keeps a byte."""
    return compute_schedule_peaks(one, stage, Layer(1, 0, 0), Layer(1, 0, 0))


@pytest.mark.parametrize("stage", range(4))
def test_chunks_in_flight(stage: int) -> None:
    """Narayanan et al. 2021, section 2.2: pp - stage micro-batches, or Megatron's interleaved warm-up."""
    even = replace(LLAMA, num_hidden_layers=16)
    assert held(plan(even, pp=4), stage).chunks == 4 - stage
    one = held(plan(even, pp=4, vpp=2), stage)
    assert one.chunks == 2 * (3 - stage) + 4 + 1
    # Four micro-batches of the first chunk, four of the second, and then the first's again.
    assert (one.first, one.chunks - one.first) == {0: (7, 4), 1: (5, 4), 2: (4, 3), 3: (4, 1)}[stage]
    assert one.dense == one.forward == one.head == 2 * one.chunks
    few = plan(even, recipe={"global_batch_size": 2}, pp=4)
    assert held(few, stage).chunks == min(4 - stage, 1)


def test_uneven_chunks_are_fullest_later() -> None:
    """Chunks of two layers and one on the last stage: at its first backward they hold five layers, once the
    first chunk's second round has come six."""
    uneven = plan(replace(LLAMA, num_hidden_layers=6), pp=2, vpp=2)
    assert count_chunk_layers(uneven.architecture, 2, 2, 1) == ((2, 0), (1, 0))
    one = held(uneven, 1)
    assert one.chunks == 3 and one.first == 2
    assert (one.head, one.forward) == (5, 6)


def test_experts_go_backward_before_the_layers_in_front_of_them() -> None:
    """So a dense layer's gradients never meet what experts have saved."""
    mixed = replace(LATENT, num_hidden_layers=4)
    dense, moe = Layer(10, 100, 0), Layer(70, 50, 0)
    assert count_chunk_layers(mixed, 1, 1, 0) == ((2, 2),)
    assert compute_schedule_peaks(plan(mixed), 0, dense, moe).backward == 2 * 10 + 2 * 70 + 50
    assert compute_schedule_peaks(plan(mixed), 0, dense._replace(working=300), moe).backward == 2 * 10 + 300
    # Played again, they keep their inputs and these inputs' gradients.
    kept = compute_schedule_peaks(plan(mixed), 0, dense._replace(working=300), moe._replace(retained=70))
    assert kept.backward == 2 * 10 + 2 * 70 + 2 * 70 + 300
    assert kept.last == 2 * 2 * 70


def test_experts_have_a_tensor_parallelism_of_their_own() -> None:
    def experts(**layout: Any) -> int:
        return plan(MOE, **layout).memory().by_stage[0].at("rest").components["parameters"]

    whole = 2 * MOE.parameter_groups["experts"]
    # ep 4 x tp 2 and ep 8 x etp 1 cut the experts into eight alike.
    assert experts(tp=2, ep=4) == experts(tp=2, ep=8, etp=1)
    assert experts(tp=2, ep=2, etp=1) - experts(tp=2, ep=4, etp=1) == whole // 4
    with pytest.raises(ValueError, match=r"Layout\.etp"):
        plan(LLAMA, tp=2, etp=1)
    with pytest.raises(ValueError, match=r"Layout\.etp"):
        plan(MOE, tp=2, etp=4)


def test_imbalance_and_capacity_weigh_on_the_fullest_rank() -> None:
    def kept(**recipe: Any) -> int:
        return plan(MOE, recipe=recipe, ep=8).memory().by_stage[0].at("backward").components["activations"]

    assert kept(expert_imbalance=2.0) > kept() > 0
    assert kept(expert_capacity_factor=2.0) == kept(expert_imbalance=2.0)


def test_the_distributed_optimizer_pads_to_whole_shards() -> None:
    odd = replace(LLAMA, hidden_size=2048, vocab_size=32_000)
    report = plan(odd, "6xh100-sxm-80gb", {"global_batch_size": 6}).memory().by_stage[0].at("rest")
    numbers = report.components["parameters"] // 2
    assert numbers % (6 * 64) == 0
    assert 0 <= numbers - odd.num_parameters < 6 * 64
    assert report.components["optimizer"] == 12 * numbers // 6


def test_dropout_leaves_a_byte_a_number_of_each_branch() -> None:
    def kept(dropout: float) -> int:
        report = plan(LLAMA, recipe={"dropout": dropout}).memory().by_stage[0]
        return report.at("forward").components["activations"]

    layers_and_embedding = 2 * LLAMA.num_hidden_layers + 1
    assert kept(0.1) - kept(0.0) == 4096 * LLAMA.hidden_size * layers_and_embedding


@pytest.mark.parametrize("arch", [LLAMA, MOE, LATENT, GPT], ids=lambda arch: arch.name)
@pytest.mark.parametrize("tp", [1, 4])
def test_full_recomputation_keeps_a_layer_s_input(arch: Any, tp: int) -> None:
    modules, cuts = Modules("megatron", False, 2, S), ShardCounts(tp, tp, tp, 1)
    moe = arch.num_moe_layers > 0
    none, full = (compute_layer(arch, moe, modules, how, cuts) for how in ("none", "full"))
    assert full.saved == 2 * arch.hidden_size // tp < none.saved
    # What was not kept comes back while the layer is played again.
    assert full.working >= none.saved + none.working - full.saved


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("arch", [LLAMA, LATENT, GPT], ids=lambda arch: arch.name)
def test_context_parallelism_is_a_shorter_sequence(arch: Any, recompute: str) -> None:
    """get_batch_on_this_cp_rank: a rank of cp 4 holds what it would of a fourth of each sequence; weights are
    split over data-parallel and context-parallel ranks alike (dist_optimizer.md, "DP * CP")."""
    recipe = {"recompute": recompute, "global_batch_size": 2}
    long = plan(arch, "8xh100-sxm-80gb", {**recipe, "seq_len": 2048}, cp=4).memory().by_stage[0]
    short = plan(arch, "2xh100-sxm-80gb", {**recipe, "seq_len": 512}).memory().by_stage[0]
    for phase in ("forward", "backward"):
        held = long.at(phase).components
        assert held["activations"] == short.at(phase).components["activations"] > 0
        assert held["logits"] == short.at(phase).components["logits"]
    whole = plan(arch, "8xh100-sxm-80gb", {"global_batch_size": 8, "seq_len": 2048}).memory().by_stage[0]
    assert long.at("rest").components["optimizer"] == whole.at("rest").components["optimizer"]


def test_eager_attention_has_no_context_parallelism() -> None:
    with pytest.raises(ValueError, match=r"Recipe\.attention .*cp=2"):
        plan(LLAMA, recipe={"attention": "eager"}, cp=2)


def test_the_gathered_sequence_shares_eager_attention_s_buffer() -> None:
    """GlobalMemoryBuffer: one buffer by the name of "mpu" and the type, of the larger size."""

    def buffers(**recipe: Any) -> int:
        return plan(LLAMA, recipe=recipe, tp=2).memory().by_stage[0].at("rest").components["gather_buffers"]

    scores = LLAMA.num_attention_heads // 2 * 4096**2
    assert buffers(attention="eager") - buffers() == 2 * (scores - 4096 * LLAMA.hidden_size)
