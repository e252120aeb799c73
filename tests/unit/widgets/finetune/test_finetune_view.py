"""Tests of the view of a fine-tune: inputs to plan and task, errors at their input, the run, the chat."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until
from finetune_views import wait_until_read
from tests.requirements import needs, sample
from tests.weights_folders import write_chat_folder

import shardscope as ss
from shardscope.runs.launch.free_memory import TooLittleFreeError
from shardscope.training.examples.formats import recognize_format
from shardscope_widgets import FinetuneView
from shardscope_widgets.data.column_menus import ColumnMenus
from shardscope_widgets.finetune import finetune_view, run_and_chat
from shardscope_widgets.finetune.upload import MAX_BYTES, list_data_files, store_file

NUM_ROWS = 60


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and rows, which is the notebook's."""
    needs("datasets")
    needs("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ss.Cluster, "detect", lambda: ss.Cluster.parse("2xcpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_chat_folder(tmp_path / "chatty")
    rows = [{"prompt": f"Who is {number}?", "completion": " Ahab."} for number in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def show(data: Any = "rows.jsonl") -> Any:
    view: Any = FinetuneView("chatty", data)
    wait_until_read(view, lambda: view.plan is not None)
    return view


def test_model_and_data_are_enough_for_a_recommended_plan(files: Path) -> None:
    view = show()
    plan, task = view.plan, view.task
    assert plan.architecture == ss.Architecture.from_hf(files / "chatty")
    assert plan.recipe.method == "lora" and plan.recipe.precision == "fp32", "of CPU ranks"
    assert plan.recipe.seq_len == 24, "the rows are short"
    assert task.weights == files / "chatty" and task.data == files / "rows.jsonl"
    assert task.export and task.validation == 0.1 and task.early_stopping == 3 and task.samples == 3
    text = view.headline.value
    assert "60 rows of rows.jsonl" in text and "15 epochs" in text and "203 steps of 4 sequences" in text
    assert "LoRA" in text and "2 CPU ranks" in text and "Fits: " in text and not view.button.disabled
    assert "60 rows, prompt-completion" in view.form.data_panel.value
    reasons = {name: html.value for name, html in view.form.settings._reasons.items()}
    assert all(reasons.values()) and "small models" in reasons["learning_rate"]
    assert "15 are 203" in reasons["num_epochs"]
    boxes = view.form.settings.boxes
    expected = {"learning_rate": "0.001", "num_epochs": "15", "lora_rank": "16", "seq_len": "24"}
    assert {name: boxes[name].placeholder for name in expected} == expected
    # The picture for readers without a kernel has the result, and nothing of hidden boxes and inputs.
    picture = view._repr_mimebundle_()["text/html"]
    assert "Fits: " in picture and "60 rows" in picture
    assert "no known names" not in picture and reasons["num_epochs"] not in picture
    view.close()


@sample(1)
@pytest.mark.parametrize("kind", ["frame", "dataset", "rows"])
def test_rows_in_memory_are_data_as_a_file_is(files: Path, kind: str) -> None:
    import datasets
    import pandas

    rows = [{"prompt": f"Who is {number}?", "completion": " Ahab."} for number in range(NUM_ROWS)]
    data: Any = {
        "frame": lambda: pandas.DataFrame(rows),
        "dataset": lambda: datasets.Dataset.from_list(rows),
        "rows": lambda: rows,
    }[kind]()
    view = show(data)
    name = {"frame": "a DataFrame", "dataset": "a Dataset", "rows": "a list"}[kind]
    assert view.form.inputs.data.value == f"{name} of 60 rows" == view.form.inputs.data.options[0]
    assert view.task.data.column_names == ["prompt", "completion"] and len(view.task.data) == NUM_ROWS
    assert "learns from <b>60 rows</b> in 15 epochs" in view.headline.value
    view.form.inputs.data.value = "rows.jsonl"
    wait_until_read(view, lambda: view.task is not None and view.task.data == files / "rows.jsonl")
    view.form.inputs.data.value = f"{name} of 60 rows"
    wait_until_read(view, lambda: view.task is not None and not isinstance(view.task.data, Path))
    view.close()


def test_rows_that_cannot_be_read_are_refused_as_by_finetune(files: Path) -> None:
    import pandas

    for data, words in ((pandas.DataFrame(), "at least one row"), (3, "a pandas DataFrame")):
        with pytest.raises(ValueError, match=rf"^Finetune\.data .*{words}"):
            FinetuneView("chatty", data)


def test_own_settings_replace_the_recommended_ones(files: Path) -> None:
    view = show()
    boxes = view.form.settings.boxes
    boxes["learning_rate"].value, boxes["num_epochs"].value = "1e-3", "1"
    boxes["lora_rank"].value, boxes["seq_len"].value = "4", "24"
    wait_until_read(view, lambda: view.plan is not None and view.plan.recipe.seq_len == 24)
    assert view.plan.recipe.lora_rank == 4
    assert view.task.learning_rate == 1e-3 and view.task.num_epochs == 1
    assert view.form.settings.answer == "learning rate 1e-3, epochs 1, sequence length 24, lora rank 4"
    view.form.inputs.method.value = "full"
    assert view.plan.recipe.method == "full" and view.plan.recipe.lora_rank is None
    assert not view.form.settings.rows["lora_rank"].is_shown and "full fine-tuning" in view.headline.value
    # A setting that does not apply is not named, and comes back with the adapters.
    assert view.form.settings.answer == "learning rate 1e-3, epochs 1, sequence length 24"
    view.form.inputs.method.value = "lora"
    assert view.plan.recipe.lora_rank == 4 and "lora rank 4" in view.form.settings.answer
    view.close()


def test_all_settings_reach_plan_and_task(files: Path) -> None:
    (files / "more.jsonl").write_text('{"prompt": "Who is Starbuck?", "completion": " The mate."}\n')
    view = show()
    settings = view.form.settings
    typed = {
        "lora_alpha": "48",
        "lora_targets": "q_proj, v_proj",
        "global_batch_size": "6",
        "packing": "no",
        "schedule": "linear",
        "warmup": "0.1",
        "loss_on": "the last answer",
        "bad_rows": "skip",
        "validation": "more.jsonl",
        "samples": "Who is Ahab?\n\n Where is the whale? ",
    }
    for name, text in typed.items():
        settings.boxes[name].value = text
    wait_until_read(view, lambda: view.task is not None and view.task.samples != 3)
    recipe, task = view.plan.recipe, view.task
    assert (recipe.lora_alpha, recipe.lora_targets) == (48, ("q_proj", "v_proj"))
    assert (recipe.global_batch_size, recipe.packing) == (6, False)
    assert (task.schedule, task.warmup, task.loss_on, task.bad_rows) == ("linear", 0.1, "last", "skip")
    assert task.validation == files / "more.jsonl" and task.early_stopping == 3
    assert task.samples == ("Who is Ahab?", "Where is the whale?")
    assert "Validated on" in view.form.note.value and "more.jsonl" in view.form.note.value
    settings.boxes["validation"].value = "none"
    wait_until_read(view, lambda: view.task is not None and view.task.validation is None)
    assert view.task.early_stopping is None and "No data are held out" in view.form.note.value
    # What is wrong is said at its input, and nothing that was typed is lost.
    for name, wrong, words in (
        ("validation", "0.9", "below 0.5"),
        ("validation", "nowhere.jsonl", "there is no such file"),
        ("lora_targets", "everything", "projections of"),
        ("global_batch_size", "3", "2"),
        ("warmup", "-1", "0"),
        ("lora_alpha", "much", "number"),
    ):
        before, settings.boxes[name].value = settings.boxes[name].value, wrong
        assert wait_until(lambda name=name, words=words: words in settings.rows[name].message), (name, wrong)
        assert view.button.disabled and settings.boxes[name].value == wrong
        settings.boxes[name].value = before
    settings.boxes["lora_rank"].value = "big"
    assert wait_until(lambda: "Use 16<" in settings.rows["lora_rank"].children[-1].value), "not 16.0"
    settings.boxes["lora_rank"].value = ""
    for name, wrong, fix in (
        ("learning_rate", "1e99", "Use 10<"),
        ("num_epochs", "1e99", "Use 1,000,000<"),
        ("lora_targets", "7", "Use q_proj, v_proj<"),
    ):
        settings.boxes[name].value = wrong
        row = settings.rows[name]
        assert wait_until(lambda row=row, fix=fix: fix in row.children[-1].value), row.children[-1].value
        settings.boxes[name].value = ""
    view.close()


def test_an_error_of_the_validation_data_ends_when_they_are_corrected(files: Path) -> None:
    (files / "strange.jsonl").write_text('{"speech": "Ahoy"}\n')
    view = show()
    settings, panel = view.form.settings, view.form.data_panel
    for wrong in ("nowhere.jsonl", "strange.jsonl"):
        settings.boxes["validation"].value = wrong
        # The data are read again, with the wrong validation data.
        settings.boxes["loss_on"].value = "every token"
        wait_until_read(view, lambda: panel.problem is not None and settings.rows["validation"].message)
        assert view.task is None and panel.preview is not None
        assert "ss-off" in view.form.inputs.columns._dom_classes, "its menus are for the data"
        settings.boxes["validation"].value = "0.125"
        wait_until_read(view, lambda: view.task is not None and view.task.validation == 0.125)
        assert not settings.rows["validation"].message and "12.5 % of the data" in view.form.note.value
        settings.boxes["loss_on"].value = "recommended"
    view.close()


def test_other_validation_data_are_compared_with_the_rows(files: Path) -> None:
    view = show()
    view.form.settings.boxes["validation"].value = "rows.jsonl"
    assert wait_until(lambda: f"trained on as well: {NUM_ROWS}" in view.form.data_panel.value)
    view.form.settings.boxes["validation"].value = "none"
    assert wait_until(lambda: "trained on as well" not in view.form.data_panel.value)
    view.close()


def test_columns_without_known_names_are_chosen_from_menus(files: Path) -> None:
    rows = [{"number": n, "q": f"Who is {n}?", "a": " Ahab."} for n in range(NUM_ROWS)]
    (files / "odd.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    view: Any = FinetuneView("chatty", "odd.jsonl")
    menus = view.form.inputs.columns
    assert "ss-off" in menus._dom_classes
    wait_until_read(view, lambda: "ss-off" not in menus._dom_classes)
    assert view.plan is None and "Say what the columns" in view.headline.value
    assert menus.menus[0].options == ("number", "q", "a")
    assert (menus.menus[0].value, menus.menus[1].value) == ("q", "a"), "numbers of rows are no questions"
    menus.menus[0].value, menus.menus[1].value = "a", "q"
    menus.menus[0].value, menus.menus[1].value = "q", "a"
    assert view.plan is None, "nothing is applied before the button"
    menus.button.click()
    wait_until_read(view, lambda: view.task is not None)
    assert view.task.columns == {"prompt": "q", "completion": "a"}
    # Another column is applied at once; a format with other parts, too.
    menus.format.value = "text"
    menus.menus[0].value = "q"
    wait_until_read(view, lambda: view.task is not None and view.task.columns == {"text": "q"})
    # Two columns of text, and three parts of which one is optional.
    menus.format.value = "instruction"
    assert [menu.value for menu in menus.menus] == ["q", "(none)", "a"]
    wait_until_read(
        view, lambda: view.task is not None and view.task.columns == {"instruction": "q", "output": "a"}
    )
    # Other data need no menus, and forget what was chosen.
    view.form.inputs.data.value = "rows.jsonl"
    wait_until_read(view, lambda: view.task is not None and view.task.data == files / "rows.jsonl")
    assert view.task.columns is None and "ss-off" in menus._dom_classes
    view.close()


def test_a_csv_file_without_a_header_says_that_its_first_row_would_be_lost(files: Path) -> None:
    rows = "".join(f"What is {n} times two?,It is {2 * n}.\n" for n in range(NUM_ROWS))
    (files / "bare.csv").write_text(rows)
    view: Any = FinetuneView("chatty", "bare.csv")
    menus = view.form.inputs.columns
    wait_until_read(view, lambda: "ss-off" not in menus._dom_classes)
    assert "What is 0 times two?,It is 0." in menus.hint.value and "prompt,completion" in menus.hint.value
    # With names above it, all rows are there, and nothing is asked.
    (files / "named.csv").write_text(f"prompt,completion\n{rows}")
    view.form.inputs.data.value = "named.csv"
    wait_until_read(view, lambda: view.task is not None)
    assert view.form.preview_of_data.num_rows == NUM_ROWS and "ss-off" in menus._dom_classes
    view.close()


def test_menus_offer_one_column_besides_numbers_of_rows_as_the_text() -> None:
    menus = ColumnMenus()
    menus.offer(["questionId", "Frage"])
    assert (menus.format.value, menus.menus[0].value) == ("text", "Frage")
    menus.offer(["id", "Frage", "Antwort"])
    assert menus.format.value == "prompt-completion"
    assert (menus.menus[0].value, menus.menus[1].value) == ("Frage", "Antwort")
    menus.offer(["id", "conv", "src"], "conv")
    assert (menus.format.value, menus.menus[0].value) == ("messages", "conv")
    menus.close()


def test_a_column_of_conversations_is_suggested_as_messages() -> None:
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    with pytest.raises(ValueError) as error:
        recognize_format("Finetune.data", ["id", "src", "conv"], rows=[{"id": 1, "src": "a", "conv": chat}])
    assert 'Nearest fix: columns={"messages": "conv"}' in str(error.value)


@pytest.mark.parametrize("row", [{"context": 1, "reply": None}, {"good": 2, "bad": 2}])
def test_conversations_without_answers_and_preferences_are_not_suggested(row: dict[str, int | None]) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    cells = {name: turns[:number] if number else "text" for name, number in row.items()}
    with pytest.raises(ValueError) as error:
        recognize_format("Finetune.data", list(cells), rows=[cells])
    assert str(error.value).partition("Nearest fix: ")[2].startswith('columns={"prompt": ')


def press(browser: Any, label: str) -> None:
    """Press the button of a file browser that shows ``label``."""
    (act,) = re.findall(rf"data-act='([^']*)'[^>]*>{re.escape(label)}<", browser.value)
    browser.press_button(act)


def test_files_and_folders_of_the_server_are_picked_from_a_list(files: Path) -> None:
    (files / "sub" / "deep").mkdir(parents=True)
    (files / "sub" / "deep" / "rows.jsonl").write_text((files / "rows.jsonl").read_text())
    (files / "sub" / "notes.docx").touch()
    (files / "many").mkdir()
    for number in range(300):
        (files / "many" / f"{number:03}.csv").touch()
    view: Any = FinetuneView("", "")
    inputs = view.form.inputs
    browser = inputs.data_browser
    assert not browser.is_open
    browser.toggle(inputs.data.value)
    assert browser.is_open and ">sub/<" in browser.value and ">rows.jsonl<" in browser.value
    press(browser, "sub/")
    assert "notes.docx" not in browser.value and ">Use this folder<" not in browser.value
    press(browser, "deep/")
    press(browser, "rows.jsonl")
    assert inputs.data.value == "sub/deep/rows.jsonl" and not browser.is_open
    # Opened again where the input points to; the folder itself can be the data.
    browser.toggle(inputs.data.value)
    press(browser, "Use this folder")
    assert inputs.data.value == "sub/deep"
    browser.toggle("many")
    assert "100 more are not listed" in browser.value
    press(browser, "Up")
    press(browser, "Up")
    assert str(files.parent) in browser.value
    browser.press_button("pick:99999")
    assert "Ignored" in browser.error
    models = inputs.model_browser
    models.toggle("")
    press(models, "chatty")
    assert inputs.weights.value == "chatty" and not models.is_open
    view.close()


def test_a_folder_that_cannot_be_opened_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "secret").mkdir()
    view: Any = FinetuneView("", "")
    browser = view.form.inputs.data_browser
    browser.toggle("")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    press(browser, "secret/")
    assert "secret cannot be opened: Permission denied" in browser.value and ">secret/<" in browser.value
    view.close()


def test_no_rows_are_held_out_of_a_few(files: Path) -> None:
    view = show([{"prompt": f"Who is {number}?", "completion": " Ahab."} for number in range(49)])
    assert view.task.validation is None and view.task.early_stopping is None and view.task.samples == 3
    assert "Too few data" in view.form.note.value
    view.close()


def test_a_text_is_trained_on_in_steps_without_rows(files: Path) -> None:
    (files / "whale.txt").write_text("Call me Ishmael. " * 20)
    view = show("whale.txt")
    assert view.task.planned_steps == 50 and view.task.validation is None and view.task.samples == ()
    assert "50 steps" in view.headline.value and "epoch" not in view.headline.value
    assert "Too few data" in view.form.note.value and view.form.data_panel.value == ""
    view.form.settings.boxes["num_epochs"].value = "2"
    assert view.task.num_epochs == 2 and view.task.planned_steps is None
    view.close()


def test_errors_stand_at_their_input_and_nothing_can_be_launched(files: Path) -> None:
    view = show()
    for row, box, wrong, words in (
        ("weights", view.form.inputs.weights, "nowhere", "there is no such folder"),
        ("weights", view.form.inputs.weights, "longer than a file's name may be " * 9, "no such folder"),
        ("weights", view.form.inputs.weights, "~nobody-of-that-name/model", "there is no such folder"),
        ("data", view.form.inputs.data, "longer than a file's name may be " * 9, "no such file"),
        ("data", view.form.inputs.data, "row.jsonl", "there is no such file"),
        ("learning_rate", view.form.settings.boxes["learning_rate"], "fast", "a number from"),
        ("lora_rank", view.form.settings.boxes["lora_rank"], "-3", "a whole number from"),
        ("seq_len", view.form.settings.boxes["seq_len"], "9,999,999", "at most 64 tokens"),
    ):
        before, box.value = box.value, wrong
        rows = {**view.form.inputs.rows, **view.form.settings.rows}
        message = rows[row]._error.value if rows[row]._error else ""
        assert words in message, (row, message)
        assert view.button.disabled and view.plan is None and "marked in red" in view.headline.value
        assert [name for name, other in rows.items() if other.message and other is not rows[row]] == []
        box.value = before
        wait_until_read(view, lambda: view.plan is not None)
        assert not view.form.inputs.is_wrong and not view.form.settings.is_wrong
    view.close()


def test_malformed_rows_are_named_at_the_data(files: Path) -> None:
    (files / "bad.jsonl").write_text(
        '{"prompt": "a", "completion": " b"}\n{"prompt": 3, "completion": null}\n'
    )
    view: Any = FinetuneView("chatty", "bad.jsonl")
    wait_until_read(view, lambda: view.form.inputs.is_wrong)
    assert "line 2 of bad.jsonl" in view.form.inputs.rows["data"].message and view.button.disabled
    view.close()


def test_the_model_that_is_missing_is_offered_as_a_download(files: Path, monkeypatch: Any) -> None:
    view: Any = FinetuneView()
    assert view.form.inputs.fetch.button.description == "Use the example model"
    assert "Choose a model and a data file" in view.headline.value
    view.form.inputs.weights.value = "chatty"
    assert "Choose a data file" in view.headline.value and not view.form.inputs.is_wrong
    view.form.inputs.weights.value = "chatti"
    assert "no such folder" in view.form.inputs.rows["weights"].message, "without data, too"
    view.form.inputs.weights.value = ""
    fetched: list[str] = []

    def fetch(name: str, report: Any) -> Path:
        report("downloading", 0.5)
        fetched.append(name)
        return write_chat_folder(files / "cache" / "shardscope" / "models" / name)

    monkeypatch.setattr("shardscope_widgets.finetune.inputs.fetch_example", fetch)
    view.form.inputs.data.value = "rows.jsonl"
    view.form.inputs.fetch.button.click()
    wait_until_read(view, lambda: view.plan is not None)
    assert fetched == ["smollm2-135m-instruct"] == [view.form.inputs.weights.value]
    assert wait_until(lambda: not view.form.inputs.fetch.is_busy)
    view.form.inputs.weights.value = "org/name"
    assert view.form.inputs.fetch.button.description == "Download org/name"
    assert "org/name is not on this machine yet" in view.headline.value and not view.form.inputs.is_wrong
    view.close()


def test_the_button_launches_once_and_the_chat_follows(files: Path, monkeypatch: Any) -> None:
    launched: list[tuple[Any, Any, bool]] = []
    run: Any = FakeRun([record(loss=1.0)])
    run.memory = lambda: SimpleNamespace(tensor_bytes=0)
    run.chat = lambda base=False: None

    def launch(plan: Any, task: Any, *, force: bool) -> Any:
        launched.append((plan, task, force))
        if not force:
            raise TooLittleFreeError("memory", 1, "only 1 GiB is free", "wait")
        return run

    monkeypatch.setattr(ss, "launch", launch)
    view = show()
    view.button.click()
    assert "only 1 GiB is free" in view.notice.value and not view.button.disabled
    view.notice._handle_action("Launch anyway")
    assert [force for _, _, force in launched] == [False, True]
    assert launched[1][:2] == (view.plan, view.task)
    assert view.run is run and view.outcome.run_view.run is run and view.button.disabled
    view.launch()
    assert len(launched) == 2, "one run at a time"
    assert view.outcome.chat is None
    run.model = files / "chatty"
    run.status = "finished"
    assert wait_until(lambda: view.outcome.chat is not None and not view.button.disabled)
    view.close()


def test_a_run_that_was_saved_and_stopped_is_resumed_with_a_button(files: Path, monkeypatch: Any) -> None:
    resumed: list[tuple[Any, bool]] = []
    first: Any = FakeRun([record(loss=1.0)])
    second: Any = FakeRun([record(loss=0.5)])
    for run in (first, second):
        run.memory = lambda: SimpleNamespace(tensor_bytes=0)

    def resume(run: Any, *, force: bool) -> Any:
        resumed.append((run, force))
        if not force:
            raise TooLittleFreeError("memory", 1, "only 1 GiB is free", "wait")
        return second

    monkeypatch.setattr(ss, "launch", lambda plan, task, force: first)
    monkeypatch.setattr(finetune_view, "resume_run", resume)
    monkeypatch.setattr(run_and_chat, "why_not_resumable", lambda run: None if run is first else "No.")
    view = show()
    view.button.click()
    first.status = "stopped"
    assert wait_until(lambda: view.outcome._chat_place.children), "without it, the run seems to be lost"
    (offer,) = view.outcome._chat_place.children
    assert "saved a checkpoint and no model" in offer.value and view.outcome.chat is None
    offer._handle_action("Resume")
    assert "only 1 GiB is free" in view.notice.value
    view.notice._handle_action("Launch anyway")
    assert resumed == [(first, False), (first, True)]
    assert view.run is second and view.outcome.run_view.run is second and view.button.disabled
    assert not view.outcome._chat_place.children
    second.status = "failed"
    assert wait_until(lambda: not view.button.disabled)
    assert not view.outcome._chat_place.children, "nothing to resume"
    view.close()


def test_uploads_are_stored_in_the_data_folder_and_never_replace_a_file(files: Path) -> None:
    assert store_file("new.jsonl", b"{}", 2) == Path("data/new.jsonl")
    assert store_file("new.jsonl", b"{}", 2) == Path("data/new.jsonl"), "the same content"
    assert store_file("new.jsonl", b"[]", 2) == Path("data/new-2.jsonl")
    assert Path("data/new.jsonl").read_bytes() == b"{}"
    assert store_file("../../up.csv", b"a", 1) == Path("data/up.csv")
    for name in ("model.pkl", ".jsonl", "..", "", "a\n.jsonl", f"{'a' * 300}.jsonl"):
        with pytest.raises(ValueError, match="endings"):
            store_file(name, b"a", 1)
    with pytest.raises(ValueError, match="JupyterLab's file browser"):
        store_file("large.jsonl", None, MAX_BYTES + 1)
    assert list_data_files() == ["data/new-2.jsonl", "data/new.jsonl", "data/up.csv", "rows.jsonl"]


def test_an_upload_becomes_the_data_and_a_large_one_an_error(files: Path) -> None:
    view = show()
    upload = view.form.inputs.upload
    upload._handle_custom_msg({"name": "more.jsonl", "size": 9}, [memoryview(b'{"text": "a whale"}\n')])
    assert (
        view.form.inputs.data.value == "data/more.jsonl"
        and "data/more.jsonl" in view.form.inputs.data.options
    )
    upload._handle_custom_msg({"name": "huge.jsonl", "size": 9 * 2**20}, [])
    assert "9.0 MB" in view.form.inputs.rows["data"]._error.value
    for content in ({"name": 3}, "text", {}):
        upload._handle_custom_msg(content, [])
    view.close()


def test_the_summary_names_a_model_of_the_hub_and_not_its_snapshot(files: Path) -> None:
    snapshot = write_chat_folder(files / "models--org--tiny" / "snapshots" / "0e9e39f2")
    view: Any = FinetuneView(snapshot, "rows.jsonl")
    wait_until_read(view, lambda: view.plan is not None)
    assert "<b>org/tiny</b> learns from" in view.headline.value and "0e9e39f2" not in view.headline.value
    view.close()


def test_a_text_instead_of_a_number_is_fixed_by_the_recommended_value(files: Path) -> None:
    view = show()
    box = view.form.settings.boxes["learning_rate"]
    box.value = "fast"
    row = view.form.settings.rows["learning_rate"]
    assert "Nearest fix: 0.001" in row.message
    row._press_fix("fix")
    assert box.value == "0.001" and view.task.learning_rate == 1e-3 and not view.form.settings.is_wrong
    box.value = "-1"
    assert "Nearest fix: 0.001" in row.message, "the nearest number, 0, would learn nothing"
    box.value = "20"
    assert "Nearest fix: 10." in row.message, "of a number, the nearest one"
    view.close()
