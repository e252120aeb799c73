"""FSDP2 with tensor-parallel parts and pipeline stages: four real ranks train as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from families import architecture
from tests.requirements import needs, thorough

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402

from shardscope import Architecture, Plan  # noqa: E402
from shardscope.frameworks.engines import get_engine_class  # noqa: E402
from shardscope.frameworks.limits import STAGED_FAMILIES  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402

NUM_STEPS = 2
ROWS, SEQ_LEN = 4, 32
LAYERS = 4
STATE = ("parameters", "gradients", "optimizer")
LLAMA = replace(tiny_llama(), num_hidden_layers=LAYERS)
TIED = replace(LLAMA, tie_word_embeddings=True)


def make_plan(world_size: int, arch: Architecture = LLAMA, rows: int = 1, **fields: Any) -> Plan:
    """``ROWS`` rows a step in micro-batches of ``rows``, however many ranks share them."""
    names = ("recompute", "precision", "method", "lora_rank", "loss", "dropout")
    recipe = {name: fields.pop(name) for name in names if name in fields}
    return tiny_plan(
        "fsdp2" if world_size > 1 else "ddp",
        world_size,
        architecture=arch,
        micro_batch_size=rows,
        global_batch_size=ROWS,
        seq_len=SEQ_LEN,
        layout=fields,
        **recipe,
    )


CASES: dict[str, Plan] = {
    "shard2 x tp2": make_plan(4, tp=2),
    "copies2 x tp2, tied": make_plan(4, TIED, rows=2, tp=2, replicate=2),
    "pp2 x tp2, recomputed": make_plan(4, pp=2, tp=2, recompute="full"),
    "shard2 x tp2, offloaded": make_plan(4, tp=2, recompute="offload"),
    "pp4, tied": make_plan(4, TIED, pp=4),
    "pp2 x vpp2 x shard2": make_plan(4, pp=2, vpp=2),
}


def make_batch(engine: Any, step: int, seq_len: int = SEQ_LEN) -> dict[str, Any]:
    """This rank's share of a global batch of which some labels do not count, more in later rows."""
    tokens = torch.randint(0, 64, (ROWS, seq_len), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 5 * row] = -100
    share, shares = engine.data_rank, engine.num_data_ranks
    return {"input_ids": tokens.chunk(shares)[share], "labels": labels.chunk(shares)[share]}


def set_up(ctx: StandInContext, plan: Plan, seed: int = 0) -> Any:
    from shardscope.training.model.model import build_model

    engine = ctx.engine = get_engine_class(plan)(ctx)
    engine.learning_rate, engine.seed = 1e-2, seed
    engine.setup(lambda: build_model(plan.architecture))
    return engine


def train_plan(ctx: StandInContext, plan: Plan) -> dict[str, Any]:
    ctx = StandInContext(ctx.rank, ctx.world_size, plan, ctx.folder, ctx.device)
    engine = set_up(ctx, plan)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(NUM_STEPS):
        found["losses"].append(engine.step(make_batch(engine, step, plan.recipe.seq_len)))
        found["norms"].append(engine.grad_norm)
    return {
        **found,
        "engine": ctx.records["engine"],
        "stage": getattr(engine, "stage", 0),
        "rest": engine.memory(),
        "held": engine.peak_tensor_bytes,
        "phases": ctx.records["memory"]["phases"],
    }


def all_cases(ctx: StandInContext) -> dict[str, Any]:
    found: dict[str, Any] = {name: train_plan(ctx, plan) for name, plan in CASES.items()}
    return {**found, "saved": resume_in_other_stages(ctx)}


def resume_in_other_stages(ctx: StandInContext) -> dict[str, Any]:
    """Resume a checkpoint of two interleaved stages in two plain ones with tp, from other weights."""
    plan, other = CASES["pp2 x vpp2 x shard2"], make_plan(4, pp=2, tp=2)
    ctx = StandInContext(ctx.rank, ctx.world_size, plan, ctx.folder, ctx.device)
    engine = set_up(ctx, plan)
    engine.step(make_batch(engine, 0))
    engine.save("checkpoint")
    engine.export("model")
    went_on = engine.step(make_batch(engine, 1))
    again = set_up(StandInContext(ctx.rank, ctx.world_size, other, ctx.folder, ctx.device), other, seed=7)
    again.load("checkpoint")
    again.export("model again")
    whole = make_plan(4)
    refuses = set_up(StandInContext(ctx.rank, ctx.world_size, whole, ctx.folder, ctx.device), whole)
    try:
        refuses.load("checkpoint")
        words = "loaded"
    except ValueError as error:
        words = str(error)
    return {
        "went_on": went_on,
        "again": again.step(make_batch(again, 1)),
        "done": again.num_steps_done,
        "words": words,
    }


def train_alone(ctx: StandInContext) -> list[dict[str, Any]]:
    return [train_plan(ctx, make_plan(1, arch, rows=ROWS)) for arch in (LLAMA, TIED)]


@pytest.fixture(scope="module")
def reference_results(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    one, tied = on_ranks(1, make_plan(1, rows=ROWS), train_alone, tmp_path_factory.mktemp("alone"))[0]
    return {False: one, True: tied}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def rank_results(folder: Any) -> list[dict[str, Any]]:
    return on_ranks(4, CASES["pp4, tied"], all_cases, folder)


@thorough()
@pytest.mark.parametrize("name", CASES)
def test_parallel_training_equals_one_process(name: str, rank_results: Any, reference_results: Any) -> None:
    whole = reference_results[CASES[name].architecture.tie_word_embeddings]
    for rank in range(4):
        one = rank_results[rank][name]
        assert one["losses"] == pytest.approx(whole["losses"], abs=1e-4)
        assert one["norms"] == pytest.approx(whole["norms"], abs=1e-4)
        assert one["losses"] == rank_results[0][name]["losses"]


@thorough()
@pytest.mark.parametrize("name", CASES)
def test_rank_memory_is_as_planned(name: str, rank_results: Any) -> None:
    """To the byte, on the ranks of every stage."""
    plan = CASES[name]
    stages = plan.memory().by_stage
    for rank in range(4):
        one = rank_results[rank][name]
        planned = stages[one["stage"]].at("optimizer").components
        assert one["held"] == sum(planned[part] for part in STATE)
        assert (one["rest"]["parameters"], one["rest"]["optimizer"]) == (
            planned["parameters"],
            planned["optimizer"],
        )
        assert {"forward", "backward", "optimizer"} <= set(one["phases"])


@thorough()
def test_the_engine_record_describes_each_layout(rank_results: Any) -> None:
    assert rank_results[0]["shard2 x tp2"]["engine"]["sentence"] == (
        "FSDP2: all 39 parameter tensors are DTensors, sharded over 2 ranks (gloo, cpu), 30 of them "
        "sharded over 2 tensor-parallel ranks, fp32 compute"
    )
    assert rank_results[3]["pp2 x vpp2 x shard2"]["engine"]["sentence"] == (
        "FSDP2: all 20 parameter tensors are DTensors, sharded over 2 ranks (gloo, cpu); pipeline stage 2 of "
        "2 with layers 1, 3 in 2 chunks, Interleaved1F1B, fp32 compute"
    )
    twice = TIED.vocab_size * TIED.hidden_size
    for rank in range(4):
        record = rank_results[rank]["pp4, tied"]["engine"]
        assert (record["stage"], record["layers"]) == (rank, [rank])
        assert record["num_parameters"] == TIED.num_parameters + twice


@thorough()
def test_a_pipeline_checkpoint_resumes_with_other_stages(rank_results: Any) -> None:
    saved = rank_results[0]["saved"]
    assert saved["again"] == pytest.approx(saved["went_on"], abs=1e-5)
    assert saved["done"] == 2
    assert "saved without pipeline stages" in saved["words"]


@thorough()
def test_pipeline_stages_export_one_model(rank_results: Any, folder: Any) -> None:
    """transformers opens what two stages in chunks exported; its loss is theirs."""
    from transformers import AutoModelForCausalLM

    class Alone:
        data_rank, num_data_ranks = 0, 1

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    batch = make_batch(Alone(), 1)
    kept = (batch["labels"][:, 1:] != -100).sum(dim=1)
    with torch.no_grad():
        rows = [
            model(input_ids=ids[None], labels=labels[None]).loss * number
            for ids, labels, number in zip(batch["input_ids"], batch["labels"], kept, strict=True)
        ]
    # Other stages, cut by tp, had the same weights to export.
    other = AutoModelForCausalLM.from_pretrained(folder / "model again")
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=0)
    assert float(sum(rows) / kept.sum()) == pytest.approx(rank_results[0]["saved"]["went_on"], abs=1e-5)


@thorough()
@pytest.mark.parametrize("family", STAGED_FAMILIES)
def test_pipeline_stages_of_each_family_compute_the_same(family: str) -> None:
    from shardscope.frameworks.fsdp2.engine.pipeline import StageModule
    from shardscope.training.model.model import build_model
    from shardscope.training.model.pipeline_stages import extract_stage

    torch.manual_seed(0)
    arch = architecture(family, 4)
    model = build_model(arch)
    ids = torch.arange(24).reshape(2, 12) % arch.vocab_size
    stream = ids
    # The second part is cut again, as a stage's chunks are.
    halves = [extract_stage(model, range(4)[:2], is_first=True, is_last=False)]
    later = extract_stage(model, range(2, 4), is_first=False, is_last=True)
    quarters = [
        extract_stage(later, [2], is_first=False, is_last=False),
        extract_stage(later, [3], is_first=False, is_last=True),
    ]
    with torch.no_grad():
        for number, part in enumerate([*halves, *quarters]):
            stream = StageModule(part, is_first=number == 0, is_last=number == 2)(stream)
        torch.testing.assert_close(stream, model(input_ids=ids).logits)
    names = {name for part in (*halves, later) for name, _ in part.named_parameters()}
    assert names >= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (make_plan(4, architecture("mixtral", 2), tp=2), "cannot shard fused projections and experts"),
        (make_plan(4, architecture("gpt2", 2), pp=2), "cannot be split into stages"),
        (make_plan(2, replace(LLAMA, intermediate_size=127), tp=2), "DTensor needs shards of equal size"),
    ],
)
def test_models_that_cannot_be_split_raise(plan: Plan, words: str) -> None:
    assert words in str(why_not_trained(plan))
