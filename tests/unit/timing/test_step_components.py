"""What each part of a step depends on: operators, kernels' starts, optimizers, the host; and known runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.timing.rates import look_up_rates
from shardscope.timing.report import StepReport

NODE = ss.Cluster.parse("8xh100-sxm-80gb")
ONE = ss.Cluster.parse("h100-sxm-80gb")


def report_of(
    model: str = "llama-3.1-8b",
    cluster: ss.Cluster = NODE,
    layout: ss.Layout | None = None,
    **recipe: Any,
) -> StepReport:
    return ss.Plan(ss.models[model], cluster, ss.Recipe(**recipe), layout or ss.Layout.fsdp2()).step()


# --------------------------------------------------------------------------------------------- operators


def test_large_products_come_near_the_share_of_the_peak_and_small_ones_do_not() -> None:
    rate = look_up_rates(NODE).get_matmul_rate("bf16")

    def reached(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / rate.seconds(m * k * n, m * k + k * n + m * n) / rate.flops_per_second

    # Memory keeps up with a product of three equal sides where a third of one is the machine's balance.
    size = round(1.5 * rate.balance)
    assert reached(size, size, size) == pytest.approx(0.5, rel=0.01)
    assert reached(2**17, 2**17, 2**17) > 0.95
    assert reached(8192, 8192, 16) < 0.1 < reached(8192, 8192, 64) < reached(8192, 8192, 8192)
    balance = rate.flops_per_second / look_up_rates(NODE).get_memory_bandwidth()
    assert rate.balance == pytest.approx(balance)


def test_tensor_parallelism_makes_products_smaller_and_so_slower() -> None:
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    whole, cut = (
        report_of("llama-3.1-8b", cluster, ss.Layout.megatron(tp=tp), global_batch_size=64) for tp in (1, 8)
    )
    assert cut.parts["matrices"] > whole.parts["matrices"]
    assert cut.tflops_per_gpu < whole.tflops_per_gpu


def test_fp8_multiplies_faster_and_casts() -> None:
    half, eight = (
        report_of("llama-3.1-70b", ss.Cluster.parse("4x8xh100-sxm-80gb"), precision=precision)
        for precision in ("bf16-mixed", "fp8-mixed")
    )
    assert 0.4 < eight.parts["matrices"] / half.parts["matrices"] < 0.75
    assert eight.parts["elementwise"] > half.parts["elementwise"]
    assert eight.peak_flops == 2 * half.peak_flops  # type: ignore[operator]


def test_attention_written_out_is_slower_than_fused() -> None:
    fused, plain = (report_of(seq_len=4096, attention=how, global_batch_size=8) for how in ("sdpa", "eager"))
    assert plain.seconds > fused.seconds
    assert plain.parts["elementwise"] > 2 * fused.parts["elementwise"]


def test_longer_sequences_cost_attention_by_their_square() -> None:
    short, long = (report_of(seq_len=n, global_batch_size=8).parts for n in (8_192, 32_768))
    assert long["matrices"] == pytest.approx(4 * short["matrices"], rel=0.02)
    assert 12 < long["attention"] / short["attention"] < 16


def test_fused_modules_move_less() -> None:
    plain, liger, compiled = (
        report_of(kernels=kernels, global_batch_size=64).parts["elementwise"]
        for kernels in ("transformers", "liger", "compiled")
    )
    assert liger < plain
    assert compiled < plain


def test_small_models_wait_for_their_kernels() -> None:
    """A step cannot be shorter than the host takes to start what it consists of."""
    rates = look_up_rates(ONE)
    passes = rates.get_passes("transformers")
    starts = (passes.kernels_forward + passes.kernels_backward) * rates.kernel_seconds
    layer_seconds = report_of("gpt2", ONE, ss.Layout.ddp(), seq_len=64, global_batch_size=1)
    layers = ss.models["gpt2"].num_hidden_layers
    assert layer_seconds.seconds > layers * starts
    arithmetic = sum(layer_seconds.parts[part] for part in ("matrices", "attention", "elementwise"))
    assert arithmetic == pytest.approx(layers * starts, rel=0.35)


def test_adapters_save_the_gradients_of_weights_and_their_exchange() -> None:
    full, lora = (report_of(method=method, global_batch_size=64) for method in ("full", "lora"))
    assert 0.6 < lora.parts["matrices"] / full.parts["matrices"] < 0.75
    assert lora.parts["optimizer"] < full.parts["optimizer"] / 20
    hidden = full.hidden["gradients"] + full.parts["gradients"]
    assert lora.hidden["gradients"] + lora.parts["gradients"] < hidden / 20
    assert lora.hardware_flops < full.hardware_flops


def test_a_base_in_four_bits_is_made_whole_again_and_again() -> None:
    lora, qlora = (
        report_of(cluster=ONE, layout=ss.Layout.ddp(), method=method, precision="bf16", global_batch_size=1)
        for method in ("lora", "qlora")
    )
    assert qlora.parts["elementwise"] > lora.parts["elementwise"]


def test_a_chunked_loss_takes_the_head_once_more() -> None:
    whole, chunked = (report_of(loss=loss, global_batch_size=64).parts for loss in ("full", "chunked"))
    assert whole["recomputation"] == 0
    arch = ss.models["llama-3.1-8b"]
    head = arch.vocab_size * arch.hidden_size / arch.matrix_parameters_per_token
    assert chunked["recomputation"] == pytest.approx(head / 3 * whole["matrices"], rel=0.2)


# --------------------------------------------------------------------------------- optimizer and host


def test_optimizers_take_what_they_move() -> None:
    layer_seconds = {
        name: report_of("llama-3.2-1b", ONE, ss.Layout.ddp(), optimizer=name, global_batch_size=1)
        for name in ("adamw", "adamw_foreach", "adamw_8bit", "sgd", "muon")
    }
    seconds = {name: one.parts["optimizer"] for name, one in layer_seconds.items()}
    assert seconds["sgd"] < seconds["adamw"] < seconds["adamw_foreach"]
    assert seconds["adamw_8bit"] < seconds["adamw"]
    # Five rounds of Newton and Schulz are arithmetic, on every rank.
    assert seconds["muon"] > 2 * seconds["adamw"]
    weights, bandwidth = ss.models["llama-3.2-1b"].num_parameters, look_up_rates(ONE).get_memory_bandwidth()
    # fp32 weights and two moments both ways, gradients once and three times for clipping: 40 bytes.
    assert seconds["adamw"] == pytest.approx(40 * weights / bandwidth, rel=0.01)


def test_sharding_shares_the_update_out() -> None:
    everywhere = report_of(layout=ss.Layout.zero(0)).parts["optimizer"]
    shared = report_of(layout=ss.Layout.zero(1)).parts["optimizer"]
    assert shared == pytest.approx(everywhere / 8, rel=0.01)


def test_offloaded_activations_hide_beneath_long_arithmetic_only() -> None:
    slow = replace(NODE.host_link, bandwidth_bytes_per_second=NODE.host_link.bandwidth_bytes_per_second / 20)
    fast_link = report_of(recompute="offload", global_batch_size=8)
    slow_link = report_of(cluster=replace(NODE, host_link=slow), recompute="offload", global_batch_size=8)
    assert fast_link.hidden["offload"] > 0
    assert slow_link.parts["offload"] > 5 * fast_link.parts["offload"]


def test_the_hosts_own_step_is_waited_for() -> None:
    layer_seconds = report_of(layout=ss.Layout.fsdp2(offload="cpu"))
    updated = ss.models["llama-3.1-8b"].num_parameters / look_up_rates(NODE).host_updates_per_second
    assert layer_seconds.parts["offload"] >= updated * 0.99
    assert layer_seconds.parts["optimizer"] == 0


def test_a_family_without_formulas_is_refused_as_for_memory() -> None:
    plan = ss.Plan(ss.models["gpt-oss-20b"], NODE, ss.Recipe(), ss.Layout.megatron())
    with pytest.raises(ValueError, match="Megatron"):
        plan.step()


# ------------------------------------------------------------------------------------------ known runs


def test_llama_3_on_sixteen_thousand_gpus() -> None:
    """Grattafiori et al. 2024 (arXiv:2407.21783), table 4: 400 TFLOP/s a GPU at 8K, 380 at 131K."""
    cluster = ss.Cluster.parse("2048x8xh100-sxm-80gb")
    for cp, seq_len, batch, measured in ((1, 8192, 2048, 400), (16, 131_072, 128, 380)):
        layout = ss.Layout.megatron(
            tp=8, pp=16, vpp=8, cp=cp, overlap_grad_reduce=True, overlap_param_gather=True
        )
        layer_seconds = report_of("llama-3.1-405b", cluster, layout, seq_len=seq_len, global_batch_size=batch)
        assert layer_seconds.tflops_per_gpu == pytest.approx(measured, rel=0.25)
        assert 0.05 < layer_seconds.parts["bubble"] / layer_seconds.seconds < 0.2


@pytest.mark.parametrize(("how", "measured"), [("full", 18.13), ("selective", 13.75)])
def test_gpt_3_on_64_gpus(how: Any, measured: float) -> None:
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
    layer_seconds = ss.Plan(gpt, ss.Cluster.parse("8x8xa100-sxm-80gb"), recipe, layout).step()
    assert layer_seconds.seconds == pytest.approx(measured, rel=0.25)


def test_copies_of_shards_average_once_a_step() -> None:
    """HSDP: shards are scattered with every micro-batch, and all-reduced between copies with the last."""
    cluster = ss.Cluster.parse("2x8xh100-sxm-80gb")
    layer_seconds = report_of("llama-3.1-8b", cluster, ss.Layout.fsdp2(replicate=2), global_batch_size=64)
    (between,) = (one for one in layer_seconds.communication if one.collective == "all_reduce")
    (within,) = (one for one in layer_seconds.communication if one.collective == "reduce_scatter")
    assert (between.link, within.link) == ("infiniband-ndr", "nvlink-4")
    # Four micro-batches, and each of eight ranks has an eighth to average.
    assert within.num_bytes == pytest.approx(4 * 8 * between.num_bytes)


def test_context_parallel_ranks_join_outputs_and_wait_for_their_gradients() -> None:
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    recipe = ss.Recipe(seq_len=65_536, global_batch_size=8)

    def made(layout: Any) -> Any:
        return ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, layout).step()

    torchs, ring = made(ss.Layout.fsdp2(cp=8)), made(ss.Layout.megatron(cp=8))
    hops = [one for one in torchs.communication if one.collective == "send"]
    # Of eight hops of the gradients, in fp32, the last is waited for.
    assert len(hops) == 2
    covered, last = sorted(hops, key=lambda one: -one.num_bytes)
    assert covered.num_bytes == pytest.approx(7 * last.num_bytes)
    assert last.hidden_seconds == 0 < covered.hidden_seconds
    local, layers, width = 65_536 // 8, 32, 8 * 128 * 2
    assert last.num_bytes == pytest.approx(8 * layers * local * width * 4)
    assert not [one for one in ring.communication if one.collective == "send"]
    # Seven parts join the first: for a number of the output 38 bytes move, and 10 for one of its gradient.
    plain = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.fsdp2()).step()
    joined = 8 * layers * 7 * local * 32 * 128
    more = torchs.parts["elementwise"] - plain.parts["elementwise"]
    assert more == pytest.approx(48 * joined / look_up_rates(cluster).get_memory_bandwidth(), rel=0.02)
    assert "joining" in torchs.explain("context_parallel")
