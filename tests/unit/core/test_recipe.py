"""Tests of ``Recipe``: valid values, error messages with their fixes, and JSON."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from random_plans import NOT_NUMBERS, recipes

from shardscope.core.errors import FieldError
from shardscope.core.recipe import Recipe

MAX_SIZES = {"seq_len": 2**24, "micro_batch_size": 2**16, "global_batch_size": 2**24}
FLOAT_RANGES = {"dropout": (0, 0.99), "expert_imbalance": (1, 1024), "expert_capacity_factor": (0.1, 1024)}
CHOICES: dict[str, tuple[str | None, ...]] = {
    "method": ("full", "lora", "qlora"),
    "precision": ("bf16-mixed", "fp16-mixed", "fp8-mixed", "bf16", "fp32"),
    "optimizer": (
        *("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "sgd", "lion", "muon"),
    ),
    "recompute": ("none", "selective", "full", "offload"),
    "kernels": ("transformers", "liger", "megatron", "compiled", None),
    "attention": ("eager", "sdpa", "flash", None),
    "loss": ("full", "chunked", "fused", None),
}
OPTIONAL = {field for field, values in CHOICES.items() if None in values}
INVALID_CHOICES = (
    "",
    "FULL",
    "full ",
    0,
    1,
    True,
    False,
    math.nan,
    math.inf,
    b"full",
    ["full"],
    {},
    "\N{SNOWMAN}",
    "a" * 9999,
)


def catch_error(field: str, value: Any, **others: Any) -> FieldError:
    with pytest.raises(FieldError) as caught:
        Recipe(**{field: value}, **others)
    error = caught.value
    assert error.field == f"Recipe.{field}"
    text = str(error)
    assert f"Recipe.{field} is " in text
    assert "allowed: " in text
    assert "Nearest fix: " in text
    assert len(text) < 1000
    return error


def test_default_values() -> None:
    recipe = Recipe()
    assert (recipe.seq_len, recipe.micro_batch_size, recipe.global_batch_size) == (4096, 1, 64)
    assert (recipe.method, recipe.precision, recipe.optimizer) == ("full", "bf16-mixed", "adamw")
    assert (recipe.recompute, recipe.kernels, recipe.lora_rank, recipe.lora_targets) == (
        "none",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("field", MAX_SIZES)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None, -1, 0, 10**30], ids=repr)
def test_fault_33_sizes_must_be_integers_in_range(field: str, value: Any) -> None:
    error = catch_error(field, value)
    assert f"from 1 to {MAX_SIZES[field]:,}" in error.allowed


@pytest.mark.parametrize("field", MAX_SIZES)
def test_the_suggested_fix_of_a_number_is_valid(field: str) -> None:
    for value in ("8", 8.4, 0, -3, 10**12, None, math.nan, math.inf):
        large = {} if field == "global_batch_size" else {"global_batch_size": 2**24}
        fixed = int(catch_error(field, value, **large).fix)
        Recipe(**large, **{field: fixed})


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("8", "8"),
        ("8k", "8192"),
        (7.6, "8"),
        (-1, "1"),
        (10**9, str(2**24)),
        (math.inf, str(2**24)),
        ("many", "4096"),
    ],
)
def test_the_suggested_fix_is_the_nearest_number(value: Any, near: str) -> None:
    assert catch_error("seq_len", value).fix == near


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("value", INVALID_CHOICES, ids=lambda value: repr(value)[:20])
def test_fault_33_invalid_choices_raise_with_all_choices(field: str, value: Any) -> None:
    error = catch_error(field, value)
    assert all(repr(choice) in error.allowed for choice in CHOICES[field] if choice is not None)
    assert error.fix_values is not None and error.fix_values[field] in CHOICES[field]


@pytest.mark.parametrize("field", sorted(set(CHOICES) - OPTIONAL))
def test_choices_without_a_default_reject_none(field: str) -> None:
    catch_error(field, None)


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("method", "LoRa", "'lora'"),
        ("precision", "bf16_mixed", "'bf16-mixed'"),
        ("optimizer", "adam", "'adamw'"),
        ("optimizer", "adamw8bit", "'adamw_8bit'"),
        ("method", "QLoRA", "'qlora'"),
        ("precision", "fp8_mixed", "'fp8-mixed'"),
        # Lightning's and transformers' names: spelling alone led to another optimizer or precision.
        ("precision", "bf16-true", "'bf16'"),
        ("optimizer", "adamw_torch_fused", "'adamw'"),
        ("optimizer", "adamw_torch", "'adamw_foreach'"),
        ("optimizer", "paged_adamw_32bit", "'paged_adamw'"),
        ("optimizer", None, "'adamw'"),
        # Switches: "true" is spelled like "none", and "false" like "full".
        ("recompute", True, "'full'"),
        ("recompute", False, "'none'"),
        ("recompute", "true", "'full'"),
        ("recompute", "off", "'none'"),
        ("recompute", np.True_, "'full'"),
        ("kernels", False, "None"),
    ],
)
def test_misspelt_choices_raise_with_the_nearest(field: str, value: Any, near: str) -> None:
    assert catch_error(field, value).fix == near


def test_every_choice_is_valid() -> None:
    for field, choices in CHOICES.items():
        for choice in choices:
            assert getattr(Recipe(**{field: choice}), field) == choice  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1, 0, 4097], ids=repr)
def test_fault_33_invalid_lora_rank_raises(value: Any) -> None:
    catch_error("lora_rank", value, method="lora")


@pytest.mark.parametrize(
    "value", ["q_proj", b"q", 3, True, (), [], ("",), ("q proj",), (3,), (None,), {"q_proj": 1}, math.nan]
)
def test_rejects_invalid_lora_targets(value: Any) -> None:
    catch_error("lora_targets", value, method="lora")


def test_lora_fields_need_method_lora() -> None:
    assert "method='lora'" in catch_error("lora_rank", 8).fix
    assert "method='lora'" in catch_error("lora_targets", ("q_proj",)).fix
    assert Recipe(method="lora").adapter_rank == 16
    assert Recipe(method="lora", lora_rank=4).adapter_rank == 4
    assert Recipe(method="lora", lora_targets=["v_proj", "q_proj", "v_proj"]).lora_targets == (
        "v_proj",
        "q_proj",
    )  # type: ignore[arg-type]


def test_global_batch_size_below_micro_batch_size_raises() -> None:
    error = catch_error("global_batch_size", 4, micro_batch_size=8)
    assert "micro_batch_size=8" in error.allowed
    assert error.fix == "micro_batch_size=4"


def test_numpy_integers_become_python_ints() -> None:
    recipe = Recipe(seq_len=np.int64(512), global_batch_size=np.int32(8))
    assert recipe == Recipe(seq_len=512, global_batch_size=8)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert type(recipe.seq_len) is int


@pytest.mark.parametrize("field", FLOAT_RANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.1", b"1", [1], {}, -1, 10**30])
def test_fault_33_floats_must_be_finite_and_in_range(field: str, value: Any) -> None:
    low, high = FLOAT_RANGES[field]
    error = catch_error(field, value)
    assert f"a number from {low:g} to {high:g}" in error.allowed
    Recipe(**{field: float(error.fix)})


def test_integers_and_numpy_floats_become_floats() -> None:
    recipe = Recipe(dropout=0, expert_imbalance=np.float64(2), expert_capacity_factor=np.float32(1))
    values = (recipe.dropout, recipe.expert_imbalance, recipe.expert_capacity_factor)
    assert [type(value) for value in values] == [float] * 3
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_packing_must_be_bool(value: Any) -> None:
    catch_error("packing", value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0, 4097], ids=repr)
def test_rejects_invalid_recompute_interval(value: Any) -> None:
    catch_error("recompute_interval", value, recompute="full")


def test_recompute_interval_needs_recompute() -> None:
    assert catch_error("recompute_interval", 2).fix == "recompute_interval=1"
    assert Recipe(recompute_interval=2, recompute="offload").recompute_interval == 2


def test_quantization_needs_a_frozen_base() -> None:
    for value in INVALID_CHOICES:
        catch_error("quantization", value, method="lora")
    assert catch_error("quantization", "nf4").fix == "quantization=None"
    assert catch_error("quantization", "int8", method="qlora").fix == "quantization=None"
    assert Recipe(method="qlora").base_quantization == "nf4"
    assert Recipe(method="lora").base_quantization is None
    assert Recipe(method="lora", quantization="int8").base_quantization == "int8"
    assert Recipe(method="qlora").has_adapters
    assert catch_error("precision", "fp8-mixed", method="lora").fix == "precision='bf16-mixed'"
    assert "method='lora'" in catch_error("lora_dropout", 0.1).fix


def test_alpha_is_twice_the_rank_unless_given() -> None:
    assert Recipe(method="lora", lora_rank=8).adapter_alpha == 16
    assert Recipe(method="lora", lora_rank=8, lora_alpha=4).adapter_alpha == 4
    for field, value in (("lora_alpha", 16), ("use_rslora", True)):
        assert "method='lora'" in catch_error(field, value).fix
    for value in (0, -1, float("nan"), 1e9, "16"):
        catch_error("lora_alpha", value, method="lora")
    catch_error("use_rslora", 1, method="lora")


def test_dora_needs_adapters_over_an_unquantized_base() -> None:
    assert Recipe(method="lora", use_dora=True).use_dora
    assert "method='lora'" in catch_error("use_dora", True).fix
    catch_error("use_dora", 1, method="lora")
    for quantized in ({"method": "qlora"}, {"method": "lora", "quantization": "nf4"}):
        assert "use_dora=False" in catch_error("use_dora", True, **quantized).fix


def test_reads_json_of_version_0_1() -> None:
    """Version 0.1 wrote ten fields; the others have their defaults."""
    written = """{"shardscope": "Recipe", "version": 1, "seq_len": 2048, "micro_batch_size": 1,
        "global_batch_size": 64, "method": "lora", "precision": "bf16-mixed", "optimizer": "adamw",
        "recompute": "none", "kernels": null, "lora_rank": 8, "lora_targets": null}"""
    assert Recipe.from_json(written) == Recipe(seq_len=2048, method="lora", lora_rank=8)


def test_recipe_is_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        Recipe(4096)  # type: ignore[misc]
    with pytest.raises(FieldError, match="Nearest fix: 'seq_len'"):
        Recipe(sequence_length=4096)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Recipe().seq_len = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("r", "lora_rank"),
        ("target_modules", "lora_targets"),
        ("load_in_4bit", "quantization"),
        ("bf16", "precision"),
        ("attn_implementation", "attention"),
        ("gradient_accumulation_steps", "global_batch_size"),
        ("adapter", "method"),
    ],
)
def test_fields_named_as_in_peft_and_transformers_are_refused_with_ours(name: str, ours: str) -> None:
    """The fix was to leave them out, and so what the user wanted."""
    with pytest.raises(FieldError, match=f"Nearest fix: '{ours}'"):
        Recipe(**{name: 1})  # type: ignore[arg-type]


@given(recipes())
def test_json_and_pickle_round_trip(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert hash(Recipe.from_json(recipe.to_json())) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize(("value", "nearest"), [(-1, 0.0), (-0.5, 0.0), (2, 0.99), (-(10**400), 0.0)])
def test_the_fix_of_a_number_out_of_range_is_its_nearest_end(value: float, nearest: float) -> None:
    assert catch_error("dropout", value).fix_values == {"dropout": nearest}
