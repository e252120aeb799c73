"""Tests of the Studio's Fine-tune tab: its form leads to the Studio's plan, button and run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import FakeRun, record, wait_until
from finetune_views import wait_until_read
from tests.requirements import needs
from tests.weights_folders import make_multimodal, write_chat_folder

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.finetune.page import OTHER_MODEL

needs("datasets")
needs("transformers")
needs("torch")

NUM_ROWS = 60


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Studio on a machine without GPUs, beside a model and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ss.Cluster, "detect", lambda: ss.Cluster.parse("2xcpu"))
    write_chat_folder(tmp_path / "chatty")
    rows = [{"prompt": f"Who is {number}?", "completion": " Ahab."} for number in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    studio = Studio()
    yield studio
    studio.close()


def fill(studio: Any, weights: str = "chatty", data: str = "rows.jsonl") -> None:
    studio.tabs.value = "Fine-tune"
    inputs = studio.finetune.form.inputs
    inputs.weights.value, inputs.data.value = weights, data
    wait_until_read(studio.finetune, lambda: studio.finetune.form.setup is not None)


def test_model_and_data_become_the_studios_plan_and_the_main_buttons_task(studio: Any) -> None:
    button, before = studio.launch.button, studio.plan
    studio.tabs.value = "Fine-tune"
    assert button.description == "Fine-tune" and button.disabled and studio.plan is before
    assert "Choose a model and a data file" in button.tooltip
    # A verdict on the model at the left would be about another run than the button's.
    assert "Not ready to fine-tune" in studio.headline.value and "Fits" not in studio.headline.value
    assert studio.rates.layout.display == "none"
    studio.tabs.value = "Memory"
    assert "Fits" in studio.headline.value and studio.rates.layout.display == ""
    fill(studio)
    plan, setup = studio.plan, studio.finetune.form.setup
    assert plan.architecture == setup.plan.architecture and plan.recipe.seq_len == 24
    assert (plan.recipe.method, plan.recipe.precision, plan.cluster) == ("lora", "fp32", setup.plan.cluster)
    assert button.description == "Fine-tune on 2 CPU ranks" and not button.disabled
    assert "LoRA rank 16" in studio.headline.value and "Fits" in studio.headline.value
    assert "<b>chatty</b>" in studio.headline.value, "named as in the form"
    assert "–" not in studio.rates.value, "CPU ranks have no MFU and no price"
    assert "15 epochs, 203 steps of 4 sequences" in studio.finetune.summary.value
    task = studio.launch.task
    assert task.data == Path("rows.jsonl").absolute() and task.samples == 3 and task.profile
    studio.options.profile.value = False
    assert not studio.launch.task.profile
    # The inputs of other tasks are not shown: they would not be used.
    assert not studio.task.rows["data"].is_shown and not studio.options.rows["num_steps"].is_shown
    assert studio.options.answer == "see Fine-tune"
    for tab in ("Memory", "Checks"):
        studio.tabs.value = tab
        assert button.description == "Fine-tune on 2 CPU ranks"


def test_a_multimodal_folder_is_fine_tuned_as_its_language_model(studio: Any) -> None:
    make_multimodal(Path("chatty"))
    fill(studio)
    assert studio.plan.architecture == ss.Architecture.from_hf(studio.launch.task.weights)
    assert studio.plan.architecture.model_type == "llama"
    assert "its language model alone" in studio.finetune.summary.value
    assert (
        studio.launch.button.description == "Fine-tune on 2 CPU ranks" and not studio.launch.button.disabled
    )


def test_a_change_on_the_left_is_kept_and_shown_on_the_tab(studio: Any) -> None:
    fill(studio)
    studio.recipe.set_fields({"method": "full"})
    assert studio.plan.recipe.method == "full" and studio.launch.task.data is not None
    page = studio.finetune
    assert page.form.inputs.method.value == "full" and "full fine-tuning" in page.summary.value
    studio.recipe.set_fields({"global_batch_size": 8})
    assert "of 8 sequences" in page.summary.value
    page.form.settings.boxes["num_epochs"].value = "1"
    assert studio.plan.recipe.global_batch_size == 8, "epochs change no plan"
    assert studio.launch.task.num_epochs == 1 and "1 epoch, 7 steps of 8" in page.summary.value
    on_the_left = {"lora_rank", "lora_alpha", "lora_targets", "seq_len", "global_batch_size", "packing"}
    assert not on_the_left & set(page.form.settings.boxes)


def test_the_plan_that_the_form_replaced_can_be_restored(studio: Any) -> None:
    studio.recipe.seq_len.value = "2048"
    before = studio.plan
    fill(studio)
    assert studio.plan.architecture != before.architecture
    # A further change of the form does not change what Undo restores.
    studio.finetune.form.inputs.method.value = "full"
    wait_until_read(studio.finetune, lambda: studio.plan.recipe.method == "full")
    studio.notice.press_button("Undo")
    assert studio.plan == before and studio.architecture.weights_folder is None
    assert OTHER_MODEL in studio.finetune.notice.value and "Undo" not in studio.notice.value


def test_another_model_on_the_left_is_not_trained_on_the_forms_data(studio: Any) -> None:
    fill(studio)
    studio.architecture.name.value = "llama-3.1-8b"
    assert studio.launch.button.disabled and studio.launch.note.value == OTHER_MODEL
    assert OTHER_MODEL in studio.finetune.notice.value
    studio.tabs.value = "Memory"
    assert studio.launch.button.description == "Try a tiny model on 2 CPU ranks"
    studio.tabs.value = "Fine-tune"
    studio.finetune.notice._handle_action("Plan with this model")
    assert studio.architecture.weights_folder == Path("chatty").absolute()
    assert studio.launch.button.description == "Fine-tune on 2 CPU ranks"
    assert not studio.finetune.notice.value


def test_settings_of_the_fine_tune_in_the_plan_of_another_model_are_named(studio: Any) -> None:
    before = studio.plan
    fill(studio)
    studio.architecture.name.value = "qwen3-8b"
    assert studio.plan.recipe.method == "lora" and studio.plan.recipe.seq_len == 24
    assert "fine-tune" in studio.notice.value and "LoRA" in studio.notice.value
    assert "24 tokens" in studio.notice.value
    studio.notice._handle_action("Use those before")
    assert studio.plan == replace(before, architecture=ss.models["qwen3-8b"])
    assert not studio.notice.value
    studio.architecture.name.value = "llama-3.1-8b"
    assert not studio.notice.value, "there are none any more"


def test_a_wrong_input_of_the_form_disables_the_button_on_every_tab(studio: Any) -> None:
    fill(studio)
    inputs = studio.finetune.form.inputs
    inputs.data.value = "row.jsonl"
    assert "there is no such file" in inputs.rows["data"].message
    for tab in ("Fine-tune", "Memory"):
        studio.tabs.value = tab
        assert studio.launch.button.disabled and "marked in red" in studio.launch.note.value
    inputs.data.value = ""
    assert not studio.launch.button.disabled, "the task below Task, which trains on a text"
    assert isinstance(studio.launch.task, ss.Finetune) and studio.launch.task.plain_text is not None


def test_the_tab_begins_with_the_model_on_the_left(studio: Any) -> None:
    studio.architecture.name.value = "chatty"
    studio.tabs.value = "Fine-tune"
    assert studio.finetune.form.inputs.weights.value == str(Path("chatty").absolute())
    assert "Choose a data file" in studio.finetune.summary.value


def test_preference_pairs_are_trained_by_dpo_with_nothing_else_to_choose(studio: Any) -> None:
    pairs = [
        {"prompt": f"Who is {number}?", "chosen": " Ahab.", "rejected": " Nobody."}
        for number in range(NUM_ROWS)
    ]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    fill(studio, data="pairs.jsonl")
    page, plan = studio.finetune, studio.plan
    task = studio.launch.task
    assert task.objective == "dpo" and not studio.launch.button.disabled
    task.check(plan)
    assert plan.recipe.micro_batch_size % 2 == 0 and not plan.recipe.packing
    line = page.form.data_panel.value
    assert "Preference pairs: trained by DPO" in line and "title='Each row has a chosen and a" in line
    assert "learns from <b>60 preference pairs of pairs.jsonl</b> by <b>DPO</b>" in page.summary.value
    assert "The reference is the model without its adapters" in page.form.note.value
    assert page.form.settings.boxes["learning_rate"].placeholder == "5e-05", (
        "a twentieth of the supervised rate"
    )
    page.form.inputs.method.value = "full"
    wait_until_read(page, lambda: studio.plan.recipe.method == "full")
    assert "The reference is the initial model: one forward over all pairs" in page.form.note.value
    studio.launch.task.check(studio.plan)
    page.form.inputs.data.value = "rows.jsonl"
    wait_until_read(page, lambda: page.form.setup is not None and page.form.setup.task.objective == "sft")


def test_pretraining_can_be_chosen_again(studio: Any) -> None:
    fill(studio)
    studio.tabs.value = "Memory"
    studio.task.menu.value = "pretrain"
    assert isinstance(studio.launch.task, ss.Pretrain) and studio.options.rows["num_steps"].is_shown
    studio.task.menu.value = "finetune"
    assert studio.launch.task.data == Path("rows.jsonl").absolute()


def test_the_run_and_the_chat_appear_on_the_tab(studio: Any, monkeypatch: Any) -> None:
    launched: list[Any] = []
    run: Any = FakeRun([record(loss=1.0)])
    run.memory = lambda: SimpleNamespace(peak_bytes=0)
    run.chat = lambda base=False: None

    def launch(plan: Any, task: Any, **options: Any) -> Any:
        launched.append((plan, task))
        return run

    monkeypatch.setattr(ss, "launch", launch)
    fill(studio)
    studio.tabs.value = "Memory"
    studio.launch.button.click()
    assert launched == [(studio.plan, studio.launch.task)]
    page = studio.finetune
    assert studio.tabs.value == "Fine-tune" and page.outcome.run_view.run is run
    assert studio.launch.button.disabled and not page.inputs.head.expanded
    assert page.inputs.head.answer == "chatty, rows.jsonl, LoRA"
    run.model = Path("chatty").absolute()
    run.status = "finished"
    assert wait_until(lambda: page.outcome.chat is not None and not studio.launch.button.disabled)


def test_a_checks_fix_of_the_rate_sets_the_forms_input(studio: Any) -> None:
    fill(studio)
    box = studio.finetune.form.settings.boxes["learning_rate"]
    box.value = "0.5"
    studio._apply_task(replace(studio.launch.task, learning_rate=3e-4))
    assert box.value == "0.0003" and studio.launch.task.learning_rate == 3e-4
    assert "learning rate 0.5 → 0.0003" in studio.notice.value
    studio.notice._handle_action("Undo")
    assert box.value == "0.5"


def test_every_fix_of_a_fine_tune_in_the_form_is_applied(studio: Any) -> None:
    Path("whale.txt").write_text("Call me Ishmael. Some years ago. " * 3000)
    fill(studio, data="whale.txt")
    studio.options.profile.value = False
    boxes = studio.finetune.form.settings.boxes
    boxes["schedule"].value = "constant"
    for name, shown in (
        ("never-profiled", "record a trace off → on"),
        ("short-warm-up", "schedule constant → constant_with_warmup, warm-up default → "),
    ):
        studio.tabs.value = "Checks"
        assert name in [finding.name for finding in studio.findings]
        studio.checks.show(studio.findings)
        studio.checks._handle_action(name)
        assert shown in studio.notice.value
        assert name not in [finding.name for finding in studio.findings]


def test_apply_of_fewer_steps_sets_the_forms_steps_for_a_text(studio: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Call me Ishmael. " * 60)
    studio.tabs.value = "Fine-tune"
    form = studio.finetune.form
    form.inputs.weights.value, form.inputs.data.value = "chatty", "short.txt"
    wait_until_read(studio.finetune, lambda: form.setup is not None)
    # Rows have epochs, a text has steps.
    assert form.settings.rows["num_steps"].is_shown and not form.settings.rows["num_epochs"].is_shown
    studio._check_results.discard()
    studio.tabs.value = "Checks"
    studio.checks.show(studio.findings)
    studio.checks._handle_action("text-read-many-times")
    steps = form.settings.boxes["num_steps"].value
    assert f"steps default → {steps}" in studio.notice.value and studio.launch.task.num_steps == int(steps)
    assert "text-read-many-times" not in [finding.name for finding in studio.findings]
    studio.notice.press_button("Undo")
    assert form.settings.boxes["num_steps"].value == "" and studio.launch.task.num_steps is None


def test_apply_of_a_field_without_an_input_says_so(studio: Any) -> None:
    fill(studio)
    studio._apply_task(replace(studio.launch.task, seed=7))
    assert "No input of the Studio sets this" in studio.notice.value
