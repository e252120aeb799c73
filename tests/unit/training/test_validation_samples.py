"""Samples for validation, each read once; prompts of sample generations; and values that are refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.requirements import needs

from shardscope import Finetune
from shardscope.runs.resume import _make_task
from shardscope.runs.task_fields import record_task_fields
from shardscope.training.data.batches import split_rows
from shardscope.training.examples.conversation import read_prompts
from shardscope.training.examples.formats import Format
from shardscope.training.tasks import text_task

needs("torch")

ROWS = [{"prompt": "Who?", "completion": "Ahab."}]


@pytest.mark.parametrize(("num_rows", "fraction", "expected"), [(100, 0.1, 10), (2, 0.1, 1), (3, 0.49, 1)])
def test_a_split_is_disjoint_complete_and_seeded(num_rows: int, fraction: float, expected: int) -> None:
    training, validation = split_rows(num_rows, fraction, seed=3)
    assert len(validation) == expected
    assert sorted(training + validation) == list(range(num_rows))
    assert split_rows(num_rows, fraction, seed=3) == (training, validation)


def test_another_seed_splits_otherwise() -> None:
    assert split_rows(100, 0.1, seed=3) != split_rows(100, 0.1, seed=4)


def test_ranks_read_each_window_once_and_pad_with_rows_without_labels() -> None:
    import numpy

    from shardscope.training.data.windows import Windows
    from shardscope.training.micro_batches import count_labels

    tokens = numpy.arange(5 * 8, dtype=numpy.int32)
    ranks = [
        Windows(tokens=tokens, seq_len=8, rows=2, rank=rank, num_ranks=2, in_order=True) for rank in range(2)
    ]
    # Two steps of four rows hold five windows.
    assert ranks[0].steps_per_epoch == 1.25
    batches = [windows.build_batch(step) for step in range(2) for windows in ranks]
    assert all(batch["input_ids"].shape == batch["labels"].shape == (2, 8) for batch in batches)
    assert [count_labels(batch) for batch in batches] == [14, 14, 7, 0]
    indices = [index for step in range(2) for windows in ranks for index in windows.list_indices(step)]
    assert indices == [0, 1, 2, 3, 4]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that passes for a Hugging Face checkpoint."""

    def open_anything(path: Path, field: str) -> SimpleNamespace:
        return SimpleNamespace(path=path)

    monkeypatch.setattr("shardscope.training.weights.weights_folder.WeightsFolder.open", open_anything)
    return tmp_path


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"validation": 0.5}, "validation"),
        ({"validation": True}, "validation"),
        ({"validation": [{"text": "a"}]}, "validation"),
        ({"validate_every": 5}, "validate_every"),
        ({"early_stopping": 5}, "early_stopping"),
        ({"num_epochs": 1, "num_steps": 5}, "num_epochs"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"samples": None}, "samples"),
        ({"samples": "Who?"}, "samples"),
        ({"samples": ["Who?", 1]}, "samples"),
        ({"samples": [" "]}, "samples"),
        ({"samples": ["Who?"] * 17}, "samples"),
        ({"samples": 17, "data": ROWS}, "samples"),
        ({"samples": True, "data": ROWS}, "samples"),
        # A text has no prompts to take.
        ({"samples": 3}, "samples"),
        ({"sample_every": 5}, "sample_every"),
        ({"samples": ["Who?"], "sample_every": 0}, "sample_every"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, object], named: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"Finetune.{named}"):
        Finetune(folder, **values)


def test_without_a_number_of_steps_a_text_has_fifty(folder: Path) -> None:
    text = Finetune(folder)
    assert text.planned_steps == 50 and (record_task_fields(text) or {})["num_steps"] == 50
    assert Finetune(folder, [{"text": "a"}]).planned_steps is None
    assert Finetune(folder, num_epochs=2).planned_steps is None


def test_other_data_or_epochs_do_not_keep_the_number_of_steps_of_a_text(folder: Path) -> None:
    text = Finetune(folder)
    assert replace(text, data=[{"text": "a"}]).planned_steps is None
    assert replace(text, num_epochs=2).planned_steps is None
    assert replace(Finetune(folder, [{"text": "a"}]), data=None).planned_steps == 50
    assert replace(Finetune(folder, num_steps=7), data=[{"text": "a"}]).planned_steps == 7


def test_a_run_folder_keeps_every_field_that_a_resumed_run_needs(folder: Path) -> None:
    task = Finetune(folder, "org/data", samples=["Who?"], loss_on="last")
    recorded = record_task_fields(task)
    assert recorded is not None and set(recorded) == {field.name for field in fields(task)}
    assert recorded["samples"] == ("Who?",) and recorded["report_to"] == ("tensorboard",)


def test_a_run_of_an_older_version_resumes_with_its_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its field was ``text``, and it had none of the fields for examples."""
    monkeypatch.setattr(text_task, "find_resumable", lambda field, value: value)
    text = tmp_path / "book.txt"
    text.write_text("Call me Ishmael.")
    old = {"num_steps", "learning_rate", "weight_decay", "seed", "profile", "memory_snapshot", "log_every"}
    old |= {"save_checkpoint", "save_every", "keep_last", "resume", "export", "weights"}
    recorded = record_task_fields(Finetune(folder, text, num_steps=30)) or {}
    asked = {name: value for name, value in recorded.items() if name in old} | {"text": str(text)}
    description = json.loads(json.dumps({"asked": asked}, default=str))
    task = _make_task(Finetune, description, tmp_path)
    assert isinstance(task, Finetune)
    assert (task.data, task.weights, task.num_steps, task.samples) == (text, folder, 30, ())


class LetterTokenizer:
    """Tokenizer with a token for each letter, and without a chat template."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_prompts_of_the_data_end_before_the_last_answer_and_long_or_malformed_rows_have_none() -> None:
    def say(*turns: str) -> dict[str, object]:
        roles = ("user", "assistant") * 2
        return {
            "messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        }

    rows: Any = [
        say("a", "b", "c", "d"),
        {"messages": []},
        say("e" * 9, "f"),
        say("g", "h"),
        say("g", "again"),
        say("x", "b", "c", "j"),
    ]
    format = Format(name="messages", columns={"messages": "messages"})
    prompts = list(read_prompts(LetterTokenizer(), rows, format, range(6), max_tokens=8))  # type: ignore[arg-type]
    # With the last question alone, the samples of both conversations would be one prompt's in the run view.
    assert [prompt.text for prompt in prompts] == ["a … c", "g", "x … c"]
    assert prompts[0].ids == tuple(map(ord, "abc"))


class CountedRows(list[dict[str, str]]):
    """Rows that count how many of them are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_one_question_about_several_documents_is_several_prompts() -> None:
    format = Format(name="prompt-completion", columns={"prompt": "prompt", "completion": "completion"})
    rows: Any = CountedRows(
        {"system": f"document {index}", "prompt": "Sum it up.", "completion": "It is short."}
        for index in range(2000)
    )
    tokenizer: Any = LetterTokenizer()
    prompts = list(islice(read_prompts(tokenizer, rows, format, range(2000), max_tokens=64), 4))
    assert [prompt.ids for prompt in prompts] == [
        tuple(map(ord, f"document {index}Sum it up.")) for index in range(4)
    ]
    assert rows.num_read == 4
    # Samples are told apart by the text: each prompt has its own answers in the run view.
    assert len({prompt.text for prompt in prompts}) == 4
    assert all(prompt.text.startswith("Sum it up.") for prompt in prompts)


def test_rows_that_repeat_one_prompt_are_not_all_read() -> None:
    format = Format(name="prompt-completion", columns={"prompt": "prompt", "completion": "completion"})
    same: Any = CountedRows([{"prompt": "Who?", "completion": "Ahab"}] * 20_000)
    tokenizer: Any = LetterTokenizer()
    assert len(list(read_prompts(tokenizer, same, format, range(20_000), max_tokens=64))) == 1
    assert same.num_read < 2000
    # Rows that are sorted by their prompt.
    by_prompt: Any = CountedRows(
        {"prompt": f"Who is {number // 2000}?", "completion": f"{number}"} for number in range(20_000)
    )
    assert len(list(read_prompts(tokenizer, by_prompt, format, range(20_000), max_tokens=64))) == 10
    assert by_prompt.num_read < 2000
    # Rows without a prompt are no repetitions: the first one counts wherever it is.
    late: Any = CountedRows([{"prompt": "?" * 99, "completion": "Ahab"}] * 2000 + same[:1])
    assert len(list(read_prompts(tokenizer, late, format, range(2001), max_tokens=64))) == 1


def test_a_resumed_run_finds_the_best_weights_where_they_are_or_begins_to_count_again(tmp_path: Path) -> None:
    """The path of a run folder that was moved since failed the export, after all steps."""
    from shardscope.training.validation import Validation

    batches: Any = None
    moved = tmp_path / "moved" / "checkpoints"
    (moved / "best").mkdir(parents=True)
    (moved / "best" / "position.json").write_text(json.dumps({"validation": {"best_loss": 1.5}}))
    state = {
        "best_loss": 1.5,
        "num_without_improvement": 2,
        "best_checkpoint": str(tmp_path / "run" / "checkpoints" / "best"),
    }
    resumed = Validation.resume(batches, 1, 3, state, moved / "step-000005")
    assert resumed.best_checkpoint == moved / "best" and resumed.best_loss == 1.5
    without = Validation.resume(batches, 1, 3, state, tmp_path / "other" / "checkpoints" / "step-000005")
    assert without.best_checkpoint is None and without.best_loss == float("inf")
    assert without.num_without_improvement == 0
    # Without early stopping the last weights are exported: they were the best ones of the run before.
    assert Validation.resume(batches, 1, None, state, moved / "step-000005").best_checkpoint is None
    # Another run, launched at the old path since: its weights were loaded, and exported as the best ones.
    another = Path(str(state["best_checkpoint"]))
    another.mkdir(parents=True)
    (another / "position.json").write_text(json.dumps({"validation": {"best_loss": 0.5}}))
    assert Validation.resume(batches, 1, 3, state, moved / "step-000005").best_checkpoint == moved / "best"


def test_generations_take_a_quarter_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardscope.training import samples

    clock = [100.0]

    def generate(*_: object) -> list[list[int]]:
        clock[0] += 10
        return [[1]]

    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(samples, "generate_greedily", generate)
    monkeypatch.setattr(samples.dist, "broadcast", lambda *_, **__: None)
    ctx: Any = SimpleNamespace(rank=1)
    for is_limited, expected in ((True, [20, 40, 50, 80, 100]), (False, [*range(10, 101, 10)])):
        tokenizer: Any = None
        task = samples.SampleGenerations(
            prompts=(),
            every=10,
            max_new_tokens=4,
            end_ids=frozenset(),
            tokenizer=tokenizer,
            is_limited=is_limited,
        )
        engine: Any = SimpleNamespace(num_steps_done=0)
        task.run(ctx, engine)
        steps = []
        for engine.num_steps_done in range(1, 101):
            clock[0] += 2
            if task.is_due(engine.num_steps_done, 100):
                steps.append(engine.num_steps_done)
                task.run(ctx, engine)
        assert steps == expected
