"""DeepSpeed's ``communication_data_type``: checks, configuration files, memory and step time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.in_process_rehearsal import list_stages
from tests.requirements import few, needs_installed
from tests.unit.random_plans import LLAMA, MOE

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.frameworks.deepspeed.defaults import get_reduce_type, suggest_fp32_reduction
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.deepspeed.memory.fp16_optimizer import count_all_reduce_copy
from shardscope.frameworks.deepspeed.memory.ipg_bucket import (
    FlatGradient,
    ReductionOptions,
    count_flattened_copy,
)
from shardscope.frameworks.registry import frameworks
from shardscope.prediction.batch.memory import compute_peaks
from shardscope.rehearsal.result import TENSOR_COMPONENTS

NODE = ss.Cluster.parse("8xh100-sxm-80gb")
FP32 = {"communication_data_type": "fp32"}
KEY = "communication_data_type"


def plan(stage: int, arch: ss.Architecture = LLAMA, recipe: Any = None, **options: Any) -> ss.Plan:
    fields = {"seq_len": 512, "global_batch_size": 16, **(recipe or {})}
    return ss.Plan(arch, NODE, ss.Recipe(**fields), ss.Layout.zero(stage, **options))


# --------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (2, {KEY: "bf16"}, "communication_data_type is 'bf16'; allowed: None, 'fp32'"),
        (3, {KEY: 4}, "communication_data_type is 4"),
        (3, {**FP32, "zero_quantized_gradients": True}, "which send 4 bits.*communication_data_type=None"),
        (1, {**FP32, "ep": 2}, "no formula counts the cast of the experts'.*communication_data_type=None"),
        (2, {**FP32, "ep": 2}, "experts' own buckets"),
    ],
)
def test_unknown_ignored_and_uncounted_types_raise(stage: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        ss.Layout.zero(stage, **options)
    assert caught.value.field == f"Layout.{KEY}"


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"ep": 2}, {"pp": 2}])
def test_stage_0_supports_fp32_communication_with_any_degree(options: dict[str, Any]) -> None:
    assert plan(0, MOE if "ep" in options else LLAMA, **options, **FP32).memory().peak_bytes


# ------------------------------------------------------------------------------- written and read back


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ds_config_has_communication_data_type_in_half_precision(stage: int) -> None:
    assert build_deepspeed_config(plan(stage, **FP32))[KEY] == "fp32"
    assert KEY not in build_deepspeed_config(plan(stage))
    assert KEY not in build_deepspeed_config(plan(stage, recipe={"precision": "fp32"}, **FP32))


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp32"])
def test_exported_communication_data_type_is_read_back(precision: str, tmp_path: Path) -> None:
    original = plan(2, recipe={"precision": precision}, **FP32)
    assert ss.Plan.from_json(original.to_json()) == original
    files = {path.name: path for path in original.export(tmp_path)}
    config = files["ds_config.json"]
    assert (KEY in json.loads(config.read_text())) == (precision != "fp32")
    nouns: dict[str, Any] = {"architecture": LLAMA, "cluster": NODE}
    assert ss.Plan.from_deepspeed(config, **nouns) == original
    copied = tmp_path / "alone" / config.name
    copied.parent.mkdir()
    copied.write_text(config.read_text())
    assert ss.Plan.from_deepspeed(copied, **nouns).layout == original.layout


@pytest.mark.parametrize(
    ("value", "section", "expected"),
    [
        ("fp32", "bf16", "fp32"),
        ("FP32", "fp16", "fp32"),
        ("bf16", "bf16", None),
        ("fp16", "fp16", None),
        (None, "bf16", None),
        ("fp32", None, None),
    ],
)
def test_reads_communication_data_type_of_a_file(
    value: Any, section: str | None, expected: str | None, tmp_path: Path
) -> None:
    """DeepSpeed accepts capitals; the compute type is the default, which a layout does not set."""
    layout: Any = read_plan(tmp_path, value, section).layout
    assert layout.communication_data_type == expected


@pytest.mark.parametrize(
    ("value", "section", "message"),
    [
        ("fp16", "bf16", "communication_data_type is 'fp16'; allowed: 'fp32', or the compute type, 'bf16'"),
        ("bf16", None, "allowed: 'fp32'"),
        (32, "bf16", "communication_data_type is 32"),
    ],
)
def test_types_other_than_fp32_and_the_compute_type_raise(
    value: Any, section: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_plan(tmp_path, value, section)


def read_plan(folder: Path, value: Any, section: str | None) -> ss.Plan:
    values: dict[str, Any] = {"zero_optimization": {"stage": 2}, KEY: value}
    if section:
        values[section] = {"enabled": True}
    (folder / "zero.json").write_text(json.dumps(values))
    return ss.Plan.from_deepspeed(folder / "zero.json", architecture=LLAMA, cluster=NODE)


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        # All of the model is used again within stage3_max_reuse_distance, a billion elements.
        ("qwen2.5-0.5b", {}, 1.0),
        ("llama-3.1-8b", {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, 0.0),
        # Of 8 billion, the head and the last layers: half a billion back and forth.
        ("llama-3.1-8b", {}, 1 / 8),
    ],
)
def test_backward_all_gathers_what_forward_did_not_keep(
    name: str, options: dict[str, Any], kept: float
) -> None:
    arch = ss.models[name]
    for micro_batches in (1, 4):
        recipe = {"global_batch_size": 8 * micro_batches}
        report = plan(3, arch, recipe, **options).step()
        calls = [call.num_bytes for call in report.communication if call.part == "gathers"]
        forward, backward = (*calls, 0)[:2]
        every = 2 * arch.num_parameters * micro_batches
        # Persistent vectors are never released; a prefetch for backward may start in forward.
        assert forward == pytest.approx(every, rel=0.02)
        assert 1 - backward / forward == pytest.approx(kept, abs=0.03)
    offloaded = plan(3, arch, {"global_batch_size": 8}, offload_params="cpu", **options)
    state = frameworks["deepspeed"].memory_model()
    stage = state.count_weights(offloaded, state.find_shapes(offloaded).kinds[0])
    traffic = frameworks["deepspeed"].timing_model().state_traffic(offloaded, stage)
    assert 1 - traffic.fetched_backward / traffic.fetched_forward == pytest.approx(kept, abs=0.03)


@pytest.mark.parametrize("options", [{}, {"zero_hpz_partition_size": 4}])
def test_all_gathers_that_do_not_start_take_no_time(options: dict[str, Any]) -> None:
    arch = ss.models["qwen2.5-0.5b"]

    def list_gathers(**more: Any) -> list[tuple[float, float]]:
        report = plan(3, arch, {"global_batch_size": 8}, **options, **more).step()
        return [(call.num_bytes, call.seconds) for call in report.communication if call.part == "gathers"]

    # All parameters are kept; without a distance of reuse, none are.
    kept = list_gathers()
    again = list_gathers(stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    assert sum(seconds for _, seconds in kept[1:]) == 0 < again[1][1]


def test_default_reduce_type_and_suggested_fp32_fix() -> None:
    for stage in range(4):
        before = plan(stage)
        assert get_reduce_type(before) == "bf16"
        description, fixed = suggest_fp32_reduction(before)
        assert fixed is not None and description == "communication_data_type='fp32'"
        assert (
            fixed == replace(before, layout=replace(before.layout, **FP32))
            and get_reduce_type(fixed) == "fp32"
        )
    description, fixed = suggest_fp32_reduction(plan(2, MOE, ep=2))
    assert fixed is None and description == '"communication_data_type": "fp32" in the DeepSpeed configuration'


# ------------------------------------------------------------------------------------ memory and time


def test_a_cast_is_allocated_besides_the_flattened_copy() -> None:
    """Elements of two bytes: four more bytes for each of them that is reduced together, flattened or not."""
    options = ReductionOptions((50, 0), rank=0, overlapping=60, bucket_size=100, cast_width=2)
    same_rank = [FlatGradient(0, 20, 50), FlatGradient(20, 20, 50)]
    assert count_flattened_copy(same_rank, options) == 2 * 40
    two_ranks = [FlatGradient(0, 40, 50), FlatGradient(40, 40, 50)]
    assert count_flattened_copy(two_ranks, options) == 80 + 2 * 80
    assert count_all_reduce_copy((10, 10, 10), 15, 2) == 20 + 2 * 20
    assert count_all_reduce_copy((30,), 15, 2) == 2 * 30


def test_stage_0_casts_all_gradients_at_once() -> None:
    """Stage 0 flattens up to 500 million gradients of two bytes; their cast has four more bytes each."""
    arch, recipe = replace(LLAMA, num_hidden_layers=2), {"seq_len": 16, "global_batch_size": 8}
    without, cast = (plan(0, arch, recipe, **options).memory() for options in ({}, FP32))
    more = cast.at("backward")["gather_buffers"] - without.at("backward")["gather_buffers"]
    assert more == 4 * arch.num_parameters
    assert cast.at("rest") == without.at("rest") and cast.at("optimizer") == without.at("optimizer")


def test_stage_3_bucket_has_the_communication_data_type() -> None:
    without, cast = (plan(3, reduce_bucket_size=10**6, **options).memory() for options in ({}, FP32))
    more = cast.at("rest")["gather_buffers"] - without.at("rest")["gather_buffers"]
    assert more == (4 - 2) * 10**6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_gradients_are_always_reduced_in_fp32(stage: int) -> None:
    default, explicit = (plan(stage, recipe={"precision": "fp32"}, **options) for options in ({}, FP32))
    assert default.memory().components == explicit.memory().components
    assert default.step().seconds == explicit.step().seconds


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_communication_sends_twice_the_gradient_bytes(stage: int) -> None:
    def count_sent_bytes(a_plan: ss.Plan, part: str) -> float:
        return sum(one.num_bytes for one in a_plan.step().communication if one.part == part)

    without, cast = plan(stage), plan(stage, **FP32)
    assert count_sent_bytes(cast, "gradients") == 2 * count_sent_bytes(without, "gradients")
    assert count_sent_bytes(cast, "gathers") == count_sent_bytes(without, "gathers")
    assert cast.step().seconds > without.step().seconds


# ---------------------------------------------------------------------------------- many plans at once


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_batch_of_plans_has_the_same_bytes_as_each_plan(stage: int) -> None:
    several = [
        plan(stage, recipe={"micro_batch_size": size}, reduce_bucket_size=3_000_000, **degrees, **FP32)
        for size in (1, 2)
        for degrees in (
            {},
            *({"tp": tp} for tp in (2, 4) if stage < 3),
            *({"pp": 2} for _ in range(stage < 2)),
        )
    ]
    assert compute_peaks(several).tolist() == [one.memory().peak_bytes for one in several]


def test_search_does_not_set_communication_data_type() -> None:
    ranking = ss.search(LLAMA, NODE, ss.Recipe(global_batch_size=16), frameworks=("deepspeed",))
    assert ranking.num_evaluated > 50
    assert {getattr(ranking.plan(row).layout, KEY) for row in range(ranking.num_evaluated)} == {None}


# ------------------------------------------------------------------------------- DeepSpeed's own engine

WIDE = replace(
    LLAMA, hidden_size=1024, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, vocab_size=8000,
)  # fmt: skip
"""A model for few tokens, so that the peak is where gradients are reduced."""
SMALL, LARGE = {"reduce_bucket_size": 6_000_000}, {"reduce_bucket_size": 100_000_000}
GATHERS = {"stage3_prefetch_bucket_size": 2_000_000, "stage3_max_reuse_distance": 1_000_000}
AGAIN = {"global_batch_size": 16}
REHEARSED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero-0": (0, {}, {}),
    "zero-1": (1, SMALL, {}),
    "zero-1, overlapping, two micro-batches": (1, {"overlap_comm": True, **SMALL}, AGAIN),
    "zero-1 on the host": (1, {"offload_optimizer": "cpu", **SMALL}, {}),
    "zero-2": (2, SMALL, {}),
    "zero-2, one bucket": (2, LARGE, {}),
    "zero-2, two micro-batches": (2, SMALL, AGAIN),
    "zero-2, gradients as they come": (2, {"contiguous_gradients": False, **LARGE}, {}),
    "zero-2 fp16": (2, SMALL, {"precision": "fp16-mixed"}),
    "zero-2 tp": (2, {"tp": 2, **SMALL}, AGAIN),
    "zero-2 lora": (2, SMALL, {"method": "lora", "lora_rank": 256}),
    "zero-3": (3, {**SMALL, **GATHERS}, {}),
    "zero-3, one bucket": (3, {**LARGE, **GATHERS}, {}),
    "zero-3, tensors beyond a bucket": (3, {"reduce_bucket_size": 1_000_000, **GATHERS}, {}),
    "zero-3, gradients as they come": (3, {"contiguous_gradients": False, **LARGE, **GATHERS}, {}),
    "zero-3 on the host": (3, {"offload_optimizer": "cpu", **SMALL, **GATHERS}, {}),
    "zero-1 pp": (1, {"pp": 2, **LARGE}, {}),
    "zero-0 pp": (0, {"pp": 2}, {}),
}


@needs_installed("deepspeed")
@pytest.mark.parametrize("name", few(REHEARSED, []))
def test_deepspeed_allocates_the_predicted_bytes(name: str) -> None:
    stage, options, recipe = REHEARSED[name]
    arch = replace(WIDE, num_hidden_layers=4) if "pp" in options else WIDE
    example = plan(stage, arch, {"seq_len": 32, "global_batch_size": 8, **recipe}, **options, **FP32)
    for rehearsed, predicted in zip(list_stages(example), example.memory().by_stage, strict=True):
        peak = max(
            sum(predicted.at(phase).components[part] for part in TENSOR_COMPONENTS)
            for phase in ("forward", "backward", "optimizer")
        )
        assert peak == pytest.approx(rehearsed.peak.num_bytes, rel=0.01)
