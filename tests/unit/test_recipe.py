"""What a recipe accepts, what it refuses and in which words, and its JSON."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from planning import NOT_NUMBERS, recipes

from shardscope.recipe import Recipe
from shardscope.validation import FieldError

NUMBERS = {"seq_len": 2**24, "micro_batch_size": 2**16, "global_batch_size": 2**24}
CHOICES = {
    "method": ("full", "lora"),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "sgd"),
    "recompute": ("none", "selective", "full"),
    "kernels": ("transformers", "megatron", None),
}
RAGGED = (
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


def refusal(field: str, value: Any, **others: Any) -> FieldError:
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


def test_defaults_are_the_designs() -> None:
    recipe = Recipe()
    assert (recipe.seq_len, recipe.micro_batch_size, recipe.global_batch_size) == (4096, 1, 64)
    assert (recipe.method, recipe.precision, recipe.optimizer) == ("full", "bf16-mixed", "adamw")
    assert (recipe.recompute, recipe.kernels, recipe.lora_rank, recipe.lora_targets) == (
        "none",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None, -1, 0, 10**30], ids=repr)
def test_numbers_are_whole_and_in_range(field: str, value: Any) -> None:
    error = refusal(field, value)
    assert f"from 1 to {NUMBERS[field]:,}" in error.allowed


@pytest.mark.parametrize("field", NUMBERS)
def test_the_fix_of_a_number_works(field: str) -> None:
    for value in ("8", 8.4, 0, -3, 10**12, None, math.nan, math.inf):
        fixed = int(refusal(field, value).fix)
        Recipe(**{"global_batch_size": 2**24, field: fixed})


@pytest.mark.parametrize(
    ("value", "near"), [("8", "8"), (7.6, "8"), (-1, "1"), (10**9, str(2**24)), (math.inf, str(2**24))]
)
def test_the_fix_is_the_nearest(value: Any, near: str) -> None:
    assert refusal("seq_len", value).fix == near


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("value", RAGGED, ids=lambda value: repr(value)[:20])
def test_choices_are_listed(field: str, value: Any) -> None:
    error = refusal(field, value)
    assert all(repr(choice) in error.allowed for choice in CHOICES[field] if choice is not None)
    assert error.fix.strip("'") in CHOICES[field]


@pytest.mark.parametrize("field", sorted(set(CHOICES) - {"kernels"}))
def test_a_choice_is_not_none(field: str) -> None:
    refusal(field, None)


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("method", "LoRa", "'lora'"),
        ("precision", "bf16_mixed", "'bf16-mixed'"),
        ("optimizer", "adam", "'adamw'"),
    ],
)
def test_a_misspelt_choice_gets_the_nearest(field: str, value: str, near: str) -> None:
    assert refusal(field, value).fix == near


def test_each_choice_is_taken() -> None:
    for field, choices in CHOICES.items():
        for choice in choices:
            assert getattr(Recipe(**{field: choice}), field) == choice  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1, 0, 4097], ids=repr)
def test_lora_rank(value: Any) -> None:
    refusal("lora_rank", value, method="lora")


@pytest.mark.parametrize(
    "value", ["q_proj", b"q", 3, True, (), [], ("",), ("q proj",), (3,), (None,), {"q_proj": 1}, math.nan]
)
def test_lora_targets(value: Any) -> None:
    refusal("lora_targets", value, method="lora")


def test_lora_fields_need_lora() -> None:
    assert 'method="lora"' in refusal("lora_rank", 8).fix
    assert 'method="lora"' in refusal("lora_targets", ("q_proj",)).fix
    assert Recipe(method="lora").adapter_rank == 16
    assert Recipe(method="lora", lora_rank=4).adapter_rank == 4
    assert Recipe(method="lora", lora_targets=["v_proj", "q_proj", "v_proj"]).lora_targets == (
        "v_proj",
        "q_proj",
    )  # type: ignore[arg-type]


def test_a_global_batch_holds_a_micro_batch() -> None:
    error = refusal("global_batch_size", 4, micro_batch_size=8)
    assert "micro_batch_size=8" in error.allowed
    assert error.fix == "global_batch_size=8"


def test_numpy_integers_are_numbers_and_become_pythons() -> None:
    recipe = Recipe(seq_len=np.int64(512), global_batch_size=np.int32(8))
    assert recipe == Recipe(seq_len=512, global_batch_size=8)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert type(recipe.seq_len) is int


def test_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        Recipe(4096)  # type: ignore[misc]
    with pytest.raises(TypeError):
        Recipe(sequence_length=4096)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Recipe().seq_len = 1  # type: ignore[misc]


@given(recipes())
def test_round_trips(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert hash(Recipe.from_json(recipe.to_json())) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
