"""Learning rate schedules on real ranks: losses are those of a loop with transformers' scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, skip_without, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")

from finetuned_models import small_model  # noqa: E402
from test_finetune_examples import LAYOUTS, ROWS, SEQ_LEN  # noqa: E402

import shardscope as ss  # noqa: E402

PEAK, NUM_STEPS, WARMUP_STEPS = 0.01, 6, 3

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def train_in_one_process(folder: Path, kind: str) -> list[float]:
    """Return the losses of ``NUM_STEPS`` steps on all rows, with transformers' model and scheduler."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    scheduler = get_scheduler(kind, optimizer, WARMUP_STEPS, NUM_STEPS)
    scheduler.step()
    losses = []
    for step in range(NUM_STEPS):
        total, count = torch.zeros(()), 0
        for row in ROWS:
            prompt, completion = (tokenizer(row[part])["input_ids"] for part in ("prompt", "completion"))
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            labels = torch.tensor(completion)
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += len(completion)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step != WARMUP_STEPS - 1:  # Steps of the warm-up have the rate of transformers' next one.
            scheduler.step()
        losses.append(float(total.detach()) / count)
    return losses


@thorough()
@pytest.mark.parametrize("kind", ["linear", "constant_with_warmup"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_transformers_scheduler(name: str, kind: Any, tmp_path: Path) -> None:
    skip_without(name.partition(",")[0] if name.startswith(("deepspeed", "megatron")) else "torch")
    folder = small_model(tmp_path, "llama")
    recipe = ss.Recipe(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, LAYOUTS[name])
    task = ss.Finetune(
        folder,
        ROWS,
        num_steps=NUM_STEPS,
        learning_rate=PEAK,
        schedule=kind,
        warmup=WARMUP_STEPS,
    )
    run = ss.launch(plan, task, folder=tmp_path / "runs")
    assert run.wait(150) == "finished", run.error
    losses = [line["loss"] for line in run.metrics() if line["rank"] == 0]
    expected = train_in_one_process(folder, kind)
    assert losses[1] < losses[0] - 1e-3, "the first step has changed the weights"
    assert losses == pytest.approx(expected, abs=1e-3)
    assert run.task_fields["schedule"] == kind
    assert run.engine_reports()[0]["training"]["schedule"] == kind
