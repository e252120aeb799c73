"""Limits of the FSDP2 engine: planned sharding, replication, tp, pp and cp that it cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import refuse
from shardscope.families.registry import families_with, family_named
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

CUT_FAMILIES = families_with("fsdp2_tensor_parallel")
"""Families with separate projections: a tensor-parallel shard of a fused one would mix its components."""

RING_FAMILIES = families_with("fsdp2_context_parallel")
"""Families whose attention is transformers' SDPA with explicit ``position_ids``, which cp can shard."""

MOVING_ROPES = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on the largest position."""

WHOLE_TRAINED = {**QUANTIZED_TRAINED, "kernels": (None, "transformers", "compiled")}
"""Supported recipe values by field, with tp = pp = cp = 1."""

PART_TRAINED = {**TRAINED, "loss": (None, "full")}
"""Supported recipe values by field, with tp, pp or cp > 1: a sharded vocabulary, a pipeline schedule and a
sharded sequence each compute their own loss."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that the engine cannot run."""
    degrees = plan.degrees
    if degrees.cp > 1:
        check_context(plan)
    if degrees.tp > 1:
        check_parallel(plan)
    if degrees.pp > 1:
        check_pipeline(plan)
    check_parts(plan)
    check_recipe(plan.recipe, PART_TRAINED if _cut(plan) else WHOLE_TRAINED)
    check_compiler(plan)


def check_config(plan: Plan, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for config.json values that context parallelism does not support."""
    if plan.degrees.cp > 1:
        check_rope(config)


def check_rope(config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for RoPE types whose angles would differ between context-parallel ranks.

    ``config`` is a config.json, or ``to_dict()`` of a transformers config.
    """
    for said in _ropes(config):
        kind = str(said.get("rope_type", said.get("type")))
        is_old_name = kind in family_named(config.get("model_type")).longrope_aliases
        if any(name in kind for name in MOVING_ROPES) or is_old_name:
            refuse(
                "config.rope_parameters rope_type",
                kind,
                f"any but {', '.join(map(repr, MOVING_ROPES))} with cp > 1: they choose frequencies by the "
                "largest position that a rank is told (transformers' dynamic_rope_update), and each has a "
                "part of the sequence",
                {"cp": 1},
            )


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the RoPE parameters of all layers, and those of each layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        said = config.get(name)
        if isinstance(said, Mapping):
            yield said
            yield from (one for one in said.values() if isinstance(one, Mapping))


def _cut(plan: Plan) -> list[str]:
    """Return which of tp, pp and cp are above 1."""
    return [name for name in ("tp", "pp", "cp") if getattr(plan.degrees, name) > 1]


def check_parts(plan: Plan) -> None:
    """Raise ``ValueError`` for recipe values that are supported only with tp = pp = cp = 1."""
    cut = _cut(plan)
    for field, values in PART_TRAINED.items() if cut else ():
        value = getattr(plan.recipe, field)
        if value not in values and value in WHOLE_TRAINED[field]:
            refuse(
                f"Recipe.{field}",
                value,
                f"{', '.join(map(repr, values))} with {' and '.join(f'{name} > 1' for name in cut)}: others "
                "train whole models on whole sequences only",
                dict.fromkeys(cut, 1),
            )


def check_parallel(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that tensor parallelism does not support."""
    arch, tp = plan.architecture, plan.degrees.tp
    if arch.model_type not in CUT_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(CUT_FAMILIES)} with tp > 1: DTensor cuts projections, not fused ones, nor experts",
            {"tp": 1},
        )
    if plan.recipe.method != "full":
        refuse(
            "Recipe.method", plan.recipe.method, "'full' with tp > 1: peft's adapters have no cut", {"tp": 1}
        )
    if arch.intermediate_size % tp:
        refuse(
            "Layout.tp",
            tp,
            f"a divisor of {arch.name}'s intermediate_size={arch.intermediate_size}: DTensor multiplies "
            "equal parts",
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


def check_context(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that context parallelism does not support."""
    arch, recipe, degrees = plan.architecture, plan.recipe, plan.degrees
    for name in ("tp", "pp"):
        if getattr(degrees, name) > 1:
            refuse(
                f"Layout.{name}",
                getattr(degrees, name),
                "1 with cp > 1 to train with FSDP2: the two were never run together here",
                {name: 1},
            )
    if arch.model_type not in RING_FAMILIES:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"{', '.join(RING_FAMILIES)} with cp > 1: others' attention was never seen in torch's ring",
            {"cp": 1},
        )
    if find_fused_attention(plan) == "none":
        refuse(
            "Recipe.precision",
            recipe.precision,
            f"fp16 or fp32 with cp > 1 on {plan.cluster.gpu.name}, whose fused attention takes no bf16: "
            "plain math has no ring",
            {"precision": "fp16-mixed"},
        )
    if recipe.recompute == "offload":
        refuse(
            "Recipe.recompute",
            recipe.recompute,
            "'none', 'selective', 'full' with cp > 1: what the ring saves are DTensors, whose storage is not "
            "theirs to send away (torch.Tensor.untyped_storage)",
            {"recompute": "full"},
        )
    if arch.sliding_window_layers and arch.sliding_window and recipe.seq_len >= arch.sliding_window:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"below {arch.name}'s sliding_window={arch.sliding_window} with cp > 1: torch's ring takes no "
            "mask",
            {"cp": 1},
        )
