"""Tests of the Studio without a browser: user input is simulated by setting widget traits."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_runs import FakeRun, wait_until
from ipywidgets import Button, ToggleButtons, Widget
from ipywidgets.widgets.widget import _remove_buffers
from shown_text import strip_tags
from tests.launch_offers import offer_for, read_verdict
from tests.requirements import THOROUGH, few, sample, skip_without, thorough
from traitlets import TraitError

import shardscope as ss
from shardscope.memory.report import COMPONENTS
from shardscope_widgets import MemoryView, Studio
from shardscope_widgets.checks.findings import summarize_findings
from shardscope_widgets.kit.display_names import count_devices, format_name
from shardscope_widgets.kit.numbers import format_short
from shardscope_widgets.pickers import LayoutPicker
from shardscope_widgets.studio.view import PAUSE_SECONDS

FIXTURE = Path(__file__).parents[3] / "fixtures" / "trace_2_ranks"


@pytest.fixture
def studio() -> Studio:
    return Studio()


def read_bars(view: MemoryView) -> dict[str, tuple[float, ...]]:
    return {trace.name: tuple(trace.x) for trace in view.figure.data if trace.type == "bar"}


def test_changing_the_model_updates_headline_chart_and_table(studio: Studio) -> None:
    before = strip_tags(studio.headline.value), read_bars(studio.memory), studio.memory.table.value
    studio.architecture.name.value = "llama-3.1-70b"
    after = strip_tags(studio.headline.value), read_bars(studio.memory), studio.memory.table.value
    assert "Llama 3.1 70B" in after[0]
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert studio.plan.architecture.name == "llama-3.1-70b"


def test_memory_bars_equal_the_memory_report(studio: Studio) -> None:
    report = studio.plan.memory()
    bars = read_bars(studio.memory)
    for name in COMPONENTS:
        assert bars[name.replace("_", " ")] == (report.components[name] / 2**30,)


def test_figure_object_is_reused_when_inputs_change(studio: Studio) -> None:
    figure = studio.memory.figure
    studio.recipe.seq_len.value = "8192"
    studio.layout_picker.framework.value = "megatron"
    assert studio.memory.figure is figure


@sample(2)
@pytest.mark.parametrize(
    "text", few(["nan", "inf", "-1", "0", "", "1e30", "four", "4096.5", "9" * 40], ["nan", "0"])
)
@pytest.mark.parametrize("box", ["seq_len", "micro", "global_batch"])
def test_fault_33_invalid_number_shows_error_at_its_input_and_keeps_plan(
    studio: Studio, box: str, text: str
) -> None:
    before = studio.plan, strip_tags(studio.headline.value)
    getattr(studio.recipe, box).value = text
    shown = " ".join(row.message for row in studio.recipe.rows.values())
    assert "allowed: a whole number from 1 to" in shown
    assert (studio.plan, strip_tags(studio.headline.value)) == before
    assert getattr(studio.recipe, box).value == text, "the typed text is kept"


def test_correcting_an_input_clears_its_error(studio: Studio) -> None:
    studio.recipe.seq_len.value = "nan"
    studio.recipe.seq_len.value = "2048"
    assert studio.plan.recipe.seq_len == 2048
    assert not any(row.message for row in studio.recipe.rows.values())


def test_conflict_between_inputs_is_shown_at_the_named_input_with_a_fix(studio: Studio) -> None:
    studio.cluster.count.value = "3"
    row = studio.recipe.rows["global_batch_size"]
    assert "global_batch_size=63" in row.message
    assert studio.plan.cluster.num_gpus == 8
    # The suggested fix is a button at the input.
    row.children[-1].press_button("fix")
    assert studio.recipe.global_batch.value == "63"
    assert studio.plan.cluster.num_gpus == 3
    assert not studio.recipe.rows["global_batch_size"].message


@pytest.mark.parametrize("name", ["llama-9", "", "/nowhere/config.json", "7q"])
def test_unknown_model_name_keeps_the_previous_model(studio: Studio, name: str) -> None:
    studio.architecture.name.value = name
    assert studio.architecture.rows["model"].message
    assert studio.plan.architecture.name == "llama-3.1-8b"


def test_model_input_accepts_a_parameter_count(studio: Studio) -> None:
    studio.architecture.name.value = "1.3b"
    assert studio.plan.architecture.num_parameters == pytest.approx(1.3e9, rel=0.03)


@sample(1)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "deepspeed", "megatron"])
@pytest.mark.parametrize("model", few(["gpt2", "llama-3.1-405b", "mixtral-8x7b"], ["gpt2"]))
def test_every_offered_layout_option_gives_a_valid_plan(studio: Studio, framework: str, model: str) -> None:
    if model == "gpt2":
        studio.recipe.seq_len.value = "1024"
    studio.architecture.name.value = model
    studio.layout_picker.framework.value = framework
    picker = studio.layout_picker
    for field, control in list(picker.boxes.items())[1:]:
        for _, value in list(control.options):
            if value not in [offered for _, offered in control.options]:
                continue
            control.value = value
            assert not any(row.message for row in picker.rows.values()), (field, value)
            plan = studio.plan
            assert plan.layout == picker.value.resolve_options(plan.architecture, plan.cluster, plan.recipe)


def test_tensor_parallel_enables_sequence_parallel_by_default(studio: Studio) -> None:
    studio.layout_picker.framework.value = "megatron"
    controls = studio.layout_picker.boxes
    controls["tp"].value = 8
    assert studio.plan.layout.splits_sequence
    controls["sequence_parallel"].value = False
    assert not studio.plan.layout.splits_sequence


def test_smaller_cluster_lowers_parallel_degrees_that_no_longer_fit(studio: Studio) -> None:
    studio.layout_picker.framework.value = "megatron"
    studio.layout_picker.boxes["tp"].value = 8
    studio.cluster.count.value = "4"
    assert studio.plan.degrees.tp == 4


def test_use_machine_button_selects_the_local_cluster(studio: Studio) -> None:
    studio.recipe.global_batch.value = "64"
    studio.cluster.use_machine.click()
    assert studio.plan.cluster.gpu.name == studio.cluster.machine.gpu.name
    assert studio.plan.cluster.num_gpus == studio.cluster.machine.num_gpus


def test_launch_button_label_describes_the_run(studio: Studio) -> None:
    machine = ss.Cluster.parse("2xcpu")
    local_plan = ss.Plan(
        ss.Architecture.of_size("2m"), machine, ss.Recipe(seq_len=64, global_batch_size=2), ss.Layout.fsdp2()
    )
    assert offer_for(local_plan, machine, local_plan.memory()).label == "Launch on 2 CPU ranks"
    trial_offer = offer_for(studio.plan, machine, studio.plan.memory())
    assert trial_offer.label == "Try a tiny model on 2 CPU ranks" and trial_offer.is_trial
    assert trial_offer.plan is not None and trial_offer.plan.layout == studio.plan.layout
    assert "Trial run" in trial_offer.note
    assert "Trial run" in studio.launch.button.tooltip
    too_large = ss.Plan(
        ss.models["llama-3.1-405b"], machine, ss.Recipe(global_batch_size=2), ss.Layout.fsdp2()
    )
    refused_offer = offer_for(too_large, machine, too_large.memory())
    assert refused_offer.is_trial and refused_offer.note.startswith("The plan needs at least")


@sample(1)
@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "deepspeed", "megatron"])
def test_every_framework_offers_a_trial_run_on_this_machine(studio: Studio, framework: str) -> None:
    if framework in ("deepspeed", "megatron"):
        skip_without(framework)
    studio.layout_picker.framework.value = framework
    assert not studio.launch.button.disabled
    assert "Trial run" in studio.launch.note.value


def test_every_toggle_button_group_has_a_selection(studio: Studio) -> None:
    for framework in FRAMEWORKS:
        studio.layout_picker.framework.value = framework
        for field, control in studio.layout_picker.boxes.items():
            if isinstance(control, ToggleButtons):
                assert control.index is not None, (framework, field)


def test_layout_picker_works_without_a_studio() -> None:
    picker = LayoutPicker(ss.Layout.zero(stage=2))
    assert picker.value == ss.Layout.zero(stage=2)


def test_input_and_button_labels_use_standard_terms(studio: Studio) -> None:
    assert studio.options.rows["num_steps"].name.value == "Steps, learning rate"
    assert studio.options.outlive.description == "Keep running if the kernel stops"
    buttons = [each.description for each in walk_widgets(studio) if isinstance(each, Button)]
    assert {"Check memory without GPUs", "Pin for comparison", "Try a tiny model on 2 CPU ranks"} <= set(
        buttons
    )
    assert not [text for text in buttons if "ehearse" in text], "project jargon in a label"


def walk_widgets(widget: Widget) -> Iterator[Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk_widgets(child)


def test_gpu_and_model_ids_are_formatted_as_display_names() -> None:
    assert format_name("h100-sxm-80gb") == "H100 SXM 80 GB"
    assert format_name("llama-3.1-8b") == "Llama 3.1 8B"
    assert format_name("rtx-pro-6000-blackwell-96gb") == "RTX PRO 6000 Blackwell 96 GB"
    assert count_devices(ss.Cluster.parse("2xcpu")) == "2 CPU ranks"
    assert count_devices(ss.Cluster.parse("h200-sxm-141gb")) == "1 GPU"


def test_verdict_states_required_and_available_memory() -> None:
    recipe, cluster = ss.Recipe(), ss.Cluster.parse("8xh100-sxm-80gb")
    fits = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.fsdp2())
    assert re.fullmatch(r"Fits: [\d.]+ of 79\.1 GiB on each GPU", read_verdict(fits, fits.memory()))
    too_large = ss.Plan(ss.models["llama-3.1-70b"], cluster, recipe, ss.Layout.fsdp2())
    text = read_verdict(too_large, too_large.memory())
    assert re.match(r"Does not fit: needs [\d,.]+ GiB on each GPU, which has 79\.1", text)


@pytest.mark.parametrize(
    ("seq_len", "pattern", "note"),
    [
        (4096, r"Fits: [\d.]+ of 79\.1 GiB on each GPU", ""),
        (
            7168,
            r"Tight: [\d.]+ of 79\.1 GiB on each GPU; may run out of memory",
            "May run out of memory: it needs",
        ),
    ],
)
def test_low_memory_headroom_is_reported_as_tight(seq_len: int, pattern: str, note: str) -> None:
    recipe, cluster = ss.Recipe(seq_len=seq_len), ss.Cluster.parse("8xh100-sxm-80gb")
    plan = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, ss.Layout.fsdp2())
    report = plan.memory()
    assert report.high_bytes <= report.usable_bytes
    assert re.fullmatch(pattern, read_verdict(plan, report))
    assert offer_for(plan, cluster, report).note.startswith(note)
    assert bool(offer_for(plan, cluster, report).note) == bool(note)


def test_fault_16_no_second_launch_while_a_run_is_active(studio: Studio) -> None:
    studio.launch.busy = True
    studio.recipe.seq_len.value = "2048"
    assert studio.launch.button.disabled
    assert "A run is active" in studio.launch.note.value
    studio.launch.busy = False
    studio.recipe.seq_len.value = "4096"
    assert not studio.launch.button.disabled


def test_launch_note_uses_singular_for_one_gpu() -> None:
    plan = ss.Plan(
        ss.models["gpt2"], ss.Cluster.parse("rtx-4090-24gb"), ss.Recipe(seq_len=512), ss.Layout.ddp()
    )
    note = offer_for(plan, ss.Cluster.parse("2xcpu"), plan.memory()).note
    assert "1 GPU," in note


def test_typing_a_hub_id_does_not_access_the_network(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ss.models["mistral-7b"], "fill the catalogue's cache, which uses from_hf as well"
    monkeypatch.setattr(ss.Architecture, "from_hf", lambda _: pytest.fail("from_hf was called"))
    studio.architecture.name.value = "Mistralai/mistral-7b-instruct"
    message = studio.architecture.rows["model"].message
    assert "path of an existing config.json" in message and "mistral-7b." in message


def test_catalogue_model_is_found_by_hub_id_unless_a_local_path_exists(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio.architecture.name.value = "Qwen/Qwen2.5-7B"
    assert studio.plan.architecture == ss.models["qwen2.5-7b"]
    assert "Qwen2.5 7B" in strip_tags(studio.headline.value)
    monkeypatch.chdir(tmp_path)
    Path("qwen").mkdir()
    Path("qwen/qwen3-8b").write_text("no json")
    studio.architecture.name.value = "qwen/qwen3-8b"
    assert "qwen3-8b, line 1" in studio.architecture.rows["model"].message, (
        "a local path takes precedence over the catalogue"
    )


def test_invalid_input_disables_launch_and_suggested_fixes(studio: Studio) -> None:
    studio.architecture.name.value = "nonsense"
    assert studio.launch.button.disabled and "red" in studio.launch.note.value
    assert "ss-stale" in studio._dom_classes
    studio.tabs.value = "Checks"
    assert studio.checks.list.frozen, "suggested fixes are disabled, also on a tab that is first shown now"
    studio.architecture.name.value = "llama-3.1-8b"
    assert not studio.launch.button.disabled and not studio.checks.list.frozen
    assert "ss-stale" not in studio._dom_classes


def test_a_fix_of_the_task_can_be_undone(studio: Studio) -> None:
    steps = studio.options.steps
    steps.value = "4000"
    studio.checks.show(studio.findings)
    (finding,) = (one for one in studio.checks.findings if one.name == "text-read-many-times")
    studio.checks._handle_action(finding.name)
    fewer = steps.value
    assert int(fewer) < 4000 and f"Applied: steps 4000 → {fewer}." in studio.notice.value
    studio.notice._handle_action("Undo")
    assert steps.value == "4000" and not studio.notice.value
    studio.checks._handle_action(finding.name)
    steps.value = "7"
    studio.notice._handle_action("Undo")
    assert steps.value == "7", "what the user has typed since then stays"


def test_changes_of_the_memory_tab_do_not_replace_what_is_being_typed(studio: Studio) -> None:
    plan = ss.Plan(
        ss.models["llama-3.1-8b"],
        ss.Cluster.parse("8xa100-sxm-80gb"),
        ss.Recipe(micro_batch_size=8),
        ss.Layout.fsdp2(),
    )
    studio.apply(plan)
    repairs = studio.memory.repairs
    repairs.show_repairs(studio.plan, studio.plan.memory())
    chips = repairs.buttons.children
    assert chips and not any(chip.disabled for chip in chips)
    studio.recipe.boxes["seq_len"].value = "4O96"
    assert studio.is_wrong and all(button.disabled for button in (*chips, repairs.make_it_fit))
    repairs.show_repairs(studio.plan, studio.plan.memory())  # a search that ends only now
    assert all(chip.disabled for chip in chips)
    studio.recipe.boxes["seq_len"].value = "2048"
    repairs.show_repairs(studio.plan, studio.plan.memory())
    assert not any(chip.disabled for chip in repairs.buttons.children)


def test_an_error_of_the_plan_goes_when_the_value_it_is_about_becomes_invalid(studio: Studio) -> None:
    count, batch = studio.cluster.count, studio.recipe.rows["global_batch_size"]
    count.value = "3"
    assert "1 x 3 = 3" in batch.message and not studio.cluster.is_wrong
    count.value = "0"
    assert studio.cluster.is_wrong and not batch.message
    # The same number as before: its error is found again.
    count.value = "3"
    assert "1 x 3 = 3" in batch.message and not studio.cluster.is_wrong
    count.value = "8"
    assert not batch.message and not studio.is_wrong


def test_an_error_closes_no_section_that_is_open(studio: Studio) -> None:
    for title in ("GPUs", "Framework"):
        studio.folds[title].head.expanded = True
    studio.cluster.count.value = "3"
    assert all(studio.folds[title].head.expanded for title in ("GPUs", "Framework", "Training"))


def test_choosing_another_task_leaves_the_fine_tune_tab(studio: Studio) -> None:
    studio.tabs.value = "Fine-tune"
    assert studio.task.menu.value == "finetune" and "Fine-tune" in studio.launch.button.description
    studio.task.menu.value = "pretrain"
    assert studio.tabs.value != "Fine-tune" and studio.task.menu.value == "pretrain"
    assert "Fine-tune" not in studio.launch.button.description
    studio.tabs.value = "Fine-tune"
    assert studio.task.menu.value == "finetune"


def test_applying_a_plan_clears_all_input_errors(studio: Studio) -> None:
    plan = studio.plan
    studio.architecture.name.value, studio.cluster.count.value = "nonsense", "many"
    studio.recipe.seq_len.value = "-1"
    assert len(set(read_errors(studio))) == 3
    studio.apply(plan)
    assert (
        not read_errors(studio) and studio.plan == plan and studio.architecture.name.value == "llama-3.1-8b"
    )


@sample(2)
@pytest.mark.parametrize("steps", ["abc", "0", "2.5", "-1", ""])
def test_invalid_num_steps_shows_an_error_and_disables_launch(studio: Studio, steps: str) -> None:
    studio.options.steps.value = steps
    assert "Pretrain.num_steps" in studio.options.rows["num_steps"].message
    assert studio.launch.button.disabled


FRAMEWORKS = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed ZeRO", "megatron": "Megatron"}


def read_errors(studio: Studio) -> list[str]:
    pickers = (studio.architecture, studio.cluster, studio.recipe, studio.layout_picker, studio.options)
    rows = [row for picker in pickers for row in picker.rows.values()]
    return [unescape(strip_tags(row.message)) for row in rows if row.message]


@pytest.mark.parametrize("framework", few(FRAMEWORKS, ["fsdp2"]))
def test_headline_describes_the_selected_model_or_an_error_is_shown(studio: Studio, framework: str) -> None:
    """For every catalogue model, the headline never shows the verdict of another model without an error."""
    studio.recipe.seq_len.value = "1024"  # GPT-2's number of positions
    studio.layout_picker.framework.value = framework
    num_headlines = 0
    names = list(ss.models)[:: 1 if THOROUGH else 5]
    for name in names:
        before = studio.plan, studio.headline.value
        studio.architecture.name.value = name
        has_errors = bool(read_errors(studio))
        assert bool(studio.launch.blocked) == has_errors
        assert has_errors == ("ss-stale" in studio._dom_classes), name
        if has_errors:
            assert (studio.plan, studio.headline.value) == before, name
            assert studio.launch.button.disabled, name
            continue
        num_headlines += 1
        assert studio.plan.architecture.name == name
        assert strip_tags(studio.headline.value).startswith(f"{format_name(name)} on"), name
        assert read_verdict(studio.plan, studio.plan.memory()) in strip_tags(studio.headline.value), name
        assert FRAMEWORKS[framework] in strip_tags(studio.headline.value), name
    assert num_headlines > len(names) * 0.7


def test_unsupported_architecture_shows_an_error_at_the_model_input(studio: Studio) -> None:
    """The plan can be built but its memory cannot be predicted: falcon-rw-1b uses ALiBi."""
    before = studio.plan, studio.headline.value, read_bars(studio.memory)
    studio.architecture.name.value = "falcon-rw-1b"
    (message,) = read_errors(studio)
    assert "'alibi'" in message and "alibi" in studio.architecture.rows["model"].message
    assert (studio.plan, studio.headline.value, read_bars(studio.memory)) == before
    assert "ss-stale" in studio._dom_classes and studio.launch.button.disabled
    studio.architecture.name.value = "falcon-7b"
    assert not read_errors(studio) and "Falcon 7B" in strip_tags(studio.headline.value)
    studio.layout_picker.framework.value = "megatron"
    assert "Nearest fix: layout=Layout.fsdp2()" in read_errors(studio)[0]
    assert studio.plan.layout.framework == "fsdp2"
    studio.layout_picker.framework.value = "deepspeed"
    assert not read_errors(studio) and studio.plan.layout.framework == "deepspeed"


def test_fault_45_internal_error_in_a_handler_is_displayed(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notebooks hide exceptions in widget handlers: without a message the old headline would look valid."""

    def raise_attribute_error(plan: ss.Plan) -> None:
        raise AttributeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(ss.Plan, "memory", raise_attribute_error)
        with pytest.raises(AttributeError):
            studio.architecture.name.value = "llama-3.1-70b"
    (error,) = read_errors(studio)
    assert "AttributeError: no such thing" in error
    assert "ss-stale" in studio._dom_classes and studio.launch.button.disabled
    studio.recipe.seq_len.value = "2048"
    assert not read_errors(studio) and "Llama 3.1 70B" in strip_tags(studio.headline.value)


def test_fault_26_widget_state_for_a_page_reload_is_small(studio: Studio) -> None:
    """JupyterLab waits two seconds for a view's model; a model that arrives later is "model not found".

    (``ManagerBase.get_model`` of jupyterlab_widgets 3.0 does not check again after a wait that a busy page
    prolonged.) Loading 700 models with 5 MB per chart took longer than that on a busy machine.
    """
    widgets: dict[str, Widget] = {}

    def collect(value: object) -> None:
        if isinstance(value, Widget) and value.model_id not in widgets:
            widgets[value.model_id] = value
            for name in value.keys:
                collect(getattr(value, name))
        elif isinstance(value, list | tuple):
            for part in value:
                collect(part)

    collect(studio)
    state, _, buffers = _remove_buffers({key: widget.get_state() for key, widget in widgets.items()})
    assert len(widgets) < 280
    assert len(json.dumps(state, default=str)) < 400_000
    assert sum(map(len, buffers)) < 2_000_000


@thorough()
def test_new_studio_works_after_widget_close_all() -> None:
    Studio()
    Widget.close_all()
    studio = Studio()
    shared = [studio.architecture.hint.layout, studio.architecture.hint.style]
    assert all(widget.comm is not None for widget in (*shared, studio.recipe.seq_len.layout))


def test_figure_state_for_a_page_reload_is_current(studio: Studio) -> None:
    studio.architecture.name.value = "llama-3.1-70b"
    state = studio.memory.figure.get_state()["_figure"]
    parameter_bars = read_bars(studio.memory)["parameters"]
    assert tuple(state["data"][0]["x"]) == parameter_bars
    assert state["layout"]["height"] == studio.memory.figure.layout.height


# ---------------------------------------------------------------------------- time, plans and checks


def test_rates_show_mfu_and_tokens_per_second(studio: Studio) -> None:
    report = studio.plan.step()
    text = strip_tags(studio.rates.value)
    assert f"{100 * report.mfu:.0f} % MFU" in text
    assert f"{format_short(report.tokens_per_second_per_gpu)} tokens/s per GPU" in text
    studio.architecture.name.value = "llama-3.2-1b"
    assert strip_tags(studio.rates.value) != text


def test_unavailable_rates_are_dashes_with_the_reason_as_tooltip(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_value_error(plan: ss.Plan) -> None:
        raise ValueError("Gpu.peak_flops is <unknown>. Nearest fix: ss.calibrate().")

    monkeypatch.setattr(ss.Plan, "step", raise_value_error)
    studio.recipe.seq_len.value = "2048"
    assert re.findall(r"<b>(.*?)</b>", studio.rates.value) == ["–"] * 3
    assert studio.rates.value.count("title='Gpu.peak_flops is &lt;unknown&gt;. Nearest fix:") == 3
    assert "Fits: " in strip_tags(studio.headline.value), "the rest of the Studio still works"
    studio.tabs.value = "Time"
    assert "ss.calibrate()" in studio.time.caption.value


def test_tab_content_is_created_when_first_shown(studio: Studio) -> None:
    assert not {"time", "plans", "checks"} & set(vars(studio))
    studio.tabs.value = "Time"
    assert "time" in vars(studio) and "plans" not in vars(studio)


def test_only_the_visible_tab_is_redrawn(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    for name in ("memory", "time", "checks"):
        view = getattr(studio, name)
        monkeypatch.setattr(view, "show", lambda *_, name=name: drawn.append(name))
    studio.recipe.seq_len.value = "2048"
    assert drawn == ["memory"]
    studio.tabs.value = "Time"
    studio.recipe.seq_len.value = "1024"
    assert drawn == ["memory", "time", "time"]
    studio.tabs.value = "Memory"
    studio.tabs.value = "Time"
    assert drawn == ["memory", "time", "time", "memory"], "an up-to-date tab is not redrawn"


def test_memory_chart_is_drawn_before_step_time_and_findings(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    drawing = threading.get_ident()

    def record(name: str) -> None:
        # The search of an earlier test may still call `step` of its plans in its own thread.
        if threading.get_ident() == drawing:
            calls.append(name)

    for name in ("step", "findings"):
        original = getattr(ss.Plan, name)
        monkeypatch.setattr(
            ss.Plan,
            name,
            lambda plan, *_, name=name, original=original: (record(name), original(plan))[1],
        )
    show = studio.memory.show
    monkeypatch.setattr(studio.memory, "show", lambda *arguments: (record("chart"), show(*arguments)))
    studio.recipe.micro.value = "2"
    assert calls[0] == "chart" and {"step", "findings"} <= set(calls)


def test_checks_tab_badge_counts_findings_and_shows_worst_severity(studio: Studio) -> None:
    # The default number of steps reads the shipped text several times; 4 steps do not.
    assert [finding.name for finding in studio.findings] == ["text-read-many-times"]
    studio.options.steps.value = "4"
    assert studio.plan.findings() == [] and "Checks" not in studio.tabs.badges
    studio.architecture.name.value = "llama-3.1-70b"
    findings = studio.plan.findings()
    assert studio.tabs.badges["Checks"] == [str(len(findings)), summarize_findings(findings), "danger"]
    studio.tabs.value = "Checks"
    assert studio.checks.list.value.count("<li ") == len(findings)
    studio.architecture.name.value = "llama-3.2-3b"
    assert {finding.severity for finding in studio.plan.findings()} == {"hint"}
    assert studio.tabs.badges["Checks"][2] == "hint", "a hint is not shown in red"
    studio.architecture.name.value = "llama-3.1-8b"
    assert "Checks" not in studio.tabs.badges and "No findings" in studio.checks.list.value


def test_suggested_fix_button_removes_the_finding(studio: Studio) -> None:
    studio.recipe.micro.value = "4"
    studio.tabs.value = "Checks"
    fixable = next(finding for finding in studio.plan.findings() if finding.plan is not None)
    studio.checks.list.press_button(fixable.name)
    assert fixable.plan is not None
    assert studio.plan.memory().peak_bytes == fixable.plan.memory().peak_bytes
    assert fixable.name not in [finding.name for finding in studio.plan.findings()]


def list_finding_names(studio: Studio) -> list[str]:
    return [finding.name for finding in studio.findings]


def test_run_options_are_checked_and_fixed_by_their_buttons(studio: Studio) -> None:
    panel = studio.options
    studio.tabs.value = "Checks"
    panel.rate.value = "0.05"
    assert "6.5e+02 times" in strip_tags(studio.checks.list.value)
    assert studio.tabs.badges["Checks"][2] == "danger"
    studio.checks.list.press_button("learning-rate-against-batch")
    assert studio.task.build_task(studio.plan).learning_rate == 8e-5 and panel.rate.value == ""
    assert list_finding_names(studio) == ["text-read-many-times"]
    studio.checks.list.press_button("text-read-many-times")
    assert panel.steps.value == "5" and not list_finding_names(studio) and "Checks" not in studio.tabs.badges
    panel.profile.value = False
    assert list_finding_names(studio) == ["never-profiled"] and "Never profiled" in strip_tags(
        studio.checks.list.value
    )
    assert "record a trace on" in strip_tags(studio.checks.list.value), "the name of the input"
    studio.checks.list.press_button("never-profiled")
    assert panel.profile.value and not list_finding_names(studio)


def test_invalid_num_steps_limits_checks_to_the_plan(studio: Studio) -> None:
    studio.options.rate.value = "0.05"
    assert "learning-rate-against-batch" in list_finding_names(studio)
    studio.options.steps.value = "many"
    assert list_finding_names(studio) == []
    studio.options.steps.value = "4"
    assert list_finding_names(studio) == ["learning-rate-against-batch"]


@sample(2)
@pytest.mark.parametrize("text", ["fast", "-1", "nan", "11"])
def test_fault_33_invalid_learning_rate_shows_error_at_its_input(studio: Studio, text: str) -> None:
    row = studio.options.rows["learning_rate"]
    studio.options.rate.value = text
    assert "Pretrain.learning_rate is" in strip_tags(row.message) and studio.launch.button.disabled
    studio.options.rate.value = ""
    assert not row.message


def test_default_learning_rate_depends_on_model_size(studio: Studio) -> None:
    """Pretrain's default of 1e-3 suits a few million weights, the size of a trial run's model."""
    offer = studio.launch.current
    assert studio.task.build_task(studio.plan).learning_rate == 8e-5
    assert offer.is_trial and offer.plan is not None
    assert studio.task.build_task(offer.plan).learning_rate == 1e-3
    assert studio.options.rate.placeholder == "0.001"


def test_checks_use_earlier_runs_of_the_plan_and_list_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").mkdir()
    run = SimpleNamespace(plan=Studio().plan, folder=tmp_path)
    calls: list[int] = []
    monkeypatch.setattr(ss, "runs", lambda: (calls.append(1), [run])[1])
    studio = Studio()
    studio.options.steps.value = "4"
    studio.options.profile.value = False
    assert "1 run of this plan and no trace" in studio.findings[0].why
    (tmp_path / "traces" / "rank-0.json.gz").touch()
    studio.options.steps.value = "3"
    assert not list_finding_names(studio) and calls == [1], (
        "the runs are listed once, not on every input change"
    )


def test_applying_a_plan_for_another_cluster_updates_the_inputs(studio: Studio) -> None:
    layout = ss.Layout.megatron(tp=2, sequence_parallel=True)
    other = ss.Plan(studio.plan.architecture, ss.Cluster.parse("2x8xh100-sxm-80gb"), ss.Recipe(), layout)
    studio.apply(other)
    assert studio.plan == other and studio.cluster.nodes.value == "2"


def test_switching_tabs_does_not_hide_shared_widgets(studio: Studio) -> None:
    """Widgets share layout objects, so a widget that is shown and hidden needs its own."""
    for name in studio.tabs.names:
        studio.tabs.value = name
        (body,) = [child for child in studio.children if "ss-body" in child._dom_classes]
        assert all(child.layout.display != "none" for child in (body, *body.children, *studio.children[1:]))


def test_fault_44_unknown_tab_raises_trait_error(studio: Studio) -> None:
    with pytest.raises(TraitError, match="allowed: Memory, Time"):
        studio.tabs.value = "Speed"


def test_findings_are_computed_once_after_input_pauses(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a running event loop, three quick changes cause one computation, for the last plan."""
    checked_models: list[str] = []
    findings = ss.Plan.findings
    monkeypatch.setattr(
        ss.Plan,
        "findings",
        lambda plan, *_: (checked_models.append(plan.architecture.name), findings(plan))[1],
    )

    async def change_models() -> None:
        for name in ("llama-3.2-1b", "mixtral-8x7b", "llama-3.1-70b"):
            studio.architecture.name.value = name
        assert not checked_models
        await asyncio.sleep(2 * PAUSE_SECONDS)

    asyncio.run(change_models())
    assert checked_models == ["llama-3.1-70b"]
    assert studio.tabs.badges["Checks"][0] == str(len(studio.findings))


def test_option_without_an_input_is_preserved_and_shown_in_the_hint(studio: Studio) -> None:
    plan = replace(studio.plan, layout=ss.Layout.zero(3, zero_hpz_partition_size=2))
    studio.apply(plan)
    assert studio.plan.layout == plan.layout
    assert "Also set: zero hpz partition size 2" in studio.layout_picker.hint.value
    studio.recipe.seq_len.value = "2048"
    assert studio.plan.layout.zero_hpz_partition_size == 2
    studio.layout_picker.boxes["stage"].value = 2
    assert studio.plan.layout.stage == 2 and studio.plan.layout.zero_hpz_partition_size == 1
    assert "Also" not in studio.layout_picker.hint.value and not read_errors(studio)


def test_fsdp2_pipeline_chunks_and_schedule_have_inputs(studio: Studio) -> None:
    studio.apply(replace(studio.plan, layout=ss.Layout.fsdp2(pp=2, vpp=2)))
    picker = studio.layout_picker
    controls, rows = picker.boxes, picker.rows
    assert controls["vpp"].value == 2 and "Also" not in picker.hint.value
    # GPipe has no virtual stages, so it is not offered with vpp > 1.
    assert not rows["pipeline_schedule"].is_shown
    controls["vpp"].value = 1
    assert rows["pipeline_schedule"].is_shown
    controls["pipeline_schedule"].value = "GPipe"
    assert studio.plan.layout == ss.Layout.fsdp2(pp=2, pipeline_schedule="GPipe")
    controls["pp"].value = 1
    assert studio.plan.layout == ss.Layout.fsdp2() and not read_errors(studio)
    assert not any(rows[name].is_shown for name in ("vpp", "pipeline_schedule"))


def test_export_button_writes_plan_files_and_keeps_edited_files(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan is exported to its own folder under ``exports`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    panel = studio.export_panel

    def press_export() -> str:
        panel.button.click()
        assert wait_until(lambda: not panel.is_busy, seconds=60)
        return strip_tags(panel.words.value)

    message = press_export()
    (folder,) = (tmp_path / "exports").iterdir()
    file_list = panel.words.value
    assert message.startswith(f"{len(list(folder.iterdir()))} files in exports/{folder.name} ")
    assert all(f"<li><code>{file.name}</code>" in file_list for file in folder.iterdir())
    copied = [unescape(text) for text in re.findall(r"data-copy='([^']*)'", file_list)]
    assert copied[0] == f"cd {folder} && ./torchrun.sh" and f"cd {folder} && sbatch job.sbatch" in copied
    assert ss.Plan.from_json((folder / "plan.json").read_text()) == studio.plan
    assert "fsdp2" in folder.name and "h100" in folder.name

    studio.recipe.seq_len.value = "2048"
    assert not strip_tags(panel.words.value), "the previous plan's file list is cleared"
    press_export()
    assert len(list((tmp_path / "exports").iterdir())) == 2, "another plan is exported to its own folder"
    studio.recipe.seq_len.value = "4096"

    (folder / "plan.json").write_text("somebody's own")
    assert "plan.json" in press_export(), "a file edited after the export is not overwritten"
    assert (folder / "plan.json").read_text() == "somebody's own"

    studio.architecture.name.value = "nonsense"
    assert "input marked in red" in press_export()


class VanishedRun(FakeRun):
    """A run whose folder is gone when its measurements are read."""

    def memory(self) -> object:
        raise OSError("no such folder")


def test_the_end_of_a_run_is_handled_in_the_kernels_thread() -> None:
    """A run's view reports it in a thread of its own."""
    threads: list[str] = []

    async def end_in_a_thread() -> None:
        studio = Studio()
        studio.launch.busy = True
        studio.launch.button.observe(lambda _: threads.append(threading.current_thread().name))
        run = VanishedRun([])
        reporter = threading.Thread(target=studio.run_events.report_ended, args=(run,), name="reporter")
        reporter.start()
        await asyncio.to_thread(reporter.join)
        for _ in range(100):
            if not studio.launch.busy:
                break
            await asyncio.sleep(0.01)
        assert not studio.launch.busy
        studio.close()

    asyncio.run(end_in_a_thread())
    assert threads and "reporter" not in threads


def test_a_run_whose_folder_vanished_frees_the_launch_button(studio: Studio) -> None:
    studio.launch.busy = True
    studio.run_events.report_ended(VanishedRun([]))  # type: ignore[arg-type]
    assert not studio.launch.busy


def test_a_plan_applied_from_the_plans_tab_can_be_undone(studio: Studio) -> None:
    before = studio.plan
    other = ss.Plan(before.architecture, before.cluster, before.recipe, ss.Layout.zero(stage=3))
    studio.plans.advice._on_apply(other)
    assert studio.plan == other
    assert "Applied DeepSpeed ZeRO-3" in studio.notice.value and "Undo" in studio.notice.value
    studio.notice._handle_action("Undo")
    assert studio.plan == before and not studio.notice.value
    studio.plans.advice._on_apply(before)  # The current plan again: nothing to undo.
    assert not studio.notice.value


def test_undo_restores_what_the_other_framework_had(studio: Studio) -> None:
    """Undo of a plan of another framework reset the degrees that were set for it, or kept its own."""
    framework = studio.layout_picker.framework
    framework.value = "megatron"
    studio.layout_picker.set_fields({"tp": 4, "pp": 2})
    users = studio.plan.layout
    framework.value = "fsdp2"
    before = studio.plan
    other = replace(before, layout=ss.Layout.megatron(tp=2, sequence_parallel=False))
    changes = studio._changes
    for apply in (changes.apply_listed, changes.apply_suggested, changes.apply_traced, changes.open_plan):
        apply(before, other)
        assert studio.plan == other
        studio.notice.press_button("Undo")
        assert studio.plan == before
        framework.value = "megatron"
        assert studio.plan.layout == users, apply
        framework.value = "fsdp2"


def test_undo_leaves_no_trace_in_a_framework_that_was_never_chosen(studio: Studio) -> None:
    before = studio.plan
    studio.layout_picker.framework.value = "deepspeed"
    usual = studio.plan
    studio.layout_picker.framework.value = "fsdp2"
    assert studio.plan == before
    studio._changes.open_plan(before, replace(before, layout=ss.Layout.zero(stage=1)))
    studio.notice.press_button("Undo")
    studio.layout_picker.framework.value = "deepspeed"
    assert studio.plan == usual


def test_an_applied_plan_of_the_same_name_is_reported_by_its_changes(studio: Studio) -> None:
    """Advice to compile the modules was reported as "Applied FSDP2.", the plan before."""
    before = studio.plan
    studio.plans.advice._on_apply(replace(before, recipe=replace(before.recipe, kernels="compiled")))
    assert "kernels" in studio.notice.value and "torch.compile" in studio.notice.value
    studio.notice.press_button("Undo")
    assert studio.plan == before


def test_the_reason_why_launch_is_off_is_shown_below_the_button(studio: Studio) -> None:
    assert strip_tags(studio.launch.reason.value) == ""
    studio.recipe.seq_len.value = "many"
    assert studio.launch.button.disabled
    assert strip_tags(studio.launch.reason.value).endswith("is off: Correct the input marked in red first.")


def test_browse_buttons_tell_the_front_end_whether_they_are_open(studio: Studio) -> None:
    inputs = studio.finetune.form.inputs
    button = next(one for one in walk_widgets(inputs) if getattr(one, "description", "") == "Browse…")
    assert "ss-expands" in button._dom_classes and "ss-expanded" not in button._dom_classes
    button.click()
    assert "ss-expanded" in button._dom_classes
    button.click()
    assert "ss-expanded" not in button._dom_classes


def test_fixes_of_memory_and_of_checks_can_be_undone(studio: Studio) -> None:
    before = studio.plan
    studio.memory.repairs.show_repairs(before, before.memory())
    chip = studio.memory.repairs.buttons.children[0]
    chip.click()
    assert studio.plan != before and "→" in studio.notice.value
    studio.notice.press_button("Undo")
    assert studio.plan == before and not studio.notice.value
    # The memory of a node is part of no input's text.
    offloaded = replace(before, layout=ss.Layout.fsdp2(offload="cpu"))
    studio.apply(replace(offloaded, cluster=replace(before.cluster, host_memory_bytes=None)))
    asked = studio.plan
    studio.checks.show(studio.findings)
    name = next(one.name for one in studio.checks.findings if one.question is not None)
    studio.checks._apply_answer(name, "900")
    assert studio.plan.cluster.host_memory_bytes == 900 * 2**30
    studio.notice.press_button("Undo")
    assert studio.plan == asked
