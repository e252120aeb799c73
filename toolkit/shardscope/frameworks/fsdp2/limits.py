"""Limits of the FSDP2 engine: planned sharding, replication, tp, pp and cp that it cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.families.registry import get_family, list_families_with
from shardscope.frameworks.limits import (
    QUANTIZED_TRAINED,
    TRAINED,
    check_compiler,
    check_recipe,
    check_staged,
)
from shardscope.memory.activations.modules.attention import find_fused_attention

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TENSOR_PARALLEL_FAMILIES = list_families_with("fsdp2_tensor_parallel")
"""Families with separate projections: a tensor-parallel shard of a fused one would mix its components."""

CONTEXT_PARALLEL_FAMILIES = list_families_with("fsdp2_context_parallel")
"""Families whose attention is transformers' SDPA with explicit ``position_ids``, which cp can shard."""

DYNAMIC_ROPES = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the largest position."""

UNSPLIT_TRAINED = {**QUANTIZED_TRAINED, "kernels": (None, "transformers", "compiled")}
"""Supported recipe values by field, with tp = pp = cp = 1."""

SPLIT_TRAINED = {**TRAINED, "loss": (None, "full")}
"""Supported recipe values by field, with tp, pp or cp > 1: a sharded vocabulary, a pipeline schedule and a
sharded sequence each compute their own loss."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that the engine cannot run."""
    degrees = plan.degrees
    if degrees.cp > 1:
        check_context_parallel(plan)
    if degrees.tp > 1:
        check_tensor_parallel(plan)
    if degrees.pp > 1:
        check_pipeline(plan)
    check_split_values(plan)
    check_recipe(plan.recipe, SPLIT_TRAINED if _list_split_degrees(plan) else UNSPLIT_TRAINED)
    check_compiler(plan)


def check_config(plan: Plan, config: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for config.json values that context parallelism does not support."""
    if plan.degrees.cp > 1:
        check_rope(config)


def check_rope(config: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for RoPE types whose angles would differ between context-parallel ranks.

    ``config`` is a config.json, or ``to_dict()`` of a transformers config.
    """
    for parameters in _list_rope_parameters(config):
        kind = str(parameters.get("rope_type", parameters.get("type")))
        is_old_name = kind in get_family(config.get("model_type")).longrope_aliases
        if any(name in kind for name in DYNAMIC_ROPES) or is_old_name:
            refuse(
                "config.rope_parameters rope_type",
                kind,
                f"any but {', '.join(map(repr, DYNAMIC_ROPES))} with cp > 1: their frequencies depend on "
                "the largest position on a rank (transformers' dynamic_rope_update), and each rank has a "
                "part of the sequence",
                {"cp": 1},
            )


def _list_rope_parameters(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the RoPE parameters of all layers, and those of each layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = config.get(name)
        if isinstance(parameters, Mapping):
            yield parameters
            yield from (nested for nested in parameters.values() if isinstance(nested, Mapping))


def _list_split_degrees(plan: Plan) -> list[str]:
    """Return which of tp, pp and cp are above 1."""
    return [name for name in ("tp", "pp", "cp") if getattr(plan.degrees, name) > 1]


def check_split_values(plan: Plan) -> None:
    """Raise ``ValueError`` for recipe values that are supported only with tp = pp = cp = 1."""
    split_degrees = _list_split_degrees(plan)
    for field, values in SPLIT_TRAINED.items() if split_degrees else ():
        value = getattr(plan.recipe, field)
        if value not in values and value in UNSPLIT_TRAINED[field]:
            condition = " and ".join(f"{name} > 1" for name in split_degrees)
            refuse(
                f"Recipe.{field}",
                value,
                f"{', '.join(map(repr, values))} with {condition}: "
                "other values need whole models and whole sequences",
                dict.fromkeys(split_degrees, 1),
            )


def check_tensor_parallel(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that tensor parallelism does not support."""
    arch, tp = plan.architecture, plan.degrees.tp
    if arch.model_type not in TENSOR_PARALLEL_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(TENSOR_PARALLEL_FAMILIES)} with tp > 1: DTensor cannot shard fused "
            "projections and experts",
            {"tp": 1},
        )
    if plan.recipe.method != "full":
        refuse(
            "Recipe.method",
            plan.recipe.method,
            "'full' with tp > 1: peft's adapters cannot be sharded",
            {"tp": 1},
        )
    if arch.intermediate_size % tp:
        refuse(
            "Layout.tp",
            tp,
            f"a divisor of {arch.name}'s intermediate_size={arch.intermediate_size}: DTensor needs "
            "shards of equal size",
            {"tp": 1},
        )


def check_pipeline(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that pipeline parallelism does not support."""
    recipe, degrees = plan.recipe, plan.degrees
    check_staged(plan)
    if recipe.seq_len % degrees.tp:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"a multiple of tp={degrees.tp} with pp > 1: stages send equal parts of the sequence",
            {"seq_len": max(1, recipe.seq_len // degrees.tp) * degrees.tp},
        )


def check_context_parallel(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that context parallelism does not support."""
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    for name in ("tp", "pp"):
        if getattr(degrees, name) > 1:
            refuse(
                f"Layout.{name}",
                getattr(degrees, name),
                "1 with cp > 1 to train with FSDP2: the two were never tested together",
                {name: 1},
            )
    if arch.model_type not in CONTEXT_PARALLEL_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(CONTEXT_PARALLEL_FAMILIES)} with cp > 1: torch's ring attention was not "
            "tested with other families",
            {"cp": 1},
        )
    if find_fused_attention(plan) == "none":
        refuse(
            "Recipe.precision",
            recipe.precision,
            f"fp16 or fp32 with cp > 1 on {plan.cluster.gpu.name}, whose fused attention does not support "
            "bf16: unfused attention has no ring",
            {"precision": "fp16-mixed"},
        )
    if recipe.recompute == "offload":
        refuse(
            "Recipe.recompute",
            recipe.recompute,
            "'none', 'selective', 'full' with cp > 1: ring attention's memory with offloaded activations "
            "was never measured",
            {"recompute": "full"},
        )
    if arch.sliding_window_layers and arch.sliding_window and recipe.seq_len >= arch.sliding_window:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"below {arch.name}'s sliding_window={arch.sliding_window} with cp > 1: torch's ring attention "
            "does not support masks",
            {"cp": 1},
        )
