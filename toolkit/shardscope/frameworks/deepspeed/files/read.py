"""A DeepSpeed JSON as a plan: what ``deepspeed_config`` writes, and what people write by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.recipe import Recipe
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.deepspeed.files.config import deepspeed_config
from shardscope.frameworks.deepspeed.files.export import CLIPPED_TO, OWN_KEY
from shardscope.frameworks.deepspeed.layout import MAX_ELEMENTS, QUANTIZED, REMOVED, ZeroLayout
from shardscope.frameworks.formats.documents import Document, read_json
from shardscope.frameworks.formats.sidecar_files import (
    PlanParts,
    apply_to_recipe,
    build_plan,
    load_plan_parts,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan

ZERO = "zero_optimization"
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion"}
"""``optimizer.type`` in lower case as a recipe's."""

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
"""Fields of the layout, and where DeepSpeed has them."""
FLAGS: dict[str, KeyPath] = {
    "overlap_comm": (ZERO, "overlap_comm"),
    "contiguous_gradients": (ZERO, "contiguous_gradients"),
    **{field: (ZERO, field) for field in QUANTIZED},
}
SUMMED: dict[str, KeyPath] = {"communication_data_type": ("communication_data_type",)}
DEVICES: dict[str, KeyPath] = {
    "offload_optimizer": (ZERO, "offload_optimizer", "device"),
    "offload_params": (ZERO, "offload_param", "device"),
}
LEGACY: dict[KeyPath, KeyPath] = {
    (ZERO, "offload_optimizer"): (ZERO, "cpu_offload"),
    (ZERO, "offload_param"): (ZERO, "cpu_offload_param"),
}
"""Sections, and the flags of older files that stand for one with the CPU (runtime/zero/config.py)."""

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TOP_LEVEL = (
    *(*BATCH, ZERO, "tensor_parallel", "bf16", "fp16", "optimizer", OWN_KEY),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"),
)
OTHER_TOP_LEVEL = (
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
)  # fmt: skip
"""Keys of DeepSpeed 0.19 (runtime/constants.py and the sections' own) that no plan holds."""
OTHER_ZERO = (
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
"""The same of ``zero_optimization`` (runtime/zero/config.py)."""
OTHER_FP16 = (
    "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
    "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
)  # fmt: skip
OTHER_BF16 = (
    "check_grad_overflow", "immediate_grad_update", "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
)  # fmt: skip
"""The same of both half precisions (runtime/precision_config.py)."""
TAKEN_FOR_GRANTED = {"gradient_clipping": CLIPPED_TO}
"""What every run of a plan does."""
SECTIONS: tuple[tuple[KeyPath, tuple[str, ...], Mapping[str, Any] | tuple[str, ...]], ...] = (
    ((), TOP_LEVEL, {**dict.fromkeys(OTHER_TOP_LEVEL), **TAKEN_FOR_GRANTED}),
    (
        (ZERO,),
        tuple(
            keys[1]
            for keys in (*NUMBERS.values(), *FLAGS.values(), *DEVICES.values(), *LEGACY.values())
            if keys[0] == ZERO
        ),
        OTHER_ZERO,
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
    (("tensor_parallel",), ("autotp_size",), ("enabled", "tp", "dtype", "tp_grain_size", "preset_model")),
    (("optimizer",), ("type",), ("params", "legacy_fusion")),
    ((OWN_KEY, "layout"), tuple(field.name for field in fields(ZeroLayout)), ()),
    ((OWN_KEY, "not_said_here"), tuple(field.name for field in fields(Recipe)), ()),
    (("fp16",), ("enabled",), OTHER_FP16),
    (("bf16",), ("enabled",), OTHER_BF16),
)


def read(
    file: str | Path,
    architecture: Architecture | None = None,
    cluster: Cluster | None = None,
    recipe: Recipe | None = None,
) -> Plan:
    """See :meth:`shardscope.core.plan.Plan.from_deepspeed`."""
    document = read_json(file)
    for keys, known, others in SECTIONS:
        document.check_keys(keys, known, others)
    for name, why in REMOVED.items():
        if document.get(ZERO, name) is not None:
            document.refuse((ZERO, name), why, "leave it out")
    rest = load_plan_parts(file, architecture, cluster, recipe)
    if rest.is_recipe_open:
        rest = replace(rest, recipe=apply_to_recipe(rest.recipe, document, _own_recipe(document)))
    layout_says = _layout(document, rest)
    start = rest.layout if isinstance(rest.layout, ZeroLayout) else ZeroLayout()
    values = {field: value for field, (_, value) in layout_says.items()}
    recipe_says = _recipe(document, rest, values.get("tp", start.tp) * values.get("pp", start.pp))
    return build_plan(
        rest,
        document,
        apply_to_recipe(rest.recipe, document, recipe_says),
        {**recipe_says, **layout_says},
        lambda: replace(start, **values),
    )


def _own_recipe(document: Document) -> dict[str, tuple[KeyPath, Any]]:
    """Field -> (key, value) of what an export wrote of the recipe, for which DeepSpeed has no words."""
    part: KeyPath = (OWN_KEY, "not_said_here")
    return {field: ((*part, field), value) for field, value in document.read_section(*part).items()}


def _layout(document: Document, rest: PlanParts) -> dict[str, tuple[KeyPath, Any]]:
    """Field -> (key, value) of what the file says otherwise than the plan beside it would be written."""
    before = _as_written(rest)
    plain = ZeroLayout()
    found: dict[str, tuple[KeyPath, Any]] = {}
    for field, keys in {**NUMBERS, **FLAGS, **DEVICES, **SUMMED}.items():
        value = _value(document, rest, field, keys)
        if before is not None and value == _at(before, keys):
            continue  # in the plan's own words then, which may leave a number open
        # Left out it is DeepSpeed's default, which is the layout's but for the stage.
        missing = 0 if field == "stage" else getattr(plain, field)
        legacy = LEGACY.get(keys[:-1], ()) if field in DEVICES else ()
        said = legacy if legacy and document.get(*legacy) is not None else keys
        found[field] = (said, missing if value is None else value)
    pinned = _pinned(document, before)
    if pinned is not None:
        found["pin_memory"] = pinned
    if before is None:
        for field in document.read_section(OWN_KEY, "layout"):
            found[field] = ((OWN_KEY, "layout", field), document.get(OWN_KEY, "layout", field))
    return found


def _value(document: Document, rest: PlanParts, field: str, keys: KeyPath) -> Any:
    """What the file has for ``field``, as the layout spells it; None where it says nothing."""
    if field in FLAGS:
        return document.read_flag(*keys)
    if field in SUMMED:
        return _summed(document, rest)
    if field in DEVICES:
        device = document.read_choice(*keys, among=("none", "cpu", "nvme"))
        if _legacy(document, keys[:-1]) or (device is None and document.read_section(*keys[:-1])):
            return "cpu"  # what DeepSpeed takes where a section names none (offload_config.py)
        return None if device == "none" else device
    if document.get(*keys) == "auto":
        width = rest.architecture.hidden_size if rest.architecture is not None else 0
        # transformers/integrations/deepspeed.py, trainer_config_finalize
        sizes = {
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        }
        if field not in sizes:
            document.refuse(keys, "a number: only the Trainer's own three keys can be 'auto'", "leave it out")
        return sizes[field] or None  # without an architecture, which is refused at the end
    return document.read_number(*keys, low=0, high=MAX_ELEMENTS)


def _summed(document: Document, rest: PlanParts) -> str | None:
    """The type in which gradients are summed, where it is not that of products (runtime/config.py,
    ``get_communication_data_type``, which takes capitals too)."""
    keys = SUMMED["communication_data_type"]
    said = document.get(*keys)
    name = said.lower() if isinstance(said, str) else said
    precision = _precision(document, rest.recipe)[1] or rest.recipe.precision
    products = precision.removesuffix("-mixed")
    if name not in (None, products, "fp32"):
        document.refuse(keys, f"'fp32', or {products!r} as products are", "'fp32'")
    return None if name == products else name


def _legacy(document: Document, section: KeyPath) -> bool:
    """Whether the file has the section's older flag; DeepSpeed refuses it beside the section itself."""
    is_on = bool(document.read_flag(*LEGACY[section]))
    if is_on and document.get(*section) is not None:
        document.refuse(LEGACY[section], f"nothing beside {'.'.join(section)}", "leave it out")
    return is_on


def _pinned(document: Document, before: Mapping[str, Any] | None) -> tuple[KeyPath, Any] | None:
    """DeepSpeed has ``pin_memory`` twice, a layout once; left out it is false."""
    found: dict[KeyPath, bool] = {}
    for part in ("offload_optimizer", "offload_param"):
        place: KeyPath = (ZERO, part, "pin_memory")
        used = _legacy(document, (ZERO, part)) or document.read_section(ZERO, part)
        if used and document.get(ZERO, part, "device") != "none":
            found[place] = bool(document.read_flag(*place))
    if not found or (
        before is not None and all(_at(before, place) == value for place, value in found.items())
    ):
        return None
    first, *others = found.items()
    keys, value = first
    for other, differs in others:
        if differs != value:
            allowed = f"{str(value).lower()}, as in {'.'.join(keys)}: a layout has one pin_memory"
            document.refuse(other, allowed, str(value).lower())
    return keys, value


def _recipe(document: Document, rest: PlanParts, model_parallel: int) -> dict[str, tuple[KeyPath, Any]]:
    """Field -> (key, value) of the recipe that the file says: batches, precision, optimizer."""
    micro, total = _batches(document, rest, model_parallel)
    kind = document.get("optimizer", "type")
    optimizer = None
    if kind is not None:
        name = kind.lower() if isinstance(kind, str) else kind
        optimizer = OPTIMIZERS.get(name) if isinstance(name, str) else None
        if optimizer is None:
            allowed = "Adam, AdamW, SGD or Lion: for others there is no formula"
            document.refuse(("optimizer", "type"), allowed, "'AdamW'")
    return {
        "micro_batch_size": (("train_micro_batch_size_per_gpu",), micro),
        "global_batch_size": (("train_batch_size",), total),
        "precision": _precision(document, rest.recipe),
        "optimizer": (("optimizer", "type"), optimizer),
    }


def _precision(document: Document, recipe: Recipe) -> tuple[KeyPath, str | None]:
    on: dict[str, bool] = {}
    for section in ("fp16", "bf16"):
        if document.get(section, "enabled") == "auto":
            return (section, "enabled"), None
        on[section] = bool(document.read_flag(section, "enabled"))
    if on["fp16"] and on["bf16"]:
        document.refuse(("bf16", "enabled"), "false while fp16.enabled is true", "false")
    if on["fp16"]:
        return ("fp16", "enabled"), "fp16-mixed"
    if not on["bf16"]:
        return ("bf16", "enabled"), "fp32"
    # DeepSpeed keeps fp32 main copies either way: the two are one in its words.
    return ("bf16", "enabled"), None if recipe.precision in ("bf16", "bf16-mixed") else "bf16-mixed"


def _batches(document: Document, rest: PlanParts, model_parallel: int) -> tuple[int | None, int | None]:
    """Micro-batch and global batch by DeepSpeed's rules (config.py, _set_batch_related_parameters)."""
    said = {
        key: None if document.get(key) == "auto" else document.read_number(key, low=1, high=2**24)
        for key in BATCH
    }
    total, micro, steps = (said[key] for key in BATCH)
    if rest.cluster is None or rest.cluster.num_gpus % model_parallel:
        return micro, total  # what is missing is refused at the end; the layout says the other better
    data_parallel = rest.cluster.num_gpus // model_parallel
    is_open = {key for key in BATCH if document.get(key) == "auto"}
    if total is None:
        if steps is None and (micro is None or is_open):
            return micro, None
        per_rank = rest.recipe.micro_batch_size if micro is None else micro
        return micro, per_rank * (steps or 1) * data_parallel
    if micro is None and steps is None and is_open:
        return None, total
    if micro is None:
        micro = max(1, total // ((steps or 1) * data_parallel))
    if steps is None:
        steps = max(1, total // (micro * data_parallel))
    product = micro * steps * data_parallel
    if product != total:
        allowed = (
            "train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks = "
            f"{micro} x {steps} x {data_parallel} = {product}"
        )
        document.refuse(("train_batch_size",), allowed, str(product))
    return micro, total


def _as_written(rest: PlanParts) -> Mapping[str, Any] | None:
    """How the plan beside the file would be written."""
    from shardscope.core.plan import Plan

    if not isinstance(rest.layout, ZeroLayout) or rest.architecture is None or rest.cluster is None:
        return None
    try:
        return deepspeed_config(Plan(rest.architecture, rest.cluster, rest.recipe, rest.layout))
    except ValueError:
        return None  # the caller gave another cluster or recipe, with which that layout does not run


def _at(values: Mapping[str, Any], keys: KeyPath) -> Any:
    found: Any = values
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
