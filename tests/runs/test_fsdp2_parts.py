"""FSDP2 with tensor-parallel parts and pipeline stages: real ranks train as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.needs import needs

torch = needs("torch")
needs("transformers")

from two_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402

from shardscope import Plan  # noqa: E402
from shardscope.frameworks.registry import engine_for  # noqa: E402

NUM_STEPS = 4
ROWS, SEQ_LEN = 8, 64
FOUR = replace(tiny_llama(), num_hidden_layers=4)
TIED = replace(FOUR, tie_word_embeddings=True)


def plan_of(world_size: int, rows: int = 1, **layout: Any) -> Plan:
    """``ROWS`` rows a step in micro-batches of ``rows``, however many ranks share them."""
    architecture = layout.pop("architecture", FOUR)
    recipe = layout.pop("recipe", {})
    return tiny_plan(
        "fsdp2" if world_size > 1 else "ddp",
        world_size,
        architecture=architecture,
        micro_batch_size=rows,
        global_batch_size=ROWS,
        layout=layout,
        **recipe,
    )


CASES: dict[str, Plan] = {
    "tp4": plan_of(4, tp=4, architecture=replace(FOUR, num_key_value_heads=4)),
    "shard2 x tp2": plan_of(4, tp=2),
    "copies2 x tp2": plan_of(4, tp=2, replicate=2, rows=4),
    "pp4": plan_of(4, pp=4),
    "pp2 x shard2": plan_of(4, pp=2),
    "pp2 x tp2": plan_of(4, pp=2, tp=2),
    "pp2 x vpp2 x shard2": plan_of(4, pp=2, vpp=2),
    "pp2 x copies2, tied": plan_of(4, pp=2, replicate=2, architecture=TIED),
    "pp4, tied": plan_of(4, pp=4, architecture=TIED),
    "shard2 x tp2, tied": plan_of(4, tp=2, architecture=TIED),
    "tp2 recomputed": plan_of(4, tp=2, recipe={"recompute": "full"}),
    "pp2 recomputed": plan_of(4, pp=2, recipe={"recompute": "selective"}),
}


def batch_of(step: int, share: int = 0, num_shares: int = 1) -> dict[str, Any]:
    """A share of a global batch in which some labels do not count, more of them in some rows."""
    tokens = torch.randint(0, 64, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 5 * row] = -100
    return {
        "input_ids": tokens.chunk(num_shares)[share],
        "labels": labels.chunk(num_shares)[share],
    }


def trained(ctx: StandInContext, plan: Plan) -> dict[str, Any]:
    from shardscope.training.model import build_model
    from shardscope.training.optimizers import build_optimizer

    ctx = StandInContext(ctx.rank, ctx.world_size, plan, ctx.folder, ctx.device)
    engine = ctx.engine = engine_for(plan)(ctx)
    engine.setup(
        lambda: build_model(plan.architecture),
        lambda p: build_optimizer(plan.recipe.optimizer, p, 1e-2),
    )
    losses, norms = [], []
    for step in range(NUM_STEPS):
        losses.append(engine.step(batch_of(step, engine.data_rank, engine.num_data_ranks)))
        norms.append(engine.grad_norm)
    return {
        "losses": losses,
        "norms": norms,
        "engine": ctx.records["engine"],
        "share": [engine.data_rank, engine.num_data_ranks],
        "held": engine.held_after_step,
    }


def all_cases(ctx: StandInContext) -> dict[str, Any]:
    return {name: trained(ctx, plan) for name, plan in CASES.items()}


def alone(ctx: StandInContext) -> dict[str, Any]:
    variants = {plan.architecture: plan for plan in CASES.values()}
    return {
        repr(architecture): trained(ctx, plan_of(1, rows=ROWS, architecture=architecture))
        for architecture in variants
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_ranks(1, plan_of(1, rows=ROWS), alone, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(4, CASES["tp4"], all_cases, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", CASES)
def test_parts_train_as_the_whole_does(name: str, found: Any, expected: Any) -> None:
    whole = expected[repr(CASES[name].architecture)]
    for rank in range(4):
        one = found[rank][name]
        assert one["losses"] == pytest.approx(whole["losses"], abs=1e-4)
        assert one["norms"] == pytest.approx(whole["norms"], abs=1e-4)
        assert one["losses"] == found[0][name]["losses"]
