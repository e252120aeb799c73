"""Keys of DeepSpeed's JSON configuration: those of a plan's fields, and those that are in no plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from shardscope.core.recipe import Recipe
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.deepspeed.files.export import CLIPPED_TO, OWN_KEY
from shardscope.frameworks.deepspeed.layout import QUANTIZED, REMOVED, ZeroLayout

ZERO = "zero_optimization"
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion"}
"""``optimizer.type`` in lower case -> ``Recipe.optimizer``. "Adam" is AdamW too, unless its parameters
turn ``adam_w_mode`` off (runtime/engine.py, ``effective_adam_w_mode``)."""

# ---- Layout fields -> their keys in the file

NUMBERS: dict[str, KeyPath] = {
    "stage": (ZERO, "stage"),
    "reduce_bucket_size": (ZERO, "reduce_bucket_size"),
    "allgather_bucket_size": (ZERO, "allgather_bucket_size"),
    "sub_group_size": (ZERO, "sub_group_size"),
    "stage3_prefetch_bucket_size": (ZERO, "stage3_prefetch_bucket_size"),
    "stage3_param_persistence_threshold": (ZERO, "stage3_param_persistence_threshold"),
    "stage3_max_live_parameters": (ZERO, "stage3_max_live_parameters"),
    "stage3_max_reuse_distance": (ZERO, "stage3_max_reuse_distance"),
    "offload_optimizer_buffer_count": (ZERO, "offload_optimizer", "buffer_count"),
    "offload_params_buffer_count": (ZERO, "offload_param", "buffer_count"),
    "offload_params_buffer_size": (ZERO, "offload_param", "buffer_size"),
    "offload_params_max_in_cpu": (ZERO, "offload_param", "max_in_cpu"),
    "zero_hpz_partition_size": (ZERO, "zero_hpz_partition_size"),
    "tp": ("tensor_parallel", "autotp_size"),
}
FLAGS: dict[str, KeyPath] = {
    "overlap_comm": (ZERO, "overlap_comm"),
    "contiguous_gradients": (ZERO, "contiguous_gradients"),
    **{field: (ZERO, field) for field in QUANTIZED},
}
REDUCE_TYPE: dict[str, KeyPath] = {"communication_data_type": ("communication_data_type",)}
DEVICES: dict[str, KeyPath] = {
    "offload_optimizer": (ZERO, "offload_optimizer", "device"),
    "offload_params": (ZERO, "offload_param", "device"),
}
IGNORED_OFFLOAD = "DeepSpeed ignores it below stage 3"
"""Reason why a plan of a lower stage has no offload of parameters (runtime/engine.py)."""
LEGACY_FLAGS: dict[KeyPath, KeyPath] = {
    (ZERO, "offload_optimizer"): (ZERO, "cpu_offload"),
    (ZERO, "offload_param"): (ZERO, "cpu_offload_param"),
}
"""Offload sections -> the older flags that mean such a section with ``"device": "cpu"``
(runtime/zero/config.py)."""

OLD_PRECISION = "bfloat16"
"""Older name of the section ``bf16``, which DeepSpeed reads without that (runtime/precision_config.py)."""

# ---- All keys of the file: those that become part of a plan, and DeepSpeed's others

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TOP_LEVEL = (
    *(*BATCH_KEYS, ZERO, "tensor_parallel", "bf16", "fp16", "optimizer", OWN_KEY),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"),
)
TOP_LEVEL_NOT_IN_PLAN = (
    "gradient_clipping",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "scheduler",
    "prescale_gradients", "gradient_predivide_factor", "disable_allgather",
    "sparse_gradients", "flops_profiler", "activation_checkpointing", "tensorboard", "wandb",
    "csv_monitor", "comet", "comms_logger", "autotuning", "elasticity", "checkpoint", "data_types",
    "aio", "pipeline", "curriculum_learning", "data_efficiency", "hybrid_engine", "compile", "timers",
    "torch_autocast", "dataloader_drop_last", "log_level", "use_data_before_expert_parallelism",
    "weight_quantization", "sequence_parallel_size", "expert_parallel",
    "seq_parallel_communication_data_type", "disable_python_gc", "gradient_allreduce_op",
    "managed_gradient_accumulation", "vocabulary_size", "datastates_ckpt", "compression_training",
    "sparse_attention", "nebula", "amp", "monitor_config", "progressive_layer_drop", "eigenvalue",
    OLD_PRECISION,
)  # fmt: skip
"""Keys of DeepSpeed 0.19 (runtime/constants.py and the modules of the sections) that are in no plan."""
REMOVED_SECTIONS = (
    "nebula", "compression_training", "amp", "sparse_gradients", "eigenvalue", "sparse_attention",
    "elasticity", "curriculum_learning", "progressive_layer_drop",
)  # fmt: skip
"""Keys at which DeepSpeed 0.19.8 stops, whatever their value is (runtime/config.py)."""
SWITCHED = (
    "flops_profiler", "torch_autocast", "hybrid_engine", "data_efficiency", "expert_parallel", "tensorboard",
    "wandb", "csv_monitor", "comet", "comms_logger", "autotuning", "amp", "curriculum_learning",
    "eigenvalue", "progressive_layer_drop", "elasticity", "nebula",
)  # fmt: skip
"""Sections without an effect unless they have ``"enabled": true``."""
COMMENTS = ("comment", "comments", "note", "notes", "description")
"""Top-level keys that serve as comments: JSON has none, and DeepSpeed ignores unknown keys there."""
ZERO_NOT_IN_PLAN = (
    "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions", "compute_grad_norm",
    "load_from_fp32_weights", "elastic_checkpoint", "zenflow",
    "cpu_offload_use_pin_memory", "stage3_model_persistence_threshold", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters",
    "stage3_gather_fp16_weights_on_model_save", "legacy_stage1", "parameter_alignment",
    *REMOVED, "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
    "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory",
    "leaf_module",
)  # fmt: skip
"""Keys of ``zero_optimization`` (runtime/zero/config.py) that are in no plan."""
TENSOR_PARALLEL_NOT_IN_PLAN = (
    "enabled", "tp", "dtype", "tp_grain_size", "preset_model", "partition_config", "tp_overlap_comm",
    "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "injection_policy_tuple", "keep_module_on_host",
    "kernel_inject",
)  # fmt: skip
"""Keys of ``tensor_parallel`` (runtime/tensor_parallel/config.py) that are in no plan."""
FP16_NOT_IN_PLAN = (
    "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
)  # fmt: skip
BF16_NOT_IN_PLAN = (
    "check_grad_overflow", "immediate_grad_update", "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
)  # fmt: skip
"""Keys of ``fp16`` and ``bf16`` (runtime/precision_config.py) that are in no plan."""
SHORT_NAMES = tuple(
    f"stage3_{name}"
    for name in (
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
        *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
        *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
    )
)
"""Keys of ``zero_optimization`` that DeepSpeed reads without ``stage3_`` too: aliases of its fields."""
DEFAULTS: Mapping[KeyPath, Mapping[str, object]] = {
    (): {
        # Every run of a plan clips to this norm, so a file with it loses nothing; "auto" is the Trainer's.
        "gradient_clipping": (CLIPPED_TO, "auto"),
        "steps_per_print": 10, "wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False,
        "prescale_gradients": False, "gradient_predivide_factor": 1.0, "disable_allgather": False,
        "sparse_gradients": False, "dataloader_drop_last": False, "sequence_parallel_size": 1,
        "gradient_allreduce_op": "mean", "disable_python_gc": False, "managed_gradient_accumulation": True,
        "use_data_before_expert_parallelism": False,
    },
    (ZERO,): {
        "reduce_scatter": True, "allgather_partitions": True, "round_robin_gradients": False,
        "stage3_gather_16bit_weights_on_model_save": False, "ignore_unused_parameters": True,
        "load_from_fp32_weights": True, "elastic_checkpoint": False, "legacy_stage1": False,
        "stage3_gather_fp16_weights_on_model_save": False, "memory_efficient_linear": True,
        "use_multi_rank_bucket_allreduce": True, "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False, "stage3_allgather_sequential": False,
        "stage3_model_persistence_threshold": 2**63 - 1, "parameter_alignment": False,
        "compute_grad_norm": True, "pipeline_loading_checkpoint": False, "override_module_apply": True,
        "log_trace_cache_warnings": False, "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False,
    },
    ("tensor_parallel",): {
        "tp_overlap_comm": False, "vocab_parallel_ce_backend": "torch", "keep_module_on_host": False,
        "kernel_inject": False,
    },
    (ZERO, "offload_optimizer"): {
        "pipeline_read": False, "pipeline_write": False, "fast_init": False, "ratio": 1.0,
        "super_offload": False, "cpuadam_cores_perc": 0.8,
    },
    ("fp16",): {
        "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    },
    ("bf16",): {
        "immediate_grad_update": False, "check_grad_overflow": True, "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    },
}  # fmt: skip
"""Keys of a section -> values of keys that are in no plan, with which a file loses nothing: DeepSpeed's
defaults, which most files repeat."""
COSTLY_KEYS = frozenset((
    "activation_checkpointing", "data_types", "torch_autocast", "amp", "compile", "sequence_parallel_size",
    "expert_parallel", "sparse_attention", "sparse_gradients", "compression_training",
    "weight_quantization", "hybrid_engine", "data_efficiency", "curriculum_learning",
    "progressive_layer_drop", "eigenvalue", "wall_clock_breakdown", "flops_profiler", "zenflow",
    "reduce_scatter", "legacy_stage1", "leaf_module", "parameter_alignment",
    "stage3_model_persistence_threshold", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "memory_efficient_linear",
    "allgather_partitions", "use_multi_rank_bucket_allreduce", "round_robin_gradients", "pipeline_read",
    "pipeline_write", "ratio", "super_offload", "immediate_grad_update", "bf16_master_weights_and_grads",
    "bf16_optimizer_states", "fp16_master_weights_and_grads", "partition_config", "tp_overlap_comm",
    "vocab_parallel_lm_head", "vocab_parallel_ce_backend",
))  # fmt: skip
"""Keys that are in no plan, but change memory or step time."""
EXPORTED_RECIPE = ("recipe", "not_said_here")
"""Keys of the recipe fields in our own exports; the second one is that of older exports."""
SECTIONS: tuple[tuple[KeyPath, tuple[str, ...], tuple[str, ...]], ...] = (
    ((), TOP_LEVEL, TOP_LEVEL_NOT_IN_PLAN),
    (
        (ZERO,),
        tuple(
            keys[1]
            for keys in (*NUMBERS.values(), *FLAGS.values(), *DEVICES.values(), *LEGACY_FLAGS.values())
            if keys[0] == ZERO
        ),
        ZERO_NOT_IN_PLAN,
    ),
    (
        (ZERO, "offload_optimizer"),
        ("device", "pin_memory", "buffer_count", "nvme_path"),
        ("pipeline_read", "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
    ),
    (
        (ZERO, "offload_param"),
        ("device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path"),
        (),
    ),
    (("tensor_parallel",), ("autotp_size",), TENSOR_PARALLEL_NOT_IN_PLAN),
    (("optimizer",), ("type",), ("params", "legacy_fusion")),
    ((OWN_KEY, "layout"), tuple(field.name for field in fields(ZeroLayout)), ()),
    *(((OWN_KEY, key), tuple(field.name for field in fields(Recipe)), ()) for key in EXPORTED_RECIPE),
    (("fp16",), ("enabled",), FP16_NOT_IN_PLAN),
    (("bf16",), ("enabled",), BF16_NOT_IN_PLAN),
)
"""(keys of a section, its keys that become part of a plan, its other keys)."""
