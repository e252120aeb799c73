"""Plans that Accelerate's plugins can reproduce. Imports no torch: used in planning and in notebooks."""

from __future__ import annotations

from dataclasses import fields
from math import gcd
from typing import TYPE_CHECKING

from shardscope.core.errors import Fix, refuse
from shardscope.frameworks.accelerate.plugin_fields import PLUGIN_FIELDS, TITLE
from shardscope.frameworks.fsdp2.layout import get_reshard_after_forward
from shardscope.frameworks.registry import why_not_trained

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MODELS = ("gpt2", "llama", "glm4_moe")
"""Decoders whose config the plugin converts to Megatron-LM's arguments: it looks for these substrings in
``model_type`` (MODEL_CONFIGS_TO_MEGATRON_PARSERS in accelerate/utils/dataclasses.py, 1.15)."""
NOT_IN_CONFIG = {"pp": "pipeline engine", "ep": "expert parallelism"}
"""Degrees that DeepSpeed takes from the model, and Accelerate does not set up."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` if Accelerate cannot reproduce ``plan`` on any machine."""
    check = {"fsdp2": _check_fsdp2, "deepspeed": _check_deepspeed, "megatron": _check_megatron}.get(
        plan.layout.framework
    )
    if check is not None:  # Accelerate reproduces every DDP plan.
        check(plan)


def why_not_started(plan: Plan) -> str | None:
    """Return as an error message why Accelerate cannot reproduce ``plan``, or None if it can.

    Scripts, suggestions and exported files share this answer. Missing packages do not count.
    """
    try:
        check_plan(plan)
    except ValueError as refusal:
        return str(refusal)
    return None


def why_not_accelerate_fsdp(plan: Plan) -> str | None:
    """Return why Accelerate's FSDP cannot reproduce the plan, or None if it can."""
    degrees = plan.degrees
    # AcceleratorState reads ACCELERATE_USE_FSDP for GPU types only (accelerate/state.py, 1.15).
    if not plan.on_gpu:
        return "on CPU ranks Accelerate's FSDP plugin silently trains with DDP instead."
    if degrees.pp > 1:
        return f"Accelerate has no pipeline, and the plan has pp={degrees.pp}."
    if not isinstance(get_reshard_after_forward(plan), bool):
        return (
            f"Accelerate's fsdp_reshard_after_forward is true or false, and the plan reshards to groups of "
            f"{get_reshard_after_forward(plan)} ranks."
        )
    # ParallelismConfig shards over dp_shard x cp, and rejects replicas without any sharding: that is DDP
    # (accelerate/parallelism_config.py).
    if degrees.shard == 1 and degrees.cp == 1 and plan.world_size > 1:
        return (
            "Accelerate's FSDP needs more than one rank to shard over, and the plan has shard=1 "
            "(ParallelismConfig)."
        )
    if degrees.shard == 1 and degrees.replicate > 1:
        return "Accelerate's ParallelismConfig has no replicas with shard=1 and tp or cp."
    return None


def _check_fsdp2(plan: Plan) -> None:
    """Raise ``ValueError`` on CPU ranks, and for layouts that Accelerate's FSDP cannot express."""
    _check_on_gpu(plan, "FSDP plugin")
    # A single rank needs no mesh: any layout of one rank is the same.
    why = why_not_accelerate_fsdp(plan)
    if why is not None and plan.world_size > 1:
        refuse(
            "Layout",
            plan.layout.description,
            f"a layout that Accelerate can set up for a Script: {why.removesuffix('.')}",
            "ss.Pretrain()",
        )


def _check_deepspeed(plan: Plan) -> None:
    """Raise ``ValueError`` on CPU ranks, and for layouts that DeepSpeed's configuration cannot express."""
    _check_on_gpu(plan, "DeepSpeed plugin")
    for degree, feature in NOT_IN_CONFIG.items():
        size = getattr(plan.degrees, degree)
        if size > 1:
            refuse(
                f"Layout.{degree}",
                size,
                f"1 for a Script: Accelerate does not set up DeepSpeed's {feature}",
                {degree: 1},
            )


def _check_megatron(plan: Plan) -> None:
    """Raise ``ValueError`` on CPU ranks, and for models and options that the plugin cannot express."""
    _check_on_gpu(plan, "Megatron-LM plugin")
    model_type = plan.architecture.model_type
    if not any(known in model_type for known in MODELS):
        refuse(
            "Architecture.model_type",
            model_type,
            f"one of {', '.join(map(repr, MODELS))} for a Script: Accelerate's Megatron-LM plugin cannot "
            "build other models",
            "ss.launch(plan, ss.Pretrain()), whose engine does",
        )
    if plan.degrees.vpp > 1:
        refuse(
            "Layout.vpp",
            plan.degrees.vpp,
            "1 for a Script: Accelerate has no option for an interleaved schedule",
            {"vpp": 1},
        )
    layers, pp = plan.architecture.num_hidden_layers, plan.degrees.pp
    if layers % pp:
        refuse(
            "Layout.pp",
            pp,
            f"a divisor of the {layers} layers for a Script: Accelerate has no option for stages that have "
            "other numbers of layers",
            {"pp": gcd(layers, pp)},
        )
    _check_plugin_fields(plan)


def _check_on_gpu(plan: Plan, plugin: str) -> None:
    """Raise ``ValueError`` on CPU ranks, where ``plugin`` becomes DDP, naming the engine to use instead."""
    if plan.on_gpu:
        return
    # The nearest fix keeps the framework if Shardscope's own engine trains the plan on CPU ranks.
    title = plan.layout.title
    why = f"there {TITLE}'s {plugin} silently becomes DDP"
    fix: Fix
    if why_not_trained(plan) is None:
        alternative, fix = (
            f"use the {title} engine",
            "ss.launch(plan, ss.Pretrain()), or f(ctx) with ctx.engine",
        )
    else:
        alternative, fix = "plan DDP", {"layout": "ddp"}
    refuse(
        "Layout.framework",
        plan.layout.framework,
        f"'ddp' for a Script on CPU ranks: {why}; {alternative}",
        fix,
    )


def _check_plugin_fields(plan: Plan) -> None:
    """Raise ``ValueError`` for the first layout field that Accelerate cannot express."""
    # A field with its default value needs no option: the framework has the same default.
    plugin_fields = PLUGIN_FIELDS[plan.layout.framework]
    for field in fields(plan.layout):
        value = getattr(plan.layout, field.name)
        if field.name not in plugin_fields and value != field.default:
            refuse(
                f"Layout.{field.name}",
                value,
                f"{field.default!r} for a Script: {TITLE}'s plugin has no option for it, but the "
                f"{plan.layout.title} engine has one (ss.Pretrain(), or f(ctx) with ctx.engine)",
                {field.name: field.default},
            )
