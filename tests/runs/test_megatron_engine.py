"""Megatron-core on real gloo ranks: it trains what transformers trains, and says what it really made.

One spawn of two ranks goes through all cases: what a case finds comes back by its name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import needs, needs_installed, thorough

from shardscope import Architecture, Cluster, Layout, Plan, Recipe
from shardscope.core.layer_parts import MixtureOfExperts

torch = needs("torch")
needs("transformers")

from finetuned_models import train_beside_single_process  # noqa: E402
from gloo_ranks import StandInContext, on_ranks  # noqa: E402
from single_process import RATE, train_in_one_process  # noqa: E402

# make test has a parity row of this framework.
pytestmark = [needs_installed("megatron"), thorough()]
"""Imported on the ranks alone: a rehearsal in this process has to import it in its own way."""
NUM_STEPS = 3
GLOBAL_ROWS = 4
SEQ_LEN = 32


def make_llama(**changes: Any) -> Architecture:
    fields: dict[str, Any] = {
        "name": "tiny",
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    return Architecture(**{**fields, **changes})


def make_gpt2() -> Architecture:
    biases = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True)
    return make_llama(
        model_type="gpt2",
        num_key_value_heads=4,
        norm="layernorm",
        gated_mlp=False,
        position_embedding="learned",
        tie_word_embeddings=True,
        **biases,
    )


def make_mixtral() -> Architecture:
    experts = MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    return make_llama(model_type="mixtral", num_hidden_layers=2, mixture_of_experts=experts)


def plan(architecture: Architecture | None = None, *, layout: dict[str, Any], **recipe: Any) -> Plan:
    fields: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "micro_batch_size": 1,
        "global_batch_size": GLOBAL_ROWS,
        "precision": "fp32",
        **recipe,
    }
    return Plan(
        architecture or make_llama(), Cluster.parse("2xcpu"), Recipe(**fields), Layout.megatron(**layout)
    )


CASES: dict[str, Plan] = {
    # 12 rows pad the vocabulary to 256 x 2, and would have a share in every softmax.
    "tensor and sequence parallel": plan(
        make_llama(vocab_size=500, tie_word_embeddings=True), layout={"tp": 2}, recompute="full"
    ),
    "interleaved stages": plan(layout={"pp": 2, "vpp": 2}),
    "a tied head on another stage": plan(make_gpt2(), layout={"pp": 2}),
    "distributed optimizer": plan(layout={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "whole optimizer": plan(layout={"distributed_optimizer": False}, optimizer="sgd", attention="eager"),
    "experts": plan(make_mixtral(), layout={"ep": 2}),
    "bf16": plan(make_llama(num_hidden_layers=2), layout={}, precision="bf16-mixed"),
    "fp16": plan(make_llama(num_hidden_layers=2), layout={}, precision="fp16-mixed"),
}
NOTHING_LEFT = "tensor and sequence parallel"
LOOSE = {"bf16": 2e-2, "fp16": 2e-2}
"""By how much losses of 16 bits may differ from those of 32, in which the single process computes."""


def make_batch(step: int) -> dict[str, Any]:
    """Make a global batch of few tokens, some of whose rows have fewer labels than others."""
    tokens = torch.randint(0, 32, (GLOBAL_ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[::3, :20] = -100
    return {"input_ids": tokens, "labels": labels}


def take_rank_rows(whole: dict[str, Any], engine: Any) -> dict[str, Any]:
    return {name: rows.chunk(engine.num_data_ranks)[engine.data_rank] for name, rows in whole.items()}


def build(case: Plan) -> Any:
    from shardscope.training.model.model import build_model

    return build_model(case.architecture)


def train_alone(case: Plan) -> dict[str, Any]:
    """Train in one process, the whole batch at once."""
    batches = [make_batch(step) for step in range(NUM_STEPS)]
    found = train_in_one_process(case.architecture, batches, case.recipe.optimizer)
    return {"losses": found["losses"], "norm": found["norms"][-1]}


def make_context(ctx: StandInContext, case: Plan) -> StandInContext:
    """Make a context for one case on this rank."""
    from shardscope.frameworks.megatron.engine.engine import MegatronEngine

    own = StandInContext(
        rank=ctx.rank, world_size=ctx.world_size, plan=case, folder=ctx.folder, device=ctx.device
    )
    own.engine = MegatronEngine(own)
    own.engine.learning_rate = RATE
    return own


def train_case(ctx: StandInContext, case: Plan) -> dict[str, Any]:
    own = make_context(ctx, case)
    engine = own.engine
    engine.setup(lambda: build(case))
    losses = [engine.step(take_rank_rows(make_batch(step), engine)) for step in range(NUM_STEPS)]
    return {
        "losses": losses,
        "norm": engine.grad_norm,
        "held": {name: engine.memory()[name] for name in ("parameters", "gradients", "optimizer")},
        "record": own.records["engine"],
        "phases": own.records["memory"]["phases"],
        "single": train_alone(case),
        "data_rank": engine.data_rank,
    }


def read_refusals(ctx: StandInContext) -> dict[str, str]:
    """Return the engine's errors for another module, optimizer or batch, by name."""
    case = plan(make_llama(num_hidden_layers=2), layout={})
    refusals = {}

    def record_error(name: str, build_model: Any, build_optimizer: Any = None, whole: Any = None) -> None:
        own = make_context(ctx, case)
        try:
            own.engine.setup(build_model, build_optimizer)
            own.engine.step(take_rank_rows(whole, own.engine))
        except (ValueError, RuntimeError) as error:
            refusals[name] = f"{type(error).__name__}: {error}"

    whole = make_batch(0)
    record_error("module", lambda: torch.nn.Linear(4, 4))
    record_error("optimizer", lambda: build(case), torch.optim.Adagrad)
    record_error("decayed vectors", lambda: build(case), torch.optim.AdamW)
    record_error("batch", lambda: build(case), None, {**whole, "attention_mask": whole["input_ids"]})
    unlabelled = {**whole, "labels": whole["labels"].clone()}
    unlabelled["labels"][0] = -100
    record_error("labels", lambda: build(case), None, unlabelled)
    return refusals


def read_contradictions(ctx: StandInContext) -> dict[str, str]:
    """Return the engine's errors if Megatron-core built something else than planned."""
    from shardscope.frameworks.megatron.engine import model

    contradictions = {}
    planned = plan(make_llama(num_hidden_layers=2), layout={"tp": 2})
    groups, buffers = model.init_model_parallel, model.wrap_chunks
    model.init_model_parallel = lambda plan: groups(
        replace(plan, layout=Layout.megatron(pp=2), recipe=replace(plan.recipe))
    )
    try:
        make_context(ctx, planned).engine.setup(lambda: build(planned))
    except RuntimeError as error:
        contradictions["groups"] = str(error)
    finally:
        model.init_model_parallel = groups
    data = plan(make_llama(num_hidden_layers=2), layout={})
    whole = replace(data, layout=Layout.megatron(distributed_optimizer=False))
    optimizer = model.build_optimizer
    model.wrap_chunks = lambda plan, *rest: buffers(whole, *rest)
    model.build_optimizer = lambda plan, *rest: optimizer(whole, *rest)
    try:
        make_context(ctx, data).engine.setup(lambda: build(data))
    except RuntimeError as error:
        contradictions["optimizer"] = str(error)
    finally:
        model.wrap_chunks, model.build_optimizer = buffers, optimizer
    return contradictions


def step_without_clipping(ctx: StandInContext) -> dict[str, Any]:
    """Return how far one step moves the weights at a rate of zero, and at ten times the rate, not clipped."""
    case = plan(make_llama(num_hidden_layers=2), layout={"distributed_optimizer": False}, optimizer="sgd")
    own = make_context(ctx, case)
    own.engine.max_grad_norm = None
    own.engine.weight_decay = 0.0
    own.engine.setup(lambda: build(case))
    moved = []
    for rate in (0.0, 0.1):
        own.engine.set_learning_rate(rate)
        before = [p.detach().clone() for p in own.engine.model.parameters()]
        own.engine.step(take_rank_rows(make_batch(0), own.engine))
        moved.append(
            sum(
                float((p - was).square().sum())
                for p, was in zip(own.engine.model.parameters(), before, strict=True)
            )
            ** 0.5
        )
    return {"moved": moved, "norm": own.engine.grad_norm}


CHAIN = ({"tp": 2}, {"pp": 2}, {})
"""Degrees of three runs, each of which goes on from the checkpoint of the one before it."""


def resumed_at_other_degrees(ctx: StandInContext) -> dict[str, list[float]]:
    """Return the losses of six steps: in one task, and in three of two steps that resume each other."""
    from shardscope.training.tasks.pretrain import Pretrain

    small = make_llama(vocab_size=2048, num_hidden_layers=2)

    def read_losses(name: str, layout: dict[str, Any], stop: int | None, **fields: Any) -> list[float]:
        own = make_context(ctx, plan(small, layout=layout))
        own.folder, own.stop_at_look = ctx.folder / name, stop
        own.folder.mkdir(exist_ok=True)
        if ctx.rank == 0:
            record = {"plan": json.loads(own.plan.to_json())}
            (own.folder / "run.json").write_text(json.dumps(record))
        # At RATE, AdamW grows the rounding of tp 2 to 4e-4, in a run that nothing interrupts too.
        Pretrain(num_steps=6, learning_rate=RATE / 10, **fields)(own)
        return [line["loss"] for line in own.lines]

    straight = read_losses("straight", {}, None)
    chained: list[float] = []
    for number, layout in enumerate(CHAIN):
        before = {"resume": ctx.folder / f"chain-{number - 1}"} if number else {}
        # Asked to stop at its third look: two steps are done, and saved.
        chained += read_losses(f"chain-{number}", layout, None if layout == {} else 3, **before)
    return {"straight": straight, "chained": chained}


def run_every_case(ctx: StandInContext) -> dict[str, Any]:
    return {
        **{name: train_case(ctx, case) for name, case in CASES.items()},
        "refusals": read_refusals(ctx),
        "contradictions": read_contradictions(ctx),
        "freely": step_without_clipping(ctx),
        "from files": train_beside_single_process(ctx, "mixtral", Layout.megatron(ep=2)),
        "resumed": resumed_at_other_degrees(ctx),
    }


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    first = next(iter(CASES.values()))
    return on_ranks(2, first, run_every_case, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("name", CASES)
def test_megatron_trains_like_transformers(name: str, rank_results: list[dict[str, Any]]) -> None:
    expected = rank_results[0][name]["single"]
    for rank in rank_results:
        found = rank[name]
        assert found["losses"] == pytest.approx(expected["losses"], abs=LOOSE.get(name, 1e-4))
        assert found["norm"] == pytest.approx(expected["norm"], rel=10 * LOOSE.get(name, 1e-4))
        assert found["losses"] == rank_results[0][name]["losses"]
    assert expected["losses"][0] > expected["losses"][-1]


def test_fault_31_a_task_resumes_at_other_degrees(rank_results: list[dict[str, Any]]) -> None:
    for rank in rank_results:
        found = rank["resumed"]
        assert len(found["straight"]) == 6
        assert found["chained"] == pytest.approx(found["straight"], abs=1e-4)


def test_megatron_loads_pretrained_weights(rank_results: list[dict[str, Any]]) -> None:
    for rank in rank_results:
        assert rank["from files"]["losses"] == pytest.approx(rank["from files"]["alone"], abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_rank_memory_is_as_planned(name: str, rank_results: list[dict[str, Any]]) -> None:
    for number, stage in enumerate(CASES[name].memory().by_stage):
        planned = stage.at("optimizer").components
        held = [rank[name]["held"] for rank in rank_results if rank[name]["record"]["stage"] == number]
        for component in ("parameters", "gradients", "optimizer"):
            assert max(each[component] for each in held) == planned[component], component


def test_the_engine_record_describes_the_run(rank_results: list[dict[str, Any]]) -> None:
    records = {name: [rank[name]["record"] for rank in rank_results] for name in CASES}
    split = records["tensor and sequence parallel"][0]
    assert split["sentence"] == (
        "Megatron-core: GPTModel in 1 chunk a rank, tp 2 with sequence parallelism (gloo, cpu), "
        "DistributedOptimizer, its state sharded, fp32 compute"
    )
    assert split["qkv_shape_here"] == [64, 64] and split["num_attention_heads_here"] == 2
    assert [each["layers_here"] for each in records["interleaved stages"]] == [[0, 2], [1, 3]]
    for name, case in CASES.items():
        core = "DotProductAttention" if case.recipe.attention == "eager" else "FusedAttention"
        assert all(each["core_attention"] == [core] for each in records[name]), name
    assert [each["stage"] for each in records["interleaved stages"]] == [0, 1]
    experts = records["experts"][0]
    assert experts["num_experts_here"] == experts["expert_parallel"] == 2
    shares = records["distributed optimizer"]
    assert sum(each["num_weights_updated_here"] for each in shares) == shares[0]["num_weights_here"]
    assert shares[0]["overlap_grad_reduce"] and shares[0]["overlap_param_gather"]
    whole = records["whole optimizer"][0]
    assert (whole["optimizer"], whole["inner_optimizer"]) == ("FP32Optimizer", "SGD")
    assert records["bf16"][0]["parameter_dtypes"] == ["bfloat16"]


# Recomputed layers leave next to nothing; with fp16 a step is fullest before its forward has left anything.
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("fp16", NOTHING_LEFT)])
def test_the_forward_saves_the_planned_tensors(name: str, rank_results: list[dict[str, Any]]) -> None:
    """And tables of angles, which weigh something in layers as narrow as these."""
    for number, stage in enumerate(CASES[name].memory().by_stage):
        left = [
            rank[name]["phases"]["forward"]["activations"]
            for rank in rank_results
            if rank[name]["record"]["stage"] == number
        ]
        planned = stage.at("forward").components["activations"]
        assert planned <= max(left) <= 1.15 * planned


def test_ranks_of_a_model_parallel_group_share_their_data(rank_results: list[dict[str, Any]]) -> None:
    shares = {name: [rank[name]["data_rank"] for rank in rank_results] for name in CASES}
    for name, case in CASES.items():
        assert shares[name] == ([0, 0] if case.degrees.tp * case.degrees.pp == 2 else [0, 1])


def test_memory_of_a_step_is_recorded(rank_results: list[dict[str, Any]]) -> None:
    phases = rank_results[0]["distributed optimizer"]["phases"]
    assert {"rest", "forward", "backward", "optimizer"} <= set(phases)
    held = rank_results[0]["distributed optimizer"]["held"]
    assert phases["optimizer"]["parameters"] == held["parameters"]
    assert phases["optimizer"]["gradients"] == held["gradients"]
    assert phases["backward"]["activations"] > 0


def test_impossible_plans_raise(rank_results: list[dict[str, Any]]) -> None:
    for rank in rank_results:
        told = rank["refusals"]
        assert "a model of transformers of the plan's family, 'llama'" in told["module"]
        assert "build_optimizer is 'Adagrad'; allowed: a torch.optim.AdamW" in told["optimizer"]
        assert "one decay for all matrices and none for vectors" in told["decayed vectors"]
        assert "batch is 'attention_mask, input_ids, labels'" in told["batch"]
        assert "Some micro-batches of this step have no labelled token" in told["labels"]


def test_a_contradiction_fails_the_run(rank_results: list[dict[str, Any]]) -> None:
    for rank in rank_results:
        told = rank["contradictions"]
        assert told["groups"] == "the plan says tensor parallel 2, and Megatron-core has 1"
        assert told["optimizer"] == "the plan says distributed optimizer True, and Megatron-core has False"


def test_learning_rate_and_clipping_are_applied(rank_results: list[dict[str, Any]]) -> None:
    found = rank_results[0]["freely"]
    assert found["moved"][0] == 0 and found["norm"] > 1.0
    assert found["moved"][1] > 0.1 * found["norm"] * 0.99
