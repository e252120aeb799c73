"""Tests of JSON of all public dataclasses: round trips, versions, unknown and duplicate keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import ARCHITECTURES, CLUSTERS, plans
from tests.requirements import examples

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import frameworks

PLAN = Plan(ARCHITECTURES[0], CLUSTERS[2], ss.Recipe(), ss.Layout.fsdp2())
INSTANCES: dict[str, Any] = {
    "architecture": PLAN.architecture,
    "experts": ARCHITECTURES[2],
    "cluster": PLAN.cluster,
    "gpu": PLAN.cluster.gpu,
    "link": PLAN.cluster.intra_node_link,
    "recipe": PLAN.recipe,
    "adapters": ss.Recipe(method="lora", lora_rank=4, lora_targets=("q_proj",)),
    "plan": PLAN,
    **{name: framework.layout_class() for name, framework in frameworks.items()},
}


def find_class(instance: Any) -> Any:
    return ss.Layout if isinstance(instance, ss.Layout) else type(instance)


@pytest.fixture(params=INSTANCES)
def instance(request: pytest.FixtureRequest) -> Any:
    return INSTANCES[request.param]


def edit_json(instance: Any, **changes: Any) -> str:
    return json.dumps({**json.loads(instance.to_json()), **changes})


def test_json_round_trip(instance: Any) -> None:
    restored = find_class(instance).from_json(instance.to_json())
    assert restored == instance
    assert type(restored) is type(instance)
    assert hash(restored) == hash(instance)
    assert json.loads(instance.to_json())["version"] == 1


def test_fault_35_a_byte_order_mark_is_ignored(instance: Any) -> None:
    assert find_class(instance).from_json("\ufeff" + instance.to_json()) == instance


@pytest.mark.parametrize("version", [0, 2, -1, 1.0, "1", True, None, [], 10**30])
def test_unknown_versions_raise(instance: Any, version: Any) -> None:
    with pytest.raises(ValueError, match=r"version is .*allowed: 1 to 1.*fix: pip install -U shardscope"):
        find_class(instance).from_json(edit_json(instance, version=version))


@pytest.mark.parametrize("name", ["", "Studio", None, 3, {}])
def test_json_of_another_class_raises(instance: Any, name: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON, (line 2, )?shardscope is"):
        find_class(instance).from_json(edit_json(instance, shardscope=name))


def test_fault_35_misspelt_keys_raise_with_the_nearest(instance: Any) -> None:
    field = (
        next(key for key in json.loads(instance.to_json()) if key not in ("shardscope", "version"))
        if not isinstance(instance, ss.Layout)
        else "framework"
    )
    with pytest.raises(ValueError, match=r"key|framework") as caught:
        find_class(instance).from_json(edit_json(instance, **{f"{field}s": 1}))
    if not isinstance(instance, ss.Layout):
        assert f"Nearest fix: '{field}'" in str(caught.value)


def test_fault_35_duplicate_keys_raise(instance: Any) -> None:
    text = instance.to_json()
    duplicated = text.replace('"version": 1,', '"version": 1, "version": 1,', 1)
    if duplicated == text:
        duplicated = text.replace('"version": 1', '"version": 1, "version": 1', 1)
    with pytest.raises(ValueError, match="duplicate key 'version'"):
        find_class(instance).from_json(duplicated)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"text"', "{'a': 1}", "{}", "not json"])
def test_invalid_json_raises_value_error(instance: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|shardscope"):
        find_class(instance).from_json(text)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"8"', "null", "[]", "1.5"]
)
def test_fault_33_invalid_numbers_in_json_raise(value: str) -> None:
    text = PLAN.recipe.to_json().replace('"seq_len": 4096', f'"seq_len": {value}')
    with pytest.raises(ValueError, match=r"Recipe\.seq_len is"):
        ss.Recipe.from_json(text)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"shardscope": "Plan", "a": ' + "[" * 50_000]
)
def test_fault_35_deeply_nested_json_raises_value_error(instance: Any, text: str) -> None:
    with pytest.raises(ValueError, match="JSON is nested too deeply"):
        find_class(instance).from_json(text)


@pytest.mark.parametrize("text", [None, 3, b"{}", [], ["{}"], {}])
def test_arguments_other_than_text_raise_value_error(instance: Any, text: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        find_class(instance).from_json(text)


@pytest.mark.parametrize("data", [None, 3, [], (), b"{}", object()])
def test_data_without_field_names_raise_value_error(instance: Any, data: Any) -> None:
    with pytest.raises(ValueError, match="mapping of field names"):
        find_class(instance).from_dict(data)


def test_text_in_place_of_data_has_the_call_that_reads_it(instance: Any) -> None:
    with pytest.raises(ValueError, match="from_json"):
        find_class(instance).from_dict(instance.to_json())


@pytest.mark.parametrize("path", ["plan.json", Path("runs") / "plan.json"])
def test_a_path_in_place_of_the_text_has_the_call_that_reads_it(path: Any) -> None:
    with pytest.raises(ValueError, match="read_text"):
        ss.Plan.from_json(path)


def test_missing_fields_raise_with_their_name() -> None:
    data = json.loads(PLAN.to_json())
    for name in ("architecture", "cluster", "recipe", "layout"):
        without = {key: value for key, value in data.items() if key != name}
        with pytest.raises(ValueError, match=rf"Plan\.{name} is None"):
            Plan.from_json(json.dumps(without))
        with pytest.raises(ValueError, match=rf"Plan\.{name} is 3"):
            Plan.from_json(json.dumps({**data, name: 3}))
    del data["architecture"]["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size"):
        Plan.from_json(json.dumps(data))


def test_layout_json_needs_a_known_framework() -> None:
    for name in (None, "fsdp", "FSDP2", 3):
        with pytest.raises(ValueError, match=r"Layout\.framework is .*'fsdp2'"):
            ss.Layout.from_json(edit_json(ss.Layout.fsdp2(), framework=name))
    with pytest.raises(ValueError, match="Layout key is 'shard'"):
        ss.Layout.from_json(edit_json(ss.Layout.ddp(), shard=8))


@settings(max_examples=examples(60), deadline=None)
@given(plans())
def test_every_plan_round_trips(plan: Plan) -> None:
    for instance in (plan, plan.architecture, plan.cluster, plan.recipe, plan.layout):
        assert find_class(instance).from_json(instance.to_json()) == instance


@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
), st.sampled_from(sorted(INSTANCES)))  # fmt: skip
@settings(max_examples=examples(300), deadline=None)
def test_fault_33_any_value_in_any_field_is_read_or_raises_value_error(value: Any, name: str) -> None:
    """No content of a file raises a TypeError or an OverflowError or crashes."""
    instance = INSTANCES[name]
    for field in json.loads(instance.to_json()):
        try:
            parsed = find_class(instance).from_json(edit_json(instance, **{field: value}))
        except ValueError as error:
            assert str(error)
        else:
            assert find_class(instance).from_json(parsed.to_json()) == parsed


def test_numpy_integers_are_written_as_json_numbers() -> None:
    import numpy as np

    recipe = replace(PLAN.recipe, seq_len=np.int64(128))
    assert json.loads(recipe.to_json())["seq_len"] == 128
