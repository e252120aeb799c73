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


@pytest.mark.parametrize("spelled", [str, float, lambda value: [value], lambda value: f" {value:,} "])
def test_numbers_are_read_in_any_form(spelled: Any) -> None:
    numbers = {key: spelled(ROW[key]) for key in ("n_gpus", "seq_len", "micro_batch", "global_batch")}
    assert mapped(row(**numbers)).plan == mapped(row()).plan


def test_words_and_units_in_numbers_are_read_and_others_refused() -> None:
    plan = mapped(row(seq_len="4k", n_gpus="8 GPUs", gpu_mem_gb="80 GB", tp="n/a", dp="auto")).plan
    assert plan == mapped(row()).plan
    with pytest.raises(UnmappedError, match="tp '2 or 4' is no whole number"):
        mapped(row(tp="2 or 4"))


def test_a_row_in_another_order_with_unknown_keys_is_the_same_row() -> None:
    turned = dict(reversed(list(row(foo="bar", notes=None, interconnect=[]).items())))
    assert mapped(turned).plan == mapped(row()).plan


def test_a_known_model_may_have_other_layers_and_a_padded_vocabulary() -> None:
    found = mapped(row(model="DeepSeek-V3", layers=4, framework="megatron-core", ep=8)).plan.architecture
    assert (found.name, found.num_hidden_layers) == ("deepseek-v3", 4)
    padded = mapped(row(layers=32, hidden=4096, vocab=128512)).plan.architecture
    assert (padded.name, padded.vocab_size) == ("llama-3.1-8b", 128512)


def test_a_shape_is_held_against_its_parameters() -> None:
    shape = {"model": "mine", "layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50368}
    plain_mlp = mapped(row(**shape, n_params=1_315_950_592))
    assert not plain_mlp.plan.architecture.gated_mlp
    assert "MLP of two matrices: from the parameters" in plain_mlp.assumed
    with pytest.raises(UnmappedError, match="other parameters than the row states"):
        mapped(row(**shape, n_params="7B"))
    for other in ("ViT-22B", "T5-11B", "bert-large"):
        with pytest.raises(UnmappedError, match="model of another kind"):
            mapped(row(**{**shape, "model": other}))
    with pytest.raises(UnmappedError, match="state-space"):
        mapped(row(**{**shape, "model": "Nemotron-H 8B"}))
    bloom = mapped(row(model="bloom-3b", layers=30, hidden=2560, heads=32, vocab=250880)).plan.architecture
    assert (bloom.gated_mlp, bloom.intermediate_size) == (False, 10240)
    with pytest.raises(UnmappedError, match="experts by a shape"):
        mapped(row(**shape, num_experts=8))


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        ("PyTorch FSDP via accelerate", {}, ("fsdp2", "FSDP2")),
        ("torchtune", {}, ("fsdp2", "FSDP2")),
        ("NeMo Automodel", {}, ("fsdp2", "FSDP2")),
        ("Primus (torchtitan)", {}, ("fsdp2", "FSDP2")),
        ("Primus (Megatron)", {}, ("megatron", "Megatron")),
        ("NeMo 2.0", {}, ("megatron", "Megatron")),
        ("axolotl + deepspeed zero2", {}, ("deepspeed", "DeepSpeed")),
        ("ds_z3_offload", {"offload": "yes"}, ("deepspeed", "DeepSpeed")),
        ("DeepSpeed", {"zero_stage": 3}, ("deepspeed", "DeepSpeed")),
        ("Megatron-DeepSpeed ZeRO stage 3", {}, ("deepspeed", "DeepSpeed")),
        ("LLaMA-Factory", {"n_gpus": 1, "global_batch": 1}, ("ddp", "one GPU")),
        (["transformers", "DDP"], {}, ("ddp", "DDP")),
    ],
)
def test_frameworks_are_found_inside_trainers(words: Any, more: dict[str, Any], expected: Any) -> None:
    found = mapped(row(framework=words, **more))
    assert (found.plan.layout.framework, found.framework) == expected


def test_what_is_split_between_copies_and_what_is_off_is_the_frameworks_own() -> None:
    hybrid = mapped(row(framework="FSDP HYBRID_SHARD", n_gpus=32, nodes=4, global_batch=32))
    assert hybrid.plan.degrees.replicate == 4
    off = mapped(row(framework="Megatron-LM"))
    assert not off.plan.layout.distributed_optimizer  # type: ignore[attr-defined]
    assert "distributed optimizer not stated: off" in off.assumed
    on = mapped(row(framework="Megatron-LM", optimizer="Adam (distributed)"))
    assert on.plan.layout.distributed_optimizer  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["offload", "activation_checkpointing", "optimizer", "precision"])
@pytest.mark.parametrize("framework", ["fsdp2", "zero3", "megatron", "ddp"])
def test_an_unknown_word_is_never_read_as_none(key: str, framework: str) -> None:
    with pytest.raises(UnmappedError, match="frobnicate"):
        mapped(row(framework=framework, **{key: "frobnicate"}))


def test_one_gpu_cannot_offload_and_megatron_has_no_formula_for_it() -> None:
    for framework in ("single", "megatron"):
        with pytest.raises(UnmappedError, match="in host memory"):
            mapped(row(framework=framework, n_gpus=1, global_batch=1, offload="optimizer"))


def test_lora_is_read_in_many_forms() -> None:
    forms: list[Any] = [
        {"rank": 8, "targets": "q,v"},
        {"r": "8", "target_modules": ["q_proj", "v_proj"]},
        "r=8 q,v",
        "rank 8, q_proj, v_proj",
    ]
    plans = [mapped(row(lora=form)).plan for form in forms]
    assert all(plan == plans[0] for plan in plans)
    assert (plans[0].recipe.lora_rank, plans[0].recipe.lora_targets) == (8, ("q_proj", "v_proj"))
    every = mapped(row(model="Phi-3-mini", lora={"rank": 8, "targets": "all linear layers"})).plan.recipe
    assert every.lora_targets == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    nothing: tuple[Any, ...] = ("no", False, {}, "none")
    for off in nothing:
        assert mapped(row(lora=off)).plan.recipe.method == "full"


def test_a_quantised_base_is_found_where_it_is_said_and_strange_ones_are_refused() -> None:
    lora = {"rank": 8}
    for said in (
        {"qlora": "yes"},
        {"precision": "4-bit"},
        {"framework": "fsdp2 QLoRA"},
        {"model": "unsloth/Meta-Llama-3.1-8B-bnb-4bit"},
    ):
        assert mapped(row(**{"lora": lora, **said})).plan.recipe.method == "qlora", said
    for strange in ("aqlm 2-bit", "hqq", "frobnicate"):
        with pytest.raises(UnmappedError, match="a base quantised as"):
            mapped(row(lora=lora, qlora=strange))


def test_defaults_of_the_software_are_used_and_named() -> None:
    found = mapped(
        row(framework="LLaMA-Factory", n_gpus=1, global_batch=1, lora=True, activation_checkpointing=None)
    )
    recipe = found.plan.recipe
    assert (recipe.lora_rank, recipe.recompute, recipe.optimizer) == (8, "full", "adamw_foreach")
    assert sum("LLaMA-Factory's own" in words for words in found.assumed) == 4
    chunked = mapped(row(framework="torchtune")).plan.recipe
    assert (chunked.loss, chunked.precision) == ("chunked", "bf16")


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


def test_eight_bits_may_be_in_the_frameworks_name() -> None:
    assert mapped(row(framework="FSDP2 + Float8")).plan.recipe.precision == "fp8-mixed"


def test_a_global_batch_may_be_in_tokens() -> None:
    found = mapped(row(global_batch=2**21, seq_len=4096)).plan.recipe
    assert (found.micro_batch_size, found.global_batch_size) == (1, 512)


def test_optimizers_kernels_are_pytorchs_own_where_nothing_is_said() -> None:
    found = mapped(row(optimizer="AdamW"))
    assert found.plan.recipe.optimizer == "adamw_foreach"
    assert "AdamW's kernel not stated: adamw_foreach, which is PyTorch's own" in found.assumed
    assert "optimizer not stated: AdamW" in mapped(row(framework="megatron")).assumed
    assert mapped(row(optimizer="AdamW (fused)")).plan.recipe.optimizer == "adamw"
    assert mapped(row(optimizer="AdamW", framework="zero3")).plan.recipe.optimizer == "adamw"


def test_degrees_that_only_the_framework_names_are_read_and_bare_ones_refused() -> None:
    degrees = mapped(row(framework="Megatron-LM TP2 PP=2", grad_accum=4, global_batch=16)).plan.degrees
    assert (degrees.tp, degrees.pp, degrees.data_parallel) == (2, 2, 2)
    assert mapped(row(framework="fsdp2 + TP", tp=2, global_batch=4)).plan.degrees.tp == 2
    with pytest.raises(UnmappedError, match="degree of ep not stated"):
        mapped(row(framework="fsdp2 + EP"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ZeRO-3 Offload", ("cpu", "cpu")),
        ("ds_z2_offload", ("cpu", None)),
        ("ZeRO-Offload", ("cpu", None)),
        ("DeepSpeed ZeRO-2 (no offload)", (None, None)),
    ],
)
def test_offload_may_be_in_the_frameworks_name(words: str, expected: tuple[str | None, str | None]) -> None:
    layout: Any = mapped(row(framework=words)).plan.layout
    assert (layout.offload_optimizer, layout.offload_params) == expected
    stated: Any = mapped(row(framework=words, offload="none")).plan.layout
    assert (stated.offload_optimizer, stated.offload_params) == (None, None)


def test_offload_in_the_name_counts_for_every_framework() -> None:
    fsdp: Any = mapped(row(framework="FSDP + CPU offload")).plan.layout
    assert fsdp.offload == "cpu"
    with pytest.raises(UnmappedError, match="Megatron with its optimizer in host memory"):
        mapped(row(framework="Megatron-LM, optimizer offload"))


def test_adapters_own_dropout_and_quantised_kind_are_read() -> None:
    found = mapped(row(framework="ddp", lora={"rank": 8, "type": "qlora", "dropout": 0.05})).plan.recipe
    assert (found.method, found.lora_dropout) == ("qlora", 0.05)
    open_targets = mapped(row(lora={"rank": 8, "targets": "default"}))
    assert "LoRA targets not stated: all of attention's" in open_targets.assumed


def test_parts_of_layers_are_not_taken_for_whole_ones() -> None:
    megatron = mapped(row(framework="megatron", activation_checkpointing="attention recompute")).plan.recipe
    assert megatron.recompute == "selective"
    second = mapped(row(activation_checkpointing="selective (1/2)")).plan.recipe
    assert (second.recompute, second.recompute_interval) == ("full", 2)
    for words in ("selective: mlp", "mlp recompute"):
        with pytest.raises(UnmappedError):
            mapped(row(framework="megatron", activation_checkpointing=words))
