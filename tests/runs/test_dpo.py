"""DPO on real ranks: the losses of one process, of each framework, and of a resumed run are the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, skip_without, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")

import numpy  # noqa: E402
from finetuned_models import small_model  # noqa: E402
from single_process import take_steps  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout  # noqa: E402
from shardscope.runs.totals import compute_totals  # noqa: E402

SEQ_LEN, RATE, NUM_STEPS, BETA = 32, 1e-3, 4, 0.2
PAIRS = [
    {"prompt": "Who hunts the whale?", "chosen": " Ahab.", "rejected": " Nobody knows who hunts it."},
    {"prompt": "What is the ship?", "chosen": " The Pequod.", "rejected": " A ship of some sort."},
    {"prompt": "Call me", "chosen": " Ishmael.", "rejected": " later, or never, as you like."},
    {"prompt": "Where?", "chosen": " At sea", "rejected": " That is not known."},
    {"prompt": "The whale is", "chosen": " white", "rejected": " a fish, and large, and grey"},
    {"prompt": "And the mate?", "chosen": " Starbuck.", "rejected": " There is one, I suppose."},
    {"prompt": "How does it end?", "chosen": " It sinks.", "rejected": " In the usual way of ships."},
    {"prompt": "Who tells it?", "chosen": " I do", "rejected": " One of the crew, long after."},
]
"""As many as a global batch of 16 sequences, so that each step has all pairs in some order."""
VALIDATION_PAIRS = [
    {"prompt": "Who is the captain?", "chosen": " Ahab.", "rejected": " A man with one leg."},
    {"prompt": "The end?", "chosen": " Sad", "rejected": " Long and winding"},
    {"prompt": "Is it deep?", "chosen": " Yes", "rejected": " It may well be"},
]
"""Fewer than a global batch: some micro-batches are empty."""
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, NF4": ("ddp", {"method": "qlora", "quantization": "nf4"}),
    "fsdp2, NF4": ("fsdp2", {"method": "qlora", "quantization": "nf4"}),
    "fsdp2, compiled": ("fsdp2", {"method": "lora", "kernels": "compiled"}),
    "fsdp2, recomputed in bf16": (
        "fsdp2",
        {"method": "lora", "recompute": "full", "precision": "bf16-mixed"},
    ),
    "ZeRO-2, two micro-batches of one pair": ("ZeRO-2", {"method": "lora", "micro_batch_size": 2}),
}
"""Layout and recipe of more plans with adapters."""
LAYOUTS = {
    "ddp": Layout.ddp(),
    "fsdp2": Layout.fsdp2(),
    "ZeRO-1": Layout.zero(stage=1),
    "ZeRO-2": Layout.zero(stage=2),
    "ZeRO-3": Layout.zero(stage=3),
}
NAMES = ("loss", "reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def launch(
    folder: Path,
    runs: Path,
    name: str,
    *,
    method: Any = "full",
    recipe: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    if name.startswith("ZeRO"):
        skip_without("deepspeed")
    sizes = {"seq_len": SEQ_LEN, "micro_batch_size": 4, "global_batch_size": 16}
    made = ss.Recipe(**{**sizes, "precision": "fp32", "method": method, **(recipe or {})})
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), made, LAYOUTS[name])
    fields: dict[str, Any] = {"num_steps": NUM_STEPS, "learning_rate": RATE, "schedule": "constant"}
    fields |= {"data": PAIRS, "objective": "dpo", "dpo_beta": BETA}
    task = ss.Finetune(folder, **{**fields, **options})
    run = ss.launch(plan, task, folder=runs)
    assert run.wait(200) == "finished", run.error
    return run


def list_values(run: Any, name: str) -> list[float]:
    return [line[name] for line in run.metrics() if line["rank"] == 0 and name in line]


def compute_log_ratios(policy: Any, reference: Any, tokenizer: Any, pair: dict[str, str]) -> list[Any]:
    """Return the log-ratios of the chosen and the rejected answer, row by row without padding."""
    ratios = []
    for side in ("chosen", "rejected"):
        prompt, answer = (tokenizer(pair[name])["input_ids"] for name in ("prompt", side))
        sums = []
        for model in (policy, reference):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            sums.append(logits.log_softmax(-1)[range(len(answer)), answer].sum())
        ratios.append(sums[0] - sums[1].detach())
    return ratios


def train_alone(folder: Path) -> tuple[list[float], float]:
    """Return the losses of one process, whose reference is a second model, and the last validation loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardscope.training.optimizers.optimizers import build_optimizer

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def compute_loss(pairs: list[dict[str, str]]) -> Any:
        ratios = [compute_log_ratios(policy, reference, tokenizer, pair) for pair in pairs]
        # Equation 7 as it stands in the paper.
        margins = torch.stack([chosen - rejected for chosen, rejected in ratios])
        return -torch.log(1 / (1 + torch.exp(-BETA * margins))).mean()

    optimizer = build_optimizer("adamw", list(policy.parameters()), RATE)
    losses, _ = take_steps(optimizer, (compute_loss(PAIRS) for _ in range(NUM_STEPS)))
    with torch.no_grad():
        return losses, compute_loss(VALIDATION_PAIRS).item()


@pytest.mark.parametrize("name", few(LAYOUTS, ["ZeRO-2"]))
def test_losses_of_full_fine_tuning_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    folder = small_model(tmp_path, "llama")
    run = launch(folder, tmp_path / "runs", name, validation=VALIDATION_PAIRS, validate_every=2, export=True)
    losses, validation_loss = train_alone(folder)
    assert list_values(run, "loss") == pytest.approx(losses, abs=1e-4)
    assert list_values(run, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert list_values(run, "validation_loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert list_values(run, "validation_loss")[-1] == pytest.approx(validation_loss, abs=1e-4)
    assert list_values(run, "validation_reward_accuracy")[-1] == 1
    assert not list_values(run, "validation_perplexity")
    margins = list_values(run, "reward_margin")
    assert margins == sorted(margins) and margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0.1
    # plan.memory() knows nothing of the objective.
    totals = compute_totals(run)
    assert totals.tensor_bytes == pytest.approx(totals.predicted_tensor_bytes, rel=0.02)
    card = run.model_card()
    assert "direct preference optimization (DPO" in card and "\n- dpo\n" in card


ADAPTED: dict[str, Any] = {"method": "lora", "validation": VALIDATION_PAIRS, "validate_every": 2}


@pytest.fixture(scope="module")
def run_of_whole_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with adapters under DDP, which shards nothing."""
    parent = tmp_path_factory.mktemp("ddp")
    return launch(small_model(parent, "llama"), parent / "runs", "ddp", **ADAPTED)


@thorough()
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "ddp"])
def test_adapters_start_at_ln_2_and_train_alike_under_each_framework(
    name: str, run_of_whole_models: Any, tmp_path: Path
) -> None:
    needs("peft")
    folder, other = small_model(tmp_path, "llama"), run_of_whole_models
    run = launch(folder, tmp_path / "runs", name, export=True, samples=1, max_new_tokens=4, **ADAPTED)
    first, *others = list_values(run, "loss")
    assert first == pytest.approx(math.log(2), abs=1e-6) and others == sorted(others, reverse=True)
    assert others[0] < first
    margins = list_values(run, "reward_margin")
    assert margins == sorted(margins) and margins[-1] > 0.01
    assert (run.model / "adapter_model.safetensors").is_file()
    for metric in (*NAMES, "grad_norm", "validation_loss", "validation_reward_margin"):
        assert list_values(run, metric) == pytest.approx(list_values(other, metric), abs=1e-4), metric
    assert run.samples()[0]["prompt"] == VALIDATION_PAIRS[0]["prompt"]
    check_exported_adapters(run, folder, list_values(run, "validation_loss")[-1])


@thorough()
@pytest.mark.parametrize("name", RECIPES)
def test_adapters_of_other_recipes_start_at_ln_2_too(name: str, tmp_path: Path) -> None:
    needs("peft")
    layout, recipe = RECIPES[name]
    if "NF4" in name:
        skip_without("bitsandbytes")
    run = launch(small_model(tmp_path, "llama"), tmp_path / "runs", layout, recipe=recipe)
    losses = list_values(run, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01
    assert list_values(run, "reward_accuracy")[-1] == 1


def check_exported_adapters(run: Any, folder: Path, validation_loss: float) -> None:
    """Check that the exported adapters have the run's last validation loss against their base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, adapted = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)
    )
    policy, tokenizer = PeftModel.from_pretrained(adapted, run.model), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ratios = [compute_log_ratios(policy, base, tokenizer, pair) for pair in VALIDATION_PAIRS]
    losses = [math.log1p(math.exp(-BETA * float(chosen - rejected))) for chosen, rejected in ratios]
    assert validation_loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)


@thorough()
@pytest.mark.parametrize(("name", "method"), [("ddp", "full"), ("ZeRO-3", "full"), ("fsdp2", "lora")])
def test_a_resumed_run_goes_on_with_the_same_reference(name: str, method: str, tmp_path: Path) -> None:
    folder, runs = small_model(tmp_path, "llama"), tmp_path / "runs"
    options: dict[str, Any] = {"method": method, "validation": VALIDATION_PAIRS, "validate_every": 1}
    straight = launch(folder, runs, name, save_every=2, keep_last=None, **options)
    checkpoint = straight.folder / "checkpoints" / "step-000002"
    resumed = launch(folder, runs, name, resume=checkpoint, **options)
    for metric in (*NAMES, "grad_norm"):
        assert list_values(resumed, metric) == list_values(straight, metric)[2:], metric
    # Those before the first step and after the first two are missing.
    assert list_values(resumed, "validation_loss") == list_values(straight, "validation_loss")[3:]
    if method == "full":
        stored = [run.folder / "tokens" / "reference.npy" for run in (straight, resumed)]
        assert numpy.array_equal(*(numpy.load(path) for path in stored))


@thorough()
def test_a_changed_file_is_refused_when_a_full_fine_tune_is_resumed(tmp_path: Path) -> None:
    folder, runs, data = small_model(tmp_path, "llama"), tmp_path / "runs", tmp_path / "pairs.jsonl"
    data.write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    first = launch(folder, runs, "ddp", data=data, num_steps=2, save_checkpoint=True)
    pairs = [*PAIRS[:-1], {**PAIRS[-1], "chosen": " Ishmael does."}]
    data.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    recipe, layout = first.plan.recipe, first.plan.layout
    plan = ss.Plan(first.plan.architecture, first.plan.cluster, recipe, layout)
    task = ss.Finetune(folder, data, objective="dpo", dpo_beta=BETA, num_steps=NUM_STEPS, resume=first.folder)
    run = ss.launch(plan, task, folder=runs)
    assert run.wait(200) == "failed"
    assert "a checkpoint of a run on the same pairs" in str(run.error)


@thorough()
def test_the_loss_is_that_of_trl(tmp_path: Path) -> None:
    trl = needs("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardscope.training.examples.encoding import Encoder
    from shardscope.training.examples.formats import recognize_format
    from shardscope.training.examples.rows import open_rows
    from shardscope.training.examples.token_table import RowCounts, build_table, iterate_encoded
    from shardscope.training.preferences.dpo import Dpo, sum_log_probabilities
    from shardscope.training.preferences.pairs import LABELS, REFERENCE, PairBatches

    folder = small_model(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)
    )
    # Another policy than the reference: else the loss is ln 2 whatever the tokens are.
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    settings = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=BETA, per_device_train_batch_size=8, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=SEQ_LEN,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=policy, ref_model=reference, args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_list(PAIRS),
    )  # fmt: skip
    theirs = trainer.compute_loss(policy, next(iter(trainer.get_train_dataloader()))).item()
    rows, counts = open_rows("data", PAIRS), RowCounts()
    format, encoder = recognize_format("data", list(PAIRS[0])), Encoder(tokenizer, "completions")
    table = build_table(
        iterate_encoded("data", rows, format, encoder, seq_len=SEQ_LEN, bad_rows="refuse", counts=counts)
    )
    batches = PairBatches(
        table=table, seq_len=SEQ_LEN, padding_id=0, pairs_per_micro_batch=8, rows=8, rank=0, num_ranks=1
    )
    batch = batches.build_batch(0)
    with torch.no_grad():
        values = sum_log_probabilities(reference(batch["input_ids"]).logits, batch[LABELS])
        loss = Dpo(BETA).compute_loss(policy(batch["input_ids"]).logits, {**batch, REFERENCE: values})
    assert abs(theirs - math.log(2)) > 1e-3
    assert loss.item() == pytest.approx(theirs, abs=1e-5)
