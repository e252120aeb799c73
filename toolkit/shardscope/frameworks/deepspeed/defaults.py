"""What DeepSpeed does by itself: reductions in the type of products, checkpoints tied to their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.deepspeed.communication import casts
from shardscope.frameworks.deepspeed.config_fields import NOT_IN_CONFIG, written
from shardscope.frameworks.defaults import CheckpointFormat, ReduceType, Tie, tied_degrees

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def reduces_in(plan: Plan) -> ReduceType:
    """``communication_data_type`` left open is the computing type (deepspeed/runtime/engine.py, 0.19)."""
    if plan.recipe.precision == "fp32" or casts(plan.layout, plan.recipe):
        return "fp32"
    return "fp16" if plan.recipe.precision == "fp16-mixed" else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """It keeps fp32 main copies beside half-precision weights in every stage."""
    return True


def reduce_remedy(plan: Plan) -> tuple[str, Plan | None]:
    """``communication_data_type``; where no layout has it beside what else it says, in words alone."""
    layout: Any = plan.layout
    try:
        mended = replace(plan, layout=replace(layout, communication_data_type="fp32"))
    except ValueError:
        return '"communication_data_type": "fp32" in the DeepSpeed configuration', None
    return "communication_data_type='fp32'", mended


def padded_vocab_size(plan: Plan) -> int:
    """It pads nothing."""
    return plan.architecture.vocab_size


def checkpoint(plan: Plan) -> CheckpointFormat:
    """Partitions as they are: "The checkpoint being loaded used a DP world size of ..." (engine.py, 0.19).

    A file for each rank, whose name and content tell its stage, its place and the type of weights: the engine
    (``engine/checkpointing.py``) reads them in no other.
    """
    layout: Any = plan.layout
    stage = Tie(value=layout.stage, words=f"ZeRO stage {layout.stage}", layout={"stage": layout.stage})
    precision = plan.recipe.precision
    kind = {"fp32": "fp32", "fp16-mixed": "fp16"}.get(precision, "bf16")
    weights = Tie(value=kind, words=f"weights of {kind}", recipe={"precision": precision})
    return CheckpointFormat(
        name="DeepSpeed's ZeRO checkpoint",
        ties={**tied_degrees(plan, ("data_parallel", "tp", "pp", "ep")), "stage": stage, "weights": weights},
        remedy="Convert it with DeepSpeed's ds_to_universal.py, which a script of one's own loads with "
        "load_universal",
        source="deepspeed/runtime/engine.py, 0.19: ZeRORuntimeException",
    )


def unused(plan: Plan) -> Mapping[str, str]:
    """What :func:`deepspeed_config` leaves out, as of another stage or of no device that it has."""
    read = written(plan)
    found = {}
    for field in fields(plan.layout):
        if field.name in read or field.name in NOT_IN_CONFIG:
            continue
        if getattr(plan.layout, field.name) != field.default:
            found[field.name] = _where(field.name)
    return found


def _where(name: str) -> str:
    if name == "communication_data_type":
        return "in half precision"
    if name.startswith(("offload_optimizer_", "offload_params_")):
        return "with NVMe"
    return "with offloading" if name == "pin_memory" else "in stage 3"


def overlaps(plan: Plan) -> Mapping[str, object]:
    """``overlap_comm``, which only stage 3 turns on by itself."""
    layout: Any = plan.layout
    is_off = layout.stage in (1, 2) and layout.pp == 1 and not layout.overlap_comm
    return {"overlap_comm": True} if is_off else {}
