"""ZeRO++'s second partitions (hpZ) on four gloo ranks, two of which have all weights a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough

torch = needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from single_process import take_steps  # noqa: E402

from shardscope.frameworks.engines import before_fork  # noqa: E402

THRESHOLD = 4000
"""Of a tiny model's tensors: its matrices are cut, its norms stay gathered."""


def make_plan(method: str) -> Any:
    layout = {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "stage3_param_persistence_threshold": THRESHOLD,
        "reduce_bucket_size": 1_000_000,
    }
    return tiny_plan("zero", 4, layout=layout, micro_batch_size=1, method=method)


def held_second(engine: Any) -> int:
    parts = (parameter.ds_secondary_tensor for parameter in engine._module.module.parameters())
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def train_every_plan(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.accounting import memory_watch
    from shardscope.training.model.model import build_model

    memory_watch.WATCHED_STEPS = ()  # The census looks at every operator.
    results: dict[str, Any] = {}
    for method in ("full", "lora"):
        ctx.plan = make_plan(method)
        engine = ctx.engine = type(ctx.engine)(ctx)
        engine.learning_rate = 1e-2
        engine.setup(lambda: build_model(tiny_llama()))
        own, held = engine._module.step, []

        def step(own: Any = own, held: list[int] = held, engine: Any = engine) -> None:
            held.append(held_second(engine))
            own()
            held.append(held_second(engine))

        engine._module.step = step
        losses = []
        for number in range(3):
            rows = make_batch(number).chunk(ctx.world_size)[ctx.rank]
            losses.append(engine.step({"input_ids": rows, "labels": rows.clone()}))
        results[method] = {"losses": losses, "second": held[-2:], "engine": ctx.records["engine"]}
    return results


def make_batch(step: int) -> Any:
    return torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    plan = make_plan("full")
    before_fork(plan, "cpu")
    folder: Path = tmp_path_factory.mktemp("hpz")
    return on_ranks(4, plan, train_every_plan, folder)


def test_losses_equal_those_of_plain_torch(rank_results: list[dict[str, Any]]) -> None:
    from shardscope.training.model.model import build_model
    from shardscope.training.optimizers.optimizers import build_optimizer

    torch.manual_seed(0)
    model = build_model(tiny_llama())
    optimizer = build_optimizer("adamw", list(model.parameters()), 1e-2)
    batches = ({"input_ids": make_batch(step), "labels": make_batch(step)} for step in range(3))
    losses, _ = take_steps(optimizer, (model(**batch).loss for batch in batches))
    assert rank_results[0]["full"]["losses"] == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_secondary_partitions_have_the_predicted_size(
    method: str, rank_results: list[dict[str, Any]]
) -> None:
    """Before the update those of all that forward released, after it those of what is frozen."""
    report, none = make_plan(method).memory(), tiny_report(method)
    for phase, seen in zip(("optimizer", "rest"), rank_results[0][method]["second"], strict=True):
        planned = report.at(phase)["gather_buffers"] - none.at(phase)["gather_buffers"]
        assert {rank[method]["second"][phase == "rest"] for rank in rank_results} == {seen} == {planned}


def tiny_report(method: str) -> Any:
    """The same plan's without second partitions."""
    from dataclasses import replace

    plan = make_plan(method)
    return replace(plan, layout=replace(plan.layout, zero_hpz_partition_size=1)).memory()


def test_the_engine_record_names_the_option(rank_results: list[dict[str, Any]]) -> None:
    record = rank_results[0]["full"]["engine"]
    assert record["zero_hpz_partition_size"] == 2
    assert record["sentence"].endswith(
        "a secondary partition of the weights over 2 ranks (hpZ), fp32 compute"
    )
