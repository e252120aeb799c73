"""Tests of offload on fake tensors of two devices: which tensors DeepSpeed and FSDP2 place on the host."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.accuracy.rehearsal_samples import in_words
from tests.accuracy.rehearsals import STORED, read_rehearsals
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import needs_installed, skip_from_torch, thorough

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.plan import Plan
from shardscope.rehearsal import fake_world as world
from shardscope.rehearsal.result import TENSOR_COMPONENTS, RehearsedStage

pytestmark = thorough()

FILE = STORED / "deepspeed-offload.jsonl"
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
needs_deepspeed = needs_installed("deepspeed")


def build_small_plan(layout: Any, cluster: Any = EIGHT) -> Plan:
    recipe = ss.Recipe(seq_len=2048, global_batch_size=8)
    return Plan(Architecture.of_size("60m"), cluster, recipe, layout)


def rehearse_stage(plan: Plan) -> RehearsedStage:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import rehearse

    (stage,) = rehearse(plan, lambda words, fraction: None)
    return stage


def test_predictions_agree_with_stored_rehearsals() -> None:
    rows, rejected = read_rehearsals([FILE])
    assert not rejected and len(rows) >= 30
    close = [row for row in rows if abs(row.error) <= 0.01]
    assert len(close) >= 0.85 * len(rows), [in_words(row) for row in rows if row not in close]


@pytest.mark.parametrize("name", ["deepspeed-offload", "deepspeed-nvme"])
def test_host_memory_agrees_with_stored_rehearsals(name: str) -> None:
    errors = {}
    for line in (STORED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        (stored,) = map(RehearsedStage.from_dict, row["stages"])
        predicted = Plan.from_dict(row["plan"]).memory()
        # Bytes of NVMe files are exact.
        assert predicted.nvme_bytes == stored.nvme_bytes
        assert stored.host_bytes > 0
        errors[row["name"]] = abs(predicted.host_bytes / stored.host_bytes - 1)
    close = [name for name, error in errors.items() if error <= 0.001]
    assert len(close) >= 0.8 * len(errors), errors


def test_fake_host_and_fake_gpu_are_different_devices() -> None:
    with world.fake_tensors(separate_host=True) as tracker:
        with tracker.phase("forward"):
            on_device = torch.empty(1000, device="cpu:0")
            on_host = on_device.to("cpu")
            back = on_host.to("cpu:0")
        assert (tracker.held_bytes, tracker.host_peak_bytes) == (8000, 4000)
        with pytest.raises(RuntimeError, match="same device"):
            on_device + on_host
        del on_host
        tracker.restart()
        # Tensors freed before the measured step do not count.
        assert (tracker.held_bytes, tracker.host_peak_bytes) == (8000, 0)
        assert back.device == on_device.device
        peaks = tracker.compute_peaks()
    assert max(peak.num_bytes for peak in peaks) == 8000


@needs_deepspeed
@pytest.mark.parametrize(
    "layout",
    [
        ss.Layout.zero(2, offload_optimizer="cpu"),
        ss.Layout.zero(3, offload_optimizer="cpu", offload_params="cpu"),
    ],
    ids=["optimizer", "both"],
)
def test_predicted_host_memory_equals_rehearsed_deepspeed_offload(layout: Any) -> None:
    plan = build_small_plan(layout)
    stage, predicted = rehearse_stage(plan), plan.memory()
    assert stage.host_bytes == pytest.approx(predicted.host_bytes, rel=1e-3)
    tensor_bytes = sum(predicted.components[name] for name in TENSOR_COMPONENTS)
    assert tensor_bytes == pytest.approx(stage.peak.num_bytes, rel=0.02)
    for peak in stage.peaks:
        # Neither moments nor master weights are ever on the GPU.
        assert peak.components.get("optimizer", 0) < 2**20


@needs_deepspeed
def test_garbage_collection_changes_no_result() -> None:
    plan = build_small_plan(ss.Layout.zero(3, offload_optimizer="cpu", offload_params="cpu"))
    collecting = rehearse_stage(plan)
    gc.disable()
    try:
        assert rehearse_stage(plan) == collecting
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("values", "recipe"),
    [
        ({}, {}),
        ({"pp": 2}, {"global_batch_size": 16}),
        ({"reshard_after_forward": False}, {"optimizer": "sgd"}),
    ],
    ids=["shards", "stages", "sgd"],
)
def test_fsdp2_cpu_offload_moves_the_training_state_to_the_host(values: Any, recipe: Any) -> None:
    from shardscope.frameworks.fsdp2.rehearsal.rehearse import rehearse

    if "pp" in values:
        skip_from_torch("2.15", "allocates pipelines' receive buffers one at a time")
    sizes = {"seq_len": 1024, "global_batch_size": 8, **recipe}
    plan = Plan(
        Architecture.of_size("60m"), EIGHT, ss.Recipe(**sizes), ss.Layout.fsdp2(offload="cpu", **values)
    )
    predicted = plan.memory()
    stages = rehearse(plan, lambda words, fraction: None)
    for stage, predicted_stage in zip(stages, predicted.by_stage, strict=True):
        # The update may need one additional tensor.
        assert -(2**20) < stage.host_bytes - predicted_stage.host_bytes < 4 * 2**20
        for peak in stage.peaks:
            assert peak.components.get("optimizer", 0) < 2**20
    fullest = max(stage.peak.num_bytes for stage in stages)
    tensor_bytes = sum(predicted.components[name] for name in TENSOR_COMPONENTS)
    assert tensor_bytes == pytest.approx(fullest, rel=0.01)


@needs_deepspeed
def test_the_report_has_host_and_device_bytes() -> None:
    report = rehearse_in_this_process(build_small_plan(ss.Layout.zero(3, offload_optimizer="cpu")))
    assert report.host_bytes > 0 and report.components["optimizer"] < 2**20


@needs_deepspeed
def test_cpu_ranks_offload_nothing() -> None:
    stage = rehearse_stage(
        build_small_plan(ss.Layout.zero(2, offload_optimizer="cpu"), ss.Cluster.parse("2xcpu"))
    )
    assert stage.host_bytes == 0 and stage.peak.components["optimizer"] > 0


@needs_deepspeed
def test_a_chunked_loss_with_zero_3_is_rejected() -> None:
    plan = replace(build_small_plan(ss.Layout.zero(3)), recipe=ss.Recipe(global_batch_size=8, loss="chunked"))
    with pytest.raises(ValueError, match=r"Recipe\.loss is 'chunked'.*when its module runs"):
        rehearse_stage(plan)


@thorough()
@needs_deepspeed
def test_autotp_shards_projections_and_head() -> None:
    """DeepSpeed's AutoTP shards projections and the head, but not an untied embedding."""
    arch = replace(Architecture.of_size("60m"), tie_word_embeddings=False)
    embedding = arch.vocab_size * arch.hidden_size
    num_parameters = {}
    # Not in parallel: DeepSpeed has its process groups in module globals.
    for tp in (2, 1):
        plan = Plan(arch, EIGHT, ss.Recipe(seq_len=256, global_batch_size=8), ss.Layout.zero(1, tp=tp))
        rest = next(peak for peak in rehearse_stage(plan).peaks if peak.phase == "rest")
        num_parameters[tp] = rest.components["parameters"] / 2
    norms = (2 * arch.num_hidden_layers + 1) * arch.hidden_size
    sharded = arch.num_parameters - embedding - norms
    assert num_parameters[1] == pytest.approx(arch.num_parameters, rel=1e-4)
    assert num_parameters[2] == pytest.approx(embedding + norms + sharded / 2, rel=1e-4)


@needs_deepspeed
def test_tensor_parallel_ranks_offload_activations() -> None:
    """AutoTP's device mesh rejected the fake GPU's name, "cpu:0", and so the rehearsal failed."""
    plan = build_small_plan(ss.Layout.zero(1, tp=2))
    plan = replace(plan, recipe=replace(plan.recipe, recompute="offload"))
    report = rehearse_in_this_process(plan)
    rehearsed, predicted = (
        sum(one.components[name] for name in TENSOR_COMPONENTS) for one in (report, plan.memory())
    )
    assert predicted == pytest.approx(rehearsed, rel=0.01)
    assert report.host_bytes > 0


def test_fsdp2_tensor_parallel_ranks_offload_activations() -> None:
    """Saved DTensors were copied by the storage that they do not have: the rehearsal failed."""
    plan = build_small_plan(ss.Layout.fsdp2(tp=2))
    plan = replace(plan, recipe=replace(plan.recipe, recompute="offload"))
    report = rehearse_in_this_process(plan)
    rehearsed, predicted = (
        sum(one.components[name] for name in TENSOR_COMPONENTS) for one in (report, plan.memory())
    )
    assert predicted == pytest.approx(rehearsed, rel=0.01)
    assert report.host_bytes == pytest.approx(plan.memory().host_bytes, rel=0.01)


@needs_deepspeed
def test_a_model_that_autotp_does_not_shard_is_rejected() -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import check_plan

    plan = Plan(ss.models["phi-3-mini"], EIGHT, ss.Recipe(seq_len=512), ss.Layout.zero(1, tp=2))
    with pytest.raises(ValueError, match=r"Architecture\.model_type is 'phi3'.*AutoTP"):
        check_plan(plan)
