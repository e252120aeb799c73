"""Tests of ``RooflineView``: its points, its steps, and what it shows without a kernel."""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope_widgets import RooflineView

LLAMA = ss.models["llama-3.1-8b"]
PLAN = ss.Plan(LLAMA, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(global_batch_size=16), ss.Layout.fsdp2())


def read_points(view: RooflineView) -> list[tuple[float, float]]:
    """Return intensity and TFLOP/s of the matmuls at the shown step."""
    frame: Any = view.figure._frames[view.step]
    trace = frame["traces"]["2"]
    return [(10**x, 10**y) for x, y in zip(trace["x"], trace["y"], strict=True)]


def test_roof_is_the_gpus_and_points_are_the_operators() -> None:
    view = RooflineView(PLAN)
    gpu = PLAN.cluster.gpu
    roof = view.figure.data[0]
    assert 10 ** max(roof.y) == pytest.approx(gpu.peak_flops["bf16"] / 1e12)
    assert 10 ** roof.x[1] == pytest.approx(gpu.peak_flops["bf16"] / gpu.memory_bandwidth_bytes_per_second)
    assert view.shown is not None
    matmuls = [one for one in view.shown.operators if one.kind == "matmul"]
    for drawn, one in zip(read_points(view), matmuls, strict=True):
        assert drawn == pytest.approx((one.flops / one.num_bytes, one.flops / one.seconds / 1e12))
    assert "q_proj" in view.table.value and "990 TFLOP/s" in view.heading.value


def test_the_second_roof_is_named_after_those_who_run_under_it() -> None:
    """Under DDP autocast leaves the matmuls of experts in fp32; fp8 converts no attention."""
    in_fp8 = ss.Plan(LLAMA, PLAN.cluster, ss.Recipe(precision="fp8-mixed"), ss.Layout.fsdp2())
    experts = ss.Plan(ss.models["mixtral-8x7b"], PLAN.cluster, PLAN.recipe, ss.Layout.ddp())
    for plan, words in ((in_fp8, "Attention runs in bf16"), (experts, "Experts run in fp32")):
        assert f" {words} (dashed)." in RooflineView(plan).heading.value


def test_steps_are_micro_batches_and_buttons_sequences() -> None:
    view = RooflineView(PLAN)
    assert view.step == 0 and "1 × 4,096" in view.figure.words
    view.choice.value = 128
    assert "bound by memory" in view.figure.words
    few = read_points(view)[0]
    view.step = 4
    assert "16 × 128 = 2,048 tokens" in view.figure.words and "16 × 128" in view.table.value
    many = read_points(view)[0]
    assert many[0] > few[0] and many[1] > few[1]
    view.choice.value = 512
    assert "16 × 512" in view.figure.words, "the same micro-batch at another length"
    frame: Any = view.figure._frames[view.step]
    low, high = view.figure.layout.xaxis.range
    assert all(low <= x <= high for trace in frame["traces"].values() for x in trace["x"])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt2", "deepseek-v3"])
@pytest.mark.parametrize("seq_len", [128, 1024])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32"])
def test_no_operator_is_above_the_roof(name: str, seq_len: int, precision: str) -> None:
    """Attention of 128 tokens moves more than it multiplies: it was predicted at its arithmetic's rate."""
    recipe = ss.Recipe(global_batch_size=16, seq_len=seq_len, precision=precision)
    view = RooflineView(ss.Plan(ss.models[name], PLAN.cluster, recipe, ss.Layout.fsdp2()))
    for step in range(view.figure.num_steps):
        view.step = step
        assert view.shown is not None
        for one in view.shown.operators:
            assert one.flops / one.seconds <= 1.001 * view.shown.compute_attainable(one), one


def test_plan_starts_at_its_own_micro_batch_and_sequences_are_those_that_the_model_has() -> None:
    recipe = ss.Recipe(global_batch_size=24, micro_batch_size=3, seq_len=1024)
    view = RooflineView(ss.Plan(ss.models["gpt2"], PLAN.cluster, recipe, ss.Layout.ddp()))
    assert "3 × 1,024" in view.figure.words
    assert [value for _, value in view.choice.options] == [128, 512, 1024]


def test_gpu_without_known_figures_says_so() -> None:
    unknown = next(name for name, gpu in ss.gpus.items() if name != "cpu" and not gpu.peak_flops.get("bf16"))
    view = RooflineView(ss.Plan(LLAMA, ss.Cluster.parse(f"8x{unknown}"), ss.Recipe(), ss.Layout.fsdp2()))
    assert "cannot be drawn" in view.heading.value and view.figure.num_steps == 0
    view.show(PLAN)
    assert view.figure.num_steps == 7 and math.isfinite(read_points(view)[0][0])


def test_page_and_saved_notebook_need_no_kernel_and_no_network(tmp_path: Path) -> None:
    view = RooflineView(PLAN)
    view.step = 2
    html = view.to_html(tmp_path / "roofline.html").read_text()
    assert not re.search(r"(?:src|href)=['\"]?https?:", html)
    assert '"step": 2' in html and "down_proj" in html
    static = view._repr_mimebundle_()["text/html"]
    assert static.count("stroke-linecap") >= 4 and escape(view.figure.words) in static
    assert ">gate, up, down<" in static
    assert not re.search(r"<script|https?://", static) and len(static) < 60_000
