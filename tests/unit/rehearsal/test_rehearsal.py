"""Tests of ``plan.rehearse()``: its process, progress and errors; and of the memory tracker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

import psutil
import pytest
import torch
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import few, thorough

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.plan import Plan
from shardscope.frameworks.fsdp2.rehearsal.rehearse import rehearse
from shardscope.memory.report import COMPONENTS
from shardscope.planner.cpu_trial import build_cpu_trial
from shardscope.rehearsal import fake_world as world
from shardscope.rehearsal import process
from shardscope.rehearsal.result import TENSOR_COMPONENTS, RehearsedStage
from shardscope.rehearsal.tracker import Tracker

GIB = 2**30
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")


def build_small_plan(layout: Any, **recipe: Any) -> Plan:
    return Plan(Architecture.of_size("60m"), EIGHT, ss.Recipe(**{"seq_len": 512, **recipe}), layout)


def find_child_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def sum_tensors(components: Any) -> int:
    return sum(components[name] for name in TENSOR_COMPONENTS)


# ----------------------------------------------------------------------------------------- the process


@pytest.mark.parametrize("framework", few(["fsdp2", "ddp"], ["fsdp2"]))
def test_a_rehearsed_report_has_the_terms_of_a_prediction(framework: str) -> None:
    reports: list[tuple[str, float]] = []
    before = find_child_processes()
    plan = build_small_plan(getattr(ss.Layout, framework)())
    report = plan.rehearse(progress=lambda words, fraction: reports.append((words, fraction)))
    assert find_child_processes() == before
    assert report.tier == "rehearsed"
    assert tuple(report.components) == COMPONENTS
    assert report.low_bytes <= report.peak_bytes <= report.high_bytes
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0 and all(words for words, _ in reports)
    assert {phase for phase, _, _ in report.timeline} == {
        "initialisation",
        "rest",
        "forward",
        "backward",
        "optimizer",
    }
    predicted = plan.memory()
    assert sum_tensors(report.components) == pytest.approx(sum_tensors(predicted.components), rel=0.03)
    # What a rank holds between steps is no estimate: the same to the byte, but for tables and step counters.
    for name in ("parameters", "optimizer"):
        assert report.at("rest")[name] == pytest.approx(predicted.at("rest")[name], abs=2**20)
    assert "fake tensors" in report.explain("parameters")


@thorough()
def test_the_caller_needs_no_torch() -> None:
    code = (
        "import sys, shardscope as ss\n"
        "from shardscope.core.architecture import Architecture\n"
        "plan = ss.Plan(Architecture.of_size('10m'), ss.Cluster.parse('2xh100-sxm-80gb'),\n"
        "               ss.Recipe(seq_len=128), ss.Layout.fsdp2())\n"
        "assert plan.rehearse().peak_bytes > 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_an_exception_in_the_callback_ends_the_process() -> None:
    before = find_child_processes()

    def raise_keyboard_interrupt(words: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_small_plan(ss.Layout.fsdp2()).rehearse(progress=raise_keyboard_interrupt)
    assert find_child_processes() == before


def test_a_process_over_its_time_or_memory_limit_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before, began = find_child_processes(), time.monotonic()
    with pytest.raises(TimeoutError, match="longer than"):
        build_small_plan(ss.Layout.fsdp2()).rehearse(timeout=0.5)
    assert time.monotonic() - began < 10
    monkeypatch.setattr(process, "MAX_BYTES", 2**20)
    with pytest.raises(MemoryError, match="GiB"):
        build_small_plan(ss.Layout.fsdp2()).rehearse()
    assert find_child_processes() == before


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), True, "60", 1e9])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        build_small_plan(ss.Layout.fsdp2()).rehearse(timeout=timeout)


def test_without_torch_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "NEEDED", ("torch", "absent_package"))
    with pytest.raises(ImportError, match=r'needs absent_package: pip install "shardscope\[train\]"'):
        build_small_plan(ss.Layout.fsdp2()).rehearse()


@thorough()
def test_plans_that_the_engine_does_not_run_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"Layout\.cp is 2.*context"):
        build_small_plan(ss.Layout.fsdp2(cp=2)).rehearse()


@thorough()
def test_an_8b_plan_is_rehearsed_at_any_world_size() -> None:
    """1,024 ranks are the largest of the usual clusters."""
    plan = Plan(
        ss.models["llama-3.1-8b"],
        ss.Cluster.parse("128x8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=1024),
        ss.Layout.fsdp2(replicate=16),
    )
    report = rehearse_in_this_process(plan)
    assert sum_tensors(report.components) == pytest.approx(sum_tensors(plan.memory().components), rel=0.01)


# ------------------------------------------------------------------------------------------- the tracker


def test_the_tracker_follows_storages_not_tensors() -> None:
    with world.fake_tensors() as tracker:
        with tracker.phase("forward"):
            kept = torch.empty(1000, dtype=torch.float32)
            view = kept.view(10, 100)
            freed = torch.empty(500, dtype=torch.float32)
            del freed
        with tracker.phase("backward"):
            view.untyped_storage().resize_(0)
            view.untyped_storage().resize_(8000)
        tracker.label([view], "gradients")
        held_bytes = tracker.held_bytes
        peaks = {peak.phase: peak for peak in tracker.compute_peaks()}
    assert held_bytes == 8000
    # A label applies to a storage from its allocation, even if it was set at the end.
    assert max(m.num_bytes for m in tracker.compute_peaks() if m.phase == "forward") == 6000
    assert peaks["backward"].components == {"gradients": 8000}


def test_a_rehearsed_stage_goes_through_json() -> None:
    tracker = Tracker()
    stage = tracker.build_stage(0, 4, note="half")
    assert RehearsedStage.from_dict(stage.to_dict()) == stage
    with pytest.raises(ValueError, match="not a rehearsed stage"):
        RehearsedStage.from_dict({"stage": 0})


def test_patches_of_torch_are_undone_afterwards() -> None:
    from transformers import masking_utils

    patched = [
        (torch.nn.functional, "scaled_dot_product_attention"),
        (torch.nn.functional, "dropout"),
        (torch.Tensor, "pow"),
        (torch.UntypedStorage, "resize_"),
        (torch.nn.Module, "_apply"),
        (masking_utils, "is_tracing"),
    ]
    before = [getattr(owner, name) for owner, name in patched]
    with pytest.raises(RuntimeError, match="inside"), world.fake_tensors():
        raise RuntimeError("inside")
    assert [getattr(owner, name) for owner, name in patched] == before


# ---------------------------------------------------------------------------------- the published trace


@thorough()
def test_rehearsal_equals_the_fsdp_memory_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B on eight ranks, traced by torch's FSDPMemTracker: 46.60 GiB at the second step's peak.

    On fake tensors transformers builds a causal mask, of which every layer saves a copy (1.00 GiB), and
    with a mask it repeats keys and values for all heads (1.50 GiB). On real tensors it does neither. A
    rehearsal prevents both; this test does not. Then both trackers and the formula agree.
    """
    monkeypatch.setattr(world, "transformers_as_on_real_tensors", nullcontext)
    monkeypatch.setattr(world, "gpu_operators", lambda **_: nullcontext())
    plan = Plan(ss.models["llama-3.1-8b"], EIGHT, ss.Recipe(global_batch_size=8), ss.Layout.fsdp2(shard=8))
    (stage,) = rehearse(plan, lambda words, fraction: None)
    assert stage.peak.num_bytes / GIB == pytest.approx(46.60, abs=0.03)
    parts = {name: size / GIB for name, size in stage.peak.components.items()}
    assert parts["parameters"] == pytest.approx(3.74, abs=0.01)
    assert parts["optimizer"] == pytest.approx(7.48, abs=0.01)
    assert parts["gather_buffers"] == pytest.approx(1.96 + 0.41, abs=0.01)
    assert parts["activations"] + parts["logits"] == pytest.approx(29.10 + 3.91, abs=0.03)

    arch, tokens = plan.architecture, plan.recipe.seq_len
    repeated = 2 * (arch.num_attention_heads - arch.num_key_value_heads) * arch.head_dim * 2
    artefacts = tokens * arch.num_hidden_layers * (repeated + 2 * tokens)
    assert sum_tensors(plan.memory().components) + artefacts == pytest.approx(46.60 * GIB, rel=0.001)


@thorough()
def test_experts_in_fp32_are_rehearsed_on_cpu_ranks_too() -> None:
    """torch's grouped matmul of routed experts supports only bf16 on fake tensors."""
    large = Plan(ss.models["mixtral-8x7b"], EIGHT, ss.Recipe(precision="fp32"), ss.Layout.ddp())
    plan = build_cpu_trial(large).plan
    assert sum_tensors(rehearse_in_this_process(plan).components) == pytest.approx(
        sum_tensors(plan.memory().components), rel=0.01
    )


def test_dynamo_can_name_every_replacement_of_a_cuda_function() -> None:
    """Dynamo asks for them when the first operator of a compiled layer is traced."""
    with world.gpu_operators():
        torch.overrides.get_testing_overrides.__wrapped__()


def test_dropout_in_unfused_attention_saves_a_mask_of_bytes() -> None:
    """As CUDA's kernel: SDPA's own operators on CPU tensors save a mask of numbers."""
    heads, seq_len, head_dim = 4, 64, 16
    query, key, value = (
        torch.zeros(1, count, seq_len, head_dim, requires_grad=True) for count in (heads, 2, 2)
    )
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with world.gpu_operators(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1, is_causal=True, enable_gqa=True
        )
    scores, operands = heads * seq_len * seq_len, 3 * heads * seq_len * head_dim
    # The softmax, the product with the mask, and the mask.
    assert sum(saved.values()) == 4 * operands + (4 + 4 + 1) * scores
    assert output.requires_grad
