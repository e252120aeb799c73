"""DeepSpeed's configuration of a plan, as a dictionary for ``deepspeed.initialize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.deepspeed.layout import QUANTIZED, casts_gradients, get_layout
from shardscope.frameworks.deepspeed.memory.offload_config import count_params_buffer_elements

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NVME_FOLDER = "/local_nvme"
"""Folder for swapped tensors in DeepSpeed's own examples; an engine replaces it with one that exists."""


def build_deepspeed_config(plan: Plan, *, nvme_folder: str = NVME_FOLDER) -> dict[str, object]:
    """Return DeepSpeed's configuration of ``plan`` (deepspeed/runtime/config.py), defaults included."""
    layout, recipe = get_layout(plan), plan.recipe
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "train_batch_size": recipe.global_batch_size,
        "zero_optimization": _build_zero_section(plan, nvme_folder),
        "zero_allow_untested_optimizer": True,
        # If true, DeepSpeed refuses to offload any optimizer but its own Adam and Lion (runtime/engine.py,
        # _configure_optimizer).
        "zero_force_ds_cpu_optimizer": recipe.optimizer == "adamw",
    }
    if layout.tp > 1:
        # DeepSpeed checks the product of the batch sizes as if all ranks were data-parallel, because AutoTP's
        # groups are created later (``DeepSpeedConfig._batch_assertion``); without the key it is derived.
        del config["train_batch_size"]
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if casts_gradients(layout, recipe):
        config["communication_data_type"] = layout.communication_data_type
    if recipe.precision == "fp16-mixed":
        config["fp16"] = {"enabled": True}
    elif recipe.precision != "fp32":
        # "bf16" and "bf16-mixed" have the same configuration: DeepSpeed always keeps fp32 main copies.
        config["bf16"] = {"enabled": True}
    return config


def _build_zero_section(plan: Plan, nvme_folder: str) -> dict[str, object]:
    """Return ``zero_optimization`` (deepspeed/runtime/zero/config.py)."""
    layout = get_layout(plan)
    section: dict[str, object] = {
        "stage": layout.stage,
        "contiguous_gradients": layout.contiguous_gradients,
        "overlap_comm": layout.overlap_comm,
        "reduce_bucket_size": layout.reduce_bucket_size,
        "allgather_bucket_size": layout.allgather_bucket_size,
    }
    if layout.stage == 3:
        section |= {
            "sub_group_size": layout.sub_group_size,
            "stage3_prefetch_bucket_size": layout.prefetched_elements,
            "stage3_param_persistence_threshold": layout.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": layout.stage3_max_live_parameters,
            "stage3_max_reuse_distance": layout.stage3_max_reuse_distance,
            "zero_hpz_partition_size": layout.zero_hpz_partition_size,
        }
        section |= {field: True for field in QUANTIZED if getattr(layout, field)}
    if layout.offload_optimizer:
        optimizer: dict[str, object] = {"device": layout.offload_optimizer, "pin_memory": layout.pin_memory}
        if layout.offload_optimizer == "nvme":
            optimizer |= {"nvme_path": nvme_folder, "buffer_count": layout.offload_optimizer_buffer_count}
        section["offload_optimizer"] = optimizer
    if layout.offload_params:
        params: dict[str, object] = {"device": layout.offload_params, "pin_memory": layout.pin_memory}
        if layout.offload_params == "nvme":
            params |= {
                "nvme_path": nvme_folder,
                "buffer_count": layout.num_params_buffers,
                # A buffer has to hold the largest partition of a tensor (partitioned_param_swapper.py).
                "buffer_size": count_params_buffer_elements(plan),
                "max_in_cpu": layout.offload_params_max_in_cpu,
            }
        section["offload_param"] = params
    return section
