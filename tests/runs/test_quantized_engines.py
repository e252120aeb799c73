"""LoRA over a base in NF4 and int8 really trains: on two ranks, to the byte, and as a run that goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import THOROUGH, few, needs, thorough

torch = needs("torch")
needs("transformers")
needs("peft")
needs("bitsandbytes")

from families import architecture  # noqa: E402
from gloo_ranks import StandInContext, on_ranks, tiny_plan  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.memory.state.lora import count_adapter_parameters  # noqa: E402

NUM_STEPS = 3
TARGETS = ("q_proj", "v_proj", "down_proj")
KINDS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora"},
    "nf4": {"method": "lora", "quantization": "nf4"},
    "int8": {"method": "lora", "quantization": "int8"},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp qlora bf16-mixed": ("ddp", {}),
    "ddp nf4 fp16-mixed": ("ddp", {}),
    "ddp int8 bf16": ("ddp", {}),
    "fsdp2 qlora fp32": ("fsdp2", {}),
    "fsdp2 qlora bf16-mixed": ("fsdp2", {"reshard_after_forward": False}),
    "fsdp2 nf4 bf16": ("fsdp2", {}),
    "fsdp2 qlora fp16-mixed": ("fsdp2", {"shard": 1, "replicate": 2}),
}
KEPT = ("ddp qlora bf16-mixed", "ddp int8 bf16", "fsdp2 qlora bf16-mixed")
"""Run in every test; the others in `make test-all`. The parity table has FSDP2 in fp32."""
SMALL_BYTES = 2 * 2 * 2048 * 64
"""Of embedding and head in half precision: a checkpoint without the base has less."""


def make_plan(name: str, **recipe: Any) -> ss.Plan:
    framework, kind, precision = name.split()
    fields = {"precision": precision, "lora_rank": 4, "lora_targets": TARGETS, **KINDS[kind], **recipe}
    return tiny_plan(framework, 2, num_micro_batches=2, layout=CASES[name][1], **fields)


def new_context(ctx: StandInContext, plan: ss.Plan, name: str) -> StandInContext:
    from shardscope.frameworks.engines import get_engine_class

    folder = ctx.folder / name.replace(" ", "-")
    context = StandInContext(ctx.rank, ctx.world_size, plan, folder, ctx.device)
    context.engine = get_engine_class(plan)(context)
    return context


def make_batch(ctx: StandInContext, step: int) -> dict[str, Any]:
    tokens = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(step))
    rows = tokens.chunk(ctx.world_size)[ctx.rank]
    return {"input_ids": rows, "labels": rows.clone()}


def set_up(ctx: StandInContext, build: Callable[[], Any] | None = None) -> Any:
    from shardscope.training.model.model import build_model

    ctx.engine.learning_rate = 1e-2
    ctx.engine.setup(build or (lambda: build_model(ctx.plan.architecture)))
    return ctx.engine


def read_parameter_bytes(engine: Any) -> dict[str, Any]:
    """Return the bytes of every parameter of this rank, by name."""
    from shardscope.training.optimizers.gradients import local_shard

    return {
        name: local_shard(p.detach()).flatten().view(torch.uint8).clone()
        for name, p in engine.model.named_parameters()
    }


def train_and_resume(ctx: StandInContext, name: str) -> dict[str, Any]:
    """Train, save, take two more steps; repeat them from the checkpoint; compare adapters with peft's."""
    context = new_context(ctx, make_plan(name), name)
    engine = set_up(context)
    before = read_parameter_bytes(engine)
    losses = [engine.step(make_batch(context, step)) for step in range(NUM_STEPS)]
    after = read_parameter_bytes(engine)
    engine.save("here")
    went_on = [engine.step(make_batch(context, 7)), engine.step(make_batch(context, 8))]
    held, peak = engine.memory(), engine.peak_tensor_bytes
    again = new_context(ctx, make_plan(name), name)
    resumed = set_up(again)
    resumed.load("here")
    same = [resumed.step(make_batch(again, 7)), resumed.step(make_batch(again, 8))]
    resumed.export("out")
    return {
        "losses": losses,
        "changed": [key for key in after if not torch.equal(after[key], before[key])],
        "went_on": [went_on, same],
        "next": resumed.step(make_batch(again, 9)),
        "held": held,
        "peak": peak,
        "engine": context.records["engine"],
        "saved_bytes": sum(file.stat().st_size for file in (context.folder / "here").iterdir()),
    }


def pretrained_in_nf4(ctx: StandInContext, storage: str = "uint8", double: bool = True) -> Callable[[], Any]:
    """Make a model that a task quantizes itself, as the Hub's examples do."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    folder = ctx.folder / "base"
    return lambda: AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )


def read_refusals(ctx: StandInContext) -> dict[str, str]:
    """Return the errors for bases that are not the plan's."""
    qlora, nf4 = make_plan("ddp qlora bf16-mixed"), make_plan("ddp nf4 fp16-mixed", precision="bf16-mixed")
    cases = {
        "double": (nf4, pretrained_in_nf4(ctx)),
        "single": (qlora, pretrained_in_nf4(ctx, double=False)),
        "none": (replace(nf4, recipe=replace(nf4.recipe, quantization=None)), pretrained_in_nf4(ctx)),
        "storage": (make_plan("fsdp2 qlora bf16-mixed"), pretrained_in_nf4(ctx)),
    }
    refusals = {}
    for name, (plan, build) in cases.items():
        with pytest.raises(RuntimeError) as refused:
            set_up(new_context(ctx, plan, name), build)
        refusals[name] = str(refused.value)
    return refusals


def own_base(ctx: StandInContext, name: str, storage: str) -> dict[str, Any]:
    """Train a base that ``from_pretrained`` quantized, and one that the engine quantized."""
    from transformers import AutoModelForCausalLM

    builds = (
        lambda: AutoModelForCausalLM.from_pretrained(ctx.folder / "base", dtype=torch.float32),
        pretrained_in_nf4(ctx, storage),
    )
    losses = []
    for build in builds:
        context = new_context(ctx, make_plan(name), f"own {name}")
        engine = set_up(context, build)
        losses.append([engine.step(make_batch(context, step)) for step in range(NUM_STEPS)])
    return {"losses": losses, "engine": context.records["engine"], "held": engine.memory()}


def all_cases(ctx: StandInContext) -> dict[str, Any]:
    import torch.distributed as dist

    from shardscope.training.model.model import build_model

    if ctx.rank == 0:
        torch.manual_seed(0)
        # In half precision before it is packed, for then both ways pack the same numbers.
        build_model(ctx.plan.architecture).to(torch.bfloat16).save_pretrained(ctx.folder / "base")
    dist.barrier()
    return {
        **{name: train_and_resume(ctx, name) for name in (CASES if THOROUGH else KEPT)},
        "refusals": read_refusals(ctx),
        "own ddp": own_base(ctx, "ddp qlora bf16-mixed", "uint8"),
        "own fsdp2": own_base(ctx, "fsdp2 qlora bf16-mixed", "bfloat16"),
    }


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Run every case in one process group; return the results of both ranks."""
    folder = tmp_path_factory.mktemp("quantized")
    return on_ranks(2, tiny_plan("ddp", 2), all_cases, folder), folder


@thorough()
@pytest.mark.parametrize("name", few(CASES, KEPT))
def test_adapters_train_over_a_frozen_quantized_base(
    name: str, rank_results: tuple[list[dict[str, Any]], Path]
) -> None:
    plan, case = make_plan(name), rank_results[0][0][name]
    assert case["losses"][-1] < case["losses"][0]
    assert case["losses"] == rank_results[0][1][name]["losses"]
    assert all("lora_" in key for key in case["changed"])
    # Of a layer A and B of each projection; B is zero at first, so that only the second step changes A.
    assert len(case["changed"]) == 2 * len(TARGETS) * plan.architecture.num_hidden_layers
    engine = case["engine"]
    assert engine["num_trained_parameters"] == count_adapter_parameters(plan.architecture, plan.recipe)
    kind = {"nf4": "NF4", "int8": "int8"}[plan.recipe.base_quantization or ""]
    double = " with double quantization" if plan.recipe.method == "qlora" else ""
    number = f"{engine['num_trained_parameters']:,}"
    assert (
        f"{number} adapter weights over a frozen base quantized to {kind}{double} (14 Linears)"
        in engine["sentence"]
    )


@thorough()
@pytest.mark.parametrize("name", few(CASES, KEPT))
def test_rank_memory_of_a_quantized_plan_is_as_planned(
    name: str, rank_results: tuple[list[dict[str, Any]], Path]
) -> None:
    case, planned = rank_results[0][0][name], make_plan(name).memory().at("optimizer")
    held = case["held"]
    gradients = case["peak"] - held["parameters"] - held["optimizer"]
    assert (held["parameters"], gradients, held["optimizer"]) == (
        planned["parameters"],
        planned["gradients"],
        planned["optimizer"],
    )


@thorough()
@pytest.mark.parametrize("name", few(CASES, KEPT))
def test_a_checkpoint_of_adapters_resumes(name: str, rank_results: tuple[list[dict[str, Any]], Path]) -> None:
    went_on, same = rank_results[0][0][name]["went_on"]
    assert same == went_on
    assert rank_results[0][0][name]["saved_bytes"] < SMALL_BYTES


@thorough()
@pytest.mark.parametrize("name", few([*KEPT, "fsdp2 qlora fp32"], KEPT))
def test_adapters_open_in_peft(name: str, rank_results: tuple[list[dict[str, Any]], Path]) -> None:
    """Over a base that bitsandbytes packs the same way, they have the loss of the engine's next step."""
    from peft import PeftModel
    from tests.parity.adapters import pack_linears

    from shardscope.training.model.model import build_model

    plan, out = make_plan(name), rank_results[1] / name.replace(" ", "-") / "out"
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    torch.manual_seed(0)
    base = build_model(plan.architecture)
    if plan.recipe.precision != "fp32":
        base = base.to(torch.bfloat16)
    pack_linears(base, plan.recipe)
    model = PeftModel.from_pretrained(base, str(out), autocast_adapter_dtype=False).train()
    tokens = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(9))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled="mixed" in plan.recipe.precision):
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    expected = rank_results[0][0][name]["next"]
    assert loss == pytest.approx(expected, abs=1e-5 if plan.recipe.precision == "fp32" else 2e-2)


@thorough()
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_a_base_quantized_by_the_task_is_accepted(
    framework: str, rank_results: tuple[list[dict[str, Any]], Path]
) -> None:
    case = rank_results[0][0][f"own {framework}"]
    ours, theirs = case["losses"]
    assert theirs == pytest.approx(ours, abs=1e-3)
    planned = make_plan(f"{framework} qlora bf16-mixed").memory().at("optimizer")
    assert case["held"]["parameters"] == planned["parameters"]
    assert (
        "over a frozen base quantized to NF4 with double quantization (14 Linears)"
        in case["engine"]["sentence"]
    )


@thorough()
def test_another_base_than_the_plans_raises(rank_results: tuple[list[dict[str, Any]], Path]) -> None:
    assert rank_results[0][0]["refusals"] == {
        "double": "the plan's base is quantized to nf4, and that of build_model is quantized to nf4 with "
        "double quantization",
        "single": "the plan's base is quantized to nf4 with double quantization, and that of build_model is "
        "quantized to nf4",
        "none": "the plan's base is not quantized, and that of build_model is quantized to nf4 with double "
        "quantization",
        "storage": "the quantized weights are stored as torch.uint8, which an all-gather in torch.bfloat16 "
        "would cast: build them with bnb_4bit_quant_storage=torch.bfloat16",
    }


@pytest.mark.parametrize("framework", few(["ddp", "fsdp2"], []))
@pytest.mark.usefixtures("bounded_time", "nothing_left")
def test_qlora_as_a_launched_run(framework: str, tmp_path: Path) -> None:
    """``launch`` with ``Pretrain``: it trains, says what it was, saves, exports, and goes on from there."""
    plan = make_plan(f"{framework} qlora bf16-mixed")
    task = ss.Pretrain(num_steps=3, learning_rate=1e-2, save_checkpoint=True, export=True)
    run = ss.launch(plan, task, folder=tmp_path, name="first")
    assert run.wait() == "finished", run.error
    said = run.engine_reports()[0]["engine"]
    assert said["base_quantization"] == "nf4" and said["base_double_quantization"]
    assert "over a frozen base quantized to NF4 with double quantization (14 Linears)" in said["sentence"]
    exported = {path.name for path in (run.folder / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= exported
    longer = replace(task, num_steps=5, export=False, warmup=0, resume=run.folder)
    second = ss.launch(plan, longer, folder=tmp_path, name="second")
    assert second.wait() == "finished", second.error
    lines = [line for line in second.metrics() if line["rank"] == 0]
    assert [line["step"] for line in lines] == [3, 4]


def train_and_evaluate(ctx: StandInContext) -> dict[str, Any]:
    """Return the losses of one batch: of a step that changes nothing, and without gradients."""
    engine = set_up(ctx)
    engine.set_learning_rate(0.0)
    return {"step": engine.step(make_batch(ctx, 0)), "evaluation": engine.evaluate(make_batch(ctx, 0))}


def test_latent_attention_is_evaluated_over_an_int8_base(tmp_path: Path) -> None:
    """Its expanded keys are a Linear of four dimensions, of which bitsandbytes' int8 takes three."""
    plan = tiny_plan(
        "ddp",
        2,
        num_micro_batches=2,
        architecture=architecture("deepseek_v2", 2),
        method="lora",
        quantization="int8",
    )
    first, _ = on_ranks(2, plan, train_and_evaluate, tmp_path)
    # Steps multiply by the dequantized weights, evaluations in int8.
    assert first["evaluation"] == pytest.approx(first["step"], abs=0.02)
