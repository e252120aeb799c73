"""DeepSpeed defaults that the preflight checks depend on: reduction type, main copies, checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from shardscope.frameworks.deepspeed.config_fields import NOT_IN_CONFIG, list_config_fields
from shardscope.frameworks.deepspeed.layout import casts_gradients, get_layout
from shardscope.frameworks.defaults import (
    CheckpointFormat,
    CheckpointRequirement,
    ReduceType,
    require_degrees,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def get_reduce_type(plan: Plan) -> ReduceType:
    """Return ``communication_data_type``, by default the compute type (deepspeed/runtime/engine.py, 0.19)."""
    if plan.recipe.precision == "fp32" or casts_gradients(get_layout(plan), plan.recipe):
        return "fp32"
    return "fp16" if plan.recipe.precision == "fp16-mixed" else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """Return True: every stage has fp32 main copies of half-precision weights."""
    return True


def suggest_fp32_reduction(plan: Plan) -> tuple[str, Plan | None]:
    """Return the suggested fix, ``communication_data_type``, and the plan with it; None if it is invalid."""
    layout = get_layout(plan)
    try:
        fixed_plan = replace(plan, layout=replace(layout, communication_data_type="fp32"))
    except ValueError:
        return '"communication_data_type": "fp32" in the DeepSpeed configuration', None
    return "communication_data_type='fp32'", fixed_plan


def pad_vocab_size(plan: Plan) -> int:
    """Return the vocabulary size: DeepSpeed does not pad it."""
    return plan.architecture.vocab_size


def get_checkpoint_format(plan: Plan) -> CheckpointFormat:
    """Return the checkpoint format: one file per rank, with its partitions.

    It loads only with the same degrees, ZeRO stage and type of weights (``engine/checkpointing.py``; "The
    checkpoint being loaded used a DP world size of ...", engine.py, 0.19).
    """
    layout = get_layout(plan)
    stage = CheckpointRequirement(
        value=layout.stage, text=f"ZeRO stage {layout.stage}", layout={"stage": layout.stage}
    )
    precision = plan.recipe.precision
    kind = {"fp32": "fp32", "fp16-mixed": "fp16"}.get(precision, "bf16")
    weights = CheckpointRequirement(value=kind, text=f"weights of {kind}", recipe={"precision": precision})
    return CheckpointFormat(
        name="DeepSpeed's ZeRO checkpoint",
        requirements={
            **require_degrees(plan, ("data_parallel", "tp", "pp", "ep")),
            "stage": stage,
            "weights": weights,
        },
        remedy="Convert it with DeepSpeed's ds_to_universal.py, which a script of one's own loads with "
        "load_universal",
        source="deepspeed/runtime/engine.py, 0.19: ZeRORuntimeException",
    )


def find_unused_options(plan: Plan) -> Mapping[str, str]:
    """Return set fields that ``build_deepspeed_config`` leaves out: they are for another stage or device."""
    used = {*list_config_fields(plan), *NOT_IN_CONFIG}
    return {
        field.name: _describe_use(field.name)
        for field in fields(plan.layout)
        if field.name not in used and getattr(plan.layout, field.name) != field.default
    }


def _describe_use(name: str) -> str:
    if name == "communication_data_type":
        return "in half precision"
    if name.startswith(("offload_optimizer_", "offload_params_")):
        return "with NVMe"
    return "with offloading" if name == "pin_memory" else "in stage 3"


def find_overlap_options(plan: Plan) -> Mapping[str, object]:
    """Return ``overlap_comm`` if it is off in stages 1 and 2; only stage 3 enables it by default."""
    layout = get_layout(plan)
    is_off = layout.stage in (1, 2) and layout.pp == 1 and not layout.overlap_comm
    return {"overlap_comm": True} if is_off else {}
