"""DeepSpeed's AutoTP really training on gloo ranks, with ZeRO over groups of them, beside plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import few, needs, needs_installed, thorough

torch = needs("torch")
needs("transformers")
pytestmark = needs_installed("deepspeed")

from deepspeed_ranks import set_up_engine, take_rank_rows  # noqa: E402
from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from single_process import NUM_STEPS, plain_torch, whole_batch  # noqa: E402
from test_tensor_parallel import FAMILY_FIELDS  # noqa: E402

from shardscope import Architecture  # noqa: E402
from shardscope.frameworks.deepspeed.limits import AUTOTP_TRAINED  # noqa: E402
from shardscope.frameworks.engines import before_fork  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402

SAVED_AFTER = 2


def of_family(model_type: str, **fields: Any) -> Architecture:
    fields = {"vocab_size": 256, **FAMILY_FIELDS.get(model_type, {}), **fields}
    return replace(tiny_llama(), model_type=model_type, **fields)


LLAMA = of_family("llama")
PLANS: dict[str, dict[str, Any]] = {
    "zero-0": {"layout": {"stage": 0}},
    "zero-1 tied": {"layout": {"stage": 1}, "architecture": of_family("llama", tie_word_embeddings=True)},
    "zero-2 offloaded": {"layout": {"stage": 2, "overlap_comm": True}, "recompute": "offload"},
    "zero-2 bf16": {"layout": {"stage": 2}, "precision": "bf16-mixed"},
}
OVER_FOUR: dict[str, dict[str, Any]] = {
    "zero-1 over four": {"layout": {"stage": 1}, "recompute": "full"},
    "zero-0 over four": {"layout": {"stage": 0}},
}
KEPT_FAMILIES = ("qwen3",)


def make_named_plan(name: str, num_ranks: int = 2) -> Any:
    """Four rows a step in micro-batches of one, of which each group of two ranks has as many."""
    fields: dict[str, Any] = {"architecture": LLAMA, **{**PLANS, **OVER_FOUR}[name]}
    return make_plan(num_ranks, **fields)


def make_plan(num_ranks: int = 2, **fields: Any) -> Any:
    layout = {"tp": 2, "stage": 1, **fields.pop("layout", {})}
    rows = {"micro_batch_size": 1, "global_batch_size": 4}
    return tiny_plan("zero", num_ranks, **{**rows, **fields}, layout=layout)


def train_plan(ctx: StandInContext, plan: Any) -> dict[str, Any]:
    engine = set_up_engine(ctx, plan)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        losses.append(engine.step(take_rank_rows(engine, step)))
        norms.append(engine.grad_norm)
    return {
        "losses": losses,
        "norms": norms,
        "held": engine.held_at_update,
        "engine": ctx.records["engine"],
        "data": [engine.data_rank, engine.num_data_ranks],
    }


def all_of_them(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.accounting import memory_watch

    memory_watch.WATCHED_STEPS = ()  # The census looks at every operator.
    names = PLANS if ctx.world_size == 2 else OVER_FOUR
    found: dict[str, Any] = {name: train_plan(ctx, make_named_plan(name, ctx.world_size)) for name in names}
    if ctx.world_size == 2:
        found["kept"] = {name: resume_and_export(ctx, name) for name in ("zero-1 tied", "zero-2 bf16")}
        for family in KEPT_FAMILIES:
            found[family] = train_plan(ctx, make_plan(architecture=of_family(family)))
        found["left whole"] = left_whole(ctx)
        # Parts of an earlier engine must not reach one without them.
        found["without"] = train_plan(
            ctx, tiny_plan("zero", 2, architecture=LLAMA, layout={"stage": 1, "tp": 1})
        )
    return found


def left_whole(ctx: StandInContext) -> str:
    """Return the error of a run whose DeepSpeed shards nothing."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = DeepSpeedEngine._apply_autotp_partitioning
    DeepSpeedEngine._apply_autotp_partitioning = lambda self, *_: {}
    try:
        set_up_engine(ctx, make_named_plan("zero-0"))
    except RuntimeError as error:
        return str(error)
    finally:
        DeepSpeedEngine._apply_autotp_partitioning = own
    return "went on"


def resume_and_export(ctx: StandInContext, name: str) -> dict[str, Any]:
    """Resume a checkpoint in a new engine, and open an export with transformers."""
    from transformers import AutoModelForCausalLM

    engine = set_up_engine(ctx, make_named_plan(name))
    for step in range(SAVED_AFTER):
        engine.step(take_rank_rows(engine, step))
    wait = engine.begin_save(f"kept/{name}")
    went_on = engine.step(take_rank_rows(engine, SAVED_AFTER))
    wait()
    engine = set_up_engine(ctx, make_named_plan(name), seed=7)
    engine.load(f"kept/{name}")
    engine.export(f"exported/{name}")
    opened = AutoModelForCausalLM.from_pretrained(ctx.folder / "exported" / name)
    with torch.no_grad():
        loss = float(opened(**whole_batch(SAVED_AFTER)).loss)
    again = [engine.step(take_rank_rows(engine, step)) for step in range(SAVED_AFTER, NUM_STEPS)]
    other = set_up_engine(
        ctx, tiny_plan("zero", 2, architecture=LLAMA, layout={"stage": engine.plan.layout.stage})
    )
    try:
        other.load(f"kept/{name}")
        words = "loaded"
    except ValueError as error:
        words = str(error)
    return {"again": again, "went_on": went_on, "exported": loss, "words": words}


@pytest.fixture(scope="module")
def results_by_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of each rank, by plan."""
    by_plan: dict[str, Any] = {}
    for num_ranks, name in ((2, "zero-0"), (4, "zero-1 over four")):
        plan = make_named_plan(name, num_ranks)
        before_fork(plan, "cpu")
        ranks = on_ranks(num_ranks, plan, all_of_them, tmp_path_factory.mktemp("tensors"))
        by_plan |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return by_plan


@thorough()
@pytest.mark.parametrize("name", [*PLANS, *OVER_FOUR])
def test_losses_equal_those_of_plain_torch(name: str, results_by_plan: dict[str, Any]) -> None:
    plan = make_named_plan(name, len(results_by_plan[name]))
    expected, half = plain_torch(plan.architecture), plan.recipe.precision != "fp32"
    for rank, one in enumerate(results_by_plan[name]):
        assert one["losses"] == pytest.approx(expected["losses"], abs=0.02 if half else 1e-5)
        assert one["norms"] == pytest.approx(expected["norms"], rel=0.05 if half else 1e-4)
        assert one["data"] == [rank // 2, plan.world_size // 2]


@thorough()
@pytest.mark.parametrize("name", [*PLANS, *OVER_FOUR])
def test_measured_bytes_equal_the_prediction(name: str, results_by_plan: dict[str, Any]) -> None:
    report = make_named_plan(name, len(results_by_plan[name])).memory()
    held = [rank["held"] for rank in results_by_plan[name]]
    assert {one["parameters"] for one in held} == {report.at("rest")["parameters"]}
    assert {one["optimizer"] for one in held} == {report.at("rest")["optimizer"]}
    assert max(one["gradients"] for one in held) == report.at("optimizer")["gradients"]


def train_families_in_one_process(ctx: StandInContext) -> dict[str, Any]:
    return {family: train_plan(ctx, make_plan(architecture=of_family(family))) for family in AUTOTP_TRAINED}


@pytest.fixture(scope="module")
def family_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plan = make_named_plan("zero-0")
    before_fork(plan, "cpu")
    ranks = on_ranks(2, plan, train_families_in_one_process, tmp_path_factory.mktemp("families"))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@thorough()
@pytest.mark.parametrize("family", few(AUTOTP_TRAINED, KEPT_FAMILIES))
def test_each_family_trains_like_one_process(family: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue("results_by_plan" if family in KEPT_FAMILIES else "family_results")[
        family
    ]
    expected = plain_torch(of_family(family))
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-4)


@thorough()
def test_the_engine_record_names_the_sharded_modules(results_by_plan: dict[str, Any]) -> None:
    record = results_by_plan["zero-1 over four"][3]["engine"]
    assert record["sentence"] == (
        "DeepSpeed ZeRO-1: optimizer state is partitioned over 2 ranks (gloo, cpu); AutoTP shards 15 of 21 "
        "tensors over 2 ranks, fp32 compute"
    )
    assert (record["tp"], record["tp_ranks"]) == (2, [2, 3])
    assert record["num_parameters"] == LLAMA.num_parameters
    assert "DeepSpeed did not shard 14: " in results_by_plan["left whole"][0]


@thorough()
def test_an_engine_without_tensor_parallelism_follows_one_with_it(results_by_plan: dict[str, Any]) -> None:
    one = results_by_plan["without"][0]
    assert one["losses"] == pytest.approx(plain_torch(LLAMA)["losses"], abs=1e-5)
    assert "AutoTP" not in one["engine"]["sentence"]


@thorough()
@pytest.mark.parametrize("name", ["zero-1 tied", "zero-2 bf16"])
def test_a_new_engine_resumes_from_the_checkpoint(name: str, results_by_plan: dict[str, Any]) -> None:
    straight, of_kept = results_by_plan[name][0]["losses"], results_by_plan["kept"][0][name]
    assert of_kept["went_on"] == pytest.approx(straight[SAVED_AFTER], abs=1e-6)
    assert of_kept["again"] == pytest.approx(straight[SAVED_AFTER:], abs=1e-6)
    assert of_kept["exported"] == pytest.approx(straight[SAVED_AFTER], abs=0.03 if "bf16" in name else 1e-5)
    assert "tp of this run is 1; allowed: 2, the tensor-parallel degree" in of_kept["words"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architecture": of_family("gemma2")}, "AutoTP is tested with no others"),
        ({"architecture": replace(LLAMA, intermediate_size=127)}, "all shards must be equal"),
        ({"precision": "bf16-mixed", "layout": {"stage": 0}}, "gradient norm is up to 20 % off"),
        ({"recompute": "selective"}, "so that it would be reduced twice"),
        ({"optimizer": "adafactor"}, "Recipe.optimizer is 'adafactor'; allowed: 'adamw', 'sgd'"),
        ({"layout": {"offload_optimizer": "cpu"}}, "AutoTP with offloading is not tested"),
        ({"num_ranks": 4, "layout": {"pp": 2}}, "AutoTP inside pipeline stages is not tested"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_plans_raise_before_any_rank_starts(fields: dict[str, Any], words: str) -> None:
    plan = make_plan(**{"architecture": LLAMA, **fields})
    refusal = why_not_trained(plan)
    assert refusal is not None and words in refusal and "Nearest fix" in refusal
