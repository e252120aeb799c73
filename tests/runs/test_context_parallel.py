"""FSDP2 over sequences in parts: torch's ring attention on gloo ranks trains as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import architecture
from tests.requirements import few, needs, thorough

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks  # noqa: E402
from test_fsdp2_parallelism import LLAMA, STATE, TIED, make_batch, make_plan, set_up, train_plan  # noqa: E402

from shardscope import Cluster, Plan  # noqa: E402
from shardscope.frameworks.fsdp2.limits import CONTEXT_PARALLEL_FAMILIES  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402

CASES: dict[str, Plan] = {
    "shard2 x cp2, recomputed": make_plan(4, cp=2, recompute="full"),
    "copies2 x cp2, tied": make_plan(4, TIED, rows=2, cp=2, replicate=2, recompute="selective"),
    "cp4": make_plan(4, cp=4),
}
HALF = make_plan(2, cp=2, precision="bf16-mixed")
LONG = replace(HALF, recipe=replace(HALF.recipe, seq_len=512, precision="fp32"))
KEPT_FAMILIES = ("llama", "mixtral", "gpt2")


def copy_context(ctx: StandInContext, plan: Plan) -> StandInContext:
    return StandInContext(ctx.rank, ctx.world_size, plan, ctx.folder, ctx.device)


def four_ranks(ctx: StandInContext) -> dict[str, Any]:
    return {name: train_plan(ctx, plan) for name, plan in CASES.items()}


def train_alone(ctx: StandInContext) -> list[dict[str, Any]]:
    plans = (
        make_plan(1, LLAMA, rows=4),
        make_plan(1, TIED, rows=4),
        make_plan(1, rows=4, precision="bf16-mixed"),
    )
    return [train_plan(ctx, plan) for plan in plans]


@pytest.fixture(scope="module")
def reference_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = on_ranks(1, make_plan(1), train_alone, tmp_path_factory.mktemp("alone"))[0]
    return found


@pytest.fixture(scope="module")
def four_rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(4, CASES["cp4"], four_ranks, tmp_path_factory.mktemp("four"))


@thorough()
@pytest.mark.parametrize("name", CASES)
def test_context_parallel_training_equals_whole_sequences(
    name: str, four_rank_results: Any, reference_results: Any
) -> None:
    whole = reference_results[CASES[name].architecture.tie_word_embeddings]
    planned = CASES[name].memory().at("optimizer")
    for rank in range(4):
        one = four_rank_results[rank][name]
        assert one["losses"] == pytest.approx(whole["losses"], abs=1e-5)
        assert one["norms"] == pytest.approx(whole["norms"], abs=1e-4)
        assert one["losses"] == four_rank_results[0][name]["losses"]
        assert one["held"] == sum(planned[part] for part in STATE)
        for part in ("parameters", "optimizer"):
            assert one["rest"][part] == planned[part]


@thorough()
def test_the_engine_record_describes_each_layout(four_rank_results: Any) -> None:
    record = four_rank_results[3]["shard2 x cp2, recomputed"]["engine"]
    assert record["sentence"] == (
        "FSDP2: all 39 parameter tensors are DTensors, sharded over 4 ranks (gloo, cpu); each sequence "
        "sharded over 2 ranks, with torch's ring attention, fp32 compute"
    )
    assert (record["cp"], record["cp_ranks"], record["mesh_shape"]) == (2, [2, 3], [4])
    assert 0 < record["ring_attention_off_by"] < 1e-5
    assert four_rank_results[3]["cp4"]["engine"]["cp_ranks"] == [0, 1, 2, 3]
    assert four_rank_results[1]["copies2 x cp2, tied"]["engine"]["mesh_shape"] == [2, 2]


# ---------------------------------------------------------------------------- on two ranks


def compare(family: str, mesh: Any) -> dict[str, float]:
    """Return the loss of the whole model and of its parts' sum, and their gradients' largest difference."""
    import torch.distributed as dist

    from shardscope.frameworks.fsdp2.engine.ring import Ring
    from shardscope.training.model.model import build_model

    # SmolLM3's fourth layer is the first without rotary embedding.
    arch = architecture(family, 4 if family == "smollm3" else 2)
    torch.manual_seed(3)
    model = build_model(arch).train()
    ids = torch.randint(arch.vocab_size, (2, 32), generator=torch.Generator().manual_seed(5))
    whole = model(input_ids=ids, labels=ids).loss
    whole.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    ring = Ring(mesh, torch.device("cpu"), repeats_keys=False)
    ring.replace_attention(model)
    following = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    with ring.shard_positions(32) as here:
        loss = model(
            input_ids=ids[:, here],
            position_ids=here[None],
            labels=following[:, here],
            shift_labels=following[:, here],
            num_items_in_batch=2 * 31,
        ).loss
        loss.backward()
    parts = loss.detach().clone()
    dist.all_reduce(parts)
    worst = 0.0
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        largest = float(expected[name].abs().max())
        worst = max(worst, float((parameter.grad - expected[name]).abs().max()) / max(largest, 1e-6))
    return {
        "whole": whole.item(),
        "parts": parts.item(),
        "worst_gradient": worst,
        "calls_per_layer": ring.num_calls / arch.num_hidden_layers,
    }


def read_error(ctx: StandInContext, plan: Plan, batch: Any = None, build: Any = None) -> str:
    """Return the error that ``plan`` raises before its first step."""
    from shardscope.frameworks.engines import get_engine_class
    from shardscope.training.model.model import build_model

    try:
        engine = get_engine_class(plan)(copy_context(ctx, plan))
        engine.setup(build or (lambda: build_model(plan.architecture)))
        engine.step(batch or make_batch(engine, 0))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "trained"


def attend_at_home(ring: Any, model: Any) -> None:
    """To the tokens of one's own part, with nobody else's keys."""
    from transformers import AttentionInterface

    whole = torch.nn.functional.scaled_dot_product_attention

    def attend_to_own_tokens(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any
    ) -> tuple[Any, None]:
        return whole(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).contiguous(), None

    AttentionInterface.register("own", attend_to_own_tokens)
    model.config._attn_implementation = "own"


def run_broken_ring(ctx: StandInContext, kind: str) -> str:
    """Return the error of a run whose ring attention is missing, or whose model does not call it."""
    from shardscope.frameworks.fsdp2.engine import context_parallel, ring
    from shardscope.training.model.model import build_model

    plan = make_plan(2, cp=2)
    if kind == "not the plan's group":
        made = context_parallel.init_device_mesh

        def train_ranks_in_one_process(kind: str, shape: Any, mesh_dim_names: Any) -> Any:
            return made(kind, (2, 1) if "cp" in mesh_dim_names else shape, mesh_dim_names=mesh_dim_names)

        context_parallel.init_device_mesh = train_ranks_in_one_process
        try:
            return read_error(ctx, plan)
        finally:
            context_parallel.init_device_mesh = made
    if kind == "keys stay at home":
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kept = _attention._templated_ring_attention
        _attention._templated_ring_attention = lambda group, dim, kernel, **given: kernel(**given)
        try:
            return read_error(ctx, plan)
        finally:
            _attention._templated_ring_attention = kept
    if kind == "attention is not asked":
        taken = ring.Ring.replace_attention
        ring.Ring.replace_attention = attend_at_home  # type: ignore[method-assign]
        try:
            return read_error(ctx, plan)
        finally:
            ring.Ring.replace_attention = taken  # type: ignore[method-assign]

    def build_eager_model() -> Any:
        return build_model(plan.architecture, attention="eager")

    return read_error(ctx, plan, build=build_eager_model)


BROKEN = {
    "not the plan's group": "the plan splits sequences over cp=2 ranks, and rank ",
    "keys stay at home": "% from attention over the whole sequence",
    "attention is not asked": "0 of 16 attention calls of the first step went through the ring",
    "eager": "allowed with cp > 1: a causal language model of transformers with attn_implementation='sdpa'",
}


def resume_with_whole_sequences(ctx: StandInContext) -> dict[str, Any]:
    """Resume a context-parallel checkpoint on ranks with whole sequences, from other weights."""
    plan, other = make_plan(2, cp=2), make_plan(2)
    engine = set_up(copy_context(ctx, plan), plan)
    engine.step(make_batch(engine, 0))
    engine.save("checkpoint")
    engine.export("model")
    went_on = engine.step(make_batch(engine, 1))
    again = set_up(copy_context(ctx, other), other, seed=7)
    again.load("checkpoint")
    back = set_up(copy_context(ctx, plan), plan, seed=8)
    back.load("checkpoint")
    return {
        "went_on": went_on,
        "whole": again.step(make_batch(again, 1)),
        "parts": back.step(make_batch(back, 1)),
        "done": again.num_steps_done,
    }


def two_ranks(ctx: StandInContext) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    masked = {"input_ids": tokens, "labels": tokens, "attention_mask": tokens}
    return {
        "families": {family: compare(family, mesh) for family in KEPT_FAMILIES},
        "half": train_plan(ctx, HALF),
        "host": train_plan(ctx, make_plan(2, cp=2, offload="cpu")),
        "long": train_plan(ctx, LONG)["phases"]["forward"]["activations"],
        "saved": resume_with_whole_sequences(ctx),
        "masked": read_error(ctx, make_plan(2, cp=2), batch=masked),
        "short": read_error(ctx, make_plan(2, cp=2), batch={"input_ids": tokens, "labels": tokens}),
        "broken": {kind: run_broken_ring(ctx, kind) for kind in BROKEN},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two_rank_results(folder: Any) -> list[dict[str, Any]]:
    return on_ranks(2, HALF, two_ranks, folder)


def other_families(ctx: StandInContext) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {family: compare(family, mesh) for family in CONTEXT_PARALLEL_FAMILIES}


@pytest.fixture(scope="module")
def family_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Families that few tests need: each of transformers' modules takes long to import."""
    found: dict[str, Any] = on_ranks(2, HALF, other_families, tmp_path_factory.mktemp("families"))[0]
    return found


@thorough()
@pytest.mark.parametrize("family", few(CONTEXT_PARALLEL_FAMILIES, KEPT_FAMILIES))
def test_split_models_of_each_family_compute_the_same(
    family: str, two_rank_results: Any, request: pytest.FixtureRequest
) -> None:
    kept = family in KEPT_FAMILIES
    one = (two_rank_results[0]["families"] if kept else request.getfixturevalue("family_results"))[family]
    assert one["parts"] == pytest.approx(one["whole"], rel=1e-5)
    assert one["worst_gradient"] < 1e-4
    assert one["calls_per_layer"] == 1


@thorough()
def test_context_parallelism_trains_in_half_precision_and_with_offloading(
    two_rank_results: Any, reference_results: Any
) -> None:
    """bf16 losses agree as closely as two orders of summation do."""
    half = two_rank_results[0]["half"]
    assert half["losses"] == pytest.approx(reference_results[2]["losses"], abs=0.02)
    assert half["norms"] == pytest.approx(reference_results[2]["norms"], rel=0.05)
    assert half["engine"]["ring_attention_off_by"] < 0.02
    assert two_rank_results[0]["host"]["losses"] == pytest.approx(reference_results[0]["losses"], abs=1e-5)


def train_adapters(ctx: StandInContext) -> list[dict[str, Any]]:
    plans = (make_plan(2, method="lora", lora_rank=4, cp=cp) for cp in (2, 1))
    return [train_plan(ctx, plan) for plan in plans]


@thorough()
def test_adapters_train_the_same_with_context_parallelism(tmp_path: Path) -> None:
    needs("peft")
    parts, whole = on_ranks(2, HALF, train_adapters, tmp_path)[0]
    assert parts["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert parts["norms"] == pytest.approx(whole["norms"], abs=1e-4)
    assert (parts["held"], parts["rest"]["parameters"]) == (whole["held"], whole["rest"]["parameters"])


@thorough()
def test_ring_attention_saves_the_planned_tensors(two_rank_results: Any) -> None:
    """Where parts are joined attention's output stays twice: by heads, and by tokens for its product."""
    planned = LONG.memory().at("forward")["activations"]
    copy = LONG.recipe.seq_len // 2 * LLAMA.num_hidden_layers * LLAMA.hidden_size * 4
    # Beside what the modules save there are ids, positions and rotary tables.
    assert 0 < two_rank_results[0]["long"] - planned < 2**16 < copy
    assert two_rank_results[0]["long"] - two_rank_results[1]["long"] == copy


@thorough()
def test_a_checkpoint_resumes_with_and_without_context_parallelism(
    two_rank_results: Any, folder: Any
) -> None:
    from transformers import AutoModelForCausalLM

    saved = two_rank_results[0]["saved"]
    assert saved["whole"] == pytest.approx(saved["went_on"], abs=1e-5)
    assert saved["parts"] == saved["went_on"]
    assert saved["done"] == 2
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    # The ring is the run's, not the model's.
    assert model.config._attn_implementation == "sdpa"
    assert "ring" not in (folder / "model" / "config.json").read_text()


@thorough()
@pytest.mark.parametrize("kind", BROKEN)
def test_missing_ring_attention_fails_the_run(kind: str, two_rank_results: Any) -> None:
    for rank in (0, 1):
        assert BROKEN[kind] in two_rank_results[rank]["broken"][kind]


@thorough()
def test_batches_that_cannot_be_split_raise(two_rank_results: Any) -> None:
    assert (
        "allowed with cp > 1: input_ids and labels: ring attention supports no mask"
        in two_rank_results[0]["masked"]
    )
    assert "allowed with cp > 1: rows of the plan's seq_len=32 tokens" in two_rank_results[0]["short"]


def on_old_gpus(plan: Plan) -> Plan:
    return replace(plan, cluster=Cluster.parse("2xv100-sxm-32gb"))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (make_plan(4, cp=2, tp=2), "Layout.tp is 2; allowed: 1 with cp > 1 to train with FSDP2"),
        (make_plan(4, cp=2, pp=2), "Layout.pp is 2; allowed: 1 with cp > 1 to train with FSDP2"),
        (make_plan(2, architecture("gpt_neox", 2), cp=2), "was not tested with other families"),
        (make_plan(2, architecture("mistral with a window", 2), cp=2), "sliding_window=16 with cp > 1"),
        (
            on_old_gpus(make_plan(2, cp=2, precision="bf16-mixed")),
            "whose fused attention does not support bf16",
        ),
        (make_plan(2, cp=2, recompute="offload"), "Recipe.recompute is 'offload'; allowed: "),
        (make_plan(2, cp=2, loss="chunked"), "Recipe.loss is 'chunked'; allowed: None, 'full'"),
        (make_plan(2, cp=2, dropout=0.1), "Recipe.dropout is 0.1; allowed: 0.0 for this engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_untested_combinations_raise(plan: Plan, words: str) -> None:
    assert words in str(why_not_trained(plan))
