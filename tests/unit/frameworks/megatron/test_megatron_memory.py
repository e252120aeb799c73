"""Megatron's memory: formulas of its papers, padded vocabularies, model chunks and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from random_plans import LATENT, LLAMA, MOE

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.core_config import compute_padded_vocab_size
from shardscope.frameworks.megatron.memory.layer import Layer, ShardCounts, compute_layer
from shardscope.frameworks.megatron.memory.pipeline import (
    SchedulePeaks,
    compute_schedule_peaks,
    count_chunk_layers,
)
from shardscope.memory.activations.modules.saved_tensors import Modules

GPT = ss.models["gpt-3-175b"]
H, A, S = 12_288, 96, 2048
STATISTICS = 2 * 2 * 4
"""Bytes of mean and 1 / deviation of two layer norms in fp32, which the papers leave out."""


def plan(
    arch: Any, cluster: str = "8xh100-sxm-80gb", recipe: dict[str, Any] | None = None, **layout: Any
) -> Plan:
    full_recipe = ss.Recipe(**{"global_batch_size": 64, **(recipe or {})})
    return Plan(arch, ss.Cluster.parse(cluster), full_recipe, ss.Layout.megatron(**layout))


def count_saved_bytes(
    tp: int, sequence_parallel: bool, recompute: str = "none", attention: str | None = "eager"
) -> float:
    modules = Modules("megatron", False, 2, S, dropout=0.1, attention=attention)
    return compute_layer(
        GPT, False, modules, recompute, ShardCounts(tp, tp if sequence_parallel else 1, tp, 1)
    ).saved


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_saved_bytes_equal_korthikanti_table_2(tp: int) -> None:
    """Korthikanti et al. 2022, table 2: bytes of a layer over s b, with dropout and eager attention."""
    scores = 5 * A * S
    assert count_saved_bytes(1, False) - STATISTICS == 34 * H + scores
    assert count_saved_bytes(tp, False) - STATISTICS == 10 * H + 24 * H / tp + scores / tp
    assert count_saved_bytes(tp, True) - STATISTICS / tp == 34 * H / tp + scores / tp
    assert count_saved_bytes(tp, False, "selective") - STATISTICS == 10 * H + 24 * H / tp
    assert count_saved_bytes(tp, True, "selective") - STATISTICS / tp == 34 * H / tp
    assert count_saved_bytes(tp, False, "full") == 2 * H
    assert count_saved_bytes(tp, True, "full") == 2 * H / tp


def test_fused_attention_saves_one_number_per_query_and_head() -> None:
    assert count_saved_bytes(1, False, attention=None) - STATISTICS == 34 * H + 4 * A


def test_selective_recomputation_saves_little_with_fused_attention() -> None:
    # Only the softmax statistics go. With rotary positions, the saved view of the values then keeps the whole
    # fused output alive.
    unrecomputed, selective = (count_saved_bytes(1, False, how, None) for how in ("none", "selective"))
    assert unrecomputed - selective == 4 * A
    modules = Modules("megatron", False, 2, S)
    saved_bytes = [
        compute_layer(LLAMA, False, modules, how, ShardCounts(1, 1, 1, 1)).saved
        for how in ("none", "selective")
    ]
    query_and_key = 2 * LLAMA.head_dim * (LLAMA.num_attention_heads + LLAMA.num_key_value_heads)
    assert saved_bytes[1] - saved_bytes[0] == query_and_key - 4 * LLAMA.num_attention_heads


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


def test_layers_of_each_model_chunk() -> None:
    experts = replace(LATENT, num_hidden_layers=16)
    # Four chunks of four layers, of which the first two layers of the model are dense.
    assert count_chunk_layers(experts, 2, 2, 0) == ((2, 2), (0, 4))
    assert count_chunk_layers(experts, 2, 2, 1) == ((0, 4), (0, 4))
    fourteen_layers = replace(LLAMA, num_hidden_layers=14)
    uneven = plan(fourteen_layers, pp=2, vpp=2)
    assert count_chunk_layers(fourteen_layers, 2, 2, 0) == ((3, 0), (4, 0))
    assert count_chunk_layers(fourteen_layers, 2, 2, 1) == ((4, 0), (3, 0))
    assert sum(map(sum, count_chunk_layers(fourteen_layers, 2, 2, 0))) == uneven.stage_layers[0]


def count_in_flight(plan: Plan, stage: int) -> SchedulePeaks:
    """Return the schedule's peaks for layers that save one byte each."""
    return compute_schedule_peaks(plan, stage, Layer(1, 0, 0), Layer(1, 0, 0))


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_in_flight(stage: int) -> None:
    """Narayanan et al. 2021, section 2.2: pp - stage micro-batches, or Megatron's interleaved warm-up."""
    even = replace(LLAMA, num_hidden_layers=16)
    assert count_in_flight(plan(even, pp=4), stage).chunks == 4 - stage
    peaks = count_in_flight(plan(even, pp=4, vpp=2), stage)
    assert peaks.chunks == 2 * (3 - stage) + 4 + 1
    # Four micro-batches of the first chunk, four of the second, and then the first's again.
    assert (peaks.first, peaks.chunks - peaks.first) == {0: (7, 4), 1: (5, 4), 2: (4, 3), 3: (4, 1)}[stage]
    assert peaks.dense == peaks.forward == peaks.head == 2 * peaks.chunks
    few = plan(even, recipe={"global_batch_size": 2}, pp=4)
    assert count_in_flight(few, stage).chunks == min(4 - stage, 1)


def test_uneven_chunks_peak_after_the_first_backward() -> None:
    """Chunks of two layers and of one on the last stage: five layers are in flight at its first backward, six
    after the first chunk's next forward."""
    uneven = plan(replace(LLAMA, num_hidden_layers=6), pp=2, vpp=2)
    assert count_chunk_layers(uneven.architecture, 2, 2, 1) == ((2, 0), (1, 0))
    peaks = count_in_flight(uneven, 1)
    assert peaks.chunks == 3 and peaks.first == 2
    assert (peaks.head, peaks.forward) == (5, 6)


def test_backward_of_experts_is_over_before_that_of_earlier_dense_layers() -> None:
    """The working memory of a dense layer and the saved tensors of later experts do not coexist."""
    mixed = replace(LATENT, num_hidden_layers=4)
    dense, moe = Layer(10, 100, 0), Layer(70, 50, 0)
    assert count_chunk_layers(mixed, 1, 1, 0) == ((2, 2),)
    assert compute_schedule_peaks(plan(mixed), 0, dense, moe).backward == 2 * 10 + 2 * 70 + 50
    assert compute_schedule_peaks(plan(mixed), 0, dense._replace(working=300), moe).backward == 2 * 10 + 300
    # Recomputed experts retain their inputs' gradients.
    retaining = compute_schedule_peaks(plan(mixed), 0, dense._replace(working=300), moe._replace(retained=70))
    assert retaining.backward == 2 * 10 + 2 * 70 + 2 * 70 + 300
    assert retaining.last == 2 * 2 * 70


def test_experts_have_their_own_tensor_parallelism() -> None:
    def predict_parameter_bytes(**layout: Any) -> int:
        return plan(MOE, **layout).memory().by_stage[0].at("rest").components["parameters"]

    undivided = 2 * MOE.parameter_groups["experts"]
    # ep 4 x tp 2 and ep 8 x etp 1 both shard the experts over eight ranks.
    assert predict_parameter_bytes(tp=2, ep=4) == predict_parameter_bytes(tp=2, ep=8, etp=1)
    assert (
        predict_parameter_bytes(tp=2, ep=2, etp=1) - predict_parameter_bytes(tp=2, ep=4, etp=1)
        == undivided // 4
    )
    with pytest.raises(ValueError, match=r"Layout\.etp"):
        plan(LLAMA, tp=2, etp=1)
    with pytest.raises(ValueError, match=r"Layout\.etp"):
        plan(MOE, tp=2, etp=4)


def test_imbalance_and_capacity_factor_increase_activations() -> None:
    def predict_activation_bytes(**recipe: Any) -> int:
        return plan(MOE, recipe=recipe, ep=8).memory().by_stage[0].at("backward").components["activations"]

    assert predict_activation_bytes(expert_imbalance=2.0) > predict_activation_bytes() > 0
    assert predict_activation_bytes(expert_capacity_factor=2.0) == predict_activation_bytes(
        expert_imbalance=2.0
    )


def test_the_distributed_optimizer_pads_buffers_to_equal_shards() -> None:
    odd = replace(LLAMA, hidden_size=2048, vocab_size=32_000)
    report = plan(odd, "6xh100-sxm-80gb", {"global_batch_size": 6}).memory().by_stage[0].at("rest")
    num_weights = report.components["parameters"] // 2
    assert num_weights % (6 * 64) == 0
    assert 0 <= num_weights - odd.num_parameters < 6 * 64
    assert report.components["optimizer"] == 12 * num_weights // 6


def test_dropout_saves_one_byte_per_element_of_each_branch() -> None:
    def predict_activation_bytes(dropout: float) -> int:
        report = plan(LLAMA, recipe={"dropout": dropout}).memory().by_stage[0]
        return report.at("forward").components["activations"]

    layers_and_embedding = 2 * LLAMA.num_hidden_layers + 1
    assert (
        predict_activation_bytes(0.1) - predict_activation_bytes(0.0)
        == 4096 * LLAMA.hidden_size * layers_and_embedding
    )


@pytest.mark.parametrize("arch", [LLAMA, MOE, LATENT, GPT], ids=lambda arch: arch.name)
@pytest.mark.parametrize("tp", [1, 4])
def test_full_recomputation_saves_only_the_layer_input(arch: Any, tp: int) -> None:
    modules, shards = Modules("megatron", False, 2, S), ShardCounts(tp, tp, tp, 1)
    moe = arch.num_moe_layers > 0
    unrecomputed, full = (compute_layer(arch, moe, modules, how, shards) for how in ("none", "full"))
    assert full.saved == 2 * arch.hidden_size // tp < unrecomputed.saved
    # The tensors that were not saved are allocated again during recomputation.
    assert full.working >= unrecomputed.saved + unrecomputed.working - full.saved


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("arch", [LLAMA, LATENT, GPT], ids=lambda arch: arch.name)
def test_context_parallelism_has_the_memory_of_a_shorter_sequence(arch: Any, recompute: str) -> None:
    """get_batch_on_this_cp_rank: a rank of cp 4 has a fourth of each sequence; the optimizer is
    sharded over data- and context-parallel ranks (dist_optimizer.md, "DP * CP")."""
    recipe = {"recompute": recompute, "global_batch_size": 2}
    long = plan(arch, "8xh100-sxm-80gb", {**recipe, "seq_len": 2048}, cp=4).memory().by_stage[0]
    short = plan(arch, "2xh100-sxm-80gb", {**recipe, "seq_len": 512}).memory().by_stage[0]
    for phase in ("forward", "backward"):
        components = long.at(phase).components
        assert components["activations"] == short.at(phase).components["activations"] > 0
        assert components["logits"] == short.at(phase).components["logits"]
    undivided = plan(arch, "8xh100-sxm-80gb", {"global_batch_size": 8, "seq_len": 2048}).memory().by_stage[0]
    assert long.at("rest").components["optimizer"] == undivided.at("rest").components["optimizer"]


def test_eager_attention_has_no_context_parallelism() -> None:
    with pytest.raises(ValueError, match=r"Recipe\.attention .*cp=2"):
        plan(LLAMA, recipe={"attention": "eager"}, cp=2)


def test_the_all_gathered_sequence_shares_the_buffer_of_eager_attention() -> None:
    """GlobalMemoryBuffer: one buffer of the name "mpu" for each dtype, of the larger size."""

    def predict_buffer_bytes(**recipe: Any) -> int:
        return plan(LLAMA, recipe=recipe, tp=2).memory().by_stage[0].at("rest").components["gather_buffers"]

    scores = LLAMA.num_attention_heads // 2 * 4096**2
    assert predict_buffer_bytes(attention="eager") - predict_buffer_bytes() == 2 * (
        scores - 4096 * LLAMA.hidden_size
    )
