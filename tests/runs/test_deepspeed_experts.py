"""DeepSpeed's MoE layers really training on gloo ranks, beside the same Mixtral in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough

torch = needs("torch")
needs("transformers")
pytestmark = needs_installed("deepspeed")

from deepspeed_ranks import set_up_engine  # noqa: E402
from gloo_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402
from single_process import NUM_STEPS, ROWS, plain_torch, whole_batch  # noqa: E402

from shardscope import Architecture  # noqa: E402
from shardscope.core.layer_parts import MixtureOfExperts  # noqa: E402
from shardscope.frameworks.deepspeed import extensions  # noqa: E402
from shardscope.frameworks.engines import before_fork  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402

SAVED_AFTER = 2


def make_mixtral(experts_per_token: int = 2) -> Architecture:
    experts = MixtureOfExperts(
        num_experts=4, num_experts_per_tok=experts_per_token, moe_intermediate_size=128
    )
    return replace(tiny_llama(), model_type="mixtral", vocab_size=256, mixture_of_experts=experts)


PLANS: dict[str, dict[str, Any]] = {
    "zero-0": {"layout": {"stage": 0}},
    "zero-1": {"layout": {"stage": 1}, "recompute": "full"},
    "zero-2": {"layout": {"stage": 2, "overlap_comm": True}},
    "zero-2, three of four experts": {"layout": {"stage": 2}, "architecture": make_mixtral(3)},
    "zero-1 bf16": {"layout": {"stage": 1}, "precision": "bf16-mixed"},
}
ON_HOST: dict[str, dict[str, Any]] = {"on the host": {"layout": {"stage": 2, "offload_optimizer": "cpu"}}}
OVER_FOUR: dict[str, dict[str, Any]] = {
    f"zero-{stage} over four": {"layout": {"stage": stage}, "micro_batch_size": 1, "num_micro_batches": 1}
    for stage in (1, 0)
}
"""Every two ranks have all experts: those of a rank are another one's too."""


def make_plan(name: str, num_ranks: int = 2) -> Any:
    """Four rows a step, of which each rank has as many, in micro-batches of one."""
    fields = {
        "micro_batch_size": 1,
        "num_micro_batches": ROWS // num_ranks,
        "architecture": make_mixtral(),
        **{**PLANS, **ON_HOST, **OVER_FOUR}[name],
    }
    return tiny_plan("zero", num_ranks, **{**fields, "layout": {"ep": 2, **fields["layout"]}})


def take_rank_rows(ctx: StandInContext, step: int) -> dict[str, Any]:
    return {name: rows.chunk(ctx.world_size)[ctx.rank] for name, rows in whole_batch(step).items()}


def train_every_plan(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.accounting import memory_watch

    memory_watch.WATCHED_STEPS = ()  # The census looks at every operator.
    results: dict[str, Any] = {}
    names = [*PLANS, *(ON_HOST if extensions.is_built("cpu_adam") else ())]
    for name in names if ctx.world_size == 2 else OVER_FOUR:
        engine = set_up_engine(ctx, make_plan(name, ctx.world_size))
        losses, norms = [], []
        for step in range(NUM_STEPS):
            losses.append(engine.step(take_rank_rows(ctx, step)))
            norms.append(engine.grad_norm)
        results[name] = {
            "losses": losses,
            "norms": norms,
            "held": engine.held_at_update,
            "engine": ctx.records["engine"],
        }
    if ctx.world_size == 2:
        results["kept"] = {name: resume_and_export(ctx, name) for name in ("zero-0", "zero-1 bf16")}
    return results


def resume_and_export(ctx: StandInContext, name: str) -> dict[str, Any]:
    """Resume a checkpoint in a new engine, and open an export with transformers."""
    from transformers import AutoModelForCausalLM

    engine = set_up_engine(ctx, make_plan(name))
    for step in range(SAVED_AFTER):
        engine.step(take_rank_rows(ctx, step))
    wait = engine.begin_save(f"kept/{name}")
    went_on = engine.step(take_rank_rows(ctx, SAVED_AFTER))
    wait()
    engine = set_up_engine(ctx, make_plan(name), seed=7)
    engine.load(f"kept/{name}")
    engine.export(f"exported/{name}")
    opened = AutoModelForCausalLM.from_pretrained(ctx.folder / "exported" / name)
    with torch.no_grad():
        loss = float(opened(**whole_batch(SAVED_AFTER)).loss)
    again = [engine.step(take_rank_rows(ctx, step)) for step in range(SAVED_AFTER, NUM_STEPS)]
    return {
        "again": again,
        "went_on": went_on,
        "exported": loss,
        "type": str(opened.dtype),
        "config": opened.config.model_type,
    }


@pytest.fixture(scope="module")
def results_by_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of each rank, by plan."""
    by_plan: dict[str, list[dict[str, Any]]] = {}
    for num_ranks, name in ((2, "zero-1"), (4, "zero-1 over four")):
        plan = make_plan(name, num_ranks)
        before_fork(plan, "cpu")
        if extensions.is_built("cpu_adam"):
            extensions.load_extension("cpu_adam")
        ranks = on_ranks(num_ranks, plan, train_every_plan, tmp_path_factory.mktemp("experts"))
        by_plan |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return by_plan


def select_results(found: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    if name not in found:
        pytest.skip(
            "DeepSpeed's Adam for the host compiles for a minute in a new environment: `make parity` runs it"
        )
    return found[name]


@thorough()
@pytest.mark.parametrize("name", [*PLANS, *ON_HOST, *OVER_FOUR])
def test_losses_equal_those_of_plain_torch(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = select_results(results_by_plan, name)
    plan = make_plan(name, len(ranks))
    expected, half = plain_torch(plan.architecture), plan.recipe.precision != "fp32"
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=0.05 if half else 1e-4)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=0.1 if half else 1e-3)


@thorough()
@pytest.mark.parametrize("name", [*PLANS, *ON_HOST])
def test_measured_bytes_equal_the_prediction(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    report, ranks = make_plan(name).memory(), [rank["held"] for rank in select_results(results_by_plan, name)]
    assert max(held["parameters"] for held in ranks) == report.at("rest")["parameters"]
    assert max(held["gradients"] for held in ranks) == report.at("optimizer")["gradients"]
    assert max(held["optimizer"] for held in ranks) == report.at("rest")["optimizer"]


@thorough()
@pytest.mark.parametrize("name", list(OVER_FOUR))
def test_experts_replicated_over_ranks_have_the_predicted_bytes(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    """With ZeRO: gradients are of whole tensors, of which the planned rank is the one that holds most."""
    report = make_plan(name, 4).memory()
    for rank in results_by_plan[name]:
        assert rank["held"]["parameters"] == report.at("rest")["parameters"]
        assert rank["held"]["optimizer"] == report.at("rest")["optimizer"]
    gradients = {rank["held"]["gradients"] for rank in results_by_plan[name]}
    assert report.at("optimizer")["gradients"] in gradients
    assert len(gradients) == 1 or "zero-0" not in name


@thorough()
def test_the_engine_record_names_expert_placement(results_by_plan: dict[str, list[dict[str, Any]]]) -> None:
    first, second = (rank["engine"] for rank in results_by_plan["zero-1"])
    assert (first["experts"], second["experts"]) == ([0, 1], [2, 3])
    assert first["sentence"] == (
        "DeepSpeed ZeRO-1: optimizer state is partitioned over 2 ranks (gloo, cpu); experts 0, 1 of each "
        "layer on this rank, over 2 ranks, fp32 compute"
    )
    for name in OVER_FOUR:
        assert [rank["engine"]["experts"] for rank in results_by_plan[name]] == [[0, 1], [2, 3]] * 2
    one = 2 * 2 * 3 * 64 * 128  # layers, experts that are elsewhere, matrices of each
    assert first["num_parameters"] == make_mixtral().num_parameters - one


@thorough()
@pytest.mark.parametrize("name", ["zero-0", "zero-1 bf16"])
def test_a_new_engine_resumes_from_the_checkpoint(
    name: str, results_by_plan: dict[str, list[dict[str, Any]]]
) -> None:
    straight, of_kept = results_by_plan[name][0]["losses"], results_by_plan["kept"][0][name]
    # Steps taken while it was written are not in it.
    assert of_kept["went_on"] == pytest.approx(straight[SAVED_AFTER], abs=1e-6)
    assert of_kept["again"] == pytest.approx(straight[SAVED_AFTER:], abs=1e-6)
    assert (of_kept["type"], of_kept["config"]) == ("torch.float32", "mixtral")
    exact = "bf16" not in name
    assert of_kept["exported"] == pytest.approx(straight[SAVED_AFTER], abs=1e-5 if exact else 0.03)


QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "layout", "words"),
    [
        ({"architecture": Architecture.from_hf(QWEN)}, {"stage": 2}, "routes as Mixtral's does"),
        ({"architecture": make_mixtral(1)}, {"stage": 2}, "top1gating"),
        ({"method": "lora"}, {"stage": 2}, "peft does not support DeepSpeed's experts"),
        ({"precision": "bf16-mixed"}, {"stage": 0}, "norm without the experts (FP16"),
    ],
)
def test_unsupported_plans_raise_before_any_rank_starts(
    fields: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    plan = tiny_plan("zero", 2, **{"architecture": make_mixtral(), **fields}, layout={"ep": 2, **layout})
    refusal = why_not_trained(plan)
    assert refusal is not None and words in refusal and "Nearest fix" in refusal


def test_experts_with_pipeline_stages_raise() -> None:
    plan = tiny_plan("zero", 4, architecture=make_mixtral(), layout={"ep": 2, "pp": 2, "stage": 1})
    assert "experts inside DeepSpeed's pipeline stages are not supported" in str(why_not_trained(plan))
