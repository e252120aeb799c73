"""Tests of the data of a fine-tune in the Studio: one line, preview, sequence length, errors."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from tests.requirements import needs
from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.data import data_panel
from shardscope_widgets.data.preview_view import PreviewView, render_histogram

needs("datasets")
needs("transformers")

READ_SECONDS = 60.0
"""The first read imports datasets and transformers."""


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    """A Studio that fine-tunes a small model with a chat template on two CPU ranks."""
    studio = Studio()
    studio.cluster.set_value(ss.Cluster.parse("2xcpu"))
    studio.architecture.name.value = str(write_chat_folder(tmp_path / "chatty", max_position_embeddings=512))
    studio.recipe.set_fields({"seq_len": 512, "global_batch_size": 8})
    assert studio.task.kind == "finetune" and not studio.is_wrong
    return studio


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_questions(path: Path, num_rows: int = 120) -> Path:
    rows = [{"question": f"Who is number {n}?", "completion": "Ahab"} for n in range(num_rows)]
    return write_rows(path, rows)


def enter_data(studio: Studio, path: Path) -> None:
    studio.task.text.value = str(path)
    # The worker is idle once the observers of its answer are done.
    assert wait_until(lambda: not studio.task.data._reader.is_busy, READ_SECONDS)
    assert not studio.task.data.is_reading


def test_the_row_is_called_data_for_a_fine_tune_and_text_for_pretraining(studio: Studio) -> None:
    name = studio.task.rows["data"].name
    assert name.value == "Data"
    studio.task.menu.value = "pretrain"
    assert name.value == "Text"


def test_one_line_says_what_the_data_is(studio: Studio, tmp_path: Path) -> None:
    panel = studio.task.data
    assert not panel.value, "Moby-Dick has no rows"
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    assert "120 rows, prompt-completion (prompt = question)<" in panel.value
    studio.task.menu.value = "pretrain"
    assert not panel.value and panel.preview is None


def test_data_is_read_in_the_background(studio: Studio, tmp_path: Path, monkeypatch: Any) -> None:
    may_continue, readers = threading.Event(), list[str]()
    read = data_panel._read_preview

    def read_slowly(question: Any) -> Any:
        readers.append(threading.current_thread().name)
        assert may_continue.wait(READ_SECONDS)
        return read(question)

    monkeypatch.setattr(studio.task.data._reader, "_compute", read_slowly)
    studio.task.text.value = str(write_questions(tmp_path / "first.jsonl", 3))
    studio.task.text.value = str(write_questions(tmp_path / "second.jsonl", 7))
    assert "Reading" in studio.task.data.value and "Data" not in studio.tabs.names
    assert not studio.launch.button.disabled, "a launch reads the data again"
    may_continue.set()
    assert wait_until(lambda: not studio.task.data._reader.is_busy, READ_SECONDS)
    assert "7 rows" in studio.task.data.value and set(readers) == {"shardscope-data"}


def test_preview_opens_the_data_tab(studio: Studio, tmp_path: Path) -> None:
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    assert studio.tabs.value == "Memory" and studio.tabs.names[0] == "Data"
    studio.task.data.press_button("preview")
    assert studio.tabs.value == "Data" and studio._pages["Data"].layout.display == ""
    assert "prompt = question" in studio.data.summary.value and "ss-length-bars" in studio.data.summary.value
    learned = re.findall(r"<mark>(.*?)</mark>", studio.data.rows.value, re.DOTALL)
    assert learned[-1] == "Ahab<i>&lt;|im_end|&gt;</i>"
    studio.task.text.value = ""
    assert "Data" not in studio.tabs.names and studio.tabs.value == "Memory"


def test_a_long_sequence_is_shortened_by_one_press(studio: Studio, tmp_path: Path) -> None:
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    panel = studio.task.data
    assert studio.task.build_task(studio.plan).sample_prompts == 3
    longest = max(panel.preview.lengths)
    assert panel.advice is not None
    assert longest <= panel.advice.seq_len < longest + 8 and panel.advice.seq_len % 8 == 0
    assert f"Use a sequence length of {panel.advice.seq_len}" in panel.value
    assert "is padding" in panel.value, "the reason is on hover"
    wanted = panel.advice.seq_len
    panel.press_button("seq_len")
    assert studio.plan.recipe.seq_len == wanted and studio.recipe.seq_len.value == str(wanted)
    assert wait_until(lambda: not panel._reader.is_busy, READ_SECONDS)
    assert panel.preview.seq_len == wanted and "Use a sequence" not in panel.value
    panel.press_button("seq_len")
    assert panel.error, "a late press changes nothing"


def test_a_short_sequence_is_lengthened_up_to_the_models_maximum(studio: Studio, tmp_path: Path) -> None:
    rows = [{"prompt": "Who?", "completion": "whale " * n} for n in range(1, 701, 14)]
    studio.recipe.set_fields({"seq_len": 32})
    enter_data(studio, write_rows(tmp_path / "long.jsonl", rows))
    panel = studio.task.data
    assert max(panel.preview.lengths) > 512 > 32
    assert panel.advice is not None and panel.advice.seq_len == 512 and "cut off" in panel.advice.why
    studio.task.data.press_button("preview")
    assert studio.data.summary.value.count("class='ss-cut'") > 5
    studio.data.summary.press_button("seq_len")
    assert studio.plan.recipe.seq_len == 512


def test_malformed_data_is_an_error_at_the_input_until_the_file_is_repaired(
    studio: Studio, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [{"prompt": "Who?", "completion": ""}])
    enter_data(studio, path)
    row = studio.task.rows["data"]
    assert "Row 1: completion is empty" in row.message and not studio.task.data.value
    assert studio.launch.button.disabled and studio.task.is_wrong
    with pytest.raises(ValueError, match="completion is empty"):
        studio.task.build_task(studio.plan)
    write_questions(path, 2)
    os.utime(path, (1, 1))
    studio.recipe.set_fields({"seq_len": 256})  # Any change of the plan looks at the file again.
    assert wait_until(lambda: not studio.task.data._reader.is_busy, READ_SECONDS)
    assert "2 rows" in studio.task.data.value
    assert not row.message and not studio.launch.button.disabled


def test_unknown_columns_and_no_examples(studio: Studio, tmp_path: Path) -> None:
    enter_data(studio, write_rows(tmp_path / "odd.jsonl", [{"a": "Who?", "b": "Ahab"}]))
    assert "the columns a, b" in studio.task.rows["data"].message
    text = tmp_path / "book.txt"
    text.write_text("Call me Ishmael. " * 100)
    enter_data(studio, text)
    assert not studio.task.rows["data"].message and not studio.task.data.value


def test_an_error_while_the_data_tab_is_open_closes_it(studio: Studio, tmp_path: Path) -> None:
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    studio.task.data.press_button("preview")
    enter_data(studio, write_rows(tmp_path / "bad.jsonl", [{"prompt": "Who?", "completion": ""}]))
    assert "Data" not in studio.tabs.names and studio.tabs.value == "Memory"


def test_histogram_counts_every_row_and_marks_the_sequence_length() -> None:
    lengths = [1, 2, 63, 64, 65, 200]
    html = render_histogram(lengths, 64)
    counts = [int(count) for count in re.findall(r"tokens?: (\d+) row", html)]
    assert sum(counts) == len(lengths) and len(counts) <= 32
    cut = re.findall(r"class='ss-cut'[^>]*title='(\d+) to \d+ tokens: (\d+) row", html)
    assert sum(int(count) for _, count in cut) == 2 and min(int(first) for first, _ in cut) == 65
    assert "left:32.0%" in html, "64 of 200 tokens"
    assert "4,096 →" in render_histogram(lengths, 4096) and "ss-cut" not in render_histogram(lengths, 4096)


def test_an_unknown_press_is_ignored_and_shown() -> None:
    view = PreviewView(on_length=lambda: None)
    view.summary.press_button("launch")
    assert "Ignored" in view.summary.error


def test_pandas_is_imported_by_the_thread_that_draws_before_the_reader_starts(
    studio: Studio, tmp_path: Path, monkeypatch: Any
) -> None:
    """plotly fails on a pandas that another thread is still importing."""
    calls = list[tuple[str, str]]()

    def record(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            calls.append((name, threading.current_thread().name))
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    record(data_panel, "_import_pandas")
    record(studio.task.data._reader, "request")
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    thread = threading.current_thread().name
    assert calls[:2] == [("_import_pandas", thread), ("request", thread)]


def test_a_fine_tune_on_rows_is_as_long_as_its_epochs(studio: Studio, tmp_path: Path) -> None:
    options = studio.options
    name = options.rows["num_epochs"].name
    assert name.value == "Steps, learning rate" and options.answer == "40 steps, with trace", "Moby-Dick"
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    assert name.value == "Epochs, learning rate" and options.answer == "3 epochs, with trace"
    task: Any = studio.launch.task
    assert task.num_steps is None and task.num_epochs is None, "the task's own default"
    # On two CPU ranks of this machine: 120 rows, 8 a step.
    assert wait_until(lambda: options.length.value.startswith("45 steps of 8 sequences"), READ_SECONDS)
    options.epochs.value = "1.5"
    task = studio.launch.task
    assert task.num_epochs == 1.5 and options.answer == "1.5 epochs, with trace"
    assert options.length.value.startswith("23 steps of 8")
    options.epochs.value = "many"
    assert "Finetune.num_epochs is" in options.rows["num_epochs"].message and studio.launch.button.disabled
    assert not options.length.value
    options.epochs.value = ""
    text = tmp_path / "book.txt"
    text.write_text("Call me Ishmael. " * 100)
    studio.task.text.value = str(text)
    task = studio.launch.task
    assert name.value == "Steps, learning rate" and task.num_steps == 40


def test_inputs_show_the_recommended_setting_and_its_reason_on_hover(studio: Studio, tmp_path: Path) -> None:
    recipe, options = studio.recipe, studio.options
    own = "Sequence length in tokens"
    enter_data(studio, write_questions(tmp_path / "questions.jsonl"))
    assert wait_until(lambda: "padding" in recipe.seq_len.tooltip, READ_SECONDS)
    assert recipe.seq_len.tooltip.startswith(f"{own}\nRecommended: ")
    assert "instead of 512. " in recipe.seq_len.tooltip
    assert "Recommended: fp32 instead of bf16-mixed. On CPU ranks" in recipe.precision.tooltip
    assert "Recommended: 2e-05. 2e-05 is Llama 2's" in options.rate.tooltip
    assert "Recommended: 3. Three passes" in options.epochs.tooltip
    assert "by plan.memory()" in recipe.micro.tooltip
    studio.task.menu.value = "pretrain"
    assert recipe.seq_len.tooltip == own and "Recommended" not in options.rate.tooltip
