"""Tests of the suggested fixes at invalid inputs, and of the summary line of each picker."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from tests.requirements import few, sample, thorough
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.planner.repairs.first_layout import choose_first_layout
from shardscope.planner.repairs.make_it_fit import Fit, make_it_fit
from shardscope_widgets import Studio
from shardscope_widgets.pickers import ArchitecturePicker, ClusterPicker, LayoutPicker, RecipePicker
from shardscope_widgets.studio.head import write_fit_question


def read_message(row: Any) -> str:
    """Return the text of the message under the row's input."""
    return unescape(re.sub("<[^>]+>", "", row.children[-1].value))


def press(row: Any) -> None:
    """Press the fix button under the row's input."""
    assert "data-act='fix'" in row.children[-1].value, read_message(row)
    row.children[-1].press_button("fix")


@pytest.fixture
def studio() -> Any:
    return Studio()


def test_fix_button_makes_the_global_batch_divisible(studio: Any) -> None:
    studio.cluster.count.value = "6"
    row = studio.recipe.rows["global_batch_size"]
    assert (
        "64" in read_message(row) and "6 GPUs" in read_message(row) and read_message(row).endswith("Use 66")
    )
    press(row)
    assert studio.plan.recipe.global_batch_size == 66 and studio.plan.cluster.num_gpus == 6
    assert not row.message and not studio.recipe.is_wrong


INVALID_INPUTS: list[dict[str, str]] = [
    {"micro_batch_size": "128"},
    {"micro_batch_size": "99999999"},
    {"global_batch_size": "-5"},
    {"micro_batch_size": "-5"},
    {"gpus_per_node": "6", "micro_batch_size": "128"},
    {"gpus_per_node": "5000"},
    {"gpus_per_node": "-5"},
    {"num_nodes": "3", "global_batch_size": "1"},
]


@sample(3)
@pytest.mark.parametrize("framework", few(["ddp", "fsdp2", "deepspeed", "megatron"], ["fsdp2"]))
@pytest.mark.parametrize("typed", INVALID_INPUTS, ids=str)
def test_one_click_on_a_fix_makes_a_valid_plan(studio: Any, framework: str, typed: dict[str, str]) -> None:
    """Regression: for micro-batch 128 the fix was a global batch of 128, which 8 GPUs do not divide."""
    studio.layout_picker.framework.value = framework
    for field, text in typed.items():
        picker = studio.cluster if field in studio.cluster.boxes else studio.recipe
        picker.boxes[field].value = text
    pickers = (studio.architecture, studio.cluster, studio.recipe, studio.layout_picker)
    press(next(row for picker in pickers for row in picker.rows.values() if row.message))
    assert not studio.is_wrong, [row.message for one in pickers for row in one.rows.values()]
    studio.plan.memory()


def test_fix_lists_every_field_that_it_changes(studio: Any) -> None:
    studio.recipe.micro.value = "128"
    row = studio.recipe.rows["global_batch_size"]
    assert "128" in read_message(row) and read_message(row).endswith("Use micro batch size 8")
    studio.recipe.micro.value = "3"
    studio.recipe.global_batch.value = "20"
    message = read_message(row)
    assert "global batch size 16" in message and "micro batch size 2" in message
    press(row)
    assert studio.plan.recipe.global_batch_size == 16 and studio.plan.recipe.micro_batch_size == 2
    studio.recipe.micro.value = "1"
    studio.cluster.boxes["gpus_per_node"].value = "99999999"
    assert "Use 1,024 GPUs per node" in read_message(studio.cluster.rows["gpus_per_node"])


def test_fix_button_replaces_an_invalid_number(studio: Any) -> None:
    studio.recipe.seq_len.value = "many"
    press(studio.recipe.rows["seq_len"])
    assert not studio.recipe.is_wrong and studio.plan.recipe.seq_len == ss.Recipe().seq_len
    studio.options.steps.value = "0"
    row = studio.options.rows["num_steps"]
    press(row)
    assert studio.options.steps.value == "1" and not row.message and not studio.launch.button.disabled


def test_fix_of_an_input_that_may_be_empty_empties_it(studio: Any) -> None:
    """Regression: the button "Use None" looked for a file of that name."""
    studio.task.text.value = "absent.txt"
    row = next(row for row in studio.task.rows.values() if row.message)
    assert "None" not in read_message(row).rpartition(".")[2]
    press(row)
    assert studio.task.text.value == "" and not studio.task.is_wrong
    assert not studio.launch.button.disabled


def test_fix_names_the_entry_of_the_menu(studio: Any) -> None:
    kernels = studio.recipe.boxes["kernels"]
    kernels.value = "liger"
    studio.layout_picker.framework.value = "megatron"
    row = studio.recipe.rows["kernels"]
    assert read_message(row).endswith('Choose "framework default"')
    press(row)
    assert not studio.is_wrong and studio.plan.recipe.kernels is None


def test_misspelled_script_name_has_a_fix(
    studio: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    studio.task.menu.value = "own"
    studio.task.code.value = "trian.py"
    press(studio.task.rows["code"])
    assert studio.task.code.value == "train.py" and not studio.task.rows["code"].message
    studio.task.code.value = "something else"
    assert "data-act" not in studio.task.rows["code"].children[-1].value


def test_fix_can_change_another_picker(studio: Any) -> None:
    """Falcon has no Megatron-core formulas: the error is at the model, the fix changes the framework."""
    studio.architecture.name.value = "falcon-7b"
    studio.layout_picker.framework.value = "megatron"
    row = studio.architecture.rows["model"]
    assert "Use FSDP2" in read_message(row)
    press(row)
    assert not row.message and studio.plan.layout.framework == "fsdp2"
    assert studio.plan.architecture.name == "falcon-7b"


def test_misspelled_model_has_a_fix_and_unknown_model_has_none() -> None:
    picker = ArchitecturePicker()
    row = picker.rows["model"]
    picker.name.value = "lama-3.1-8b"
    press(row)
    assert picker.name.value == "llama-3.1-8b" and not picker.is_wrong
    for name in ("nonsense", "meta-llama/Llama-9-8B", "/nowhere/config.json", "<b>x</b>"):
        picker.name.value = name
        assert f"'{name}' is not in the catalogue" in read_message(row)
        assert "data-act" not in row.children[-1].value and "<b>" not in row.children[-1].value
        assert not any(model in row.message for model in ss.models)


def test_folder_without_config_json_is_reported(tmp_path: Any) -> None:
    picker = ArchitecturePicker()
    picker.name.value = str(tmp_path)
    assert "no config.json" in read_message(picker.rows["model"]) and picker.weights_folder is None


def test_applied_model_is_distinct_from_the_catalogue_model() -> None:
    picker = ArchitecturePicker()
    other = ss.Architecture.from_dict({**ss.models["gpt2"].to_dict(), "num_hidden_layers": 6})
    picker.set_value(other)
    assert picker.value == other
    picker.name.value = "gpt2"
    assert picker.value == ss.models["gpt2"]


def offered_action(studio: Any) -> str:
    """Return the action of the notice's only button other than dismiss."""
    (name,) = set(re.findall(r"data-act='([^']*)'", studio.notice.value)) - {"dismiss"}
    return unescape(name)


def is_shown(row: Any) -> bool:
    return "ss-off" not in row._dom_classes


def test_host_memory_input_is_shown_if_the_memory_is_unknown() -> None:
    picker = ClusterPicker("8xh100-sxm-80gb")
    host = picker.rows["host_memory_bytes"]
    assert not is_shown(host) and not is_shown(picker.host_hint)
    picker.type.value = "mi300x-192gb"
    assert is_shown(host) and is_shown(picker.host_hint) and "unknown" in picker.host_hint.value
    picker.host.value = "1,024"
    assert picker.value.host_memory_bytes == 2**40 and not is_shown(picker.host_hint)
    picker.more.click()
    assert is_shown(host) and is_shown(picker.rows["nvme_bytes"])
    picker.nvme.value = "lots"
    picker.more.click()
    assert is_shown(picker.rows["nvme_bytes"]), "an input with an error stays visible"


def test_default_degrees_fit_the_model_and_user_degrees_are_kept(studio: Any) -> None:
    studio.cluster.set_value(ss.Cluster.parse("8x8xh100-sxm-80gb"))
    studio.architecture.name.value = "llama-3.1-70b"
    studio.layout_picker.framework.value = "megatron"
    assert studio.plan.layout.tp * studio.plan.layout.pp > 1 and studio.plan.memory().fits
    studio.layout_picker.boxes["tp"].value = 2
    studio.layout_picker.framework.value = "fsdp2"
    studio.layout_picker.boxes["tp"].value = 4
    studio.layout_picker.framework.value = "megatron"
    assert studio.plan.layout.tp == 2
    studio.layout_picker.framework.value = "fsdp2"
    assert studio.plan.layout.tp == 4


def test_a_look_at_another_framework_loses_no_option(studio: Any) -> None:
    """Also after a change of the GPUs, and of options without an input, such as those of an opened plan."""
    before = studio.plan
    studio.layout_picker.framework.value = "megatron"
    studio.layout_picker.framework.value = "fsdp2"
    assert studio.plan == before
    studio.apply(replace(before, layout=ss.Layout.megatron(tp=4, pp=2, overlap_grad_reduce=True)))
    studio.cluster.nodes.value = "4"
    changed = studio.plan
    assert (changed.layout.tp, changed.layout.overlap_grad_reduce) == (4, True)
    for framework in ("fsdp2", "deepspeed", "megatron"):
        studio.layout_picker.framework.value = framework
    assert studio.plan == changed


def test_degrees_of_the_user_stay_when_the_gpus_change_meanwhile(studio: Any) -> None:
    """As they do without a look at another framework; those that nobody has set follow the GPUs."""
    picker = studio.layout_picker
    picker.set_fields({"cp": 2, "reshard_after_forward": False})
    picker.framework.value = "megatron"
    studio.cluster.nodes.value = "2"
    studio.architecture.name.value = "qwen3-8b"
    picker.framework.value = "fsdp2"
    assert (studio.plan.layout.cp, studio.plan.layout.reshard_after_forward) == (2, False)
    picker.set_fields({"cp": 1, "reshard_after_forward": True})
    picker.framework.value = "megatron"
    studio.cluster.nodes.value = "1"
    studio.architecture.name.value = "llama-3.1-70b"
    picker.framework.value = "fsdp2"
    assert studio.plan.memory().fits


def test_degrees_are_chosen_once_the_framework_can_run_the_recipe(studio: Any) -> None:
    studio.layout_picker.framework.value = "megatron"
    expected = studio.plan
    studio.layout_picker.framework.value = "fsdp2"
    fresh = Studio()
    fresh.recipe.method.value = "lora"
    fresh.layout_picker.framework.value = "megatron"
    assert fresh.is_wrong
    fresh.recipe.method.value = "full"
    assert fresh.plan == expected and fresh.plan.memory().fits
    fresh.close()


def test_every_picker_summarizes_its_value(studio: Any) -> None:
    pickers = (studio.architecture, studio.cluster, studio.recipe, studio.layout_picker, studio.options)
    answers = [picker.answer for picker in (*pickers, studio.task)]
    assert answers == [
        "8.03B, 32 layers",
        "8 × H100 80 GB, NVLink 4",
        "bf16-mixed, 4,096 tokens",
        "FSDP2, shard 8",
        "40 steps, with trace",
        "Pretrain",
    ]
    for picker in (ArchitecturePicker(), ClusterPicker(), RecipePicker(), LayoutPicker()):
        assert picker.value is not None


def test_default_degrees_follow_the_model_and_the_cluster() -> None:
    picker, recipe = LayoutPicker(), ss.Recipe()
    eight = ss.Cluster.parse("8xh100-sxm-80gb")
    picker.offer_choices(ss.models["llama-3.1-8b"], eight, recipe)
    picker.framework.value = "megatron"
    nodes = ss.Cluster.parse("8x8xh100-sxm-80gb")
    picker.offer_choices(ss.models["llama-3.1-405b"], nodes, recipe)
    assert picker.value == choose_first_layout("megatron", ss.models["llama-3.1-405b"], nodes, recipe)
    picker.boxes["pp"].value = 2
    picker.offer_choices(ss.models["llama-3.1-70b"], nodes, recipe)
    assert picker.value.pp == 2, "a degree that the user set is kept"


@thorough()
def test_undone_fix_does_not_return_with_its_framework() -> None:
    studio = Studio()
    studio.cluster.nodes.value = "8"
    studio.architecture.name.value = "llama-3.1-405b"
    studio.layout_picker.framework.value = "megatron"
    before, fit = studio.plan, make_it_fit(studio.plan)
    assert fit is not None and fit.plan.layout.framework != "megatron"
    studio.fit.button.click()
    assert wait_until(lambda: "data-act" in studio.notice.value, 120)
    assert studio.plan == before, "a change of framework needs a confirmation"
    studio.notice.press_button(offered_action(studio))
    assert studio.plan == fit.plan
    studio.notice.press_button("Undo")
    assert studio.plan.degrees == before.degrees and studio.plan.recipe == before.recipe
    framework = fit.plan.layout.framework
    studio.layout_picker.framework.value = framework
    expected = choose_first_layout(framework, before.architecture, before.cluster, before.recipe)
    assert studio.layout_picker.value == expected
    studio.close()


def test_task_uses_the_weights_folder_chosen_last(tmp_path: Path) -> None:
    """Two folders have the same name and model: the plan stays equal, the weights differ."""
    first, second = (write_folder(tmp_path / name / "m") for name in ("x", "y"))
    studio = Studio()
    studio.recipe.seq_len.value = "32"
    for folder in (first, second):
        studio.architecture.name.value = str(folder)
        assert studio.task.build_task(studio.plan).weights == folder
    studio.apply(studio.plan)
    assert studio.task.build_task(studio.plan).weights == second
    studio.close()


def test_studio_shows_each_opened_plan_and_clears_old_notices(tmp_path: Path) -> None:
    studio = Studio()

    def open_plan(plan: ss.Plan) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(plan.to_json())
        studio.open_plan.path.value = str(path)

    for layers in (4, 16):
        arch = replace(ss.Architecture.of_size("2m"), name="my-model", num_hidden_layers=layers)
        open_plan(replace(studio.plan, architecture=arch))
        assert studio.plan.architecture == arch and "opened" in studio.notice.value
    before = studio.plan
    studio.cluster.count.value = "6"  # 6 GPUs do not divide a batch of 64: the last plan stays.
    assert studio.plan == before
    wider = replace(before, recipe=replace(before.recipe, global_batch_size=96))
    open_plan(wider)
    assert studio.plan.cluster.num_gpus == 8 and studio.plan.recipe.global_batch_size == 96
    studio.recipe.seq_len.value = "512"
    assert not studio.notice.value, "the notice and its Undo belong to the previous plan"
    studio.close()


@thorough()
def test_make_it_fit_confirms_a_framework_change_and_can_be_undone() -> None:
    """Regression: the head's button changed the framework without asking, the Memory tab's had no Undo."""
    studio = Studio()
    studio.cluster.nodes.value = "8"
    studio.architecture.name.value = "llama-3.1-405b"
    studio.layout_picker.framework.value = "megatron"
    before, fit = studio.plan, make_it_fit(studio.plan)
    assert fit is not None and fit.plan.layout.framework != "megatron"
    panel = studio.memory.repairs
    for button in (studio.fit.button, panel.make_it_fit):
        if button is panel.make_it_fit:
            panel.show_repairs(studio.plan, studio.plan.memory())
            assert wait_until(lambda: panel.make_it_fit.layout.display == "", 120)
        button.click()
        assert wait_until(lambda: "No Megatron-core layout fits." in unescape(studio.notice.value), 120)
        assert studio.plan == before
        label = offered_action(studio)
        assert label.startswith(f"Use {fit.plan.layout.title}")
        studio.notice.press_button(label)
        assert studio.plan.layout.framework == fit.plan.layout.framework
        assert format_gib(studio.plan.memory().peak_bytes) in label
        assert "Made it fit" in studio.notice.value
        studio.notice.press_button("Undo")
        assert studio.plan.degrees == before.degrees and studio.plan.recipe == before.recipe
        before = studio.plan
    studio.close()


def test_make_it_fit_within_the_framework_is_applied_at_once() -> None:
    studio = Studio()
    studio.recipe.micro.value = "2"
    before, panel = studio.plan, studio.memory.repairs
    for button in (studio.fit.button, panel.make_it_fit):
        if button is panel.make_it_fit:
            panel.show_repairs(studio.plan, studio.plan.memory())
            assert wait_until(lambda: panel.make_it_fit.layout.display == "", 60)
        button.click()
        assert wait_until(lambda: "Made it fit" in studio.notice.value, 60)
        assert studio.plan.layout.framework == before.layout.framework
        studio.notice.press_button("Undo")
        assert studio.plan == before
    studio.close()


def test_fit_question_reports_a_slower_framework_as_slower() -> None:
    plan = ss.Plan(
        ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
    )
    other = replace(plan, layout=ss.Layout.megatron(tp=2))
    fit = Fit(plan=other, changes=(), bytes_won=0, seconds_lost=0.0, own_framework_fits=True)
    words, label = write_fit_question(plan, fit) or ("", "")
    assert "FSDP2" in words and "3 times slower" in words
    assert label.startswith("Use Megatron-core (tp 2)")
    smaller = replace(plan, architecture=ss.models["llama-3.2-1b"])
    fit = Fit(plan=smaller, changes=("model a → b",), bytes_won=0, seconds_lost=0.0)
    words, label = write_fit_question(plan, fit) or ("", "")
    assert "No layout of any framework" in words and "model a → b" in label
    assert "NVMe, whose size is not known" in words
    known = replace(plan, cluster=replace(plan.cluster, nvme_bytes=2**40))
    words, _ = write_fit_question(known, replace(fit, plan=replace(known, architecture=smaller.architecture)))
    assert "No layout of any framework" in words and "NVMe" not in words


def test_a_fit_on_gpus_without_known_times_does_not_claim_a_search_of_all_layouts() -> None:
    """A T4 has no bf16: with fp16-mixed, offload makes full training fit."""
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("2xt4-16gb"), ss.Recipe(), ss.Layout.fsdp2())
    adapters = replace(plan, recipe=replace(plan.recipe, method="qlora"))
    fit = Fit(plan=adapters, changes=("method full → qlora",), bytes_won=0, seconds_lost=0.0)
    words, _ = write_fit_question(plan, fit) or ("", "")
    assert "No layout of any framework" not in words
    assert "were not searched: the bf16 FLOP/s" in words and "fp16-mixed" in words
