"""Random weights of a large model: a rank of ZeRO-3 or of a pipeline initializes only its own part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough

torch = needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from host_memory import asks_linux, most_anonymous  # noqa: E402
from single_process import NUM_STEPS, RATE, ROWS, take_steps, whole_batch  # noqa: E402

from shardscope.frameworks.engines import get_engine_class  # noqa: E402
from shardscope.memory.overheads import building  # noqa: E402

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero-3": {"stage": 3},
    "zero-3, adapters": {"stage": 3, "method": "lora", "lora_rank": 4},
    "zero-1 pp": {"stage": 1, "pp": 2},
    "zero-0 pp, tied": {"stage": 0, "pp": 2, "tied": True},
}


def make_plan(stage: int, pp: int = 1, *, tied: bool = False, **recipe: Any) -> Any:
    """Return a plan for two ranks, on as many rows as :func:`train_alone` uses."""
    llama = replace(tiny_llama(tie_word_embeddings=tied), num_hidden_layers=3, vocab_size=256)
    fields = {"global_batch_size": ROWS, "micro_batch_size": 1, **recipe}
    return tiny_plan("zero", 2, architecture=llama, layout={"stage": stage, "pp": pp}, **fields)


def train_alone(plan: Any) -> list[float]:
    """Return the losses of one process whose weights are initialized by name, without an engine."""
    from shardscope.training.model import lora
    from shardscope.training.model.model import build_model
    from shardscope.training.optimizers.optimizers import build_optimizer
    from shardscope.training.weights.initial_weights import FreshWeights, build_initialized

    def make_model() -> Any:
        made = build_model(plan.architecture)
        if not plan.recipe.has_adapters:
            return made
        return lora.add_adapters(made, plan.architecture, plan.recipe, in_fp32=False)

    model = build_initialized(make_model, lambda made: FreshWeights(made, seed=3, device=torch.device("cpu")))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer("adamw", trained, RATE, 0.1, model)
    losses, _ = take_steps(optimizer, (model(**whole_batch(step)).loss for step in range(NUM_STEPS)))
    return losses


def set_up(ctx: StandInContext, plan: Any) -> Any:
    from shardscope.training.model.model import build_model

    ctx.plan = plan
    engine = ctx.engine = get_engine_class(plan)(ctx)
    engine.learning_rate, engine.seed, engine.fresh_weights = RATE, 3, True
    engine.setup(lambda: build_model(plan.architecture))
    return engine


def train_every_way(ctx: StandInContext) -> dict[str, list[float]]:
    building.HOST_BUILD_BYTES = 0
    results = {}
    for name, fields in LAYOUTS.items():
        engine = set_up(ctx, make_plan(**fields))
        share = partial(torch.chunk, chunks=engine.num_data_ranks)
        results[name] = [
            engine.step({key: share(rows)[engine.data_rank] for key, rows in whole_batch(step).items()})
            for step in range(NUM_STEPS)
        ]
    return results


@pytest.fixture(scope="module")
def rank_losses(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    return on_ranks(2, make_plan(3), train_every_way, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_random_initialization_gives_one_model(
    name: str, rank_losses: list[dict[str, list[float]]]
) -> None:
    expected = train_alone(make_plan(**LAYOUTS[name]))
    for rank in rank_losses:
        assert rank[name] == pytest.approx(expected, abs=1e-4)


def most_held(ctx: StandInContext) -> dict[str, float]:
    """Return the peak of a rank's host memory during initialization, as a share of the fp32 model."""
    from shardscope.frameworks.deepspeed.engine import engine, pipeline

    results: dict[str, float] = {}

    def record_most_held(name: str, make: Any, plan: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with most_anonymous() as most:
                made = make(*args, **options)
            results[name] = most[0] / (4 * plan.architecture.num_parameters)
            return made

        return run

    wide = replace(tiny_llama(), hidden_size=512, intermediate_size=2048, vocab_size=8192, head_dim=128)
    wide = replace(wide, num_hidden_layers=4)
    set_up(ctx, make_plan(3))  # The first setup imports libraries and creates buffers that stay.
    building.HOST_BUILD_BYTES = 0
    for name, module, made, layout in (
        ("zero-3", engine, "partition_one_by_one", {"stage": 3}),
        ("pp", pipeline, "build_initialized", {"stage": 1, "pp": 2}),
    ):
        plan = replace(make_plan(**layout), architecture=wide)
        own = getattr(module, made)
        setattr(module, made, record_most_held(name, own, plan))
        set_up(ctx, plan)
        setattr(module, made, own)
    return results


@asks_linux
def test_no_rank_builds_the_whole_model(tmp_path: Path) -> None:
    first, last = on_ranks(2, make_plan(3), most_held, tmp_path)
    # Its half, and the largest matrix twice: initialized, and as it is sharded.
    assert max(first["zero-3"], last["zero-3"]) < 0.85
    assert max(first["pp"], last["pp"]) < 0.8
    # Two layers and an embedding, or two and the head, stay: a measurement without them is wrong.
    assert min(first["pp"], last["pp"]) > 0.4
