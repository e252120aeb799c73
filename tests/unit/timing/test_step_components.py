"""Tests of the parts of a step: operators, kernel launches, optimizers and offload; published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.timing.rates import look_up_rates
from shardscope.timing.report import StepReport

NODE = ss.Cluster.parse("8xh100-sxm-80gb")
ONE = ss.Cluster.parse("h100-sxm-80gb")


def predict_step(
    model: str = "llama-3.1-8b",
    cluster: ss.Cluster = NODE,
    layout: ss.Layout | None = None,
    **recipe: Any,
) -> StepReport:
    return ss.Plan(ss.models[model], cluster, ss.Recipe(**recipe), layout or ss.Layout.fsdp2()).step()


# --------------------------------------------------------------------------------------------- operators


def test_only_large_matmuls_reach_the_peak_rate() -> None:
    rate = look_up_rates(NODE).get_matmul_rate("bf16")

    def compute_efficiency(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / rate.seconds(m * k * n, m * k + k * n + m * n) / rate.flops_per_second

    # A cubic matmul with sides of 1.5 times the machine balance reaches half of the rate.
    size = round(1.5 * rate.balance)
    assert compute_efficiency(size, size, size) == pytest.approx(0.5, rel=0.01)
    assert compute_efficiency(2**17, 2**17, 2**17) > 0.95
    assert (
        compute_efficiency(8192, 8192, 16)
        < 0.1
        < compute_efficiency(8192, 8192, 64)
        < compute_efficiency(8192, 8192, 8192)
    )
    balance = rate.flops_per_second / look_up_rates(NODE).get_memory_bandwidth()
    assert rate.balance == pytest.approx(balance)


def test_tensor_parallelism_makes_matmuls_less_efficient() -> None:
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    whole, cut = (
        predict_step("llama-3.1-8b", cluster, ss.Layout.megatron(tp=tp), global_batch_size=64)
        for tp in (1, 8)
    )
    assert cut.parts["matrices"] > whole.parts["matrices"]
    assert cut.tflops_per_gpu < whole.tflops_per_gpu


def test_fp8_has_faster_matmuls_and_additional_casts() -> None:
    half, eight = (
        predict_step("llama-3.1-70b", ss.Cluster.parse("4x8xh100-sxm-80gb"), precision=precision)
        for precision in ("bf16-mixed", "fp8-mixed")
    )
    assert 0.4 < eight.parts["matrices"] / half.parts["matrices"] < 0.75
    assert eight.parts["elementwise"] > half.parts["elementwise"]
    assert eight.peak_flops == 2 * half.peak_flops  # type: ignore[operator]


def test_eager_attention_is_slower_than_sdpa() -> None:
    fused, plain = (
        predict_step(seq_len=4096, attention=how, global_batch_size=8) for how in ("sdpa", "eager")
    )
    assert plain.seconds > fused.seconds
    assert plain.parts["elementwise"] > 2 * fused.parts["elementwise"]


def test_sdpa_is_faster_than_flash_attention_where_it_takes_cudnn() -> None:
    seconds = {
        (gpu, how): predict_step(
            "llama-3.1-8b", ss.Cluster.parse(f"8x{gpu}"), seq_len=8192, attention=how
        ).parts["attention"]
        for gpu in ("h100-sxm-80gb", "a100-sxm-80gb")
        for how in ("sdpa", "flash")
    }
    assert seconds["h100-sxm-80gb", "flash"] > 2 * seconds["h100-sxm-80gb", "sdpa"]
    assert seconds["a100-sxm-80gb", "flash"] == seconds["a100-sxm-80gb", "sdpa"]


def test_attention_time_is_quadratic_in_the_sequence_length() -> None:
    short, long = (predict_step(seq_len=n, global_batch_size=8).parts for n in (8_192, 32_768))
    assert long["matrices"] == pytest.approx(4 * short["matrices"], rel=0.02)
    assert 12 < long["attention"] / short["attention"] < 16


def test_fused_kernels_reduce_elementwise_time() -> None:
    plain, liger, compiled = (
        predict_step(kernels=kernels, global_batch_size=64).parts["elementwise"]
        for kernels in ("transformers", "liger", "compiled")
    )
    assert liger < plain
    assert compiled < plain


def test_small_models_are_bound_by_kernel_launches() -> None:
    """A step takes at least as long as the host needs to launch its kernels."""
    rates = look_up_rates(ONE)
    passes = rates.get_passes("transformers")
    starts = (passes.kernels_forward + passes.kernels_backward) * rates.kernel_seconds
    report = predict_step("gpt2", ONE, ss.Layout.ddp(), seq_len=64, global_batch_size=1)
    layers = ss.models["gpt2"].num_hidden_layers
    assert report.seconds > layers * starts
    arithmetic = sum(report.parts[part] for part in ("matrices", "attention", "elementwise"))
    assert arithmetic == pytest.approx(layers * starts, rel=0.35)


def test_lora_saves_weight_gradients_and_their_reduction() -> None:
    full, lora = (predict_step(method=method, global_batch_size=64) for method in ("full", "lora"))
    assert 0.6 < lora.parts["matrices"] / full.parts["matrices"] < 0.75
    assert lora.parts["optimizer"] < full.parts["optimizer"] / 20
    hidden = full.hidden["gradients"] + full.parts["gradients"]
    assert lora.hidden["gradients"] + lora.parts["gradients"] < hidden / 20
    assert lora.hardware_flops < full.hardware_flops


def test_a_4_bit_base_adds_dequantization_time() -> None:
    lora, qlora = (
        predict_step(
            cluster=ONE, layout=ss.Layout.ddp(), method=method, precision="bf16", global_batch_size=1
        )
        for method in ("lora", "qlora")
    )
    assert qlora.parts["elementwise"] > lora.parts["elementwise"]


def test_a_chunked_loss_recomputes_the_head() -> None:
    whole, chunked = (predict_step(loss=loss, global_batch_size=64).parts for loss in ("full", "chunked"))
    assert whole["recomputation"] == 0
    arch = ss.models["llama-3.1-8b"]
    head = arch.vocab_size * arch.hidden_size / arch.matrix_parameters_per_token
    assert chunked["recomputation"] == pytest.approx(head / 3 * whole["matrices"], rel=0.2)


# --------------------------------------------------------------------------------- optimizer and host


def test_optimizer_time_follows_the_bytes_it_moves() -> None:
    reports = {
        name: predict_step("llama-3.2-1b", ONE, ss.Layout.ddp(), optimizer=name, global_batch_size=1)
        for name in ("adamw", "adamw_foreach", "adamw_8bit", "sgd", "muon")
    }
    seconds = {name: one.parts["optimizer"] for name, one in reports.items()}
    assert seconds["sgd"] < seconds["adamw"] < seconds["adamw_foreach"]
    assert seconds["adamw_8bit"] < seconds["adamw"]
    # Muon computes five Newton-Schulz iterations on every rank.
    assert seconds["muon"] > 2 * seconds["adamw"]
    weights, bandwidth = ss.models["llama-3.2-1b"].num_parameters, look_up_rates(ONE).get_memory_bandwidth()
    # fp32 weights and two moments both ways, gradients once and three times for clipping: 40 bytes.
    assert seconds["adamw"] == pytest.approx(40 * weights / bandwidth, rel=0.01)


def test_zero_1_divides_the_update_among_ranks() -> None:
    everywhere = predict_step(layout=ss.Layout.zero(0)).parts["optimizer"]
    shared = predict_step(layout=ss.Layout.zero(1)).parts["optimizer"]
    assert shared == pytest.approx(everywhere / 8, rel=0.01)


def test_offloaded_activations_are_copied_while_nothing_else_runs() -> None:
    """They are copied there and back on the layer's own stream (``training/model/recompute.py``)."""
    fast = NODE.host_link
    slow = replace(fast, bandwidth_bytes_per_second=fast.bandwidth_bytes_per_second / 20)
    fast_link = predict_step(recompute="offload", global_batch_size=8)
    slow_link = predict_step(cluster=replace(NODE, host_link=slow), recompute="offload", global_batch_size=8)
    assert fast_link.hidden["offload"] == slow_link.hidden["offload"] == 0
    assert slow_link.parts["offload"] == pytest.approx(20 * fast_link.parts["offload"])


def test_other_stages_wait_for_the_copies_of_offloaded_activations() -> None:
    """Each micro-batch has them, as it has arithmetic: a pipeline's bubble is longer by its share."""
    layout = ss.Layout.fsdp2(pp=2)
    report = predict_step(layout=layout, recompute="offload", global_batch_size=16)
    plain = predict_step(layout=layout, global_batch_size=16)
    # Two equal stages: the bubble is the other stage's time for one of the 4 micro-batches.
    longer = report.parts["bubble"] - plain.parts["bubble"]
    assert longer == pytest.approx(report.parts["offload"] / 4, rel=0.1)


def test_cpu_offload_includes_the_optimizer_step_on_the_host() -> None:
    report = predict_step(layout=ss.Layout.fsdp2(offload="cpu"))
    update_seconds = ss.models["llama-3.1-8b"].num_parameters / look_up_rates(NODE).host_updates_per_second
    assert report.parts["offload"] >= update_seconds * 0.99
    assert report.parts["optimizer"] == 0


def test_gradients_that_are_added_up_on_the_host_block_backward() -> None:
    """``foreach_reduce`` copies without blocking only where the host has no gradient yet (torch 2.13)."""
    layout = ss.Layout.fsdp2(offload="cpu")
    once = predict_step(layout=layout, global_batch_size=8)
    twice = predict_step(layout=layout, global_batch_size=16)
    arch, rates = ss.models["llama-3.1-8b"], look_up_rates(NODE)
    copied = 4 * arch.num_parameters / 8 / rates.host.bytes_per_second
    added = 3 / 7 * arch.num_parameters / rates.host_updates_per_second
    assert twice.parts["offload"] - once.parts["offload"] == pytest.approx(copied + added, rel=0.01)
    # Its reduce-scatter is waited for, too; without offload both are overlapped.
    reductions = [one for one in twice.communication if one.collective == "reduce_scatter"]
    assert [one.hidden_seconds > 0 for one in reductions] == [True, False]
    assert reductions[0].seconds == pytest.approx(reductions[1].seconds)
    # HSDP adds them up on the GPU, and a pipeline reduces once a step.
    hybrid = [
        predict_step(layout=replace(layout, replicate=2), global_batch_size=batch).parts["offload"]
        for batch in (8, 16)
    ]
    assert hybrid[0] == pytest.approx(hybrid[1], rel=0.01)


def test_a_family_without_formulas_has_no_step_time() -> None:
    plan = ss.Plan(ss.models["falcon-rw-1b"], NODE, ss.Recipe(seq_len=1024), ss.Layout.fsdp2())
    with pytest.raises(ValueError, match="alibi"):
        plan.step()


# ------------------------------------------------------------------------------------------ known runs


def test_llama_405b_on_16384_gpus_is_near_the_published_rate() -> None:
    """Grattafiori et al. 2024 (arXiv:2407.21783), table 4: 400 TFLOP/s a GPU at 8K, 380 at 131K."""
    cluster = ss.Cluster.parse("2048x8xh100-sxm-80gb")
    for cp, seq_len, batch, measured in ((1, 8192, 2048, 400), (16, 131_072, 128, 380)):
        layout = ss.Layout.megatron(
            tp=8, pp=16, vpp=8, cp=cp, overlap_grad_reduce=True, overlap_param_gather=True
        )
        report = predict_step("llama-3.1-405b", cluster, layout, seq_len=seq_len, global_batch_size=batch)
        assert report.tflops_per_gpu == pytest.approx(measured, rel=0.25)
        assert 0.05 < report.parts["bubble"] / report.seconds < 0.2


@pytest.mark.parametrize(("how", "measured"), [("full", 18.13), ("selective", 13.75)])
def test_gpt_3_on_64_gpus_is_near_the_published_step_time(how: Any, measured: float) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 5: seconds of a step of the 175B model."""
    gpt = replace(
        ss.models["gpt2"],
        name="gpt-3",
        hidden_size=12_288,
        intermediate_size=4 * 12_288,
        num_hidden_layers=96,
        num_attention_heads=96,
        num_key_value_heads=96,
        head_dim=128,
        vocab_size=51_200,
        max_position_embeddings=2048,
    )
    recipe = ss.Recipe(seq_len=2048, global_batch_size=64, recompute=how, attention="eager")
    layout = ss.Layout.megatron(tp=8, pp=8, vpp=3)
    report = ss.Plan(gpt, ss.Cluster.parse("8x8xa100-sxm-80gb"), recipe, layout).step()
    assert report.seconds == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("stage", "collective"),
    [(0, "all_reduce"), (1, "all_reduce"), (2, "all_reduce"), (3, "reduce_scatter")],
)
def test_deepspeed_reduce_scatters_gradients_in_stage_3_only(stage: int, collective: str) -> None:
    """In stages 1 and 2 each rank copies its partition out of an all-reduced bucket."""
    report = predict_step(layout=ss.Layout.zero(stage=stage), global_batch_size=8)
    (reduction,) = (one for one in report.communication if one.part == "gradients")
    assert reduction.collective == collective


@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [
        # The vocabulary of 128,256 in parts of tp; Megatron-core reduces in fp32.
        (ss.Layout.megatron(tp=2, pp=2), 128_256 // 2 * 2048 * 4),
        (ss.Layout.zero(stage=1, pp=2), 128_256 * 2048 * 2),
        # A shard of each of eight ranks, in the type of the originals.
        (ss.Layout.fsdp2(pp=2), 128_256 // 8 * 2048 * 4),
    ],
)
def test_tied_embedding_is_all_reduced_between_first_and_last_stage(
    layout: ss.Layout, num_bytes: int
) -> None:
    cluster = ss.Cluster.parse("2x8xh100-sxm-80gb")

    def list_pairs(model: str, **recipe: Any) -> list[tuple[str, float]]:
        report = predict_step(model, cluster, layout, global_batch_size=64, seq_len=1024, **recipe)
        return [
            (one.link, one.num_bytes)
            for one in report.communication
            if one.part == "gradients" and one.ranks == 2
        ]

    # Stages are on different nodes.
    assert list_pairs("llama-3.2-1b") == [("infiniband-ndr", num_bytes)]
    assert not list_pairs("llama-3.1-8b"), "its head is a matrix of its own"


def test_frozen_tied_embedding_has_no_gradient_to_reduce() -> None:
    report = predict_step(
        "llama-3.2-1b", layout=ss.Layout.fsdp2(pp=2), global_batch_size=64, seq_len=1024, method="lora"
    )
    assert not [one for one in report.communication if one.ranks == 2 and one.part == "gradients"]


def test_hsdp_all_reduces_between_replicas_once_a_step() -> None:
    """HSDP reduce-scatters with every micro-batch, and all-reduces between replicas with the last."""
    cluster = ss.Cluster.parse("2x8xh100-sxm-80gb")
    report = predict_step("llama-3.1-8b", cluster, ss.Layout.fsdp2(replicate=2), global_batch_size=64)
    (between,) = (one for one in report.communication if one.collective == "all_reduce")
    (within,) = (one for one in report.communication if one.collective == "reduce_scatter")
    assert (between.link, within.link) == ("infiniband-ndr", "nvlink-4")
    # Four micro-batches, and each of eight ranks has an eighth to average.
    assert within.num_bytes == pytest.approx(4 * 8 * between.num_bytes)


def test_torch_ring_attention_merges_outputs_and_exposes_the_last_hop() -> None:
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    recipe = ss.Recipe(seq_len=65_536, global_batch_size=8)

    def predict(layout: Any) -> Any:
        return ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, layout).step()

    torchs, ring = predict(ss.Layout.fsdp2(cp=8)), predict(ss.Layout.megatron(cp=8))
    hops = [one for one in torchs.communication if one.collective == "send"]
    # The last of the eight hops of the fp32 gradients is not overlapped.
    assert len(hops) == 2
    covered, last = sorted(hops, key=lambda one: -one.num_bytes)
    assert covered.num_bytes == pytest.approx(7 * last.num_bytes)
    assert last.hidden_seconds == 0 < covered.hidden_seconds
    local, layers, width = 65_536 // 8, 32, 8 * 128 * 2
    assert last.num_bytes == pytest.approx(8 * layers * local * width * 4)
    assert not [one for one in ring.communication if one.collective == "send"]
    # Seven partial outputs are merged with the first: 38 bytes per element, and 10 per element of gradient.
    plain = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.fsdp2()).step()
    joined = 8 * layers * 7 * local * 32 * 128
    more = torchs.parts["elementwise"] - plain.parts["elementwise"]
    assert more == pytest.approx(48 * joined / look_up_rates(cluster).get_memory_bandwidth(), rel=0.02)
    assert "joining" in torchs.explain("context_parallel")
