"""Tests of ``Layout``: fields, degrees on a cluster, valid values, nearest valid layouts, pipeline stages."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import ARCHITECTURES, CLUSTERS, LLAMA, MOE, NOT_NUMBERS, sizes
from tests.requirements import examples

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.errors import FieldError
from shardscope.core.layout import Layout, find_largest_divisor, list_divisors, split_layers_evenly
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.frameworks.formats.exported import describe_plan
from shardscope.frameworks.registry import frameworks

CONSTRUCTORS: dict[str, Any] = {
    "ddp": Layout.ddp, "fsdp2": Layout.fsdp2, "deepspeed": Layout.zero, "megatron": Layout.megatron,
}  # fmt: skip
DEGREES = [
    (name, field.name)
    for name, framework in frameworks.items()
    for field in fields(framework.layout_class)
    if field.name in ("shard", "replicate", "tp", "pp", "vpp", "cp", "ep")
]
EIGHT = Cluster.parse("8xh100-sxm-80gb")


def catch_error(make: Any, field: str) -> FieldError:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.field == field
    text = str(caught.value)
    assert f"{field} is " in text
    assert "allowed: " in text
    assert "Nearest fix: " in text
    return caught.value


def test_constructors_return_layouts_of_their_framework() -> None:
    assert set(CONSTRUCTORS) == set(frameworks)
    for name, make in CONSTRUCTORS.items():
        layout = make()
        assert layout == frameworks[name].layout_class()
        assert layout.framework == name
        assert layout.title in ("DDP", "FSDP2", "DeepSpeed ZeRO", "Megatron-core")


@pytest.mark.parametrize(("name", "field"), DEGREES)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None, -1, 0, 2**20 + 1, 10**30], ids=repr)
def test_fault_33_degrees_must_be_integers_in_range(name: str, field: str, value: Any) -> None:
    if field == "shard" and value is None:
        assert Layout.fsdp2(shard=None).shard is None  # type: ignore[attr-defined]
        return
    error = catch_error(lambda: CONSTRUCTORS[name](**{field: value}), f"Layout.{field}")
    assert "from 1 to 1,048,576" in error.allowed


@pytest.mark.parametrize("value", [*NOT_NUMBERS, None, -1, 4], ids=repr)
def test_fault_33_zero_stage_must_be_0_to_3(value: Any) -> None:
    assert "from 0 to 3" in catch_error(lambda: Layout.zero(value), "Layout.stage").allowed


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, 1, -1, "True", None, 1e30])
def test_rejects_invalid_reshard_after_forward(value: Any) -> None:
    catch_error(lambda: Layout.fsdp2(reshard_after_forward=value), "Layout.reshard_after_forward")


@pytest.mark.parametrize("value", [0, 1, "yes", math.nan, math.inf, [], 1e30])
def test_fault_33_flags_must_be_bool(value: Any) -> None:
    catch_error(lambda: Layout.megatron(distributed_optimizer=value), "Layout.distributed_optimizer")
    catch_error(lambda: Layout.megatron(tp=2, sequence_parallel=value), "Layout.sequence_parallel")
    catch_error(lambda: Layout.megatron(distributed_optimizer=None), "Layout.distributed_optimizer")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["CPU", "disk", True, 0, math.nan, b"cpu", ["cpu"]])
def test_rejects_invalid_offload_devices(value: Any) -> None:
    assert "'cpu'" in catch_error(lambda: Layout.fsdp2(offload=value), "Layout.offload").allowed
    for field in ("offload_optimizer", "offload_params"):
        assert (
            "'nvme'"
            in catch_error(lambda field=field: Layout.zero(**{field: value}), f"Layout.{field}").allowed
        )
    assert catch_error(lambda: Layout.fsdp2(offload="nvme"), "Layout.offload").fix  # type: ignore[arg-type]


def test_incompatible_fields_raise() -> None:
    catch_error(lambda: Layout.zero(2, pp=2), "Layout.stage")
    catch_error(lambda: Layout.zero(0, offload_optimizer="cpu"), "Layout.stage")
    catch_error(lambda: Layout.zero(2, offload_optimizer="nvme"), "Layout.offload_optimizer")
    catch_error(lambda: Layout.zero(2, offload_params="cpu"), "Layout.offload_params")
    for field in ("tp", "ep"):
        error = catch_error(lambda field=field: Layout.zero(3, **{field: 2}), "Layout.stage")
        assert error.fix == "stage=2"
        stays = {"offload_params": "cpu", field: 2}
        assert catch_error(lambda stays=stays: Layout.zero(3, **stays), "Layout.stage").fix == f"{field}=1"
        assert Layout.zero(2, **{field: 2})
    assert catch_error(lambda: Layout.zero(1, tp=2, ep=2), "Layout.ep").fix == "ep=1"
    catch_error(lambda: Layout.megatron(vpp=2), "Layout.vpp")
    catch_error(lambda: Layout.fsdp2(vpp=2), "Layout.vpp")
    catch_error(lambda: Layout.fsdp2(pp=2, pipeline_schedule="ZBV"), "Layout.pipeline_schedule")
    catch_error(lambda: Layout.fsdp2(pp=2, vpp=2, pipeline_schedule="GPipe"), "Layout.pipeline_schedule")
    catch_error(lambda: Layout.megatron(sequence_parallel=True), "Layout.sequence_parallel")


def test_unknown_fields_raise() -> None:
    for make in CONSTRUCTORS.values():
        with pytest.raises(FieldError, match="key is 'tensor_parallel'"):
            make(tensor_parallel=2)


@pytest.mark.parametrize(
    ("name", "near"),
    [("tensor_parallel", "tp"), ("tensor_model_parallel_size", "tp"), ("pipeline_parallel_degree", "pp")],
)
def test_degrees_by_names_of_other_tools_raise_with_ours(name: str, near: str) -> None:
    """The fix was sequence_parallel for one, and to leave the other out."""
    with pytest.raises(FieldError) as caught:
        Layout.megatron(**{name: 8})  # type: ignore[arg-type]
    assert caught.value.fix == repr(near)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout.fsdp2(tp=8, pp=2), "FSDP2 (tp 8, pp 2)"),
        (Layout.fsdp2(replicate=2, cp=2), "FSDP2 (HSDP, cp 2)"),
        (Layout.zero(stage=1, pp=4), "DeepSpeed ZeRO-1 (pp 4)"),
        (Layout.megatron(tp=2, pp=2, vpp=4), "Megatron-core (tp 2, pp 2, vpp 4)"),
        (Layout.ddp(), "DDP"),
    ],
)
def test_plans_and_their_files_name_all_degrees(layout: Layout, expected: str) -> None:
    """Two plans that differ in tp alone had one name, in lists and above exported files."""
    plan = Plan(ss.models["llama-3.1-8b"], Cluster.parse("2x8xh100-sxm-80gb"), Recipe(), layout)
    assert f"with {expected}, full" in repr(plan)
    assert str(plan).splitlines()[2].split(maxsplit=1)[1] == expected
    assert describe_plan(plan).endswith(f", {expected}")


def test_numpy_degrees_become_python_ints() -> None:
    layout = Layout.megatron(tp=np.int64(2))  # type: ignore[arg-type]
    assert layout == Layout.megatron(tp=2)
    assert Layout.from_json(layout.to_json()) == layout


def test_degrees_of_the_base_layout_raise_type_error() -> None:
    with pytest.raises(TypeError, match=r"Layout\.ddp"):
        Layout().compute_degrees(LLAMA, EIGHT, Recipe())


# --------------------------------------------------------------------------------------------- degrees


def compute_degrees(
    layout: Layout, cluster: Cluster = EIGHT, arch: Architecture = LLAMA, **recipe: Any
) -> Any:
    return Plan(arch, cluster, Recipe(**recipe), layout).degrees


def test_unset_degrees_follow_from_the_cluster() -> None:
    assert compute_degrees(Layout.ddp()).replicate == 8
    assert compute_degrees(Layout.fsdp2()).shard == 8
    hybrid = compute_degrees(Layout.fsdp2(replicate=2, tp=2))
    assert (hybrid.shard, hybrid.replicate, hybrid.data_parallel, hybrid.tp) == (2, 2, 4, 2)
    assert compute_degrees(Layout.fsdp2(cp=2)).data_parallel == 4
    zero = compute_degrees(Layout.zero(1, tp=2, pp=2))
    assert (zero.data_parallel, zero.shard, zero.replicate) == (2, 2, 1)
    assert compute_degrees(Layout.zero(0)).replicate == 8
    megatron = compute_degrees(Layout.megatron(tp=2, pp=2, cp=2))
    assert (megatron.data_parallel, megatron.cp, megatron.shard) == (1, 2, 1)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout.fsdp2(shard=4), "Layout.shard"),
        (Layout.fsdp2(shard=16), "Layout.shard"),
        (Layout.fsdp2(replicate=3), "Layout replicate x tp x pp x cp"),
        (Layout.zero(2, ep=2), "Layout.ep"),
        (Layout.zero(2, tp=3), "Layout.tp"),
        (Layout.megatron(tp=2, pp=8), "Layout tp x pp x cp"),
        (Layout.megatron(tp=16), "Layout tp x pp x cp"),
        (Layout.megatron(tp=6), "Layout.tp"),
        (Layout.megatron(pp=64), "Layout.pp"),
        (Layout.megatron(ep=2), "Layout.ep"),
        (Layout.fsdp2(reshard_after_forward=3), "Layout.reshard_after_forward"),
    ],
)
def test_fault_34_layouts_that_cannot_run_raise_in_the_plan(layout: Layout, field: str) -> None:
    error = catch_error(lambda: Plan(LLAMA, EIGHT, Recipe(), layout), field)
    assert error.fix


def test_fault_34_experts_and_seq_len_must_be_divisible() -> None:
    catch_error(lambda: compute_degrees(Layout.megatron(ep=16), arch=MOE), "Layout.ep")
    catch_error(lambda: compute_degrees(Layout.megatron(tp=8, ep=2), arch=MOE), "Layout.ep")
    assert compute_degrees(Layout.megatron(ep=8), arch=MOE).ep == 8
    catch_error(lambda: compute_degrees(Layout.fsdp2(cp=8), seq_len=100), "Layout.cp")
    catch_error(lambda: compute_degrees(Layout.megatron(tp=8), seq_len=100), "Layout.tp")
    assert compute_degrees(Layout.megatron(tp=8, sequence_parallel=False), seq_len=100).tp == 8
    deep = replace(LLAMA, num_hidden_layers=16)
    interleaved = Layout.megatron(pp=8, vpp=2)
    catch_error(
        lambda: compute_degrees(interleaved, arch=deep, global_batch_size=4), "Recipe.global_batch_size"
    )


# ---------------------------------------------------------------------------------------- pipeline stages


def test_126_layers_are_split_over_16_stages() -> None:
    cluster = Cluster.parse("16x8xh100-sxm-80gb")
    plan = Plan(ss.models["llama-3.1-405b"], cluster, Recipe(), Layout.megatron(tp=8, pp=16))
    assert plan.stage_layers == (7, *[8] * 14, 7)


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        # Embedding and loss count as a layer where all stages are equal then.
        *[(32, 4, [8] * 4), (31, 4, [8, 8, 8, 7]), (30, 4, [7, 8, 8, 7]), (126, 9, [14] * 9), (2, 2, [1, 1])],
        # Otherwise the stages between the first and the last are, as in NVIDIA's recipes for DeepSeek-V3.
        *[(61, 16, [3, *[4] * 14, 2]), (61, 8, [7, *[8] * 6, 6]), (28, 8, [2, *[4] * 6, 2])],
        *[(17, 8, [3, *[2] * 6, 2]), (25, 8, [4, *[3] * 6, 3])],
    ],
)
def test_megatron_splits_layers_over_stages(layers: int, pp: int, stages: list[int]) -> None:
    arch = replace(LLAMA, num_hidden_layers=layers)
    plan = Plan(arch, Cluster.parse(f"{pp}xh100-sxm-80gb"), Recipe(), Layout.megatron(pp=pp))
    assert list(plan.stage_layers) == stages


def test_experts_that_are_sliced_over_tp_may_be_whole() -> None:
    """The fix of ep=8 next to tp=8, as DeepSeek-V3 is trained, was ep=1: no expert parallelism."""
    cluster = Cluster.parse("8x8xh100-sxm-80gb")
    layout = Layout.megatron(tp=8, pp=8, ep=8)
    with pytest.raises(
        FieldError, match=r"Layout\.ep is 8; .*1 rank that etp=8.*Nearest fix: etp=1\.$"
    ) as caught:
        Plan(ss.models["mixtral-8x7b"], cluster, Recipe(), layout)
    fixed = replace(layout, **(caught.value.fix_values or {}))
    assert Plan(ss.models["mixtral-8x7b"], cluster, Recipe(), fixed).degrees.ep == 8


def test_invalid_megatron_pp_raises_with_the_nearest_valid() -> None:
    arch = replace(LLAMA, num_hidden_layers=19)
    error = catch_error(lambda: Plan(arch, EIGHT, Recipe(), Layout.megatron(pp=8)), "Layout.pp")
    fixed = int(error.fix.removeprefix("pp="))
    assert sum(Layout.megatron(pp=fixed).stage_layers(arch, degrees_with_pp(fixed))) == 19


def degrees_with_pp(pp: int) -> Any:
    from shardscope.core.layout import Degrees

    return Degrees(data_parallel=1, pp=pp)


@given(st.integers(1, 200), st.integers(1, 64))
def test_layers_are_split_evenly_over_stages(layers: int, pp: int) -> None:
    stages = split_layers_evenly(layers, pp)
    assert sum(stages) == layers
    assert max(stages) - min(stages) <= 1
    assert stages == sorted(stages, reverse=True)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_list_divisors_and_find_largest_divisor(number: int, at_most: int) -> None:
    divisors = list_divisors(number)
    assert divisors == [d for d in range(1, number + 1) if number % d == 0]
    assert find_largest_divisor(number, at_most) == max(d for d in divisors if d <= at_most)


# ------------------------------------------------------------------------ valid values and nearest layout


@settings(max_examples=examples(80), deadline=None)
@given(
    st.sampled_from(sorted(frameworks)),
    st.sampled_from(ARCHITECTURES),
    st.sampled_from(CLUSTERS),
    sizes(),
    st.data(),
)
def test_every_listed_valid_value_runs(
    name: str, arch: Architecture, cluster: Cluster, recipe: Recipe, data: st.DataObject
) -> None:
    layout: Layout = frameworks[name].layout_class()
    for field in layout.choices:
        valid_values = layout.list_valid_values(arch, cluster, recipe)
        assert list(valid_values) == list(layout.choices)
        assert all(values for values in valid_values.values())
        assert getattr(layout, field) in valid_values[field] or getattr(layout, field) is None
        chosen = {before: getattr(layout, before) for before in layout.choices}
        for value in valid_values[field]:
            changed = layout.find_nearest_valid({**chosen, field: value}, arch, cluster, recipe)
            assert getattr(changed, field) == value
            assert Plan(arch, cluster, recipe, changed).memory().peak_bytes > 0
        drawn_value = data.draw(st.sampled_from(valid_values[field]))
        layout = layout.find_nearest_valid({**chosen, field: drawn_value}, arch, cluster, recipe)


def test_megatron_experts_with_tp_need_sequence_parallel() -> None:
    error = catch_error(
        lambda: compute_degrees(Layout.megatron(tp=2, sequence_parallel=False), arch=MOE),
        "Layout.sequence_parallel",
    )
    assert error.fix == "sequence_parallel=True"
    assert compute_degrees(Layout.megatron(tp=2), arch=MOE).tp == 2
    assert Layout.megatron(tp=2).list_valid_values(MOE, EIGHT, Recipe())["sequence_parallel"] == [True]


def test_megatron_supports_tp_above_the_number_of_key_value_heads() -> None:
    arch, sixteen = ss.models["llama-3.1-70b"], Cluster.parse("2x8xh100-sxm-80gb")
    assert (arch.num_attention_heads, arch.num_key_value_heads) == (64, 8)
    assert compute_degrees(Layout.megatron(tp=16), sixteen, arch).tp == 16
    catch_error(lambda: compute_degrees(Layout.fsdp2(tp=16), sixteen, arch), "Layout.tp")
    odd = replace(arch, num_key_value_heads=4, num_attention_heads=24, head_dim=128)
    error = catch_error(
        lambda: compute_degrees(Layout.megatron(tp=6), Cluster.parse("6xcpu"), odd), "Layout.tp"
    )
    assert "multiple" in error.allowed
    # Four divides the heads, but not the six ranks.
    assert error.fix == "tp=2, global_batch_size=63"


def test_zero_3_has_no_tensor_or_expert_parallelism() -> None:
    assert Layout.zero().stage == 3  # type: ignore[attr-defined]
    for stage, tp, ep in ((3, [1], [1]), (2, [1, 2, 4, 8], [1, 2, 4, 8])):
        dense, experts = (
            Layout.zero(stage).list_valid_values(arch, EIGHT, Recipe()) for arch in (LLAMA, MOE)
        )
        assert (dense["stage"], dense["tp"], dense["ep"]) == ([0, 1, 2, 3], tp, [1])
        # AutoTP does not shard experts.
        assert (experts["stage"], experts["tp"], experts["ep"]) == ([0, 1, 2, 3], [1], ep)


@pytest.mark.parametrize(
    ("arch", "recipe", "why"),
    [
        (MOE, Recipe(), "experts"),
        (ss.models["gpt2"], Recipe(seq_len=1024), "GPT-2"),
        (LLAMA, Recipe(method="lora"), "adapters"),
    ],
)
def test_models_that_auto_tp_does_not_support_raise(arch: Architecture, recipe: Recipe, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        Plan(arch, EIGHT, recipe, Layout.zero(2, tp=2))
    error = caught.value
    assert isinstance(error, FieldError)
    assert (error.field, error.fix) == ("Layout.tp", "tp=1")
    Plan(arch, EIGHT, recipe, Layout.zero(2))


def test_nearest_valid_zero_3_layout_is_data_parallel_only() -> None:
    assert (
        Layout.zero().find_nearest_valid({"stage": 3, "tp": 8, "ep": 8}, MOE, EIGHT, Recipe())
        == Layout.zero()
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(ARCHITECTURES),
    st.sampled_from(CLUSTERS),
    sizes(),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_find_nearest_valid_reduces_tp_and_pp_until_the_plan_runs(
    arch: Architecture, cluster: Cluster, recipe: Recipe, tp: int, pp: int
) -> None:
    nearest: Any = Layout.megatron().find_nearest_valid({"tp": tp, "pp": pp, "ep": 1}, arch, cluster, recipe)
    assert nearest.tp <= tp
    assert nearest.pp <= pp
    assert cluster.num_gpus % (nearest.tp * nearest.pp) == 0
    Plan(arch, cluster, recipe, nearest)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("FULL_SHARD", "reshard_after_forward=True"),
        ("ShardingStrategy.SHARD_GRAD_OP", "reshard_after_forward=False"),
        ("no_shard", "Layout.ddp()"),
        ("_HYBRID_SHARD_ZERO2", "reshard_after_forward=False with replicate= the number of nodes"),
        ("yes", "reshard_after_forward=True"),
        (1, "reshard_after_forward=True"),
    ],
)
def test_fsdp1_sharding_strategies_raise_with_the_fsdp2_option(name: Any, fix: str) -> None:
    with pytest.raises(ValueError, match="allowed: True, False or a whole number of ranks") as caught:
        Layout.fsdp2(reshard_after_forward=name)
    assert str(caught.value).endswith(f"Nearest fix: {fix}.")
