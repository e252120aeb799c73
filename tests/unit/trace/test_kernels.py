"""Tests of kernels: classes, times, FLOPs of shapes and peaks of the GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import (
    Events,
    all_reduce,
    annotation,
    copy,
    cpu_events,
    gpu_events,
    kernel,
    launch,
    load_ranks,
    operator,
    to_ns,
)

import shardscope as ss
from shardscope.trace import Trace
from shardscope.trace.analysis.kernels import KERNEL_KINDS, OPERATOR_KINDS, find_gpu
from shardscope.trace.analysis.kernels import _match_kind as match_kind
from shardscope.trace.table import Table

COLUMNS = [
    "rank",
    "name",
    "kind",
    "num_calls",
    "total_seconds",
    "mean_seconds",
    "share",
    "tflops",
    "bytes_per_second",
]
A100 = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
BF16 = ["c10::BFloat16", "c10::BFloat16"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt", "matmul"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(Params)", "matmul"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", "matmul"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>(Flash_fwd_params)", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>(int)", "normalization"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2>(float)", "normalization"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>(int)", "elementwise"),
        ("triton_poi_fused_add_mul_0", "elementwise"),
        ("triton_red_fused_mean_3", "reduction"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(float*)", "copy"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "convolution"),
        ("triton_poi_fused_convolution_relu_3", "elementwise"),
        ("triton_red_fused_convert_element_type_mul_sum_1", "reduction"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_2", "elementwise"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_tem_fused_mm_4", "matmul"),
        ("_attn_fwd", "attention"),
        ("attn_fwd", "attention"),
        ("void ck_tile::kentry<ck_tile::FmhaFwdKernel<Problem>>", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6", "attention"),
        ("__amd_rocclr_copyBuffer", "copy"),
        ("something_of_a_vendor", "other"),
    ],
)
def test_kernels_have_the_class_of_their_name(name: str, kind: str) -> None:
    assert match_kind(KERNEL_KINDS, name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::mul", "elementwise"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm", "normalization"),
        ("aten::copy_", "copy"),
        ("aten::_log_softmax", "reduction"),
        ("aten::view", "view"),
    ],
)
def test_operators_of_cpu_ranks_have_classes_too(name: str, kind: str) -> None:
    assert match_kind(OPERATOR_KINDS, name) == kind


def test_times_and_shares_of_kernels_add_up(tmp_path: Path) -> None:
    events = [kernel(0, 30), kernel(40, 60), all_reduce(50, 90), copy(100, 110)]
    table = load_ranks(tmp_path, {0: events}).kernels()
    assert [(row["kind"], row["num_calls"], to_ns(row["total_seconds"])) for row in table] == [
        ("matmul", 2, 50),
        ("all_reduce", 1, 40),
        ("copy", 1, 10),
    ]
    assert [row["share"] for row in table] == [0.5, 0.4, 0.1]
    assert to_ns(table[0]["mean_seconds"]) == 25
    assert (table[0]["track"], to_ns(table[0]["longest_seconds"])) == ("stream 7", 30)
    assert list(table.to_frame().columns) == COLUMNS
    assert table.sum_by_kind()[0] == {
        "rank": 0,
        "kind": "matmul",
        "num_calls": 2,
        "total_seconds": pytest.approx(50e-9),
        "share": 0.5,
    }


def test_flops_come_from_the_operator_that_launched_the_kernel(tmp_path: Path) -> None:
    """A matmul of 64 x 32 and 32 x 16 in 1 us: 65,536 FLOPs, 0.0655 TFLOP/s, of 312 that an A100 has."""
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": BF16}
    events = [
        operator(0, 100, "aten::linear", **{"Input Dims": [[9, 9], [9, 9]], "Input type": BF16}),
        operator(10, 90, "aten::mm", **shapes),
        launch(20, 30, 1),
        launch(40, 50, 2),
        kernel(
            1000, 2000, "ampere_bf16_s16816gemm_64x64", correlation=1, **{"est. achieved occupancy %": 40}
        ),
        kernel(2000, 2100, "void splitKreduce_kernel<float>", correlation=2),
    ]
    table = load_ranks(tmp_path, {0: events}, deviceProperties=A100).kernels()
    gemm, split = table
    assert gemm["tflops"] == pytest.approx(2 * 64 * 32 * 16 / 1e-6 / 1e12)
    assert gemm["peak_share"] == pytest.approx(
        gemm["tflops"] * 1e12 / ss.gpus["a100-sxm-80gb"].peak_flops["bf16"]
    )
    assert gemm["bytes_per_second"] == pytest.approx(2 * (64 * 32 + 32 * 16 + 64 * 16) / 1e-6)
    assert gemm["uses_tensor_cores"] and gemm["occupancy"] == 0.4
    assert split["tflops"] is None and split["occupancy"] is None
    assert table.tensor_core_share == pytest.approx(1000 / 1100)


def test_a_kernel_whose_first_operator_was_not_recorded_has_a_share_of_the_peak(tmp_path: Path) -> None:
    """A recording that begins while the GPU still works on what was launched before."""
    events = [
        operator(10, 90, "aten::mm", **{"Input Dims": [[64, 32], [32, 16]], "Input type": BF16}),
        launch(20, 30, 1),
        kernel(0, 1000, "ampere_bf16_s16816gemm_64x64"),
        kernel(1000, 2000, "ampere_bf16_s16816gemm_64x64", correlation=1),
    ]
    (gemm,) = load_ranks(tmp_path, {0: events}, deviceProperties=A100).kernels()
    peak = ss.gpus["a100-sxm-80gb"].peak_flops["bf16"]
    assert gemm["peak_share"] == pytest.approx(gemm["tflops"] * 1e12 / peak)


def test_sm_efficiency_is_the_share_of_multiprocessors_with_a_block(tmp_path: Path) -> None:
    """1 us with a quarter block each and 3 us with two each: a quarter and all, weighted by time."""
    events = [
        kernel(0, 1000, "gemm", **{"blocks per SM": 0.25}),
        kernel(1000, 4000, "gemm", **{"blocks per SM": 2}),
    ]
    gemm, other = load_ranks(
        tmp_path, {0: [*events, kernel(4000, 5000, "plain", **{"blocks per SM": "x"})]}
    ).kernels()
    assert gemm["sm_efficiency"] == pytest.approx((0.25 + 3) / 4)
    assert other["sm_efficiency"] is None


def test_attention_flops_halve_if_causal(tmp_path: Path) -> None:
    """Four times batch, heads, queries, keys and width; half of it with a causal mask."""
    query = [2, 4, 128, 64]
    types = ["c10::BFloat16"] * 3 + ["Scalar"] * 2
    for number, causal in enumerate(("False", "True")):
        shapes = {
            "Input Dims": [query, query, query, [], []],
            "Input type": types,
            "Concrete Inputs": ["", "", "", "0.", causal],
        }
        events = [
            operator(0, 100, "aten::_scaled_dot_product_flash_attention", **shapes),
            launch(10, 20, 1),
            kernel(1000, 2000, "void flash_fwd_kernel<Flash_fwd_kernel_traits>", correlation=1),
        ]
        (row,) = load_ranks(tmp_path / causal, {0: events}).kernels()
        assert row["kind"] == "attention"
        assert row["tflops"] == pytest.approx(4 * 2 * 4 * 128 * 128 * 64 / (1 + number) / 1e-6 / 1e12)


def test_bytes_of_copies_are_those_recorded(tmp_path: Path) -> None:
    (row,) = load_ranks(tmp_path, {0: [copy(0, 1000, bytes=25_000)]}).kernels()
    assert row["bytes_per_second"] == pytest.approx(25e9)


def test_pointwise_bytes_are_inputs_and_result(tmp_path: Path) -> None:
    """A sum of [10, 20] and [20] in float: 200 + 20 read, 200 written."""
    shapes = {"Input Dims": [[10, 20], [20], []], "Input type": ["float", "float", "Scalar"]}
    events = [
        operator(0, 90, "aten::add", **shapes),
        launch(5, 10, 1),
        kernel(100, 200, "Functor", correlation=1),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).kernels()
    assert row["bytes_per_second"] == pytest.approx(4 * 420 / 100e-9) and row["tflops"] is None


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"Input Dims": [[64, 32], [31, 16]], "Input type": BF16},
        {"Input Dims": [[64, 32]], "Input type": BF16},
        {"Input Dims": "damaged", "Input type": BF16},
        {"Input Dims": [[[1, 2]], [[3, 4]]], "Input type": BF16},
        {"Input Dims": [[64, 32], [32, 16]], "Input type": ["a type of the future", ""]},
    ],
)
def test_without_usable_shapes_there_is_no_rate(tmp_path: Path, shapes: dict) -> None:
    events = [operator(0, 90, "aten::mm", **shapes), launch(5, 10, 1), kernel(100, 200, correlation=1)]
    (row,) = load_ranks(tmp_path, {0: events}).kernels()
    assert (row["tflops"], row["bytes_per_second"], row["peak_share"]) == (None, None, None)


def test_kernels_inside_the_optimizer_step_are_the_optimizers(tmp_path: Path) -> None:
    events = [
        annotation(0, 50, "Optimizer.step#AdamW.step"),
        operator(5, 45, "aten::mul_"),
        launch(10, 20, 1),
        kernel(100, 200, "void vectorized_elementwise_kernel", correlation=1),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).kernels()
    assert row["kind"] == "optimizer"


def test_triton_kernels_do_not_say_whether_they_use_tensor_cores(tmp_path: Path) -> None:
    """A model compiled with max-autotune was said to have no matmul on tensor cores."""
    events = [kernel(0, 900, "triton_tem_fused_mm_4"), kernel(900, 1000, "nvjet_tst_128x256_64x4_h_bz_NNT")]
    trace = load_ranks(tmp_path, {0: events})
    uses = {row["name"]: row["uses_tensor_cores"] for row in trace.kernels()}
    assert uses == {"triton_tem_fused_mm_4": None, "nvjet_tst_128x256_64x4_h_bz_NNT": True}
    assert not any("tensor cores" in text for text in trace.summary().sentences)


def test_an_unknown_kernel_has_the_class_of_its_operator(tmp_path: Path) -> None:
    events = [
        operator(0, 90, "aten::native_layer_norm"),
        launch(5, 10, 1),
        kernel(100, 200, "k17", correlation=1),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).kernels()
    assert row["kind"] == "normalization"


def test_operators_of_cpu_ranks_count_without_what_they_call(tmp_path: Path) -> None:
    events = [
        operator(0, 100, "aten::linear"),
        operator(10, 90, "aten::addmm"),
        annotation(0, 40, "gloo:send", 200),
    ]
    rows = load_ranks(tmp_path, {0: events}).kernels()
    assert {row["name"]: to_ns(row["total_seconds"]) for row in rows} == {
        "aten::addmm": 80,
        "aten::linear": 20,
        "gloo:send": 40,
    }


@given(st.one_of(gpu_events(), cpu_events()))
def test_shares_of_every_rank_add_up_and_nothing_is_negative(events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = load_ranks(Path(folder), {0: events}).kernels()
    assert all(row["total_seconds"] >= 0 and row["num_calls"] > 0 for row in rows)
    total = sum(row["share"] for row in rows)
    assert total == pytest.approx(1) or all(row["total_seconds"] == 0 for row in rows)


def test_gpus_are_found_by_the_drivers_name() -> None:
    gpu = find_gpu("NVIDIA H100 80GB HBM3")
    assert gpu is not None and gpu.name == "h100-sxm-80gb"
    amd = find_gpu("AMD Instinct MI300X")
    assert amd is not None and amd.peak_flops["bf16"] == 1307.4e12
    assert find_gpu("NVIDIA A100-PG509-200") is None and find_gpu(None) is None


def test_recorded_gloo_ranks_have_operators() -> None:
    rows = Trace.load(Path(__file__).parents[2] / "fixtures" / "trace_2_ranks").kernels()
    kinds = {row["kind"] for row in rows}
    assert {"matmul", "elementwise", "normalization", "optimizer", "all_reduce"} <= kinds


def test_long_tables_are_printed_and_shown_in_part() -> None:
    table = Table([{"rank": rank, "total_seconds": rank / 7} for rank in range(900)])
    lines = repr(table).splitlines()
    assert lines[0].split() == ["rank", "total_seconds"] and "of 900 rows" in lines[-1]
    assert len(lines) < 60 and table._repr_html_().count("<tr") < 60
    assert len(table.to_frame()) == 900


def test_tables_show_their_sentence_and_no_names_of_a_thousand_characters(tmp_path: Path) -> None:
    name = f"void kernel<{', '.join(['at::GenericPackedTensorAccessor<float, 1ul>'] * 40)}>()"
    here = load_ranks(tmp_path / "here", {0: [kernel(0, 100, name)]})
    there = load_ranks(tmp_path / "there", {0: [kernel(0, 300, name)]})
    table = here.diff(there)
    assert table[0]["name"] == table.to_frame()["name"][0] == name
    for shown in (repr(table), table._repr_html_()):
        assert "Largest differences" in shown and "of each name" in shown and len(shown) < 2_000
    stragglers = here.stragglers()
    assert stragglers.text in repr(stragglers) and stragglers.text in stragglers._repr_html_()
