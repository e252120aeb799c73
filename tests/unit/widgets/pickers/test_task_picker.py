"""Tests of the task picker: the task that it builds, and the launch that the main button offers for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope_widgets import Studio
from shardscope_widgets.pickers import RunOptions, TaskPicker
from shardscope_widgets.run.launching.launch_offer import build_offer

needs("torch")
needs("transformers")
MACHINE = ss.Cluster.parse("2xcpu")
SMALL = ss.Plan(
    ss.Architecture.of_size("2m"), MACHINE, ss.Recipe(seq_len=64, global_batch_size=2), ss.Layout.fsdp2()
)
LARGE = ss.Plan(
    ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
)


def train_function(ctx: Any) -> None:
    """Stand in for a training function of a notebook."""


def main() -> None:
    """Stand in for a script's entry point, which takes no context."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "smollm")


@pytest.fixture
def picker() -> TaskPicker:
    return TaskPicker(RunOptions(), functions=lambda: {"trains": train_function, "main": main, "number": 3})


def build_plan(folder: Path, cluster: str = "2xcpu", **recipe: Any) -> ss.Plan:
    fields = {"seq_len": 32, "global_batch_size": 8, **recipe}
    arch, gpus = ss.Architecture.from_hf(folder), ss.Cluster.parse(cluster)
    return ss.Plan(arch, gpus, ss.Recipe(**fields), ss.Layout.fsdp2())


def build_local_offer(picker: TaskPicker, plan: ss.Plan) -> Any:
    return build_offer(plan, MACHINE, plan.memory(), picker)


def test_folder_with_weights_is_fine_tuned_by_default(picker: TaskPicker, folder: Path) -> None:
    plan = build_plan(folder)
    picker.set_plan(plan, None)
    assert isinstance(picker.build_task(plan), ss.Pretrain) and picker.answer == "Pretrain"
    picker.set_plan(plan, folder)
    task = picker.build_task(plan)
    assert isinstance(task, ss.Finetune) and task.weights == folder and picker.answer == "Fine-tune smollm"
    assert build_local_offer(picker, plan).label == "Fine-tune smollm on 2 CPU ranks"
    picker.menu.value = "pretrain"
    picker.set_plan(plan, folder)
    assert isinstance(picker.build_task(plan), ss.Pretrain)
    assert "random weights" in picker.note.value, "the note warns that the folder's weights are not used"
    picker.set_plan(SMALL, None)
    picker.menu.value = "own"
    picker.set_plan(plan, folder)
    assert picker.kind == "own", "the user's choice is kept"


def test_pretrain_as_the_only_option_does_not_count_as_a_choice(picker: TaskPicker, folder: Path) -> None:
    picker.set_plan(SMALL, None)
    picker.menu.value = "own"
    picker.menu.value = "pretrain"
    picker.set_plan(build_plan(folder), folder)
    assert picker.kind == "finetune"


def test_studio_uses_the_typed_weights_folder(folder: Path) -> None:
    studio: Any = Studio()
    studio.architecture.name.value = str(folder)
    assert studio.architecture.weights_folder == folder
    assert studio.launch.button.description == "Fine-tune smollm on 2 CPU ranks"
    assert "64 instead of 4,096 tokens" in studio.launch.note.value, (
        "the note lists the differences from the plan"
    )
    assert isinstance(studio.launch.task, ss.Finetune)
    plan = studio.plan
    studio.architecture.name.value = "llama-3.1-8b"
    assert studio.architecture.weights_folder is None and isinstance(studio.launch.task, ss.Pretrain)
    assert studio.launch.button.description == "Try a tiny model on 2 CPU ranks"
    studio.apply(plan)
    assert studio.architecture.weights_folder == folder, "applying a plan of that folder restores its weights"
    (folder / "model.safetensors").unlink()
    studio.architecture.name.value = "gpt2"
    studio.architecture.name.value = str(folder)
    assert studio.architecture.weights_folder is None and isinstance(studio.launch.task, ss.Pretrain)


def test_a_fine_tune_moved_to_cpu_ranks_is_in_fp32_and_the_note_says_so(
    picker: TaskPicker, folder: Path
) -> None:
    plan = build_plan(folder, "8xh100-sxm-80gb")
    assert plan.recipe.precision == "bf16-mixed"
    picker.set_plan(plan, folder)
    offer = build_local_offer(picker, plan)
    assert offer.plan.recipe.precision == "fp32"
    assert "fp32, which is faster there, instead of bf16-mixed" in offer.note
    finding_names = [finding.name for finding in offer.plan.findings(picker.build_task(offer.plan))]
    assert "bf16-on-cpu-ranks" not in finding_names
    # The user's own code has a precision of its own.
    picker.menu.value = "own"
    picker.code.value = "trains"
    assert build_local_offer(picker, plan).plan.recipe.precision == "bf16-mixed"


def test_warns_about_lora_on_random_weights(picker: TaskPicker, folder: Path) -> None:
    lora = replace(SMALL, recipe=replace(SMALL.recipe, method="lora", lora_rank=4))
    picker.set_plan(lora, None)
    for text in (picker.note.value, build_local_offer(picker, lora).note):
        assert "learn nothing" in text and "folder" in text
    picker.set_plan(build_plan(folder, method="lora", lora_rank=4), folder)
    assert "learn nothing" not in picker.note.value and isinstance(picker.build_task(lora), ss.Finetune)


def test_trial_of_a_fine_tune_pretrains_a_tiny_random_model(
    picker: TaskPicker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is too large for this machine, and no folder has the tiny model's weights."""
    monkeypatch.setattr("shardscope_widgets.run.launching.launch_offer._fits_free_memory", lambda plan: False)
    plan = build_plan(folder, "8xh100-sxm-80gb")
    picker.set_plan(plan, folder)
    offer = build_local_offer(picker, plan)
    assert offer.label == "Try a tiny model on 2 CPU ranks" and offer.is_trial
    assert "random weights" in offer.note
    task = picker.build_task(offer.plan, as_trial=True)
    assert isinstance(task, ss.Pretrain)
    task.check(offer.plan)


def test_run_options_are_passed_to_the_task(picker: TaskPicker, folder: Path) -> None:
    text = folder.parent / "book.txt"
    text.write_text("Call me Ishmael. " * 100)
    options = picker.options
    assert "Moby-Dick" in picker.note.value
    options.steps.value, options.rate.value, options.profile.value = "1,000", "3e-5", False
    picker.text.value = str(text)
    assert "Moby-Dick" not in picker.note.value and options.answer == "1,000 steps"
    for weights in (None, folder):
        picker.set_plan(build_plan(folder), weights)
        task = picker.build_task(build_plan(folder))
        assert (task.num_steps, task.learning_rate, task.profile) == (1000, 3e-5, False)
        assert task.plain_text == text
    options.rate.value = ""
    assert picker.build_task(build_plan(folder)).learning_rate is None and options.rate.placeholder == "2e-05"


def test_a_file_of_examples_is_no_text_to_train_on(folder: Path) -> None:
    chat = folder.parent / "chat.jsonl"
    chat.write_text('{"prompt": "Who?", "completion": "Ahab"}\n')
    studio: Any = Studio()
    studio.architecture.name.value = str(folder)
    studio.task.text.value = str(chat)
    row = studio.task.rows["data"]
    for kind in ("finetune", "pretrain"):
        studio.task.menu.value = kind
        assert "plain UTF-8 text" in row.message and studio.launch.button.disabled
        assert "chat.jsonl is JSON lines" in row.children[-1].value, "a short message at the input"
    studio.task.text.value = ""
    assert not row.message and not studio.launch.button.disabled


def test_a_missing_data_file_is_rejected_at_the_input(folder: Path) -> None:
    studio: Any = Studio()
    studio.architecture.name.value = str(folder)
    for text in (
        str(folder.parent / "absent.jsonl"),
        "Call me Ishmael. " * 20,
        "~nobody-of-that-name/book.txt",
    ):
        studio.task.text.value = text
        assert "an existing text file" in studio.task.rows["data"].message and studio.launch.button.disabled
        studio.task.text.value = ""


def test_own_code_runs_as_a_script_or_a_function(picker: TaskPicker, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    picker.set_plan(LARGE, None)
    picker.menu.value = "own"
    assert picker.missing, "nothing to run yet"
    picker.code.value = str(script)
    task = picker.build_task(LARGE)
    assert isinstance(task, ss.Script) and task.source == script
    offer = build_local_offer(picker, LARGE)
    assert offer.label == "Run train.py on 2 CPU ranks" and offer.plan is not None
    task.check(offer.plan)
    assert picker.options.answer == "set by the code" and picker.answer == "My code train.py"
    picker.code.value = "trains"
    assert picker.build_task(LARGE) is train_function and build_local_offer(picker, LARGE).plan is not None
    picker.code.value = "main"
    assert isinstance(picker.build_task(LARGE), ss.Script), (
        "a function without a context parameter runs as a script"
    )
    for name in ("trian", "number", "/nowhere/train.py", "~nobody/x.py", "\0"):
        picker.code.value = name
        with pytest.raises(ValueError) as error:
            picker.build_task(LARGE)
        assert getattr(error.value, "field", "") == "Task.code", name
        assert build_local_offer(picker, LARGE).plan is None
    picker.code.value = "trian"
    with pytest.raises(ValueError, match="Nearest fix: trains"):
        picker.build_task(LARGE)


def test_script_with_a_syntax_error_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import (\n")
    studio: Any = Studio()
    studio.task.menu.value = "own"
    studio.task.code.value = str(script)
    assert studio.launch.button.disabled and "line 1" in studio.launch.note.value
    studio.task.code.value = "nowhere.py"
    assert "nowhere.py" in studio.task.rows["code"].message


def test_the_example_model_is_chosen_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "smollm2-135m-instruct"
    studio: Any = Studio()
    studio.architecture.name.value = name
    assert studio.architecture.is_wrong, "it is not downloaded yet"
    folder = write_folder(tmp_path / "shardscope" / "models" / name)
    studio.architecture.set_folder(folder)
    assert studio.architecture.name.value == name and studio.architecture.weights_folder == folder
    other = write_folder(tmp_path / "other")
    studio.architecture.set_folder(other)
    assert studio.architecture.name.value == str(other) and studio.architecture.weights_folder == other


def test_a_folder_below_the_notebook_is_shown_with_a_short_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    studio: Any = Studio()
    # "7b" alone would be the model of that size.
    folder = write_folder(tmp_path / "7b")
    studio.architecture.set_folder(folder)
    assert studio.architecture.name.value == "./7b" and studio.architecture.weights_folder == folder
