"""Fine-tuning on files of examples, on real ranks: losses are those of transformers on the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, skip_without, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")

from finetuned_models import small_model  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout  # noqa: E402

SEQ_LEN = 32
ROWS = [
    {"prompt": "Who hunts the whale?", "completion": " Captain Ahab does."},
    {"prompt": "What is the ship?", "completion": " The Pequod."},
    {"prompt": "Call me", "completion": " Ishmael. Some years ago."},
    {"prompt": "Where?", "completion": " At sea"},
]
LAYOUTS = {
    "ddp": Layout.ddp(),
    "fsdp2": Layout.fsdp2(),
    "fsdp2, two stages": Layout.fsdp2(pp=2),
    "deepspeed": Layout.zero(stage=2),
    "deepspeed, stage 3": Layout.zero(stage=3),
    "megatron": Layout.megatron(),
    "megatron, two stages": Layout.megatron(pp=2),
}

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def compute_loss(folder: Path, rows: Sequence[Sequence[list[int]]]) -> float:
    """Return the mean loss over the completions' tokens, row by row without padding, in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for prompt, completion in rows:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="sum")
        total, count = total + float(losses.detach()), count + len(completion)
    return total / count


def launch(folder: Path, data: object, layout: Layout, runs: Path, **options: Any) -> Any:
    recipe = ss.Recipe(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, layout)
    return ss.launch(plan, ss.Finetune(folder, data, num_steps=2, **options), folder=runs)


@pytest.mark.parametrize("name", few(LAYOUTS, ["fsdp2, two stages"]))
def test_the_first_loss_is_that_of_the_completions(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    skip_without(name.partition(",")[0] if name.startswith(("deepspeed", "megatron")) else "torch")
    folder = small_model(tmp_path, "llama")
    run = launch(folder, write_rows(tmp_path / "rows.jsonl", ROWS), LAYOUTS[name], tmp_path / "runs")
    assert run.wait(150) == "finished", run.error
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template is None and tokenizer.eos_token_id is None
    tokens = [[tokenizer(row[part])["input_ids"] for part in ("prompt", "completion")] for row in ROWS]
    losses = {line["rank"]: line["loss"] for line in run.metrics() if line["step"] == 0}
    assert list(losses.values()) == pytest.approx([compute_loss(folder, tokens)] * 2, abs=1e-4)
    assert "4 of 4 rows are examples" in run.logs(0)


@thorough()
def test_a_run_can_be_exported_and_its_data_is_recorded(tmp_path: Path) -> None:
    folder, data = small_model(tmp_path, "llama"), write_rows(tmp_path / "rows.jsonl", ROWS)
    run = launch(folder, data, Layout.ddp(), tmp_path / "runs", export=True, columns={"text": "completion"})
    assert run.wait(150) == "finished", run.error
    assert run.model == run.folder / "export" and (run.model / "model.safetensors").is_file()
    recorded = run.task_fields
    assert recorded["data"] == str(data) and recorded["columns"] == {"text": "completion"}


@thorough()
def test_malformed_rows_are_refused_before_a_rank_starts_or_skipped(tmp_path: Path) -> None:
    folder = small_model(tmp_path, "llama")
    rows = [*ROWS, {"prompt": "Who?", "completion": ""}]
    with pytest.raises(ValueError, match="Row 5: completion is empty"):
        launch(folder, rows, Layout.ddp(), tmp_path / "runs")
    run = launch(folder, rows, Layout.ddp(), tmp_path / "runs", bad_rows="skip")
    assert run.wait(150) == "finished", run.error
    assert "skipped: 1 malformed row (row 5: completion is empty)" in run.logs(0)
    assert run.model is None


@thorough()
def test_a_row_whose_completion_is_cut_off_is_refused_before_a_rank_starts_or_left_out(
    tmp_path: Path,
) -> None:
    folder = small_model(tmp_path, "llama")
    long = {"prompt": "Where is the whale? " * 9, "completion": " At sea"}
    data = write_rows(tmp_path / "rows.jsonl", [*ROWS, long])
    with pytest.raises(ValueError, match=r"Line 5 of rows\.jsonl: seq_len=32 cuts off .*bad_rows='skip'"):
        launch(folder, data, Layout.ddp(), tmp_path / "runs")
    run = launch(folder, data, Layout.ddp(), tmp_path / "runs", bad_rows="skip_truncated")
    assert run.wait(150) == "finished", run.error
    assert "left out: 1 row without a token that bears loss (line 5 of rows.jsonl: " in run.logs(0)
