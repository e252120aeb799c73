"""tests/accuracy: rows become the plans that they describe, or say why not; the levels reached hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy.__main__ import main
from tests.accuracy.kinds import compared, kind, measured_bytes
from tests.accuracy.mapping import mapped
from tests.accuracy.rows import sampled
from tests.accuracy.unmapped import UnmappedError

GIB = 2**30
LAST_LINE = re.compile(
    r"overall memory: \d+ sources, \d+ of \d+ rows, median of source medians \d+\.\d %, p90 \d+\.\d %"
)
ROW: dict[str, Any] = {
    "id": "a-1",
    "source": "a source that nobody has seen",
    "model": "Llama-3.1-8B",
    "gpu": "H100-SXM-80GB",
    "gpu_mem_gb": 80,
    "n_gpus": 8,
    "framework": "fsdp2",
    "seq_len": 4096,
    "micro_batch": 1,
    "global_batch": 8,
    "precision": "bf16",
    "activation_checkpointing": "none",
    "peak_memory_gib": 47.0,
    "memory_kind": "allocated",
    "status": "ok",
}


def row(**changes: Any) -> dict[str, Any]:
    """ROW with changes; None takes a field away."""
    return {key: value for key, value in {**ROW, **changes}.items() if value is not None}


def test_a_row_becomes_the_plan_that_it_describes() -> None:
    plan = mapped(row()).plan
    assert plan.architecture.name == "llama-3.1-8b"
    assert (plan.layout.framework, plan.degrees.shard, plan.world_size) == ("fsdp2", 8, 8)
    assert (plan.recipe.precision, plan.recipe.recompute, plan.recipe.method) == (
        "bf16-mixed",
        "none",
        "full",
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"framework": "single", "n_gpus": 1, "global_batch": 1}, ("ddp", "bf16")),
        ({"framework": "fsdp1 FULL_SHARD (~zero3)"}, ("fsdp2", "bf16-mixed")),
        ({"framework": "zero3 (DeepSpeed 0.14.2)"}, ("deepspeed", "bf16-mixed")),
        ({"framework": "deepspeed zero2", "precision": None}, ("deepspeed", "bf16-mixed")),
        ({"framework": "megatron-bridge"}, ("megatron", "bf16-mixed")),
        ({"framework": "megatron-deepspeed zero1", "precision": "fp16"}, ("megatron", "fp16-mixed")),
        ({"framework": "nanotron zero0"}, ("megatron", "bf16-mixed")),
    ],
)
def test_frameworks_and_precisions_are_found_by_meaning(
    changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    plan = mapped(row(**changes)).plan
    assert (plan.layout.framework, plan.recipe.precision) == expected


def test_layouts_take_degrees_stages_and_where_the_optimizer_is_split() -> None:
    megatron: Any = mapped(row(framework="megatron", tp=2, pp=2, sequence_parallel=False)).plan.layout
    assert (megatron.tp, megatron.pp, megatron.splits_sequence) == (2, 2, False)
    split = [
        mapped(row(framework=name)).plan.layout.distributed_optimizer  # type: ignore[attr-defined]
        for name in ("nanotron zero0", "nanotron zero1", "megatron-bridge", "megatron")
    ]
    assert split == [False, True, True, False]
    zero: Any = mapped(row(framework="zero3", offload="optimizer params")).plan.layout
    assert (zero.stage, zero.offload_optimizer, zero.offload_params) == (3, "cpu", "cpu")
    kept: Any = mapped(row(framework="fsdp1 SHARD_GRAD_OP (~zero2)")).plan.layout
    assert kept.reshard_after_forward is False


def test_models_are_found_by_any_spelling_and_otherwise_by_shape() -> None:
    for name in ("meta-llama/Meta-Llama-3-8B", "Llama-3-8B", "llama 3 8B-Instruct"):
        assert mapped(row(model=name)).plan.architecture.num_parameters == 8_030_261_248
    shaped = mapped(
        row(
            model="mine",
            layers=16,
            hidden=2048,
            heads=32,
            kv_heads=32,
            ffn=8192,
            vocab=131072,
            n_params=1_342_244_864,
        )
    ).plan.architecture
    assert shaped.num_parameters == pytest.approx(1_342_244_864, rel=1e-3)
    assert shaped.tie_word_embeddings
    gpt = mapped(
        row(model="GPT-1.5B", framework="megatron", layers=22, hidden=2304, heads=24)
    ).plan.architecture
    assert (gpt.model_type, gpt.intermediate_size, gpt.num_parameters // 10**8) == ("gpt2", 9216, 15)


def test_a_card_with_other_memory_keeps_its_chip() -> None:
    gpu = mapped(row(gpu="H100-96GB-HBM2e-500W", gpu_mem_gb=96)).plan.cluster.gpu
    assert gpu.memory_bytes == 96 * GIB
    assert 90 * GIB < gpu.usable_bytes < 96 * GIB


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": None}, "framework not stated"),
        ({"framework": "colossalai"}, "ColossalAI is not modelled"),
        ({"framework": "megatron + ZB-2p"}, "zero-bubble schedule is not modelled"),
        ({"framework": "something new"}, "is not one of ours"),
        ({"framework": "zero2/3 (2 nodes)"}, "several ZeRO stages"),
        ({"model": "no-such-model-9b"}, "model not in the catalogue"),
        ({"gpu": "TPU"}, "is not in the catalogue"),
        ({"n_gpus": None}, "number of GPUs not stated"),
        ({"seq_len": None}, "sequence length not stated"),
        ({"micro_batch": None, "global_batch": 16}, "micro-batch not stated"),
        ({"activation_checkpointing": None}, "recomputation not stated"),
        ({"lora": {"rank": None}}, "LoRA rank not stated"),
        ({"lora": {"type": "BOFT", "rank": 8}}, "adapters of another kind"),
        ({"tp": 3}, "degrees do not divide the GPUs"),
        ({"dp": 4}, "degrees contradict"),
        ({"optimizer": "shampoo"}, "optimizer"),
        ({"global_batch": 12}, "no multiple"),
        ({"lora": {"rank": 10**6}}, "refused: Recipe.lora_rank"),
        ({"seq_len": 10**9}, "refused: Recipe.seq_len"),
        ({"layers": 4, "hidden": 10**9, "ffn": 8}, "refused: Architecture"),
    ],
)
def test_a_row_without_a_plan_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnmappedError, match=re.escape(reason)):
        mapped(row(**changes))


def test_each_kind_of_memory_is_compared_with_what_it_counts() -> None:
    found = mapped(row())
    report = found.plan.memory()
    bands = {
        name: compared(row(memory_kind=name), report)
        for name in ("allocated (max)", "reserved", "nvidia-smi")
    }
    tensors, reserved, everything = bands.values()
    assert tensors.low == tensors.point == tensors.high
    assert tensors.point < reserved.point < everything.point == report.peak_bytes
    assert reserved.low <= reserved.point <= reserved.high
    assert (everything.low, everything.high) == (report.low_bytes, report.high_bytes)
    assert [kind(row(memory_kind=name)) for name in ("active (peak GB)", "unknown", "nvidia-smi/device")] == [
        "allocated",
        "unknown",
        "nvidia-smi",
    ]
    assert measured_bytes(row()) == 47 * GIB
    assert measured_bytes(row(memory_kind="unknown (peak, GB)")) == 47e9
    assert measured_bytes(row(memory_kind="printed GB", notes="GB treated as GiB")) == 47 * GIB


def test_large_sources_are_sampled_the_same_way_in_any_order() -> None:
    many = [row(id=f"x-{number:04}") for number in range(400)]
    chosen = sampled(many)
    assert len(chosen) == 150
    assert sampled(reversed(many)) == chosen


def test_a_file_of_rows_nobody_has_seen_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    odd = {"peak_memory_gib": "much", "framework": 7, "lora": "yes", "gpu": [], "precision": {}}
    rows = [
        row(),
        row(id="a-2", framework=None),
        row(id="a-3", quality="C"),
        {"id": "a-4"},
        row(id="a-5", **odd),
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["--kind", "memory", "--rows", str(file)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert LAST_LINE.fullmatch(last)
    assert last.startswith("overall memory: 1 sources, 1 of 2 rows")


def test_no_row_at_all_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("", encoding="utf-8")
    assert main(["--rows", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "overall memory: 0 sources, 0 of 0 rows, no row scored"


def test_step_time_is_not_scored_before_there_is_a_step_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "time"]) != 0
    assert "no step model yet" in capsys.readouterr().err
