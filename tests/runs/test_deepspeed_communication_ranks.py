"""DeepSpeed's ``communication_data_type`` on real gloo ranks: what travels, what is held, what is learned."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough

torch = needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]

from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from single_process import NUM_STEPS, RATE, plain_torch, whole_batch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from shardscope.frameworks.engines import before_fork  # noqa: E402
from shardscope.rehearsal.result import TENSOR_COMPONENTS  # noqa: E402

IN_FP32 = {"communication_data_type": "fp32"}
BUCKET = {"reduce_bucket_size": 800_000}
"""Room for a feed-forward's three matrices."""
TIMES = 3
"""gloo's own thread lets go of a bucket a moment after the collective has ended: now and then it is counted
twice, so that the least of several runs is what a rank holds."""
LLAMA = replace(tiny_llama(), vocab_size=128, hidden_size=256, intermediate_size=1024, head_dim=64)
"""Wide, of few tokens: where gradients are reduced there is more than where logits are."""
PLANS: dict[str, dict[str, Any]] = {
    f"zero-{stage}{words}": {"stage": stage, **BUCKET, **options}
    for stage in (0, 1, 2, 3)
    for words, options in (("", {}), (" in fp32", IN_FP32))
}


def make_plan(name: str) -> Any:
    return tiny_plan("zero", 2, architecture=LLAMA, layout=PLANS[name], precision="bf16-mixed")


def train_every_plan(ctx: StandInContext) -> dict[str, Any]:
    """Return the losses, bytes and reduction types of every plan."""
    results: dict[str, Any] = {}
    for name in PLANS:
        again = [_train_plan(ctx, make_plan(name)) for _ in range(TIMES)]
        least = min(sum(one["phases"]["backward"].values()) for one in again)
        results[name] = {**again[0], "backward": least}
    return {**results, "contradiction": _read_contradiction(ctx)}


def _read_contradiction(ctx: StandInContext) -> str:
    """Return the error if DeepSpeed is configured with another communication type than the plan's."""
    from shardscope.frameworks.deepspeed.engine import engine

    truth = engine.build_deepspeed_config

    def omit_communication_type(plan: Any, **options: Any) -> dict[str, Any]:
        return {**truth(plan, **options), "communication_data_type": None}

    engine.build_deepspeed_config = omit_communication_type
    try:
        _train_plan(ctx, make_plan("zero-2 in fp32"))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.build_deepspeed_config = truth
    return "it went on"


def _train_plan(ctx: StandInContext, plan: Any) -> dict[str, Any]:
    from shardscope.training.model.model import build_model

    gc.collect()  # What an engine before this one held in cycles.
    ctx.plan = plan
    engine = ctx.engine = type(ctx.engine)(ctx)
    engine.learning_rate = RATE
    engine.setup(lambda: build_model(plan.architecture))
    losses, types = [], set()
    for step in range(NUM_STEPS):
        mine = {name: rows.chunk(2)[ctx.rank] for name, rows in whole_batch(step).items()}
        with _Reduced(types):
            losses.append(engine.step(mine))
    return {
        "losses": losses,
        "held": engine.held_at_update,
        "sentence": ctx.records["engine"]["sentence"],
        "types": sorted(types),
        "phases": ctx.records["memory"]["phases"],
    }


class _Reduced(TorchDispatchMode):
    """Notes the types of what ranks add up, but for a few numbers: norms and losses."""

    def __init__(self, types: set[str]) -> None:
        super().__init__()
        self.types = types

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in function.__name__ and function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.types.update(str(tensor.dtype) for tensor in tensors if tensor.numel() > 1000)
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    plan = make_plan("zero-2")
    before_fork(plan, "cpu")
    return on_ranks(2, plan, train_every_plan, tmp_path_factory.mktemp("types"))


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_reduced_in_the_layouts_communication_dtype(
    name: str, rank_results: list[dict[str, Any]]
) -> None:
    expected = "torch.float32" if "fp32" in name else "torch.bfloat16"
    assert [rank[name]["types"] for rank in rank_results] == [[expected]] * 2


@pytest.mark.parametrize("name", PLANS)
def test_the_engine_record_names_the_option(name: str, rank_results: list[dict[str, Any]]) -> None:
    assert ("gradients summed in fp32" in rank_results[0][name]["sentence"]) == ("fp32" in name)


def test_another_communication_dtype_than_the_plans_fails_the_run(rank_results: list[dict[str, Any]]) -> None:
    words = "the plan's bytes of a reduced gradient: 4; DeepSpeed built: 2"
    assert [rank["contradiction"] for rank in rank_results] == [words] * 2


@pytest.mark.parametrize("name", PLANS)
def test_losses_equal_those_of_plain_torch(name: str, rank_results: list[dict[str, Any]]) -> None:
    expected = plain_torch(LLAMA)["losses"]
    for rank in rank_results:
        assert rank[name]["losses"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", PLANS)
def test_state_bytes_do_not_depend_on_the_communication_dtype(
    name: str, rank_results: list[dict[str, Any]]
) -> None:
    """To the byte: sums come back in half precision."""
    report = make_plan(name).memory()
    held = [rank[name]["held"] for rank in rank_results]
    assert max(one["parameters"] for one in held) == report.at("rest")["parameters"]
    assert max(one["gradients"] for one in held) == report.at("optimizer")["gradients"]
    assert max(one["optimizer"] for one in held) == report.at("rest")["optimizer"]


@pytest.mark.parametrize("name", PLANS)
def test_backward_memory_is_as_predicted(name: str, rank_results: list[dict[str, Any]]) -> None:
    """All tensors of the first rank, whose part is predicted; the second one's comes first in backward."""
    measured = rank_results[0][name]["backward"]
    predicted = make_plan(name).memory().at("backward")
    tensors = sum(size for part, size in predicted.items() if part in TENSOR_COMPONENTS)
    assert tensors == pytest.approx(measured, rel=0.01)
