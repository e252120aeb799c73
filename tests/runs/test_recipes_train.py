"""Recipes beyond AdamW over whole logits, on real gloo ranks: the code that rehearsals play trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, sample

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_plan  # noqa: E402

from shardscope.core.architecture import Architecture  # noqa: E402

NUM_STEPS = 4


def make_batch(ctx: StandInContext, step: int) -> dict[str, Any]:
    tokens = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(step))
    rows = tokens.chunk(ctx.world_size)[ctx.rank]
    return {"input_ids": rows, "labels": rows.clone()}


def train(ctx: StandInContext) -> dict[str, Any]:
    """Some steps of the engine's own optimizer; a checkpoint, a step, the checkpoint and that step again."""
    from shardscope.training.model.model import build_model

    ctx.engine.setup(lambda: build_model(ctx.plan.architecture))
    ctx.engine.set_learning_rate(3e-3)
    losses = [ctx.engine.step(make_batch(ctx, 0)) for _ in range(NUM_STEPS)]
    ctx.engine.save(ctx.folder / "here")
    after = ctx.engine.step(make_batch(ctx, 1)), ctx.engine.step(make_batch(ctx, 1))
    ctx.engine.load(ctx.folder / "here")
    again = ctx.engine.step(make_batch(ctx, 1)), ctx.engine.step(make_batch(ctx, 1))
    return {
        "losses": losses,
        "after": after,
        "again": again,
        "engine": ctx.records["engine"],
        "held": ctx.engine.memory()["optimizer"],
    }


@sample(2)
@pytest.mark.parametrize(
    ("framework", "optimizer", "name"),
    [
        ("ddp", "muon", "MuonWithAdamW"),
        ("ddp", "adafactor", "Adafactor"),
        ("ddp", "lion", "Lion"),
        ("fsdp2", "lion", "Lion"),
        ("fsdp2", "adamw_foreach", "AdamW"),
    ],
)
def test_each_optimizer_trains_and_resumes(framework: str, optimizer: str, name: str, tmp_path: Path) -> None:
    plan = tiny_plan(framework, 2, optimizer=optimizer)
    first, second = on_ranks(2, plan, train, tmp_path)
    assert first["engine"]["optimizer"] == name
    assert first["losses"] == second["losses"]
    # Adafactor steps by the size of the weights, which is small at first.
    assert first["losses"][-1] < first["losses"][0] - 0.02
    assert first["again"] == pytest.approx(first["after"], abs=1e-6)
    # Step counters are a few bytes each.
    assert first["held"] == pytest.approx(plan.memory().at("rest")["optimizer"], abs=2000)


@sample(1)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_the_chunked_loss_equals_the_plain_loss(framework: str, precision: str, tmp_path: Path) -> None:
    whole, _ = on_ranks(2, tiny_plan(framework, 2, precision=precision), train, tmp_path / "whole")
    chunked, _ = on_ranks(
        2, tiny_plan(framework, 2, precision=precision, loss="chunked"), train, tmp_path / "chunked"
    )
    assert chunked["losses"] == pytest.approx(whole["losses"], abs=1e-4 if precision == "fp32" else 2e-2)


def make_small_architecture(family: str, **values: Any) -> Architecture:
    return Architecture(**{
        "name": family,
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        **values,
    })  # fmt: skip


GPT2 = {
    "norm": "layernorm",
    "gated_mlp": False,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize(
    "arch",
    [
        make_small_architecture("gemma2", norms_per_layer=4, tie_word_embeddings=True),
        make_small_architecture("granite"),
        make_small_architecture("gpt2", **GPT2),
        make_small_architecture("llama"),
    ],
    ids=lambda arch: arch.name,
)
@pytest.mark.parametrize("tokens", [40, 1100])
def test_the_chunked_loss_applies_each_familys_head(arch: Architecture, tokens: int) -> None:
    """Gemma's cap and Granite's scale come before the loss; a label of -100 does not count."""
    from shardscope.training.model.loss import apply_chunked_loss
    from shardscope.training.model.model import build_model

    torch.manual_seed(0)
    model = build_model(arch)
    ids = torch.randint(0, arch.vocab_size, (tokens // 20, 20))
    labels = ids.clone()
    labels[:, ::7] = -100
    results = []
    for chunked in (False, True):
        if chunked:
            apply_chunked_loss(model)
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0])
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_lion_equals_a_hand_computation() -> None:
    from shardscope.training.optimizers.optimizers import Lion

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weight.grad = torch.tensor([3.0, -1.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.95 - 0.1, -1.9 + 0.1]))
    weight.grad = torch.tensor([-0.1, 5.0])
    # 0.9 x 0.03 - 0.1 x 0.1 is still positive.
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.85 * 0.95 - 0.1, -1.8 * 0.95 - 0.1]))
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"][0], torch.tensor(0.99 * 0.03 - 0.001))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_equals_bitsandbytes(kind: Any) -> None:
    """On real tensors: the classes, the bytes that the plan counts, and gradients of adapters alone."""
    bnb = needs("bitsandbytes")

    import shardscope as ss
    from shardscope.training.model.lora import add_adapters
    from shardscope.training.model.model import build_model
    from shardscope.training.model.quantization import list_scales, quantize_base

    arch = make_small_architecture("llama")
    recipe = ss.Recipe(method="lora", quantization=kind, precision="bf16", seq_len=32)
    model = build_model(arch).to(torch.bfloat16)
    quantize_base(model, recipe, sharded=False, compute=torch.bfloat16)
    model = add_adapters(model, arch, recipe)
    own = bnb.nn.Linear4bit if kind == "nf4" else bnb.nn.Linear8bitLt
    assert sum(isinstance(module, own) for module in model.modules()) == 2 * 7
    tensors = [*model.parameters(), *list_scales(model)]
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    plan = ss.Plan(arch, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())
    assert sum(held.values()) == plan.memory().components["parameters"]
    ids = torch.randint(0, arch.vocab_size, (1, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)
