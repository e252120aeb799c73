"""DoRA on two real ranks: losses and memory are right, and the trained magnitudes merge as by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, thorough

torch = needs("torch")
needs("transformers")
needs("peft")

from finetuned_models import small_model  # noqa: E402
from gloo_ranks import StandInContext, on_ranks, tiny_plan  # noqa: E402
from single_process import take_steps  # noqa: E402
from test_recipes_train import make_batch  # noqa: E402

import shardscope as ss  # noqa: E402

TARGETS = ("q_proj", "down_proj")
RECIPE: dict[str, Any] = {"method": "lora", "use_dora": True, "lora_rank": 4, "lora_targets": TARGETS}
NUM_STEPS = 4
RATE = 3e-3


def train(ctx: StandInContext) -> dict[str, Any]:
    from shardscope.training.model.model import build_model

    ctx.engine.setup(lambda: build_model(ctx.plan.architecture))
    ctx.engine.set_learning_rate(RATE)
    losses = [ctx.engine.step(make_batch(ctx, step)) for step in range(NUM_STEPS)]
    return {
        "losses": losses,
        "memory": ctx.engine.memory(),
        # In a rank, for the test's own process must not compute before it forks ranks again.
        "losses_of_peft": train_with_peft(ctx.plan, ctx.engine.seed),
    }


def train_with_peft(plan: ss.Plan, seed: int) -> list[float]:
    """Return the losses of peft's own model in one process, over the batches of both ranks."""
    from peft import LoraConfig, get_peft_model

    from shardscope.training.model.model import build_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model: Any = get_peft_model(build_model(plan.architecture), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    whole = StandInContext(0, 1, plan, Path())
    losses, _ = take_steps(optimizer, (model(**make_batch(whole, step)).loss for step in range(NUM_STEPS)))
    return losses


@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_losses_are_those_of_peft_and_memory_is_the_plans(framework: str, tmp_path: Path) -> None:
    plan = tiny_plan(framework, 2, **RECIPE)
    first, second = on_ranks(2, plan, train, tmp_path)
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(first["losses_of_peft"], abs=1e-5)
    at_rest = plan.memory().at("rest")
    for name in ("parameters", "optimizer"):
        # Step counters are a few bytes each.
        assert first["memory"][name] == pytest.approx(at_rest[name], abs=2000), name


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return small_model(tmp_path, "llama")


@thorough()
@pytest.mark.parametrize("layout", few([ss.Layout.ddp(), ss.Layout.fsdp2()], [ss.Layout.ddp()]))
def test_trained_magnitudes_are_exported_and_merged(layout: ss.Layout, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    recipe = ss.Recipe(seq_len=32, micro_batch_size=2, global_batch_size=4, precision="fp32", **RECIPE)
    plan = ss.Plan(ss.Architecture.from_hf(base), ss.Cluster.parse("2xcpu"), recipe, layout)
    rows = [{"prompt": "Who hunts the whale?", "completion": " Captain Ahab does."}] * 4
    run = ss.launch(
        plan, ss.Finetune(base, rows, num_steps=4, learning_rate=0.05, export=True), folder=tmp_path / "runs"
    )
    assert run.wait(200) == "finished", run.error

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    merged = AutoModelForCausalLM.from_pretrained(ss.merge(run)).state_dict()
    adapted: Any = PeftModel.from_pretrained(load(), run.model)
    magnitudes = {name: value for name, value in adapted.named_parameters() if "magnitude" in name}
    assert len(magnitudes) == len(TARGETS) * plan.architecture.num_hidden_layers
    # They began as the norms of the base's rows, and have been trained since.
    weights = load().state_dict()
    for name, magnitude in magnitudes.items():
        norms = weights[name.removeprefix("base_model.model.").split(".lora_")[0] + ".weight"].norm(dim=1)
        assert 0 < (magnitude.detach() - norms).abs().max() < 0.3
    expected = adapted.merge_and_unload().state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
