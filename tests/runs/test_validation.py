"""Validation while training: the loss is that of transformers, and the training stays the same."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, skip_without, thorough

torch = needs("torch")
needs("transformers")
needs("datasets")

from finetuned_models import small_model  # noqa: E402
from test_finetune_examples import LAYOUTS, ROWS, SEQ_LEN, compute_loss, write_rows  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope import Layout  # noqa: E402
from shardscope.records.terminal_text import plain_text  # noqa: E402

VALIDATION_ROWS = [
    {"prompt": "Who is the captain of the ship?", "completion": " Ahab."},
    {"prompt": "And the mate?", "completion": " Starbuck, who doubts the hunt."},
    {"prompt": "The whale is", "completion": " white"},
    {"prompt": "Where do they sail?", "completion": " To the Pacific"},
    {"prompt": "How does it end?", "completion": " The ship sinks."},
]
"""One row more than a global batch: the second batch has empty rows."""
PROMPTS = ["Who hunts the whale?", "Call me", "And the mate? " * 5]
"""An odd number, of different lengths; the last one leaves room for a part of an answer only."""
NEW_TOKENS = 20
MORE_LAYOUTS = {
    "fsdp2, tensor parallel": Layout.fsdp2(tp=2),
    "fsdp2, context parallel": Layout.fsdp2(cp=2),
    "fsdp2, interleaved": Layout.fsdp2(pp=2, vpp=2),
    "deepspeed, two stages": Layout.zero(stage=1, pp=2),
}
ALL_LAYOUTS = {**LAYOUTS, **MORE_LAYOUTS}
GETS_WORSE: dict[str, Any] = {
    "validation": VALIDATION_ROWS,
    "validate_every": 1,
    "learning_rate": 0.03,
    "warmup": 0,
    "export": True,
}
"""Options of a run whose loss grows after the second step."""

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def launch(
    folder: Path, data: object, runs: Path, layout: Layout, *, finish: bool = False, **options: Any
) -> Any:
    recipe = ss.Recipe(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, layout)
    run = ss.launch(plan, ss.Finetune(folder, data, **options), folder=runs)
    if finish:
        run.finish()
    assert run.wait(150) == "finished", run.error
    return run


def generate(folder: Path, texts: list[str], num_tokens: int = NEW_TOKENS) -> list[str]:
    """Return the most likely continuations of ``texts``, in one process, without control characters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, answers = AutoTokenizer.from_pretrained(folder), []
    for text in texts:
        prompt = torch.tensor([tokenizer(text)["input_ids"]])
        tokens = model.generate(
            prompt, max_new_tokens=min(num_tokens, SEQ_LEN - len(prompt[0])), do_sample=False
        )
        answers.append(plain_text(tokenizer.decode(tokens[0, len(prompt[0]) :])))
    return answers


def list_values(run: Any, name: str) -> list[float]:
    return [line[name] for line in run.metrics() if line["rank"] == 0 and name in line]


def evaluate(folder: Path) -> float:
    """Return the loss on the validation rows in one process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = ("prompt", "completion")
    tokens = [[tokenizer(row[part])["input_ids"] for part in parts] for row in VALIDATION_ROWS]
    return compute_loss(folder, tokens)


@pytest.mark.parametrize("name", few(ALL_LAYOUTS, ["ddp"]))
def test_the_validation_loss_is_that_of_transformers_and_training_is_the_same(
    name: str, tmp_path: Path
) -> None:
    skip_without(name.partition(",")[0] if name.startswith(("deepspeed", "megatron")) else "torch")
    folder, layout, options = small_model(tmp_path, "llama"), ALL_LAYOUTS[name], {"num_steps": 3}
    without = launch(folder, ROWS, tmp_path / "runs", layout, **options)
    options |= {"validation": VALIDATION_ROWS, "validate_every": 1, "export": True}
    options |= {"samples": PROMPTS, "sample_every": 1, "max_new_tokens": NEW_TOKENS}
    run = launch(folder, ROWS, tmp_path / "runs", layout, **options)
    losses = list_values(run, "validation_loss")
    # Before the first step, and after each.
    assert len(losses) == 4
    assert losses[0] == pytest.approx(evaluate(folder), abs=1e-4)
    assert losses[-1] == pytest.approx(evaluate(run.model), abs=1e-4)
    assert abs(losses[0] - losses[-1]) > 1e-3
    samples = run.samples()
    assert [sample["step"] for sample in samples] == [step for step in range(4) for _ in PROMPTS]
    assert [sample["prompt"] for sample in samples] == PROMPTS * 4
    texts = [sample["text"] for sample in samples]
    assert texts[: len(PROMPTS)] == generate(folder, PROMPTS)
    assert texts[-len(PROMPTS) :] == generate(run.model, PROMPTS) != texts[: len(PROMPTS)]
    assert list_values(run, "loss") == pytest.approx(list_values(without, "loss"), abs=1e-6)
    assert list_values(run, "grad_norm") == pytest.approx(list_values(without, "grad_norm"), rel=1e-5)


@thorough()
def test_a_fraction_is_not_trained_on_and_the_ranks_count_epochs(tmp_path: Path) -> None:
    folder, rows = small_model(tmp_path, "llama"), [*ROWS, *VALIDATION_ROWS, ROWS[0]]
    data = write_rows(tmp_path / "rows.jsonl", [*rows, *rows])
    run = launch(folder, data, tmp_path / "runs", Layout.ddp(), num_epochs=1.5, validation=0.2)
    # 16 of 20 rows are for training, four a step.
    assert run.num_steps == 6 and len(list_values(run, "loss")) == 6
    assert "16 of 16 rows are examples" in run.logs(0) and "4 of 4 rows are examples" in run.logs(0)
    assert "validation examples are also trained on" in run.logs(0)
    assert run.task_fields["validation"] == 0.2
    assert list_values(run, "validation_perplexity")[0] > 100


@thorough()
def test_the_last_part_of_a_text_is_for_validation(tmp_path: Path) -> None:
    folder, text = small_model(tmp_path, "llama"), tmp_path / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 40)
    run = launch(folder, text, tmp_path / "runs", Layout.ddp(), num_epochs=1, validation=0.3)
    losses, data = list_values(run, "validation_loss"), run.engine_reports()[0]["data"]
    assert losses[-1] < losses[0]
    assert run.num_steps == -(-data["num_samples"] // 4)


@thorough()
def test_early_stopping_keeps_and_exports_the_best_weights_also_after_a_resume(tmp_path: Path) -> None:
    folder, runs = small_model(tmp_path, "llama"), tmp_path / "runs"
    options = {**GETS_WORSE, "early_stopping": 3}
    first = launch(folder, ROWS, runs, Layout.ddp(), num_steps=4, save_every=1, keep_last=1, **options)
    losses = list_values(first, "validation_loss")[1:]
    assert losses[1] == min(losses) and len(losses) == 4
    checkpoints = {path.name for path in (first.folder / "checkpoints").iterdir()}
    assert checkpoints == {"best", "step-000004"}
    assert evaluate(first.model) == pytest.approx(losses[1], abs=1e-3)
    position = json.loads((first.folder / "checkpoints/step-000004/position.json").read_text())
    assert position["validation"]["num_without_improvement"] == 2
    second = launch(folder, ROWS, runs, Layout.ddp(), num_steps=9, resume=first.folder, **options)
    assert len(list_values(second, "validation_loss")) == 1
    assert "stopped early: 3 validations without a lower loss" in second.logs(0)
    assert evaluate(second.model) == pytest.approx(losses[1], abs=1e-3)


@thorough()
@pytest.mark.parametrize("early_stopping", [None, 3])
def test_a_model_that_became_worse_is_named_so(early_stopping: int | None, tmp_path: Path) -> None:
    """It was exported as the best, without a word."""
    folder, options = small_model(tmp_path, "llama"), {"num_steps": 2, "warmup": 0, "validate_every": 1}
    options |= {"validation": VALIDATION_ROWS, "early_stopping": early_stopping}
    worse = launch(folder, ROWS, tmp_path / "runs", Layout.ddp(), learning_rate=3.0, **options)
    before, *after = list_values(worse, "validation_loss")
    assert min(after) > before
    assert "the model became worse" in worse.reason and f"{before:.4g}" in worse.reason
    better = launch(folder, ROWS, tmp_path / "runs", Layout.ddp(), learning_rate=0.003, **options)
    assert better.reason == "the task returned on every rank"


@thorough()
def test_a_run_that_was_killed_goes_on_from_its_best_weights_also_where_it_was_moved(tmp_path: Path) -> None:
    folder, runs = small_model(tmp_path, "llama"), tmp_path / "runs"
    options = {**GETS_WORSE, "early_stopping": 100}
    first = launch(folder, ROWS, runs, Layout.ddp(), num_steps=4, **options)
    moved = shutil.move(first.folder, runs / "moved")
    losses = list_values(ss.Run.attach(moved), "validation_loss")[1:]
    assert min(losses) == losses[1]
    # A higher rate: no validation is better, and the best weights are those of the first run.
    again = {**options, "learning_rate": 1.0}
    second = launch(folder, ROWS, runs, Layout.ddp(), num_steps=4, resume=Path(moved), **again)
    assert "resumed from" in second.logs(0) and "checkpoints/best: 2 steps done" in second.logs(0)
    assert evaluate(second.model) == pytest.approx(losses[1], abs=1e-3)


@dataclass(frozen=True, kw_only=True)
class SeesNoCheckpointOnRank1(ss.Finetune):
    """Rank 1 finds no complete checkpoint, as on a node that does not share the run folder."""

    def __call__(self, ctx: Any) -> None:
        is_file: Any = Path.is_file
        if ctx.rank == 1:
            Path.is_file = lambda path, **options: "best" not in path.parts and is_file(path, **options)
        super().__call__(ctx)


@thorough()
def test_ranks_load_the_best_weights_together_or_not_at_all(tmp_path: Path) -> None:
    """Those that found them waited for the others, until the process group's time was over."""
    folder = small_model(tmp_path, "llama")
    recipe = ss.Recipe(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, Layout.fsdp2())
    options: dict[str, Any] = {"validation": VALIDATION_ROWS, "validate_every": 1, "early_stopping": 3}
    task = SeesNoCheckpointOnRank1(folder, ROWS, num_steps=2, export=True, **options)
    run = ss.launch(plan, task, folder=tmp_path / "runs")
    assert run.wait(60) == "finished", run.error
    assert "exporting the last ones" in run.logs(0) and run.model is not None


@dataclass(frozen=True, kw_only=True)
class SharesNoFolder(SeesNoCheckpointOnRank1):
    """Its ranks are told what those of Ray's nodes without a shared folder are."""

    def __call__(self, ctx: Any) -> None:
        os.environ["SHARDSCOPE_OWN_FOLDER"] = "1"
        super().__call__(ctx)


@pytest.mark.parametrize("layout", few(list(LAYOUTS), ["fsdp2"]))
def test_nodes_without_a_shared_folder_export_the_best_weights(layout: str, tmp_path: Path) -> None:
    """They exported the last ones: no rank could load the checkpoint of several nodes."""
    folder = small_model(tmp_path, "llama")
    recipe = ss.Recipe(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, LAYOUTS[layout])
    options: dict[str, Any] = {"validation": VALIDATION_ROWS, "validate_every": 1, "early_stopping": 3}
    options |= {"learning_rate": 0.03, "warmup": 0, "export": True}
    run = ss.launch(plan, SharesNoFolder(folder, ROWS, num_steps=4, **options), folder=tmp_path / "runs")
    assert run.wait(90) == "finished", run.error
    losses = list_values(run, "validation_loss")[1:]
    assert min(losses) < losses[-1] - 1e-2
    assert evaluate(run.model) == pytest.approx(min(losses), abs=1e-3)
    assert run.engine_reports()[0]["export"]["num_steps_done"] == 1 + losses.index(min(losses))
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["best"]


@thorough()
def test_a_run_that_is_asked_to_finish_exports_its_best_weights(tmp_path: Path) -> None:
    folder = small_model(tmp_path, "llama")
    options: dict[str, Any] = {"validation": VALIDATION_ROWS, "early_stopping": 3, "export": True}
    run = launch(folder, ROWS, tmp_path / "runs", Layout.ddp(), num_steps=100_000, finish=True, **options)
    assert run.keeps_best and "ending the training early, by request" in run.logs(0)
    losses = list_values(run, "validation_loss")
    assert len(losses) == 2, "before training, and after the last step"
    assert len(list_values(run, "loss")) < 10
    assert evaluate(run.model) == pytest.approx(losses[1], abs=1e-3)


@thorough()
def test_a_recorded_first_step_is_without_the_validation_before_it(tmp_path: Path) -> None:
    folder, options = small_model(tmp_path, "llama"), {"num_steps": 1, "profile": True}
    counts = []
    for validation in ({}, {"validation": VALIDATION_ROWS, "validate_every": 100}):
        run = launch(folder, ROWS, tmp_path / "runs", Layout.ddp(), **options, **validation)
        trace = run.trace()
        counts.append([trace.names[index] for index in trace.name_index.tolist()].count("aten::embedding"))
    assert counts[0] == counts[1] > 0
