"""Layout fields that are written to DeepSpeed's JSON configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from shardscope.frameworks.deepspeed.layout import QUANTIZED, casts_gradients, get_layout

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NOT_IN_CONFIG = ("pp", "ep")
"""Degrees that are set in the model: ``PipelineModule(num_stages=...)``, ``MoE(ep_size=...)``."""


def list_config_fields(plan: Plan) -> set[str]:
    """Return the layout fields in the JSON; others have no effect with this stage, device or precision."""
    layout = get_layout(plan)
    names = {"stage", "tp", "contiguous_gradients", "overlap_comm", "reduce_bucket_size"}
    names |= {"allgather_bucket_size", "offload_optimizer", "offload_params"}
    if casts_gradients(layout, plan.recipe):
        names.add("communication_data_type")
    if layout.stage == 3:
        names |= {field.name for field in fields(layout) if field.name.startswith("stage3_")}
        names |= {"sub_group_size", "zero_hpz_partition_size", *QUANTIZED}
    if layout.offload_optimizer or layout.offload_params:
        names.add("pin_memory")
    # Buffer options of a section have an effect only with NVMe.
    for device, prefix in (
        (layout.offload_optimizer, "offload_optimizer_"),
        (layout.offload_params, "offload_params_"),
    ):
        if device == "nvme":
            names |= {field.name for field in fields(layout) if field.name.startswith(prefix)}
    return names
