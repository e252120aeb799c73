"""Megatron-core over sequences in parts, on gloo ranks under a stand-in for Transformer Engine's attention.

All but that attention is what runs on GPUs: what of a batch a rank has, angles, loss, gradients, state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, needs_installed, thorough

from shardscope import Architecture, Cluster, Layout, Plan, Recipe
from shardscope.core.layer_parts import MixtureOfExperts

torch = needs("torch")
needs("transformers")

from all_gather_attention import (  # noqa: E402
    GatheredAttention,
    KeysStayAtHome,
    NothingComesBack,
    instead_of_transformer_engine,
)
from gloo_ranks import StandInContext, on_ranks, tiny_llama  # noqa: E402
from single_process import RATE, train_in_one_process  # noqa: E402

pytestmark = [needs_installed("megatron"), thorough()]
NUM_STEPS = 4
SEQ_LEN = 32
ROWS = 4
STATE = ("parameters", "gradients", "optimizer")
LLAMA = replace(tiny_llama(), vocab_size=500)


def make_gpt2() -> Architecture:
    biases = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True)
    fields: dict[str, Any] = {"num_key_value_heads": 4, "norm": "layernorm", "gated_mlp": False, **biases}
    return replace(LLAMA, model_type="gpt2", position_embedding="learned", tie_word_embeddings=True, **fields)


def make_mixtral() -> Architecture:
    experts = MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    return replace(LLAMA, model_type="mixtral", mixture_of_experts=experts)


def make_plan(num_ranks: int, architecture: Architecture = LLAMA, **fields: Any) -> Plan:
    recipe = {name: fields.pop(name) for name in ("precision", "recompute") if name in fields}
    sizes = {"seq_len": SEQ_LEN, "global_batch_size": ROWS, "precision": "fp32", **recipe}
    return Plan(architecture, Cluster.parse(f"{num_ranks}xcpu"), Recipe(**sizes), Layout.megatron(**fields))


TWO: dict[str, Plan] = {
    "cp2": make_plan(2, cp=2),
    "cp2, whole optimizer, recomputed": make_plan(2, cp=2, distributed_optimizer=False, recompute="full"),
    "cp2, learned positions, selective": make_plan(2, make_gpt2(), cp=2, recompute="selective"),
    "cp2, experts on two": make_plan(2, make_mixtral(), cp=2, ep=2),
    "cp2, bf16": make_plan(2, cp=2, precision="bf16-mixed"),
}
FOUR: dict[str, Plan] = {
    "cp2 x dp2": make_plan(4, cp=2, overlap_grad_reduce=True, overlap_param_gather=True),
    "cp2 x tp2": make_plan(4, cp=2, tp=2),
    "cp2 x pp2": make_plan(4, cp=2, pp=2),
    "cp2 x pp2, vpp2": make_plan(4, replace(LLAMA, num_hidden_layers=4), cp=2, pp=2, vpp=2),
    "cp4": make_plan(4, cp=4),
    "cp2 x dp2, experts on four": make_plan(4, make_mixtral(), cp=2, ep=4),
}
CASES = {**TWO, **FOUR}
LOOSE = {"cp2, bf16": 2e-2}
"""By how much losses of 16 bits may differ from those of 32, in which the single process computes."""
KEPT = ("cp2",)
EVERY = few(CASES, KEPT)


def make_batch(step: int) -> dict[str, Any]:
    """Make a global batch of few tokens, with more labels in one part of a sequence than in another."""
    tokens = torch.randint(0, 32, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[::3, :20] = -100
    # Of this row one of two parts has no label at all.
    labels[1, 8:25] = -100
    return {"input_ids": tokens, "labels": labels}


def train_alone(plan: Plan) -> dict[str, list[float]]:
    """Train in one process, the whole batch at once."""
    batches = [make_batch(step) for step in range(NUM_STEPS)]
    return train_in_one_process(plan.architecture, batches, plan.recipe.optimizer)


def set_up(ctx: StandInContext, plan: Plan, seed: int = 0) -> Any:
    from shardscope.frameworks.megatron.engine.engine import MegatronEngine
    from shardscope.training.model.model import build_model

    own = replace(ctx, plan=plan, records={})
    engine = own.engine = MegatronEngine(own)
    engine.learning_rate, engine.seed = RATE, seed
    engine.setup(lambda: build_model(plan.architecture))
    return engine


def compute_step(engine: Any, number: int) -> float:
    rows = {
        name: rows.chunk(engine.num_data_ranks)[engine.data_rank] for name, rows in make_batch(number).items()
    }
    loss: float = engine.step(rows)
    return loss


def train_plan(ctx: StandInContext, plan: Plan) -> dict[str, Any]:
    engine = set_up(ctx, plan)
    losses, norms = [], []
    for number in range(NUM_STEPS):
        losses.append(compute_step(engine, number))
        norms.append(engine.grad_norm)
    return {
        "losses": losses,
        "norms": norms,
        "held": {name: engine.memory()[name] for name in STATE},
        "record": engine.ctx.records["engine"],
        "single": train_alone(plan) if ctx.rank == 0 else None,
    }


def read_error(
    ctx: StandInContext, plan: Plan, attention: type = GatheredAttention, length: int = SEQ_LEN
) -> str:
    """Return the error that ``plan`` raises before its first step."""
    with instead_of_transformer_engine(attention):
        try:
            engine = set_up(ctx, plan)
            engine.step({name: rows[:, :length] for name, rows in make_batch(0).items()})
        except (ValueError, RuntimeError) as error:
            return str(error)
    return "trained"


def attention_of_another(ctx: StandInContext) -> str:
    """Layers that were made with megatron-core's own attention, over a part of each sequence."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from shardscope.frameworks.megatron.engine import model as engine_model

    class Own(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, **fields: Any) -> None:
            super().__init__(replace(config, context_parallel_size=1), **fields)

    before = engine_model.choose_attention
    engine_model.choose_attention = lambda plan: Own
    try:
        return read_error(ctx, TWO["cp2"])
    finally:
        engine_model.choose_attention = before


def list_local_positions() -> list[int]:
    """Return this rank's positions of a sequence of eight tokens."""
    from shardscope.frameworks.megatron.engine.context_parallel import shard_sequences

    own: list[int] = shard_sequences({"positions": torch.arange(8)[None]})["positions"][0].tolist()
    return own


def resume_with_whole_sequences(ctx: StandInContext) -> dict[str, Any]:
    """Resume a context-parallel checkpoint on ranks with whole sequences, from other weights."""
    plan, other = TWO["cp2"], make_plan(2)
    engine = set_up(ctx, plan)
    compute_step(engine, 0)
    engine.save("checkpoint")
    engine.export("model")
    found: dict[str, Any] = {"went_on": compute_step(engine, 1)}
    # One engine after another: each ends the groups of the one before it.
    for name, where in (("parts", plan), ("whole", other)):
        again = set_up(ctx, where, seed=7)
        again.load("checkpoint")
        found[name] = compute_step(again, 1)
        found[f"{name} done"] = again.num_steps_done
    return found


def full_region(ctx: StandInContext, names: list[str]) -> dict[str, Any]:
    with instead_of_transformer_engine():
        return {name: train_plan(ctx, CASES[name]) for name in names}


def more_on_two(ctx: StandInContext) -> dict[str, Any]:
    found = full_region(ctx, [name for name in TWO if name not in KEPT])
    with instead_of_transformer_engine():
        return {**found, "saved": resume_with_whole_sequences(ctx)}


def on_two(ctx: StandInContext) -> dict[str, Any]:
    return {
        **full_region(ctx, [*KEPT]),
        "positions": list_local_positions(),
        "keys": read_error(ctx, TWO["cp2"], KeysStayAtHome),
        "gradients": read_error(ctx, TWO["cp2"], NothingComesBack),
        "another": attention_of_another(ctx),
        "short": read_error(ctx, TWO["cp2"], length=30),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def two_rank_results(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(2, TWO["cp2"], on_two, folder)


@pytest.fixture(scope="module")
def more_two_rank_results(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(2, TWO["cp2"], more_on_two, folder)


@pytest.fixture(scope="module")
def four_rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    made = tmp_path_factory.mktemp("context-of-four")
    return on_ranks(4, FOUR["cp4"], partial(full_region, names=[*FOUR]), made)


@pytest.fixture
def rank_results(name: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of the ranks of one case."""
    start = (
        "two_rank_results"
        if name in KEPT
        else "more_two_rank_results"
        if name in TWO
        else "four_rank_results"
    )
    return [rank[name] for rank in request.getfixturevalue(start)]


@pytest.mark.parametrize("name", EVERY)
def test_context_parallel_megatron_trains_like_one_process(
    name: str, rank_results: list[dict[str, Any]]
) -> None:
    alone, loose = rank_results[0]["single"], LOOSE.get(name, 1e-4)
    assert alone["losses"][0] - alone["losses"][-1] > 1
    for rank in rank_results:
        assert rank["losses"] == rank_results[0]["losses"]
        assert rank["losses"] == pytest.approx(alone["losses"], abs=loose)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=10 * loose)


@pytest.mark.parametrize("name", EVERY)
def test_rank_memory_is_as_planned(name: str, rank_results: list[dict[str, Any]]) -> None:
    for number, stage in enumerate(CASES[name].memory().by_stage):
        planned = stage.at("optimizer").components
        held = [rank["held"] for rank in rank_results if rank["record"]["stage"] == number]
        for component in STATE:
            assert max(each[component] for each in held) == planned[component], component


@pytest.mark.parametrize("name", EVERY)
def test_the_engine_record_describes_the_run(name: str, rank_results: list[dict[str, Any]]) -> None:
    degrees = CASES[name].degrees
    for rank in rank_results:
        record = rank["record"]
        assert (record["context_parallel"], record["data_parallel"]) == (degrees.cp, degrees.data_parallel)
        assert record["core_attention"] == ["GatheredAttention"]
        assert 0 < record["attention_off_by"] < LOOSE.get(name, 1e-4)
        assert f"cp {degrees.cp}" in record["sentence"]
        assert "sharded sequences with GatheredAttention" in record["sentence"]
    readers = degrees.tp * degrees.cp
    assert [rank["record"]["data_rank"] for rank in rank_results] == [
        number // readers % degrees.data_parallel for number in range(len(rank_results))
    ]


@thorough()
def test_a_checkpoint_resumes_with_and_without_context_parallelism(
    more_two_rank_results: Any, folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    for rank in more_two_rank_results:
        found = rank["saved"]
        assert found["parts"] == found["went_on"]
        assert found["whole"] == pytest.approx(found["went_on"], abs=1e-5)
        assert found["parts done"] == found["whole done"] == 2
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    # Of the weights after one step, as every rank had them.
    with torch.no_grad():
        assert model(**make_batch(1)).loss.item() == pytest.approx(
            more_two_rank_results[0]["saved"]["went_on"], abs=1e-4
        )


@pytest.mark.parametrize("broken", ["keys", "gradients"])
def test_attention_over_partial_sequences_fails_the_run(broken: str, two_rank_results: Any) -> None:
    for rank in two_rank_results:
        words = "the plan splits sequences over cp=2 ranks, and attention over them is "
        assert rank[broken].startswith(words) and "off what it is over the whole sequence" in rank[broken]


def test_layers_with_another_attention_fail_the_run(two_rank_results: Any) -> None:
    for rank in two_rank_results:
        assert rank["another"].endswith("core attention ['GatheredAttention'], and Megatron-core has ['Own']")


def test_sequences_that_cannot_be_split_equally_raise(two_rank_results: Any) -> None:
    for rank in two_rank_results:
        assert rank["short"].startswith("batch is 'rows of 30 tokens'; allowed: rows of a multiple of 4")


def test_each_rank_gets_a_chunk_from_the_front_and_one_from_the_back(two_rank_results: Any) -> None:
    assert [rank["positions"] for rank in two_rank_results] == [[0, 1, 6, 7], [2, 3, 4, 5]]
