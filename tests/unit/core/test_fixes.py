"""Tests of the nearest fix in an error: applying it resolves the error, and fixes never form a cycle."""

from __future__ import annotations

import ast
import pickle
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import NOT_NUMBERS
from tests.requirements import examples

import shardscope as ss
from shardscope.core.cluster import Gpu, Link
from shardscope.core.errors import FieldError
from shardscope.core.fixes import MAX_TRIES
from shardscope.core.plan import Plan
from shardscope.core.recipe import CHOICES, OPEN_CHOICES, Recipe

RECIPE_FIELDS = {field.name for field in fields(Recipe)}
DEGREES = {
    "ddp": (),
    "fsdp2": ("tp", "pp", "cp", "vpp", "replicate"),
    "zero": ("tp", "pp", "ep"),
    "megatron": ("tp", "pp", "cp", "ep", "vpp", "etp"),
}
LAYOUT_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ddp": {},
    "fsdp2": {"offload": ("cpu",), "shard": (1, 3, 8), "reshard_after_forward": (False, 2, 4)},
    "zero": {
        "stage": (0, 1, 2),
        "offload_optimizer": ("cpu", "nvme"),
        "offload_params": ("cpu", "nvme"),
        "contiguous_gradients": (False,),
        "allgather_bucket_size": (1_000_001,),
    },
    "megatron": {"distributed_optimizer": (False,), "sequence_parallel": (True, False)},
}
RECIPE_VALUES: dict[str, tuple[Any, ...]] = {
    **{field: values[1:] for field, values in CHOICES.items()},
    **OPEN_CHOICES,
    "seq_len": (1, 7, 512, 32_768),
    "micro_batch_size": (2, 3),
    "global_batch_size": (1, 5, 96),
    "recompute_interval": (2, 3),
    "dropout": (0.1,),
    "packing": (True,),
    "lora_rank": (8,),
    "lora_dropout": (0.1,),
    "lora_alpha": (8.0,),
    "use_rslora": (True,),
    "use_dora": (True,),
    "lora_targets": (("q_proj",), ("c_attn", "gate")),
    "expert_imbalance": (1.5,),
    "expert_capacity_factor": (1.25,),
}
CLUSTERS = (
    "h100-sxm-80gb",
    "2xcpu",
    "8xa100-sxm-80gb",
    "6xv100-sxm-32gb",
    "3x4xl4-24gb",
    "16x8xh100-sxm-80gb",
)
Options = tuple[str, str, dict[str, Any], str, dict[str, Any]]


@st.composite
def plan_options(draw: Any) -> Options:
    """Draw options of a plan: most combinations are invalid, often for several reasons."""
    framework = draw(st.sampled_from(sorted(DEGREES)))
    degrees: dict[str, tuple[Any, ...]] = dict.fromkeys(DEGREES[framework], (2, 3, 4, 5, 7, 8, 10, 16))
    return (
        draw(st.sampled_from(sorted(ss.models))),
        draw(st.sampled_from(CLUSTERS)),
        _draw_fields(draw, RECIPE_VALUES),
        framework,
        _draw_fields(draw, degrees | LAYOUT_OPTIONS[framework]),
    )


def _draw_fields(draw: Any, values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True)) if values else []
    return {name: draw(st.sampled_from(values[name])) for name in names}


def build_plan(options: Options) -> Plan:
    model, cluster, recipe, framework, layout = options
    return Plan(
        ss.models[model],
        ss.Cluster.parse(cluster),
        Recipe(**recipe),
        getattr(ss.Layout, framework)(**layout),
    )


def apply_fix(options: Options, error: FieldError) -> Options:
    """Return ``options`` with the fix of ``error``: "tp=4, seq_len=512", another layout, or a value."""
    model, cluster, recipe, framework, layout = options
    call: Any = ast.parse(f"fix({error.fix})", mode="eval").body
    keywords = {item.arg: item.value for item in call.keywords}
    if other := keywords.pop("layout", None):
        framework, layout = ast.unparse(other).removeprefix("Layout.").removesuffix("()"), {}
    changes = {name: ast.literal_eval(value) for name, value in keywords.items()}
    for value in call.args:
        changes[error.field.partition(".")[2]] = ast.literal_eval(value)
    recipe = recipe | {name: value for name, value in changes.items() if name in RECIPE_FIELDS}
    layout = layout | {name: value for name, value in changes.items() if name not in RECIPE_FIELDS}
    return model, cluster, recipe, framework, layout


@settings(deadline=None, max_examples=examples(300))
@given(plan_options())
def test_at_most_three_suggested_fixes_lead_to_a_valid_plan(options: Options) -> None:
    """One for the recipe, one for the layout, and one for their combination."""
    messages: list[str] = []
    while True:
        try:
            build_plan(options)
        except FieldError as error:
            message = str(error)
            assert message not in messages, (options, messages, str(error))
            messages.append(message)
            assert len(messages) <= 3, (options, messages, str(error))
            options = apply_fix(options, error)
        else:
            return


INTERACTING: list[tuple[Options, str]] = [
    # A pipeline needs stage 1, offloaded parameters need stage 3.
    (
        ("llama-3.1-8b", "8xh100-sxm-80gb", {}, "zero", {"pp": 2, "offload_params": "cpu"}),
        "stage=1, offload_params=None",
    ),
    (
        ("llama-3.1-8b", "8xh100-sxm-80gb", {}, "zero", {"stage": 1, "pp": 2, "offload_optimizer": "nvme"}),
        "offload_optimizer=None",
    ),
    # No formula counts recomputation of compiled layers in autocast; an interval needs recomputation.
    (
        (
            "llama-3.2-1b",
            "2xh100-sxm-80gb",
            {"recompute": "full", "recompute_interval": 2, "kernels": "compiled"},
            "ddp",
            {},
        ),
        "recompute='none', recompute_interval=1",
    ),
    # tp has to divide the query heads, the key/value heads and the GPUs.
    (("llama-3.1-8b", "8xh100-sxm-80gb", {}, "fsdp2", {"tp": 10}), "tp=8"),
    (("qwen3-30b-a3b", "8xh100-sxm-80gb", {}, "fsdp2", {"tp": 10}), "tp=4"),
    (("mistral-7b-v0.3", "6xh100-sxm-80gb", {"global_batch_size": 12}, "fsdp2", {"tp": 5}), "tp=2"),
    # pp and vpp have to divide the layers, and pp the GPUs.
    (
        (
            "llama-3.1-405b",
            "16x8xh100-sxm-80gb",
            {"global_batch_size": 128},
            "megatron",
            {"pp": 16, "vpp": 7},
        ),
        "vpp=8",
    ),
    (("deepseek-v3", "16x8xh100-sxm-80gb", {}, "megatron", {"pp": 32}), "pp=16"),
    (
        ("qwen3-0.6b", "3x4xh100-sxm-80gb", {"global_batch_size": 96}, "megatron", {"pp": 7, "vpp": 8}),
        "pp=3, vpp=10",
    ),
    # Packing needs SDPA or flash attention, which the family does not support.
    (("gemma-2-2b", "2xcpu", {"packing": True, "seq_len": 512}, "fsdp2", {}), "packing=False"),
    # A sequence that three ranks divide is longer than the learned positions.
    (("gpt2", "3xh100-sxm-80gb", {"seq_len": 1024, "global_batch_size": 3}, "fsdp2", {"cp": 3}), "cp=1"),
]


@pytest.mark.parametrize(
    ("options", "fix"), INTERACTING, ids=lambda given: given if isinstance(given, str) else ""
)
def test_a_fix_names_every_field_that_must_change(options: Options, fix: str) -> None:
    with pytest.raises(FieldError) as caught:
        build_plan(options)
    assert caught.value.fix == fix
    assert str(caught.value).endswith(f"Nearest fix: {fix}.")
    build_plan(apply_fix(options, caught.value))


@settings(deadline=None, max_examples=examples(100))
@given(plan_options())
def test_every_change_of_a_fix_is_necessary(options: Options) -> None:
    model, cluster, recipe, framework, layout = options
    try:
        arguments = Recipe(**recipe), getattr(ss.Layout, framework)(**layout)
        Plan(ss.models[model], ss.Cluster.parse(cluster), *arguments)
    except FieldError as error:
        if "()" in error.fix or not (changes := re.findall(r"(\w+)=", error.fix))[1:]:
            return
        whole = apply_fix(options, error)
        for name in changes:
            part = 2 if name in RECIPE_FIELDS else 4
            without = [dict(item) if isinstance(item, dict) else item for item in whole]
            before: dict[str, Any] = options[part]  # type: ignore[assignment]
            without[part].pop(name)  # type: ignore[union-attr]
            without[part] |= {name: before[name]} if name in before else {}  # type: ignore[operator]
            with pytest.raises(FieldError):
                build_plan(tuple(without))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_the_fix_of_any_invalid_value_is_valid(value: Any) -> None:
    for field in ("seq_len", "recompute_interval", "lora_targets", "optimizer", "packing"):
        if field == "packing" and isinstance(value, bool):
            continue
        with pytest.raises(FieldError) as caught:
            Recipe(method="lora", **{field: value})
        changed = apply_fix(("", "", {"method": "lora"}, "ddp", {}), caught.value)[2]
        assert field in changed
        Recipe(**changed)


def test_a_recipe_of_another_type_has_the_default_recipe_as_fix() -> None:
    with pytest.raises(FieldError) as caught:
        Plan(ss.models["gpt2"], ss.Cluster.parse("2xcpu"), "lora", ss.Layout.ddp())  # type: ignore[arg-type]
    assert caught.value.fix == "ss.Recipe()"
    assert caught.value.__traceback__ is not None


def test_the_search_for_a_fix_is_bounded() -> None:
    """The number of tries has a limit, however many fields are invalid."""
    tries = []
    original = Recipe.__post_init__

    def count_checks(self: Recipe) -> None:
        tries.append(self)
        original(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(FieldError):
        patch.setattr(Recipe, "__post_init__", count_checks)
        build_plan(
            (
                "gpt2",
                "16x8xh100-sxm-80gb",
                {"seq_len": 2**20, "packing": True, "loss": "fused", "expert_imbalance": 2.0},
                "megatron",
                {"tp": 7, "pp": 13, "vpp": 11, "cp": 9, "ep": 5, "etp": 3, "sequence_parallel": False},
            )
        )
    assert 1 < len(tries) <= 2 * MAX_TRIES


# ---------------------------------------------------------------------------------------- unknown keywords


@pytest.mark.parametrize(
    ("make", "wrong", "near"),
    [
        (ss.Recipe, "seqlen", "seq_len"),
        (ss.Layout.zero, "reduce_bucket_sise", "reduce_bucket_size"),
        (ss.Layout.fsdp2, "reshard_after_foward", "reshard_after_forward"),
        (ss.Layout.megatron, "sequence_paralel", "sequence_parallel"),
        (ss.Architecture, "num_hiden_layers", "num_hidden_layers"),
        (ss.Architecture, "n_layer", "num_hidden_layers"),
        (ss.Cluster, "gpu_per_node", "gpus_per_node"),
        (ss.Cluster, "num_gpus", "gpus_per_node"),
        (Gpu, "usable_byte", "usable_bytes"),
        (Link, "latency", "latency_seconds"),
    ],
)
def test_misspelt_keywords_raise_with_the_nearest(make: Any, wrong: str, near: str) -> None:
    with pytest.raises(FieldError, match=f"key is '{wrong}'; allowed: .*{near}.* Nearest fix: '{near}'"):
        make(**{wrong: 5})


def test_unknown_keywords_of_ddp_raise_with_none_allowed() -> None:
    with pytest.raises(FieldError, match=r"Layout\.ddp key is 'stage'; allowed: none"):
        ss.Layout.ddp(stage=1)  # type: ignore[call-arg]


def test_misspelt_keywords_of_plan_and_replace_raise_with_the_nearest() -> None:
    from dataclasses import replace

    with pytest.raises(FieldError, match="Nearest fix: 'architecture'"):
        Plan(architectur=ss.models["gpt2"])  # type: ignore[call-arg]
    with pytest.raises(FieldError, match=r"Layout key is 'stag'.*Nearest fix: 'stage'"):
        replace(ss.Layout.zero(), stag=2)  # type: ignore[call-arg]


def test_signatures_list_the_fields() -> None:
    """A notebook's Tab completion and ``?`` read them, although a wrapper checks the names."""
    from inspect import signature

    assert list(signature(Recipe).parameters) == [field.name for field in fields(Recipe)]
    assert "reshard_after_forward" in signature(ss.Layout.fsdp2).parameters
    assert list(signature(Plan).parameters) == ["architecture", "cluster", "recipe", "layout"]


# ------------------------------------------------------------------------------- fixes as ``changes``


def test_errors_of_indivisible_batches_have_a_summary_and_changes() -> None:
    with pytest.raises(FieldError) as caught:
        build_plan(("llama-3.2-1b", "6xv100-sxm-32gb", {"global_batch_size": 64}, "fsdp2", {}))
    assert caught.value.summary == "64 does not divide over 6 GPUs. Use 66"
    assert caught.value.changes == {"Recipe.global_batch_size": 66}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.summary, again.changes) == (caught.value.summary, caught.value.changes)


@pytest.mark.parametrize(
    ("batch", "micro_batch_size", "changes"),
    [
        # A smaller micro-batch trains the same.
        (64, 12, {"Recipe.micro_batch_size": 8}),
        (8, 4, {"Recipe.micro_batch_size": 1}),
        (100, 8, {"Recipe.global_batch_size": 128}),
        # The batch changes less than with 8 micro-batches of 16.
        (60, 16, {"Recipe.global_batch_size": 64, "Recipe.micro_batch_size": 8}),
        (4, 4, {"Recipe.global_batch_size": 8, "Recipe.micro_batch_size": 1}),
        (60, 8, {"Recipe.global_batch_size": 64}),
    ],
)
def test_a_batch_that_does_not_divide_changes_as_little_as_possible(
    batch: int, micro_batch_size: int, changes: dict[str, object]
) -> None:
    sizes = {"global_batch_size": batch, "micro_batch_size": micro_batch_size}
    with pytest.raises(FieldError) as caught:
        build_plan(("llama-3.2-1b", "8xh100-sxm-80gb", sizes, "fsdp2", {}))
    assert caught.value.changes == changes


@pytest.mark.parametrize(
    ("refused", "changes"),
    [
        (lambda: Recipe(seq_len=0), {"Recipe.seq_len": 1}),
        (lambda: Recipe(precision="bf61"), {"Recipe.precision": "bf16"}),  # type: ignore[arg-type]
        (lambda: Recipe(lora_rank=8), {"Recipe.method": "lora"}),
        (lambda: Recipe(sequence=8), {}),  # type: ignore[call-arg]
        (lambda: ss.Layout.zero(1, offload_params="cpu"), None),
        (lambda: Plan(ss.models["llama-3.2-1b"], ss.Cluster.parse("2xcpu"), None, None), {}),  # type: ignore[arg-type]
        (
            lambda: build_plan(("llama-3.2-1b", "8xh100-sxm-80gb", {}, "megatron", {"tp": 3})),
            {"Layout.tp": 2},
        ),
    ],
)
def test_errors_have_their_fix_as_changes(refused: Any, changes: dict[str, object] | None) -> None:
    with pytest.raises(FieldError) as caught:
        refused()
    if changes is None:
        changes = caught.value.changes
        assert changes and all(key.startswith("Layout.") for key in changes)
    assert caught.value.changes == changes


def test_a_fix_that_is_another_layout_is_a_change() -> None:
    with pytest.raises(FieldError) as caught:
        build_plan(("llama-3.2-1b", "2xh100-sxm-80gb", {"optimizer": "paged_adamw"}, "fsdp2", {}))
    for key, value in caught.value.changes.items():
        assert key.partition(".")[0] in ("Recipe", "Layout"), (key, value)
    error = FieldError("Recipe.optimizer", "paged_adamw", "adamw", {"layout": "ddp"})
    assert error.changes == {"Layout": ss.Layout.ddp()}


@settings(deadline=None, max_examples=examples(100))
@given(plan_options())
def test_changes_of_an_error_equal_its_fix_text(options: Options) -> None:
    try:
        build_plan(options)
    except FieldError as error:
        _, _, recipe, framework, layout = options
        for key, value in error.changes.items():
            if key == "Layout":
                framework = next(name for name in DEGREES if getattr(ss.Layout, name)() == value)
                layout = {}
            elif key.startswith("Recipe."):
                recipe = recipe | {key.removeprefix("Recipe."): value}
            else:
                layout = layout | {key.removeprefix("Layout."): value}
        assert apply_fix(options, error)[3:] == (framework, layout) or "Layout" in error.changes
        assert apply_fix(options, error)[2] == recipe
        assert ". Use " in error.summary


def test_targets_of_another_model_are_left_out_and_misspelt_ones_replaced() -> None:
    recipe = ss.Recipe(method="lora", lora_targets=("q_proj", "c_attn", "o_prj"))
    with pytest.raises(FieldError) as caught:
        ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
    assert caught.value.changes == {"Recipe.lora_targets": ("q_proj", "o_proj")}
    recipe = ss.Recipe(method="lora", lora_targets=("c_attn",))
    with pytest.raises(FieldError) as caught:
        ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
    assert caught.value.changes == {"Recipe.lora_targets": None}
