"""DeepSpeed configuration of a plan, as a dictionary for ``deepspeed.initialize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.frameworks.deepspeed.layout import QUANTIZED, casts_gradients
from shardscope.frameworks.deepspeed.memory.offload_config import count_params_buffer_elements

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NVME_FOLDER = "/local_nvme"
"""Where DeepSpeed's own examples put swapped tensors; an engine replaces it with a folder that exists."""


def deepspeed_config(plan: Plan, *, nvme_folder: str = NVME_FOLDER) -> dict[str, Any]:
    """``plan`` in DeepSpeed's own words (deepspeed/runtime/config.py); options that are its defaults too."""
    layout: Any = plan.layout
    recipe = plan.recipe
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "train_batch_size": recipe.global_batch_size,
        "zero_optimization": _zero(plan, layout, nvme_folder),
        "zero_allow_untested_optimizer": True,
        # DeepSpeed refuses to offload any optimizer but its own Adam unless told that this is meant.
        "zero_force_ds_cpu_optimizer": recipe.optimizer == "adamw",
    }
    if layout.tp > 1:
        # Without a mesh of the caller's DeepSpeed counts all ranks as data-parallel ones when it checks this
        # (``DeepSpeedConfig._batch_assertion``), and AutoTP's are made later: it follows from the others.
        del found["train_batch_size"]
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    if casts_gradients(layout, recipe):
        found["communication_data_type"] = layout.communication_data_type
    if recipe.precision == "fp16-mixed":
        found["fp16"] = {"enabled": True}
    elif recipe.precision != "fp32":
        # "bf16" and "bf16-mixed" are one for DeepSpeed: it always keeps fp32 main copies beside bf16 weights.
        found["bf16"] = {"enabled": True}
    return found


def _zero(plan: Plan, layout: Any, nvme_folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stage": layout.stage,
        "contiguous_gradients": layout.contiguous_gradients,
        "overlap_comm": layout.overlap_comm,
        "reduce_bucket_size": layout.reduce_bucket_size,
        "allgather_bucket_size": layout.allgather_bucket_size,
    }
    if layout.stage == 3:
        found |= {
            "sub_group_size": layout.sub_group_size,
            "stage3_prefetch_bucket_size": layout.prefetched_elements,
            "stage3_param_persistence_threshold": layout.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": layout.stage3_max_live_parameters,
            "stage3_max_reuse_distance": layout.stage3_max_reuse_distance,
            "zero_hpz_partition_size": layout.zero_hpz_partition_size,
        }
        found |= {field: True for field in QUANTIZED if getattr(layout, field)}
    if layout.offload_optimizer:
        found["offload_optimizer"] = {"device": layout.offload_optimizer, "pin_memory": layout.pin_memory}
        if layout.offload_optimizer == "nvme":
            found["offload_optimizer"] |= {
                "nvme_path": nvme_folder,
                "buffer_count": layout.offload_optimizer_buffer_count,
            }
    if layout.offload_params:
        found["offload_param"] = {"device": layout.offload_params, "pin_memory": layout.pin_memory}
        if layout.offload_params == "nvme":
            found["offload_param"] |= {
                "nvme_path": nvme_folder,
                "buffer_count": layout.num_params_buffers,
                "buffer_size": count_params_buffer_elements(plan),
                "max_in_cpu": layout.offload_params_max_in_cpu,
            }
    return found
