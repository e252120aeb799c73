"""A run that begins from a real model's files: every engine on real ranks, with one process's losses.

One case each of DeepSpeed and Megatron-core runs in their own tests, whose ranks have imported them.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, skip_without, thorough

torch = needs("torch")
needs("transformers")

from finetuned_models import (  # noqa: E402
    MODELS,
    MULTIMODAL,
    SIZES,
    make_batch,
    make_plan,
    set_up_engine,
    small_model,
    train_alone,
    train_on_ranks,
    write_model,
)
from gloo_ranks import StandInContext, on_ranks  # noqa: E402
from host_memory import asks_linux, most_anonymous  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout  # noqa: E402

NF4 = {"method": "qlora", "lora_rank": 4, "precision": "bf16-mixed"}
CASES: dict[str, dict[str, tuple[str, Any, dict[str, Any]]]] = {
    "torch": {
        "ddp": ("llama", Layout.ddp(), {}),
        "ddp of a tied model in bf16": ("tied", Layout.ddp(), {}),
        "ddp of experts": ("mixtral", Layout.ddp(), {}),
        "ddp, adapters": ("llama", Layout.ddp(), {"method": "lora", "lora_rank": 4}),
        "fsdp2": ("gpt2", Layout.fsdp2(), {}),
        "fsdp2 without formulas": ("qwen3_5", Layout.fsdp2(), {}),
        "fsdp2 of experts": ("mixtral", Layout.fsdp2(), {}),
        "ddp of a multimodal gemma3": ("gemma3", Layout.ddp(), {}),
        "fsdp2 of a multimodal gemma3": ("gemma3", Layout.fsdp2(), {}),
        "ddp of a multimodal mistral3": ("mistral3", Layout.ddp(), {}),
        "fsdp2 of a multimodal mistral3": ("mistral3", Layout.fsdp2(), {}),
        "fsdp2 of a multimodal gemma3, adapters": (
            *("gemma3", Layout.fsdp2()),
            {"method": "lora", "lora_rank": 4},
        ),
        "fsdp2, adapters": ("llama", Layout.fsdp2(), {"method": "lora", "lora_rank": 4}),
        "fsdp2 of a tied model in bf16": ("tied", Layout.fsdp2(), {}),
        "fsdp2, shards on the host": ("llama", Layout.fsdp2(offload="cpu"), {}),
        "tp of a tied model in bf16": ("tied", Layout.fsdp2(tp=2), {}),
        "tp": ("llama", Layout.fsdp2(tp=2), {}),
        "pp of a tied model in bf16": ("tied", Layout.fsdp2(pp=2), {}),
        "pp, interleaved": ("llama", Layout.fsdp2(pp=2, vpp=2), {}),
        "ddp, a base in NF4": ("llama", Layout.ddp(), NF4),
        "fsdp2, a base in NF4": ("llama", Layout.fsdp2(), NF4),
    },
    "deepspeed": {
        "zero-0": ("llama", Layout.zero(stage=0), {}),
        "zero-1": ("gpt2", Layout.zero(stage=1), {}),
        "zero-2": ("llama", Layout.zero(stage=2), {}),
        "zero-3": ("gpt2", Layout.zero(stage=3), {}),
        "zero-3 without formulas": ("qwen3_5", Layout.zero(stage=3), {}),
        "zero-3 of a tied model in bf16": ("tied", Layout.zero(stage=3), {}),
        "zero-3 of experts": ("mixtral", Layout.zero(stage=3), {}),
        "zero-3, adapters": ("llama", Layout.zero(stage=3), {"method": "lora", "lora_rank": 4}),
        "pp of a tied model in bf16": ("tied", Layout.zero(stage=1, pp=2), {}),
        "ep": ("mixtral", Layout.zero(stage=1, ep=2), {}),
    },
    "megatron": {
        "tp": ("gpt2", Layout.megatron(tp=2), {}),
        "pp of a tied model in bf16": ("tied", Layout.megatron(pp=2), {}),
        "ep": ("mixtral", Layout.megatron(ep=2), {}),
        "distributed optimizer": ("llama", Layout.megatron(), {}),
    },
}
KEPT = (
    *("ddp, adapters", "fsdp2", "fsdp2 of experts", "fsdp2, adapters", "tp of a tied model in bf16"),
    *("pp of a tied model in bf16", "fsdp2 of a multimodal gemma3"),
)
"""Cases that run in every test."""
STARTS = {
    "torch": ("torch", KEPT),
    "bitsandbytes": ("torch", tuple(name for name in CASES["torch"] if "NF4" in name)),
    "torch, others": (
        "torch",
        tuple(name for name in CASES["torch"] if name not in KEPT and "NF4" not in name),
    ),
    "deepspeed": ("deepspeed", tuple(CASES["deepspeed"])),
    "megatron": ("megatron", tuple(CASES["megatron"])),
}
"""Each entry starts two ranks: a framework, and names of its cases."""


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: small_model(parent, name) for name in (*MODELS, *MULTIMODAL)}


def read_losses(
    ctx: StandInContext, models: dict[str, Path], framework: str, names: tuple[str, ...]
) -> dict[str, list[float]]:
    results = {}
    for name in names:
        model, layout, recipe = CASES[framework][name]
        results[name] = train_on_ranks(ctx, models[model], make_plan(models[model], layout, **recipe))
    return results


@pytest.fixture(scope="module")
def reference_losses(model_folders: dict[str, Path]) -> dict[str, list[float]]:
    return {name: train_alone(folder) for name, folder in model_folders.items()}


@thorough()
@pytest.mark.parametrize("start", few(STARTS, ["torch"]))
def test_every_engine_starts_with_the_pretrained_models_loss(
    start: str, model_folders: dict[str, Path], reference_losses: dict[str, list[float]], tmp_path: Path
) -> None:
    framework, names = STARTS[start]
    skip_without(start.partition(",")[0])
    cases = CASES[framework]
    model, layout, recipe = cases[names[0]]
    first = make_plan(model_folders[model], layout, **recipe)
    body = partial(read_losses, models=model_folders, framework=framework, names=names)
    results = on_ranks(2, first, body, tmp_path)
    for result in results:
        for name in names:
            # Adapters change another step than all weights do, and four bits another loss.
            recipe = cases[name][2]
            steps = 1 if recipe else len(result[name])
            wanted, within = reference_losses[cases[name][0]], 0.02 if recipe == NF4 else 1e-4
            assert result[name][:steps] == pytest.approx(wanted[:steps], abs=within), name
        adapted = [result[name] for name in names if cases[name][2] and cases[name][0] == "llama"]
        assert all(losses == pytest.approx(adapted[0], abs=1e-4) for losses in adapted)
        assert all(losses[1] != losses[0] for losses in result.values())


# ---- host memory of each rank

WIDE = {**SIZES, "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192}
"""34 MB in bf16, 68 MB as fp32 originals."""


def most_held(ctx: StandInContext, small: Path, wide: Path) -> dict[str, float]:
    """Return the peak of a rank's host memory during setup, as a share of the fp32 model."""
    results = {}
    for layout in (Layout.fsdp2(), Layout.ddp()):
        # The first setup imports libraries and creates buffers that stay.
        set_up_engine(ctx, small, make_plan(small, layout))
        plan = make_plan(wide, layout)
        with most_anonymous() as most:
            own = set_up_engine(ctx, wide, plan)
        results[own.plan.layout.framework] = most[0] / (4 * plan.architecture.num_parameters)
    return results


def most_held_by_stage_3(ctx: StandInContext, small: Path, wide: Path) -> float:
    """Return the same of ZeRO-3 while the model is read and sharded, before the optimizer state is made."""
    from shardscope.frameworks.deepspeed.engine import engine

    set_up_engine(ctx, small, make_plan(small, Layout.zero(stage=3)))
    cut, found = engine.partition_one_by_one, [0]

    def record_most_held(*args: Any, **options: Any) -> None:
        with most_anonymous() as most:
            cut(*args, **options)
        found[0] = most[0]

    engine.partition_one_by_one = record_most_held
    plan = make_plan(wide, Layout.zero(stage=3))
    set_up_engine(ctx, wide, plan)
    return found[0] / (4 * plan.architecture.num_parameters)


@thorough()
@asks_linux
def test_no_zero_3_rank_holds_the_whole_model(model_folders: dict[str, Path], tmp_path: Path) -> None:
    skip_without("deepspeed")
    wide = write_model(tmp_path / "wide", WIDE, torch.bfloat16, max_shard_size="16MB")
    plan, body = make_plan(wide, Layout.zero(stage=3)), partial(most_held_by_stage_3, wide=wide)
    for held in on_ranks(2, plan, partial(body, small=model_folders["llama"]), tmp_path / "ranks"):
        assert 0.4 < held < 0.85, "its half, and the largest matrix whole"


def most_held_packed(ctx: StandInContext, small: Path, wide: Path, layout: Any) -> float:
    """Return the same of a base in NF4, whose matrices are packed one by one."""
    set_up_engine(ctx, small, make_plan(small, layout, **NF4))
    plan = make_plan(wide, layout, **NF4)
    with most_anonymous() as most:
        set_up_engine(ctx, wide, plan)
    return most[0] / (4 * plan.architecture.num_parameters)


WIDER = {**WIDE, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 2048}
"""Its matrices are so large that the system's allocator gives them back."""


@thorough()
@asks_linux
@pytest.mark.parametrize("layout", [Layout.ddp(), Layout.fsdp2()], ids=["ddp", "fsdp2"])
def test_no_rank_holds_an_unquantized_base(
    layout: Any, model_folders: dict[str, Path], tmp_path: Path
) -> None:
    skip_without("bitsandbytes")
    wide = write_model(tmp_path / "wide", WIDER, torch.bfloat16, max_shard_size="100MB")
    body = partial(most_held_packed, small=model_folders["llama"], wide=wide, layout=layout)
    for held in on_ranks(2, make_plan(wide, layout, **NF4), body, tmp_path / "ranks"):
        # The packed base is 0.15 of it; packing one of its twelve matrices takes 0.28.
        assert 0.3 < held < 0.7


@thorough()
@asks_linux
def test_no_fsdp2_rank_holds_the_whole_model(model_folders: dict[str, Path], tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide", WIDE, torch.bfloat16, max_shard_size="16MB")
    plan = make_plan(wide, Layout.fsdp2())
    for held in on_ranks(
        2, plan, partial(most_held, small=model_folders["llama"], wide=wide), tmp_path / "ranks"
    ):
        assert 0.4 < held["fsdp2"] < 0.75, held
        assert held["ddp"] > 0.9, f"the measure sees a whole model: {held}"


# ---- from a folder to a folder


@pytest.mark.usefixtures("bounded_time", "nothing_left")
def test_a_pretrained_model_is_fine_tuned_and_exported(
    model_folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("It was the whale, and nothing but the whale. " * 400)
    folder = Path(shutil.copytree(model_folders["tied"], tmp_path / "tied"))
    record = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.25}
    (folder / "config.json").write_text(json.dumps(record))
    task = ss.Finetune(weights=folder, num_steps=4, learning_rate=1e-3, data=text, export=True)
    plan = make_plan(folder, Layout.fsdp2())
    run = ss.launch(plan, task, folder=tmp_path / "runs")
    assert run.wait(120) == "finished", run.error
    losses = [line["loss"] for line in run.metrics() if line["rank"] == 0]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert f"initial weights from {folder}: " in run.logs(0)

    out = Path(run.folder) / "export"
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert after.config.rms_norm_eps == SIZES["rms_norm_eps"] and type(after) is type(before)
    moved = {
        name: float((parameter - before.get_parameter(name)).detach().abs().max())
        for name, parameter in after.named_parameters()
    }
    assert all(0 < distance < 0.01 for distance in moved.values()), moved
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer.decode(tokenizer("the whale")["input_ids"]) == "the whale"

    exported = json.loads((out / "config.json").read_text())
    assert exported == record | {"dtype": "float32"}, "the folder's own, dropout and all"

    again = ss.Finetune(weights=out)
    again.check(make_plan(out, Layout.fsdp2()))
    assert make_plan(out, Layout.fsdp2()).architecture.parameter_groups == plan.architecture.parameter_groups


@thorough()
@pytest.mark.usefixtures("bounded_time", "nothing_left")
@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_language_model_of_a_multimodal_checkpoint_is_exported(
    name: str, model_folders: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder, tokens = model_folders[name], make_batch(7)["input_ids"]
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    before = whole(input_ids=tokens).logits
    runs = {}
    # The learning rate changes no digit of the base, and much of the adapters.
    for method, layout, rate in (("full", Layout.fsdp2(), 1e-12), ("lora", Layout.ddp(), 1e-2)):
        task = ss.Finetune(folder, num_steps=2, learning_rate=rate, export=True)
        plan = make_plan(folder, layout, method=method)
        runs[method] = run = ss.launch(plan, task, folder=tmp_path / method)
        assert run.wait(120) == "finished", run.error
        assert "its language model alone" in run.logs(0)

    exported = AutoModelForCausalLM.from_pretrained(runs["full"].model)
    assert (
        type(exported).__name__ == {"gemma3": "Gemma3ForCausalLM", "mistral3": "Ministral3ForCausalLM"}[name]
    )
    assert torch.allclose(exported(input_ids=tokens).logits, before, atol=1e-5)
    again = ss.Finetune(runs["full"].model)
    again.check(make_plan(runs["full"].model, Layout.ddp()))

    merged = AutoModelForCausalLM.from_pretrained(ss.merge(runs["lora"]))
    assert type(merged) is type(exported)
    after = merged(input_ids=tokens).logits
    assert (after - before).abs().max() > 0.01
    adapted = PeftModel.from_pretrained(exported, runs["lora"].model).eval()
    assert torch.allclose(adapted(input_ids=tokens).logits, after, atol=1e-4)
