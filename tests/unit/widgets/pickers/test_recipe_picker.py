"""Tests of the recipe picker: advanced inputs, options of each framework, and errors at hidden inputs."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.prediction.support import SUPPORT, list_supported
from shardscope_widgets import Studio
from shardscope_widgets.pickers import RecipePicker
from shardscope_widgets.pickers.recipe_choices import (
    ADVANCED_LABELS,
    OPEN_LABELS,
    list_options,
    to_recipe_value,
)

LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "zero": ss.Layout.zero(),
    "megatron": ss.Layout.megatron(),
}


def list_shown_fields(picker: RecipePicker) -> set[str]:
    return {field for field, row in picker.advanced.rows.items() if row.is_shown}


def test_advanced_inputs_are_shown_by_their_button() -> None:
    picker = RecipePicker()
    assert picker.value == ss.Recipe()
    assert not list_shown_fields(picker)
    picker.advanced.button.click()
    assert list_shown_fields(picker) == {"optimizer", "kernels", "attention", "loss", "dropout"}
    picker.recompute.value = "full"
    picker.method.value = "lora"
    assert list_shown_fields(picker) == {*ADVANCED_LABELS, "recompute_interval", "dropout"}
    picker.advanced.button.click()
    assert not list_shown_fields(picker)


def test_every_input_sets_its_recipe_field() -> None:
    picker = RecipePicker()
    picker.method.value, picker.recompute.value = "lora", "selective"
    for field, value in {"optimizer": "lion", "quantization": "nf4", "loss": "chunked"}.items():
        picker.advanced.dropdowns[field].value = value
    picker.advanced.interval.value, picker.advanced.dropout.value = "2", "0.1"
    recipe = picker.value
    assert (recipe.optimizer, recipe.quantization, recipe.loss) == ("lion", "nf4", "chunked")
    assert (recipe.recompute_interval, recipe.dropout) == (2, 0.1)
    picker.method.value = "full"
    assert picker.value.quantization is None
    picker.recompute.value = "none"
    assert picker.value.recompute_interval == 1
    assert "optimizer" not in picker.also.value, "a field with an input is not listed again"


@pytest.mark.parametrize(
    ("box", "text"), [("dropout", "much"), ("dropout", "2"), ("interval", "x"), ("interval", "0")]
)
def test_invalid_hidden_input_is_shown_with_its_message(box: str, text: str) -> None:
    picker = RecipePicker()
    picker.recompute.value = "full"
    getattr(picker.advanced, box).value = text
    field = {"interval": "recompute_interval"}.get(box, box)
    assert picker.is_wrong
    assert picker.rows[field].message
    assert list_shown_fields(picker) == {field}
    getattr(picker.advanced, box).value = "1" if box == "interval" else "0"
    assert not picker.is_wrong
    assert not list_shown_fields(picker)


@pytest.mark.parametrize("name", LAYOUTS)
def test_offers_only_options_that_the_framework_supports(name: str) -> None:
    picker = RecipePicker()
    picker.offer_choices(LAYOUTS[name])
    for field, control in {
        **picker.advanced.dropdowns,
        "method": picker.method,
        "precision": picker.precision,
        "recompute": picker.recompute,
    }.items():
        offered = {to_recipe_value(value) for _, value in control.options}
        assert offered - {None} == set(list_supported(LAYOUTS[name], field))
        assert (None in offered) == (field in OPEN_LABELS)
    assert picker.value == ss.Recipe(), "offering options does not change the value"


def test_every_option_has_a_readable_label() -> None:
    for field in {*ADVANCED_LABELS, "method"}:
        for label, value in list_options(field, None, None):
            assert label != value or value in ("full", "transformers", "compiled", "megatron")
    assert set(ADVANCED_LABELS) <= set(SUPPORT)


def test_option_that_the_new_framework_lacks_is_reported() -> None:
    studio: Any = Studio()
    studio.layout_picker.framework.value = "ddp"
    studio.recipe.advanced.dropdowns["optimizer"].value = "muon"
    assert studio.plan.recipe.optimizer == "muon"
    studio.layout_picker.framework.value = "fsdp2"
    assert "muon" in studio.recipe.rows["optimizer"].message
    assert "optimizer" in list_shown_fields(studio.recipe)
    studio.recipe.advanced.dropdowns["optimizer"].value = "adamw"
    assert not studio.recipe.rows["optimizer"].message
    assert studio.plan.layout.framework == "fsdp2"
    assert "muon" not in {value for _, value in studio.recipe.advanced.dropdowns["optimizer"].options}


def test_qlora_asks_for_no_type_of_its_base_weights() -> None:
    picker = RecipePicker()
    row = picker.rows["quantization"]
    picker.advanced.show_rows(True)
    # QLoRA's base is NF4: "not quantized" beside it would be false.
    for method, is_shown in (("lora", True), ("qlora", False), ("full", False)):
        picker.method.value = method
        assert row.is_shown is is_shown, method
