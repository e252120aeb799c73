"""Reader of DeepSpeed's JSON configuration, exported by Shardscope or written by hand, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import warn_user
from shardscope.core.layout import OptionValue
from shardscope.core.serialization import replace_fields
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.deepspeed.files.config import build_deepspeed_config
from shardscope.frameworks.deepspeed.files.config_keys import (
    BATCH_KEYS,
    COMMENTS,
    COSTLY_KEYS,
    DEFAULTS,
    DEVICES,
    EXPORTED_RECIPE,
    FLAGS,
    IGNORED_OFFLOAD,
    LEGACY_FLAGS,
    NUMBERS,
    OLD_PRECISION,
    OPTIMIZERS,
    REDUCE_TYPE,
    REMOVED_SECTIONS,
    SECTIONS,
    SHORT_NAMES,
    SWITCHED,
    ZERO,
)
from shardscope.frameworks.deepspeed.files.export import OWN_KEY
from shardscope.frameworks.deepspeed.layout import MAX_ELEMENTS, REMOVED, ZeroLayout
from shardscope.frameworks.formats.documents import Document, read_json
from shardscope.frameworks.formats.sidecar_files import (
    FileFields,
    PlanParts,
    apply_to_recipe,
    build_plan,
    load_plan_parts,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


def read_plan(
    file: str | Path,
    architecture: Architecture | None = None,
    cluster: Cluster | None = None,
    recipe: Recipe | None = None,
    *,
    allow_comments: bool = True,
) -> Plan:
    """Return the plan of a file: see :meth:`shardscope.core.plan.Plan.from_deepspeed`.

    DeepSpeed reads Hjson: JSON that may have comments and trailing commas (runtime/config.py).
    """
    document = read_json(file, allow_comments=allow_comments)
    _rename_keys(document)
    document.costly_keys = COSTLY_KEYS | {name.removeprefix("stage3_") for name in COSTLY_KEYS}
    # Unknown and removed keys first: a misspelt key would otherwise be a default without notice.
    for keys, planned, not_in_plan in SECTIONS:
        section = document.read_section(*keys)
        notes = [] if keys else [key for key in section if _is_comment(key)]
        # A disabled precision has no effect, whatever its other options are.
        if keys in (("fp16",), ("bf16",)) and section.get("enabled") is False:
            silent = list(not_in_plan)
        else:
            silent = [key for key in not_in_plan if _is_off(key, section.get(key))] + notes
        defaults = {**dict.fromkeys(not_in_plan), **DEFAULTS.get(keys, {})}
        document.check_keys(keys, [*planned, *silent], defaults)
    _warn_of_removed_sections(document)
    for name, why in REMOVED.items():
        if document.get(ZERO, name) is not None:
            document.refuse((ZERO, name), why, "leave it out")
    # The parts that DeepSpeed's configuration lacks come from the caller's arguments, plan.json in the same
    # folder, or the recipe fields that an export adds under its own key.
    parts = load_plan_parts(file, architecture, cluster, recipe)
    if parts.is_recipe_open:
        parts = replace(
            parts, recipe=apply_to_recipe(parts.recipe, document, _read_exported_recipe(document))
        )
    # The layout before the recipe: the number of data-parallel ranks, and so the batch sizes, depend on it.
    start = parts.layout if isinstance(parts.layout, ZeroLayout) else ZeroLayout()
    layout_fields = _read_layout(document, parts, start)
    layout_values = {field: value for field, (_, value) in layout_fields.items()}
    recipe_fields = _read_recipe(document, parts, _count_model_parallel(start, layout_values))
    return build_plan(
        parts,
        document,
        apply_to_recipe(parts.recipe, document, recipe_fields),
        {**recipe_fields, **layout_fields},
        lambda: replace_fields(start, layout_values),
    )


def _rename_keys(document: Document) -> None:
    """Give keys that DeepSpeed has another name for the name that is read here.

    These are keys of ZeRO-3 without ``stage3_``, and the older name of ``bf16``. A key with both names is
    left: DeepSpeed rejects the first ones, and ignores the older name.
    """
    section = document.get(ZERO)
    for name in SHORT_NAMES:
        short = name.removeprefix("stage3_")
        if isinstance(section, Mapping) and short in section and name not in section:
            document.rename_key((ZERO, short), name)
    if OLD_PRECISION in document.values and document.get("bf16") is None:
        document.rename_key((OLD_PRECISION,), "bf16")


def _is_comment(key: str) -> bool:
    """Return whether a top-level key is a comment: DeepSpeed ignores those that it does not know."""
    return key.startswith(("_", "//")) or key.lower() in COMMENTS


def _is_off(name: str, value: object) -> bool:
    """Return whether an unread section has no effect: disabled, empty, or with all of its options off."""
    if not isinstance(value, Mapping):
        return False
    if name in SWITCHED or "enabled" in value:
        return value.get("enabled", False) is False
    # It sizes the buffers of contiguous_memory_optimization (activation_checkpointing/checkpointing.py).
    options = [option for key, option in value.items() if key != "number_checkpoints"]
    return all(option in (None, False) or _is_off("", option) for option in options)


def _warn_of_removed_sections(document: Document) -> None:
    if names := [name for name in REMOVED_SECTIONS if name in document.values]:
        lines = ", ".join(f"{name} (line {document.lines.get((name,))})" for name in names)
        warn_user(
            f"{document.name} has keys that DeepSpeed 0.19.8 has removed and stops at, even if they are "
            f"disabled: {lines}. Leave them out.",
            UserWarning,
        )


def _count_model_parallel(layout: ZeroLayout, values: Mapping[str, object]) -> int:
    """Return the ranks of one replica: ``layout``'s tp and pp, or those in ``values``."""
    tp, pp = values.get("tp", layout.tp), values.get("pp", layout.pp)
    # Invalid degrees are reported when the layout is built.
    return max(1, tp * pp) if isinstance(tp, int) and isinstance(pp, int) else 1


def _read_exported_recipe(document: Document) -> FileFields:
    """Return the recipe fields that an export writes under its own key, as DeepSpeed has none for them."""
    sections: list[KeyPath] = [(OWN_KEY, key) for key in EXPORTED_RECIPE]
    return {
        field: ((*section, field), value)
        for section in sections
        for field, value in document.read_section(*section).items()
    }


# ---- Layout


def _read_layout(document: Document, parts: PlanParts, start: ZeroLayout) -> FileFields:
    """Return the layout fields whose value in the file differs from what the plan in its folder exports."""
    exported = _export_stored_plan(parts)
    defaults = ZeroLayout()
    file_fields: FileFields = {}
    for field, keys in {**NUMBERS, **FLAGS, **DEVICES, **REDUCE_TYPE}.items():
        value = _read_layout_value(document, parts, field, keys)
        if exported is not None and value == _get_value(exported, keys):
            # Unchanged since the export: keep the stored layout's value, which may be None (derived).
            continue
        # A missing key means DeepSpeed's default, which is the layout's except for the stage
        # (runtime/zero/config.py: 0).
        default = 0 if field == "stage" else getattr(defaults, field)
        legacy_flag = LEGACY_FLAGS.get(keys[:-1], ()) if field in DEVICES else ()
        is_legacy = bool(legacy_flag) and document.get(*legacy_flag) is not None
        file_fields[field] = (legacy_flag if is_legacy else keys, default if value is None else value)
    # Below stage 3 DeepSpeed accepts the offload of parameters, and ignores it (runtime/engine.py).
    stage = file_fields["stage"][1] if "stage" in file_fields else start.stage
    keys = DEVICES["offload_params"]
    if stage in (0, 1, 2) and _read_offload_device(document, keys) is not None:
        section = keys[:-1]
        ignored_keys = LEGACY_FLAGS[section] if document.get(*section) is None else section
        document.add_ignored_key(ignored_keys, IGNORED_OFFLOAD)
        file_fields["offload_params"] = (keys, None)
    pin_memory = _read_pin_memory(document, exported, stage)
    if pin_memory is not None:
        file_fields["pin_memory"] = pin_memory
    if exported is None:
        # Without a plan.json the exporter's section has the degrees that DeepSpeed's configuration lacks.
        for field, exported_value in document.read_section(OWN_KEY, "layout").items():
            file_fields[field] = ((OWN_KEY, "layout", field), exported_value)
    return file_fields


def _read_layout_value(document: Document, parts: PlanParts, field: str, keys: KeyPath) -> OptionValue:
    """Return the file's value for a layout field; None if it is missing."""
    if field in FLAGS:
        return document.read_flag(*keys)
    if field in REDUCE_TYPE:
        return _read_reduce_type(document, parts)
    if field in DEVICES:
        return _read_offload_device(document, keys)
    if document.get(*keys) == "auto":
        return _resolve_auto_size(document, parts, field, keys)
    number = document.read_number(*keys, low=0, high=3 if field == "stage" else MAX_ELEMENTS)
    # A sub-group ends at the first parameter that reaches its size, so 0 and 1 are the same: one for each
    # (runtime/zero/stage3.py, _create_fp16_sub_groups).
    return 1 if field == "sub_group_size" and number == 0 else number


def _read_offload_device(document: Document, keys: KeyPath) -> str | None:
    """Return the device of an offload section; None if nothing is offloaded.

    A section without a device offloads nothing (DeepSpeed 0.19.8, runtime/zero/offload_config.py).
    """
    device = document.read_choice(*keys, among=("none", "cpu", "nvme"))
    if _has_legacy_flag(document, keys[:-1]):
        return "cpu"
    return None if device == "none" else device


def _resolve_auto_size(document: Document, parts: PlanParts, field: str, keys: KeyPath) -> int | None:
    """Return the number that transformers' Trainer replaces "auto" by.

    Source: transformers/integrations/deepspeed.py, ``trainer_config_finalize``.
    """
    width = parts.architecture.hidden_size if parts.architecture is not None else 0
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    if field not in sizes:
        document.refuse(keys, "a number: the Trainer sets only three other keys from 'auto'", "leave it out")
    # Without an architecture the default is kept: build_plan reports the missing architecture.
    return sizes[field] or None


def _read_reduce_type(document: Document, parts: PlanParts) -> str | None:
    """Return the gradient reduction type; None if it is the compute type.

    DeepSpeed accepts upper case too (runtime/config.py, ``get_communication_data_type``).
    """
    keys = REDUCE_TYPE["communication_data_type"]
    value = document.get(*keys)
    if value is None:
        return None
    precision = _read_precision(document, parts.recipe)[1] or parts.recipe.precision
    compute_type = precision.removesuffix("-mixed")
    name = value.lower() if isinstance(value, str) else None
    if name not in (compute_type, "fp32"):
        document.refuse(keys, f"'fp32', or the compute type, {compute_type!r}", "'fp32'")
    return None if name == compute_type else name


def _has_legacy_flag(document: Document, section: KeyPath) -> bool:
    """Return whether the older flag of an offload section is on. DeepSpeed rejects it with the section."""
    is_on = bool(document.read_flag(*LEGACY_FLAGS[section]))
    if is_on and document.get(*section) is not None:
        allowed = f"only one of the two: {'.'.join(section)} is set as well"
        document.refuse(LEGACY_FLAGS[section], allowed, "leave it out")
    return is_on


def _read_pin_memory(
    document: Document, exported: Mapping[str, object] | None, stage: object
) -> tuple[KeyPath, bool] | None:
    """Return the key and value of ``pin_memory``; None without offloading, or if it is as exported.

    Each of DeepSpeed's two offload sections has one (true if it is missing: DeepSpeed 0.19.8,
    runtime/zero/offload_config.py), a layout one for both.
    """
    flags: dict[KeyPath, bool] = {}
    for name in ("offload_optimizer", "offload_param") if stage == 3 else ("offload_optimizer",):
        keys: KeyPath = (ZERO, name, "pin_memory")
        if _read_offload_device(document, (ZERO, name, "device")) is not None:
            pin_memory = document.read_flag(*keys)
            flags[keys] = True if pin_memory is None else pin_memory
    if not flags:
        return None
    if exported is not None and all(_get_value(exported, keys) == flag for keys, flag in flags.items()):
        return None
    (first_keys, first_flag), *other_flags = flags.items()
    for keys, flag in other_flags:
        if flag != first_flag:
            allowed = f"{str(first_flag).lower()}, as in {'.'.join(first_keys)}: a layout has one pin_memory"
            document.refuse(keys, allowed, str(first_flag).lower())
    return first_keys, first_flag


def _export_stored_plan(parts: PlanParts) -> Mapping[str, object] | None:
    """Return DeepSpeed's configuration of the ``plan.json`` in the file's folder; None if there is none."""
    from shardscope.core.plan import Plan

    if not isinstance(parts.layout, ZeroLayout) or parts.architecture is None or parts.cluster is None:
        return None
    try:
        return build_deepspeed_config(Plan(parts.architecture, parts.cluster, parts.recipe, parts.layout))
    except ValueError:
        # The caller passed another cluster or recipe, for which the stored layout is invalid.
        return None


def _get_value(config: Mapping[str, object], keys: KeyPath) -> object:
    """Return the value at ``keys`` of a nested configuration; None if it is missing."""
    value: object = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# ---- Recipe


def _read_recipe(document: Document, parts: PlanParts, model_parallel: int) -> FileFields:
    """Return the recipe fields of the file: batch sizes, precision and optimizer."""
    micro_batch, global_batch = _read_batch_sizes(document, parts, model_parallel)
    return {
        "micro_batch_size": (("train_micro_batch_size_per_gpu",), micro_batch),
        "global_batch_size": (("train_batch_size",), global_batch),
        "precision": _read_precision(document, parts.recipe),
        "optimizer": (("optimizer", "type"), _read_optimizer(document)),
    }


def _read_optimizer(document: Document) -> str | None:
    """Return ``Recipe.optimizer``; None if the file has no optimizer, which the training script creates."""
    keys: KeyPath = ("optimizer", "type")
    name = document.get(*keys)
    if name is None:
        return None
    optimizer = OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
    if optimizer is None:
        document.refuse(keys, "Adam, AdamW, SGD or Lion: others have no formula", "'AdamW'")
    return optimizer


def _read_precision(document: Document, recipe: Recipe) -> tuple[KeyPath, str | None]:
    """Return the key and value of the precision; None to keep the recipe's."""
    # None: "auto", which the Trainer replaces by its own argument.
    enabled: dict[str, bool | None] = {
        section: None
        if document.get(section, "enabled") == "auto"
        else bool(document.read_flag(section, "enabled"))
        for section in ("fp16", "bf16")
    }
    if enabled["fp16"] and enabled["bf16"]:
        document.refuse(("bf16", "enabled"), "false while fp16.enabled is true", "false")
    if enabled["fp16"]:
        return ("fp16", "enabled"), "fp16-mixed"
    if enabled["bf16"]:
        # "bf16" and "bf16-mixed" have the same configuration: DeepSpeed always keeps fp32 main copies.
        return ("bf16", "enabled"), None if recipe.precision in ("bf16", "bf16-mixed") else "bf16-mixed"
    for section, is_enabled in enabled.items():
        if is_enabled is None:
            return (section, "enabled"), None
    return ("bf16", "enabled"), "fp32"


def _read_batch_sizes(
    document: Document, parts: PlanParts, model_parallel: int
) -> tuple[int | None, int | None]:
    """Return micro-batch and global batch size by DeepSpeed's rules; None keeps the recipe's.

    Source: ``_set_batch_related_parameters`` and ``_batch_assertion``, deepspeed/runtime/config.py.
    """
    is_auto = {key: document.get(key) == "auto" for key in BATCH_KEYS}
    global_batch, micro_batch, num_steps = (
        None if is_auto[key] else document.read_number(key, low=1, high=2**24) for key in BATCH_KEYS
    )
    if parts.cluster is None or parts.cluster.num_gpus % model_parallel:
        # The number of replicas is unknown: build_plan reports the missing cluster or the invalid degrees.
        return micro_batch, global_batch
    data_parallel = parts.cluster.num_gpus // model_parallel
    if global_batch is None:
        # With "auto" the Trainer's arguments decide, so the recipe's global batch is kept.
        if num_steps is None and (micro_batch is None or any(is_auto.values())):
            return micro_batch, None
        per_rank = parts.recipe.micro_batch_size if micro_batch is None else micro_batch
        return micro_batch, per_rank * (num_steps or 1) * data_parallel
    if micro_batch is None and num_steps is None and any(is_auto.values()):
        return None, global_batch
    # Of three sizes DeepSpeed derives the missing ones, then requires that their product is the global batch.
    if micro_batch is None:
        micro_batch = max(1, global_batch // ((num_steps or 1) * data_parallel))
    if num_steps is None:
        num_steps = max(1, global_batch // (micro_batch * data_parallel))
    product = micro_batch * num_steps * data_parallel
    if product != global_batch:
        allowed = (
            "train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks = "
            f"{micro_batch} x {num_steps} x {data_parallel} = {product}"
        )
        document.refuse(("train_batch_size",), allowed, str(product))
    return micro_batch, global_batch
