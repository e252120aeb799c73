"""Tests of ``plan.step()``: its parts, properties of random plans, and errors about missing figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_plans import plans
from tests.requirements import examples

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.prediction.pipeline import compute_bubbles
from shardscope.timing.pipeline import compute_bubble_seconds
from shardscope.timing.report import PARTS, StepReport, format_seconds

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
COMMUNICATION = (
    "tensor_parallel", "context_parallel", "expert_parallel", "pipeline_transfers",
)  # fmt: skip
SLOW = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def build_plan(
    model: str = "llama-3.1-8b",
    cluster: str = "8xh100-sxm-80gb",
    layout: ss.Layout | None = None,
    **recipe: object,
) -> ss.Plan:
    a_recipe = ss.Recipe(**recipe)  # type: ignore[arg-type]
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), a_recipe, layout or ss.Layout.fsdp2())


def predict_or_none(plan: ss.Plan) -> StepReport | None:
    try:
        return plan.step()
    except FieldError as refusal:
        assert refusal.field.startswith(("Gpu.", "Cluster.nvme_")), refusal
        return None


# ------------------------------------------------------------------------------------------- the report


@SLOW
@given(plan=plans())
def test_fault_37_parts_sum_to_the_step_and_none_is_negative(plan: ss.Plan) -> None:
    report = predict_or_none(plan)
    assume(report is not None)
    assert report is not None
    assert tuple(report.parts) == tuple(report.hidden) == PARTS
    assert sum(report.parts.values()) == report.seconds > 0
    assert math.isfinite(report.seconds)
    assert all(value >= -1e-12 for value in (*report.parts.values(), *report.hidden.values()))
    for one in report.communication:
        assert 0 <= one.hidden_seconds <= one.seconds * (1 + 1e-9)
        assert one.num_bytes > 0
    if report.mfu is not None and plan.recipe.precision != "fp8-mixed":
        assert 0 < report.mfu < 1
    assert all(report.explain(part) for part in PARTS)


def test_throughput_cost_and_energy_follow_from_the_step_time() -> None:
    plan = build_plan(seq_len=2048, global_batch_size=32)
    report = plan.step()
    tokens = 32 * 2048
    assert report.tokens_per_second == pytest.approx(tokens / report.seconds)
    assert report.tokens_per_second_per_gpu == pytest.approx(tokens / report.seconds / 8)
    flops = plan.architecture.flops_per_token(2048) * tokens
    assert report.tflops_per_gpu == pytest.approx(flops / report.seconds / 8 / 1e12)
    assert report.mfu == pytest.approx(report.tflops_per_gpu * 1e12 / 989.5e12)
    assert report.tflops_per_gpu_full_attention > report.tflops_per_gpu
    assert report.days(1e12) == pytest.approx(1e12 / report.tokens_per_second / 86_400)
    assert report.cost_per_token is not None
    assert report.cost(1e9) == pytest.approx(1e9 * report.cost_per_token)
    price = EIGHT.price_per_hour_usd
    assert price is not None
    assert report.cost(report.tokens_per_second * 3600) == pytest.approx(price)
    assert report.joules_per_token == pytest.approx(700 * 8 / report.tokens_per_second)
    assert "h" in report.calibration


def test_a_gpu_without_price_or_power_has_no_cost_or_energy() -> None:
    gpu = replace(EIGHT.gpu, price_per_hour_usd=None, price_date=None, tdp_watts=None)
    plan = replace(build_plan(), cluster=replace(EIGHT, gpu=gpu))
    report = plan.step()
    assert report.cost_per_token is None
    assert report.cost(1e12) is None
    assert report.joules_per_token is None


def test_hardware_flops_include_recomputation() -> None:
    """Full recomputation repeats a third of the layers' model FLOPs: 4/3 of a step without its head."""
    plain, recomputed = build_plan(), build_plan(recompute="full")
    arch, seq_len = plain.architecture, plain.recipe.seq_len
    tokens = plain.recipe.global_batch_size * seq_len
    head, model = 6.0 * arch.vocab_size * arch.hidden_size, arch.flops_per_token(seq_len)
    assert plain.step().hardware_flops == pytest.approx(tokens * model)
    assert recomputed.step().hardware_flops == pytest.approx(tokens * (model + (model - head) / 3))
    assert recomputed.step().model_flops == plain.step().model_flops
    chunked = build_plan(loss="chunked").step()
    assert chunked.hardware_flops == pytest.approx(tokens * (model + head / 3))
    assert "chunked loss" in chunked.explain("recomputation")
    partly_recomputed = build_plan(recompute="full", recompute_interval=7).step()
    assert partly_recomputed.hardware_flops == pytest.approx(tokens * (model + 5 / 32 * (model - head) / 3))
    assert "one layer of 7" in partly_recomputed.explain("recomputation")


def test_a_mask_of_a_sliding_window_hides_scores_that_are_computed() -> None:
    """SDPA gets the window as a mask, and its kernels skip nothing; FlashAttention gets it as a number."""
    windowed = build_plan("mistral-7b", seq_len=8192, global_batch_size=64)
    whole = replace(
        windowed,
        architecture=replace(windowed.architecture, sliding_window=None, sliding_window_layers=0),
    )
    masked, plain = windowed.step(), whole.step()
    assert masked.parts["attention"] == pytest.approx(2 * plain.parts["attention"])
    assert masked.hardware_flops > plain.hardware_flops > masked.model_flops
    assert "all scores" in masked.explain("attention")
    # transformers passes the mask from a sequence as long as the window on.
    shorter, as_long = (
        replace(windowed, recipe=replace(windowed.recipe, seq_len=length)).step() for length in (4095, 4096)
    )
    assert as_long.parts["attention"] > 1.9 * shorter.parts["attention"]
    assert "causal scores" in shorter.explain("attention")
    assert "all scores" in as_long.explain("attention")
    flash, flash_whole = (
        replace(plan, recipe=replace(plan.recipe, attention="flash")).step() for plan in (windowed, whole)
    )
    assert flash.parts["attention"] == pytest.approx(3 / 4 * flash_whole.parts["attention"])
    assert "the window" in flash.explain("attention")


def test_a_familys_own_attention_by_name_changes_nothing() -> None:
    """Gemma 2 is eager without a choice of attention."""
    own, named = (build_plan("gemma-2-2b", seq_len=8192, attention=one).step() for one in (None, "eager"))
    assert own.parts == named.parts
    assert own.hardware_flops == named.hardware_flops
    assert own.explain("attention") == named.explain("attention")


def test_frozen_weights_count_four_flops_each() -> None:
    """With 6 FLOPs for a frozen weight, the model FLOPs would exceed those that the GPUs execute."""
    full, lora = build_plan().step(), build_plan(method="lora").step()
    weights = ss.models["llama-3.1-8b"].matrix_parameters_per_token
    assert full.model_flops - lora.model_flops == pytest.approx(2 * weights * full.num_tokens)
    crowded = build_plan("llama-3.1-70b", "8xa100-sxm-80gb", method="lora", global_batch_size=512).step()
    assert crowded.mfu is not None
    assert crowded.tflops_per_gpu == pytest.approx(crowded.hardware_tflops_per_gpu)
    assert crowded.mfu < 1


def test_a_report_is_displayed_as_table_and_text() -> None:
    report = build_plan("llama-3.1-70b", "8x8xh100-sxm-80gb", ss.Layout.megatron(tp=8, pp=4)).step()
    frame = report.to_frame()
    assert list(frame.index) == list(PARTS)
    assert frame["seconds"].sum() == pytest.approx(report.seconds)
    assert frame["share"].sum() == pytest.approx(1)
    assert "<script" not in report.to_html()
    assert "MFU" in repr(report)
    assert "Narayanan" in report.explain("bubble")
    text = report.explain("tensor_parallel")
    assert "overlapped with arithmetic" in text
    assert "reduce-scatter of" in text and "among 8 ranks over nvlink-4" in text
    with pytest.raises(ValueError, match=r"part is 'bubbles'.*'bubble'"):
        report.explain("bubbles")
    with pytest.raises(ValueError, match="num_tokens"):
        report.days(math.nan)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (123.4, "123 s"),
        (12.34, "12.3 s"),
        (1.0, "1.00 s"),
        (0.0456, "45.6 ms"),
        (7.9e-6, "7.90 µs"),
        (0, "0 s"),
    ],
)
def test_seconds_are_formatted_with_three_digits(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


# ------------------------------------------------------------------------------------------- properties


@SLOW
@given(plan=plans(), factor=st.sampled_from([2, 3, 8]))
def test_fault_37_step_time_never_falls_with_the_batch_size(plan: ss.Plan, factor: int) -> None:
    recipe = replace(plan.recipe, global_batch_size=plan.recipe.global_batch_size * factor)
    try:
        larger = replace(plan, recipe=recipe)
    except ValueError:
        assume(False)
    first, second = predict_or_none(plan), predict_or_none(larger)
    assume(first is not None and second is not None)
    assert first is not None
    assert second is not None
    assert second.seconds >= first.seconds * (1 - 1e-9)


@SLOW
@given(plan=plans(), name=st.sampled_from(["intra_node_link", "inter_node_link", "host_link"]))
def test_fault_37_step_time_never_falls_with_a_slower_link(plan: ss.Plan, name: str) -> None:
    link = getattr(plan.cluster, name)
    slower = replace(
        link,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / 3,
        latency_seconds=link.latency_seconds * 3,
    )
    first = predict_or_none(plan)
    second = predict_or_none(replace(plan, cluster=replace(plan.cluster, **{name: slower})))
    assume(first is not None and second is not None)
    assert first is not None
    assert second is not None
    assert second.seconds >= first.seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    "layout", [ss.Layout.ddp(), ss.Layout.fsdp2(), ss.Layout.zero(), ss.Layout.megatron()]
)
def test_one_gpu_has_no_communication(layout: ss.Layout) -> None:
    report = build_plan("gpt2", "h100-sxm-80gb", layout, seq_len=512).step()
    assert report.communication == ()
    assert all(report.parts[part] == report.hidden[part] == 0 for part in COMMUNICATION)
    assert report.parts["bubble"] == 0


def test_full_recomputation_costs_about_a_third_of_forward_and_backward() -> None:
    """Megatron repeats all of forward; torch stops before the last matmul, a quarter of a layer."""
    for layout, low, high in ((ss.Layout.megatron(tp=8), 0.30, 0.36), (ss.Layout.fsdp2(), 0.2, 0.30)):
        plain = build_plan("llama-3.1-70b", "8x8xh100-sxm-80gb", layout).step()
        recomputed = build_plan("llama-3.1-70b", "8x8xh100-sxm-80gb", layout, recompute="full").step()
        arithmetic = sum(plain.parts[part] for part in ("matrices", "attention", "elementwise"))
        assert low < recomputed.parts["recomputation"] / arithmetic < high
        assert recomputed.parts["matrices"] == plain.parts["matrices"]
        assert plain.parts["recomputation"] == 0


def test_step_time_rises_from_no_to_selective_to_full_recomputation() -> None:
    for layout in (ss.Layout.fsdp2(), ss.Layout.megatron()):
        none, selective, full = (
            build_plan(layout=layout, recompute=how).step().seconds for how in ("none", "selective", "full")
        )
        assert none < selective < full


def test_recomputing_every_other_layer_costs_half() -> None:
    every, other = (build_plan(recompute="full", recompute_interval=n).step().parts for n in (1, 2))
    assert other["recomputation"] == pytest.approx(every["recomputation"] / 2)


@given(
    stages=st.integers(2, 64),
    vpp=st.integers(1, 8),
    further=st.integers(0, 448),
    each=st.floats(0.1, 10),
)
def test_the_bubble_of_equal_stages_equals_the_published_formula(
    stages: int, vpp: int, further: int, each: float
) -> None:
    """Narayanan et al. 2021, section 2.2: (pp - 1) / (vpp x micro-batches) of the ideal time."""
    micro_batches = stages + further
    one = each * micro_batches
    bubble_seconds = compute_bubble_seconds(stages * one, one, vpp, micro_batches)
    assert bubble_seconds == pytest.approx((stages - 1) / (vpp * micro_batches) * one)


def test_interleaving_and_more_micro_batches_reduce_the_bubble() -> None:
    def compute_bubble_share(vpp: int, batch: int) -> float:
        layout = ss.Layout.megatron(tp=8, pp=4, vpp=vpp)
        report = build_plan("llama-3.1-70b", "4x8xh100-sxm-80gb", layout, global_batch_size=batch).step()
        return report.parts["bubble"] / report.seconds

    assert compute_bubble_share(4, 16) < compute_bubble_share(1, 16)
    assert compute_bubble_share(1, 64) < compute_bubble_share(1, 16)


def test_context_parallelism_divides_attention_among_ranks() -> None:
    whole, cut = (
        build_plan(layout=ss.Layout.megatron(cp=cp), seq_len=32_768, global_batch_size=8) for cp in (1, 8)
    )
    assert cut.step().parts["attention"] == pytest.approx(whole.step().parts["attention"])
    assert cut.step().hidden["context_parallel"] > 0


def test_expert_imbalance_increases_the_step_time() -> None:
    even, crowded = (
        build_plan(
            "mixtral-8x7b", "2x8xh100-sxm-80gb", ss.Layout.megatron(ep=8), expert_imbalance=load
        ).step()
        for load in (1.0, 2.0)
    )
    assert crowded.parts["expert_parallel"] > 1.5 * even.parts["expert_parallel"]
    assert crowded.parts["matrices"] > even.parts["matrices"]


def test_megatron_overlap_flags_reduce_exposed_communication() -> None:
    def predict(**flags: bool) -> StepReport:
        layout = ss.Layout.megatron(tp=8, **flags)
        return build_plan("llama-3.1-70b", "4x8xh100-sxm-80gb", layout, global_batch_size=64).step()

    plain, reduced = predict(), predict(overlap_grad_reduce=True)
    gathered = predict(overlap_grad_reduce=True, overlap_param_gather=True)
    buffers = predict(tp_comm_overlap=True)
    assert reduced.parts["gradients"] < plain.parts["gradients"]
    assert gathered.parts["gathers"] < reduced.parts["gathers"]
    assert buffers.parts["tensor_parallel"] < plain.parts["tensor_parallel"]


def test_nvme_takes_time_on_cpu_ranks_too() -> None:
    """The host is the device there, but its drives are not."""
    gpu = replace(EIGHT.gpu, vendor="cpu")
    cluster = replace(EIGHT, gpu=gpu, nvme_bytes=2**44, nvme_bandwidth_bytes_per_second=20e9)

    def predict_offload(**options: str) -> float:
        layout = ss.Layout.zero(stage=3, **options)  # type: ignore[arg-type]
        return ss.Plan(ss.models["llama-3.1-8b"], cluster, ss.Recipe(), layout).step().parts["offload"]

    # Eight ranks read and write 12 bytes of optimizer state for each weight, and 4 of its gradient.
    weights = ss.models["llama-3.1-8b"].num_parameters
    optimizer = predict_offload(offload_optimizer="nvme")
    assert optimizer == pytest.approx(2 * 16 * weights / 20e9, rel=1e-2)
    assert predict_offload(offload_optimizer="nvme", offload_params="nvme") > optimizer


def test_cpu_offload_is_slower_and_nvme_offload_slowest() -> None:
    nvme = replace(EIGHT, nvme_bytes=2**44, nvme_bandwidth_bytes_per_second=20e9)

    def predict_seconds(**where: str) -> float:
        layout = ss.Layout.zero(**where)  # type: ignore[arg-type]
        return ss.Plan(ss.models["llama-3.1-8b"], nvme, ss.Recipe(), layout).step().seconds

    none, host = predict_seconds(), predict_seconds(offload_optimizer="cpu")
    assert none < host < predict_seconds(offload_optimizer="nvme")


# ------------------------------------------------------------------------------------- missing figures


def test_catalog_gpus_have_step_times_or_name_the_missing_figure() -> None:
    num_predicted = 0
    for name, gpu in ss.gpus.items():
        for precision in ("bf16", "fp16-mixed", "fp32"):
            cluster = ss.Cluster.of(gpu, 2)
            plan = ss.Plan(
                ss.models["gpt2"], cluster, ss.Recipe(seq_len=512, precision=precision), ss.Layout.ddp()
            )  # type: ignore[arg-type]
            peak = precision.removesuffix("-mixed")
            if peak in gpu.peak_flops and gpu.memory_bandwidth_bytes_per_second:
                assert 0 < plan.step().seconds < 60, name
                num_predicted += 1
            else:
                with pytest.raises(
                    ValueError, match=rf"Gpu\.(peak_flops\['{peak}'\]|memory_band).*(calibrate|Recipe)"
                ):
                    plan.step()
    assert num_predicted > 50


def test_a_missing_bandwidth_is_named_in_the_error() -> None:
    gpu = replace(EIGHT.gpu, memory_bandwidth_bytes_per_second=None)
    with pytest.raises(ValueError, match=r"Gpu\.memory_bandwidth_bytes_per_second is None.*ss\.calibrate"):
        replace(build_plan(), cluster=replace(EIGHT, gpu=gpu)).step()
    with pytest.raises(ValueError, match=r"Cluster\.nvme_bandwidth_bytes_per_second is None"):
        build_plan(layout=ss.Layout.zero(offload_optimizer="nvme")).step()


@pytest.mark.parametrize(("link", "nearest"), [(None, "pcie-4-x16"), ("nvlink-9", "nvlink-5")])
def test_a_gpu_with_an_unknown_link_is_rejected(link: str | None, nearest: str) -> None:
    """A single GPU needs no link, and the cluster may name one."""
    gpu = replace(EIGHT.gpu, name="my-gpu", link=link)
    plan = replace(build_plan(micro_batch_size=4, seq_len=8192), cluster=ss.Cluster.of(gpu, 8))
    with pytest.raises(ValueError, match=rf"Gpu\.link is .*nvlink-4.*Nearest fix: link='{nearest}'"):
        plan.step()
    repairs = plan.repairs()
    assert repairs and all(math.isnan(repair.seconds_lost) for repair in repairs)
    named = replace(plan.cluster, intra_node_link=EIGHT.intra_node_link)
    assert replace(plan, cluster=named).step().seconds > 0
    one_gpu = ss.Plan(ss.models["gpt2"], ss.Cluster.of(gpu, 1), ss.Recipe(seq_len=512), ss.Layout.ddp())
    assert one_gpu.step().communication == ()


def test_bubbles_of_other_schedules_are_reported() -> None:
    cluster = ss.Cluster.parse("8x8xh100-sxm-80gb")
    recipe = ss.Recipe(seq_len=4096, global_batch_size=128)

    def make_plan(layout: Any, **changes: Any) -> ss.Plan:
        return ss.Plan(ss.models["llama-3.1-8b"], cluster, replace(recipe, **changes), layout)

    plain = make_plan(ss.Layout.megatron(tp=2, pp=4))
    bubbles = compute_bubbles(plain)
    own = plain.step().parts["bubble"]
    assert bubbles["1f1b"] == bubbles["gpipe"] == pytest.approx(own)
    assert bubbles["interleaved"] == pytest.approx(own / 2)
    assert bubbles["zb-h2"] < bubbles["zb-h1"] < bubbles["1f1b"]
    chunked = make_plan(ss.Layout.megatron(tp=2, pp=4, vpp=4))
    assert compute_bubbles(chunked)["interleaved"] == pytest.approx(chunked.step().parts["bubble"])
    assert "forward_backward_pipelining_with_interleaving" in chunked.step().explain("bubble")
    text = make_plan(ss.Layout.zero(stage=1, pp=4)).step().explain("bubble")
    assert "TrainSchedule" in text and "GPipe" in text and "ZB-H1" in text
    # Frozen matrices have no gradients to fill a bubble with.
    adapters = compute_bubbles(make_plan(ss.Layout.fsdp2(pp=4), method="lora", lora_rank=8))
    assert adapters["zb-h1"] == adapters["1f1b"]
    whole = make_plan(ss.Layout.fsdp2())
    assert compute_bubbles(whole) == {}
    assert "GPipe" not in whole.step().explain("bubble")
