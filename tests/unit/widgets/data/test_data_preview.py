"""Tests of the data of a fine-tune: one line, preview, sequence length, errors."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from finetune_views import READ_SECONDS, wait_until_read
from tests.requirements import needs
from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope.planner.checks.case import replace_plan_fields
from shardscope.training.examples.length_histogram import render_histogram
from shardscope_widgets import FinetuneView
from shardscope_widgets.data import data_panel
from shardscope_widgets.data.preview_view import PreviewView

needs("datasets")
needs("transformers")


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinetuneView:
    """A view that fine-tunes a small model with a chat template on two CPU ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ss.Cluster, "detect", lambda: ss.Cluster.parse("2xcpu"))
    write_chat_folder(tmp_path / "chatty", max_position_embeddings=512)
    return FinetuneView("chatty")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_questions(path: Path, num_rows: int = 120) -> Path:
    rows = [{"question": f"Who is number {n}?", "completion": "Ahab"} for n in range(num_rows)]
    return write_rows(path, rows)


def enter_data(view: FinetuneView, path: Path) -> None:
    view.form.inputs.data.value = str(path)
    wait_until_read(view)


def test_one_line_describes_the_data(view: FinetuneView) -> None:
    panel = view.form.data_panel
    assert not panel.value, "no data yet"
    enter_data(view, write_questions(Path("questions.jsonl")))
    assert "120 rows, prompt-completion (prompt = question)<" in panel.value
    view.form.inputs.data.value = ""
    assert not panel.value and panel.preview is None


def test_data_is_read_in_the_background(view: FinetuneView, monkeypatch: Any) -> None:
    may_continue, readers = threading.Event(), list[str]()
    read = data_panel._read_preview

    def read_slowly(question: Any) -> Any:
        readers.append(threading.current_thread().name)
        assert may_continue.wait(READ_SECONDS)
        return read(question), None

    panel = view.form.data_panel
    monkeypatch.setattr(panel._reader, "_compute", read_slowly)
    view.form.inputs.data.value = str(write_questions(Path("first.jsonl"), 3))
    view.form.inputs.data.value = str(write_questions(Path("second.jsonl"), 7))
    assert "Reading" in panel.value and "Reading the data" in view.headline.value and view.button.disabled
    may_continue.set()
    wait_until_read(view)
    assert "7 rows" in panel.value and set(readers) == {"shardscope-data"}


def test_rows_for_validation_that_are_trained_on_are_counted(view: FinetuneView) -> None:
    rows = [{"prompt": f"Who is {n % 40}?", "completion": "Ahab"} for n in range(120)]
    enter_data(view, write_rows(Path("twice.jsonl"), rows))
    assert wait_until(lambda: view.task is not None, READ_SECONDS)
    num_shared = view.task.preview().num_shared_rows
    sentence = f"Rows of the validation data that are trained on as well: {num_shared}."
    assert num_shared and sentence in view.form.data_panel.value
    assert sentence in view.form.preview.summary.value


def test_preview_opens_the_rows_with_their_learned_tokens(view: FinetuneView) -> None:
    fold, preview = view.form.folds["Data"], view.form.preview
    enter_data(view, write_questions(Path("questions.jsonl")))
    assert not fold.head.expanded
    view.form.data_panel.press_button("preview")
    assert fold.head.expanded
    assert "prompt = question" in preview.summary.value and "ss-length-bars" in preview.summary.value
    learned = re.findall(r"<mark>(.*?)</mark>", preview.rows.value, re.DOTALL)
    assert learned[-1] == "Ahab<i>&lt;|im_end|&gt;</i>"
    view.form.inputs.data.value = ""
    assert "ss-off" in fold._dom_classes


def test_rows_are_shown_in_windows_where_the_plan_packs_them(view: FinetuneView) -> None:
    preview = view.form.preview
    enter_data(view, write_questions(Path("questions.jsonl")))
    assert view.plan is not None and not view.plan.recipe.packing
    assert "Row 1<" in preview.rows.value and "Window 1" not in preview.rows.value
    packed = replace_plan_fields(view.plan, recipe={"packing": True, "seq_len": 2 * view.plan.recipe.seq_len})
    preview.set_plan(packed)
    assert "Window 1" not in preview.rows.value, "windows of another length hold other rows"
    view.form.settings.boxes["seq_len"].value = str(packed.recipe.seq_len)
    wait_until_read(view)
    preview.set_plan(packed)
    assert "<strong>Window 1</strong> <span>2 rows" in preview.rows.value
    assert "positions 0 to" in preview.rows.value
    preview.set_plan(view.plan)
    assert "Window 1" not in preview.rows.value


def test_the_sequence_length_holds_the_longest_row(view: FinetuneView) -> None:
    enter_data(view, write_questions(Path("questions.jsonl")))
    panel = view.form.data_panel
    longest = max(panel.preview.lengths)
    assert view.plan is not None and longest <= view.plan.recipe.seq_len < longest + 8
    assert panel.preview.seq_len == view.plan.recipe.seq_len and panel.advice is None
    panel.press_button("seq_len")
    assert panel.error, "a late press changes nothing"


def test_long_rows_take_the_models_maximum_and_a_typed_length_is_advised_against(view: FinetuneView) -> None:
    rows = [{"prompt": "Who?", "completion": "whale " * n} for n in range(1, 701, 14)]
    enter_data(view, write_rows(Path("long.jsonl"), rows))
    panel, preview = view.form.data_panel, view.form.preview
    assert max(panel.preview.lengths) > 512 and view.plan is not None and view.plan.recipe.seq_len == 512
    view.form.settings.boxes["seq_len"].value = "32"
    wait_until_read(view)
    assert panel.advice is not None and panel.advice.seq_len == 512 and "cut off" in panel.advice.why
    assert preview.summary.value.count("class='ss-cut'") > 5
    preview.summary.press_button("seq_len")
    assert view.form.settings.boxes["seq_len"].value == "512" and view.plan.recipe.seq_len == 512


def test_malformed_data_is_an_error_at_the_input_until_the_file_is_repaired(view: FinetuneView) -> None:
    path = write_rows(Path("bad.jsonl"), [{"prompt": "Who?", "completion": ""}])
    enter_data(view, path)
    row, panel = view.form.inputs.rows["data"], view.form.data_panel
    assert "Line 1 of bad.jsonl: completion is empty" in row.message and not panel.value
    assert view.button.disabled and view.form.inputs.is_wrong and view.task is None
    write_questions(path, 2)
    os.utime(path, (1, 1))
    view.form.settings.boxes["num_epochs"].value = "2"  # Any change looks at the file again.
    wait_until_read(view)
    assert "2 rows" in panel.value
    assert not row.message and not view.button.disabled


def test_unknown_columns_and_no_examples(view: FinetuneView) -> None:
    enter_data(view, write_rows(Path("odd.jsonl"), [{"a": "Who?", "b": "Ahab"}]))
    row, menus = view.form.inputs.rows["data"], view.form.inputs.columns
    assert "ss-off" not in menus._dom_classes and menus.menus[1].value == "b"
    Path("book.txt").write_text("Call me Ishmael. " * 100)
    enter_data(view, Path("book.txt"))
    assert not row.message and not view.form.data_panel.value


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
    view: FinetuneView, monkeypatch: Any
) -> None:
    """plotly fails on a pandas that another thread is still importing."""
    calls = list[tuple[str, str]]()

    def record(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            calls.append((name, threading.current_thread().name))
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    record(data_panel, "_import_libraries")
    record(view.form.data_panel._reader, "request")
    enter_data(view, write_questions(Path("questions.jsonl")))
    thread = threading.current_thread().name
    assert calls[:2] == [("_import_libraries", thread), ("request", thread)]
