"""Import of a plan from an accelerate configuration: DDP, FSDP2, or the DeepSpeed JSON that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Fix, Value, find_similar, refuse, warn_user
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.ddp.layout import DdpLayout
from shardscope.frameworks.deepspeed.files import read as deepspeed
from shardscope.frameworks.deepspeed.files.config_keys import IGNORED_OFFLOAD
from shardscope.frameworks.deepspeed.files.export import CLIPPED_TO
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.formats.accelerate_config import MIXED
from shardscope.frameworks.formats.comment_fields import read_comment_fields
from shardscope.frameworks.formats.documents import Document, read_json, read_text, read_yaml
from shardscope.frameworks.formats.sidecar_files import (
    FileFields,
    PlanParts,
    apply_to_recipe,
    build_plan,
    load_plan_parts,
    warn_of_unread_keys,
)
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
from shardscope.machine.user_folders import expand_home

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe

DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
"""Supported values of ``distributed_type``."""
TOP_LEVEL = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu")
SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config")
READ_SECTIONS = {"FSDP": SECTIONS[:2], "DEEPSPEED": SECTIONS[2:]}
"""``distributed_type`` -> the sections that become part of a plan; the others are listed as unread."""
OTHER_TOP_LEVEL: Mapping[str, object] = {
    "compute_environment": "LOCAL_MACHINE",
    "machine_rank": 0,
    "gpu_ids": "all",
    "main_process_ip": None,
    "main_process_port": (29500, None),
    "rdzv_backend": "static",
    "same_network": True,
    "main_training_function": "main",
    "enable_cpu_affinity": False,
    "debug": False,
    "fp8_config": {"backend": "AO"},
    "megatron_lm_config": {},
    "mpirun_config": {},
    "downcast_bf16": ("no", False),  # YAML reads a bare no as false
    "tpu_name": None,
    "tpu_zone": None,
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "command_file": None,
    "commands": None,
    "tpu_vm": None,
    "tpu_env": [],
    "dynamo_config": {},
}
"""``ClusterConfig``'s other keys, with the values, or a tuple of them, that ``accelerate config`` writes by
default."""
FSDP_KEYS = (
    "version",
    "reshard_after_forward",
    "offload_params",
    "activation_checkpointing",
    "sharding_strategy",
    "auto_wrap_policy",
)
WRAP_POLICY = "TRANSFORMER_BASED_WRAP"
"""The policy that shards each decoder layer, as a plan does."""
OTHER_FSDP: Mapping[str, object] = {
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_min_num_params": None,
    "fsdp_backward_prefetch": None,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing_offload": False,
    "fsdp_ignored_modules": None,
}
PARALLEL_KEYS: Mapping[str, str] = {
    "replicate": "parallelism_config_dp_replicate_size",
    "shard": "parallelism_config_dp_shard_size",
    "tp": "parallelism_config_tp_size",
    "cp": "parallelism_config_cp_size",
}
OTHER_PARALLEL: Mapping[str, object] = {
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length": None,
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": None,
}
COSTLY_KEYS = frozenset((
    "parallelism_config", "parallelism_config_sp_size", "fp8_config", "dynamo_config", "megatron_lm_config",
    "fsdp_activation_checkpointing_offload", "fsdp_ignored_modules",
))  # fmt: skip
"""Keys that are in no plan, but change memory or step time."""
STRATEGIES = {
    "FULL_SHARD": "fsdp_version: 2 with fsdp_reshard_after_forward: true",
    "SHARD_GRAD_OP": "fsdp_version: 2 with fsdp_reshard_after_forward: false",
    "NO_SHARD": "distributed_type: MULTI_GPU",
    "HYBRID_SHARD": "fsdp_version: 2 with parallelism_config_dp_replicate_size",
    "HYBRID_SHARD_ZERO2": "fsdp_version: 2 with parallelism_config_dp_replicate_size and "
    "fsdp_reshard_after_forward: false",
}
"""FSDP1's strategies, in the order of their numbers -> the equivalent options of FSDP2."""
INLINE_DEEPSPEED = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
}
"""Keys of ``deepspeed_config`` that stand for a JSON's (accelerate/utils/dataclasses.py, DeepSpeedPlugin)."""
STARTING_DEEPSPEED = ("deepspeed_multinode_launcher", "zero3_init_flag")
"""Keys that say how ranks start and build the model, which an export writes; no step depends on them."""
OTHER_DEEPSPEED: Mapping[str, object] = {
    "gradient_clipping": (CLIPPED_TO, "auto"),
    "zero3_save_16bit_model": None,
    "deepspeed_moe_layer_cls_names": None,
    # accelerate takes any key here; TRL's example of Ulysses has DeepSpeed's own.
    "seq_parallel_communication_data_type": None,
    "deepspeed_hostfile": None,
    "deepspeed_exclusion_filter": None,
    "deepspeed_inclusion_filter": None,
}
REFUSED_WITH_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero3_save_16bit_model", *INLINE_DEEPSPEED),
)
"""Keys of ``deepspeed_config`` for which accelerate raises an error beside a ``deepspeed_config_file``
(accelerate/utils/dataclasses.py, ``_deepspeed_config_checks``); so does it for ``mixed_precision``."""


def read(
    file: str | Path,
    architecture: Architecture | None = None,
    cluster: Cluster | None = None,
    recipe: Recipe | None = None,
) -> Plan:
    """Read a plan; see :meth:`shardscope.core.plan.Plan.from_accelerate`."""
    # ``accelerate launch`` reads both formats. An unknown key is an error: if misspelled, it has no effect.
    document = read_json(file) if str(file).endswith(".json") else read_yaml(file)
    document.costly_keys = COSTLY_KEYS
    _read_unquoted_no(document)
    read_sections = READ_SECTIONS.get(str(document.get("distributed_type")), ())
    unread_sections: Mapping[str, object] = {name: {} for name in SECTIONS if name not in read_sections}
    # Without it, and without a key that may be a misspelled one, this is another tool's file.
    if document.get("distributed_type") is None and not find_similar("distributed_type", document.values):
        allowed, fix = ", ".join(DISTRIBUTED_TYPES), "distributed_type: FSDP"
        if not document.values.keys() & {*TOP_LEVEL, *OTHER_TOP_LEVEL}:
            allowed += "; the file has no key of accelerate config"
            fix = "the file that accelerate launch --config_file reads"
        refuse(f"{document.name}, distributed_type", None, allowed, fix)
    _check_old_formats(document)
    others = {**OTHER_TOP_LEVEL, **unread_sections}
    if not _has_compiler(document.get("dynamo_config")):
        others["dynamo_config"] = document.get("dynamo_config")
    document.check_keys((), (*TOP_LEVEL, *read_sections), others)
    kind = _read_distributed_type(document)
    parts = load_plan_parts(file, architecture, cluster, recipe)
    _check_ranks(document, parts)
    # DeepSpeed's options are in a JSON of their own, or a few of them inline.
    if kind == "DEEPSPEED":
        path = _find_deepspeed_file(document, expand_home(file))
        if path is not None:
            # Accelerate reads strict JSON (utils/deepspeed.py, HfDeepSpeedConfig).
            plan = deepspeed.read_plan(path, architecture, cluster, recipe, allow_comments=False)
            warn_of_unread_keys(document)
            return plan
        return _read_inline_deepspeed(document, parts)

    # An export lists the fields that the format lacks in a comment. A recipe of the caller or of plan.json
    # has priority over it.
    layout_class = Fsdp2Layout if kind == "FSDP" else DdpLayout
    comment_recipe, comment_layout = read_comment_fields(document, read_text(file), layout_class)
    if parts.is_recipe_open:
        parts = replace(parts, recipe=apply_to_recipe(parts.recipe, document, comment_recipe))
    recipe_fields: FileFields = {"precision": (("mixed_precision",), _read_precision(document, parts))}
    if kind != "FSDP":
        changed = apply_to_recipe(parts.recipe, document, recipe_fields)
        return build_plan(parts, document, changed, recipe_fields, DdpLayout)

    # Options of the file win over its comments, which may be older than a manual edit of the file.
    start, layout_fields = _read_fsdp(document, parts)
    if parts.layout is None:
        layout_fields = {**comment_layout, **layout_fields}
    recipe_fields |= _read_recomputation(document, parts.recipe)
    return _build_plan(parts, document, start, recipe_fields, layout_fields)


def _read_unquoted_no(document: Document) -> None:
    """Write out an unquoted NO, which YAML reads as false; accelerate starts one process then, too."""
    if document.get("distributed_type") is False:
        document.values = {**document.values, "distributed_type": "NO"}


def _has_compiler(value: object) -> bool:
    """Return whether a ``dynamo_config`` compiles: its default backend is NO (commands/launch.py)."""
    if not isinstance(value, Mapping):
        return value is not None
    backend = value.get("dynamo_backend", value.get("backend", "NO"))
    return not isinstance(backend, str) or backend.upper() != "NO"


def _read_distributed_type(document: Document) -> str:
    """Return ``distributed_type``. Raises ``ValueError`` for types without a plan, and misspelled ones."""
    kind = document.get("distributed_type")
    if isinstance(kind, str) and kind in DISTRIBUTED_TYPES:
        return kind
    name = str(kind).upper().replace("-", "_")
    fix: Fix = Value(name if name in DISTRIBUTED_TYPES else find_similar(name, DISTRIBUTED_TYPES) or "FSDP")
    if name == "MEGATRON_LM":
        fix = "ss.Plan.from_megatron with the arguments of Megatron-LM"
    elif name.startswith("MULTI_") and name not in DISTRIBUTED_TYPES:
        fix = Value("MULTI_GPU")  # DDP too, on accelerators that no cluster has
    return document.refuse(("distributed_type",), ", ".join(map(repr, DISTRIBUTED_TYPES)), fix)


def _check_old_formats(document: Document) -> None:
    """Raise ``ValueError`` for SageMaker's files, and for a precision as accelerate wrote it before 0.11."""
    if document.get("compute_environment") == "AMAZON_SAGEMAKER":
        allowed = "LOCAL_MACHINE: a file for SageMaker has other keys"
        document.refuse(("compute_environment",), allowed, Value("LOCAL_MACHINE"))
    # accelerate still converts it (commands/config/config_args.py, ``process_config``).
    if document.read_flag("fp16") is not None:
        fix = "mixed_precision: fp16" if document.read_flag("fp16") else "leave it out"
        document.refuse(("fp16",), "nothing: mixed_precision has replaced it", fix)


def _check_ranks(document: Document, parts: PlanParts) -> None:
    """Raise ``ValueError`` if the file's processes, machines or ``use_cpu`` contradict the cluster."""
    # ClusterConfig's default of num_processes is -1, for a number that the command line gives.
    numbers = {key: document.read_number(key, low=-1) for key in ("num_processes", "num_machines")}
    use_cpu = document.read_flag("use_cpu")
    cluster = parts.cluster
    if cluster is None:
        return
    for key, number in (("num_processes", cluster.num_gpus), ("num_machines", cluster.num_nodes)):
        if numbers[key] not in (None, -1, number):
            document.refuse((key,), f"{number}, as {cluster} has", f"cluster=..., or {key}: {number}")
    is_cpu = cluster.gpu.vendor == "cpu"
    # accelerate starts one process then, whatever num_processes is (commands/launch.py, simple_launcher).
    if document.get("distributed_type") == "NO" and cluster.num_gpus > 1:
        kind = "MULTI_CPU" if is_cpu else "MULTI_GPU"
        document.refuse(
            ("distributed_type",), f"a type with the {cluster.num_gpus} ranks of {cluster}", Value(kind)
        )
    if use_cpu not in (None, is_cpu):
        document.refuse(("use_cpu",), f"{str(is_cpu).lower()} with {cluster}", str(is_cpu).lower())


def _read_precision(document: Document, parts: PlanParts) -> str | None:
    """Return the recipe's precision for ``mixed_precision``; None if the recipe's own is the same there."""
    value = document.get("mixed_precision")
    if value is False:
        value = "no"  # YAML reads a bare no as false
    if value is None and parts.is_recipe_open:
        value = "no"  # accelerate's default (commands/launch.py)
    if value is None or MIXED[parts.recipe.precision] == value:
        return None
    # MIXED maps several precisions to "no": a file cannot distinguish bf16 weights from fp32 ones.
    names = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-mixed", "no": "fp32"}
    if not isinstance(value, str) or value not in names:
        document.refuse(("mixed_precision",), ", ".join(map(repr, names)), "'bf16'")
    return names[value]


def _read_fsdp(document: Document, parts: PlanParts) -> tuple[Fsdp2Layout, FileFields]:
    """Return the layout of ``plan.json`` or the default one, and the layout fields that the file sets."""
    part = "fsdp_config"
    document.check_keys((part,), [f"fsdp_{name}" for name in FSDP_KEYS], OTHER_FSDP)
    document.check_keys(("parallelism_config",), PARALLEL_KEYS.values(), OTHER_PARALLEL)
    _check_version(document)
    _check_wrap_policy(document)
    stored = parts.layout if isinstance(parts.layout, Fsdp2Layout) else None
    layout_fields = _read_degrees(document, stored, parts.cluster)

    # fully_shard's own default is to reshard after forward.
    reshard_keys = (part, "fsdp_reshard_after_forward")
    flag = document.read_flag(*reshard_keys)
    reshard: bool | int = True if flag is None else flag
    if stored is not None and not isinstance(stored.reshard_after_forward, bool) and reshard:
        # A number in the stored layout is that of all sharding ranks, which an export writes as true.
        reshard = stored.reshard_after_forward
    layout_fields["reshard_after_forward"] = (reshard_keys, reshard)
    offload = "cpu" if document.read_flag(part, "fsdp_offload_params") else None
    layout_fields["offload"] = ((part, "fsdp_offload_params"), offload)
    return stored or Fsdp2Layout(), layout_fields


def _check_version(document: Document) -> None:
    """Raise ``ValueError`` for FSDP1, with the options of FSDP2 that have the same effect as the fix."""
    part, strategy_key = "fsdp_config", "fsdp_sharding_strategy"
    version = document.read_number(part, "fsdp_version", low=1, high=2)
    strategy = document.get(part, strategy_key)
    if version == 2:
        if strategy is not None:
            replacement = _find_replacement(strategy)
            flag = document.get(part, "fsdp_reshard_after_forward")
            # The options may be there already, and only the strategy be left of FSDP1.
            is_replaced = f"fsdp_reshard_after_forward: {flag}".lower() in replacement
            fix = "leave it out" if is_replaced else replacement
            document.refuse((part, strategy_key), "nothing: FSDP2 has none, and ignores it", fix)
        return
    # A newer FSDP1 file has the strategy under the key that is a flag of FSDP2.
    reshard = document.get(part, "fsdp_reshard_after_forward")
    replacement = _find_replacement(reshard if strategy is None else strategy)
    if version is None and strategy is not None:
        allowed = "nothing: without fsdp_version: 2 this is FSDP1, which cannot be planned"
        document.refuse((part, strategy_key), allowed, replacement)
    allowed = "2: FSDP1, which is also what Accelerate takes without it, cannot be planned"
    document.refuse((part, "fsdp_version"), allowed, replacement)


def _find_replacement(strategy: object) -> str:
    """Return FSDP2's options for a strategy of FSDP1, which has a name and a number from 1."""
    text, names = str(strategy).upper(), list(STRATEGIES)
    number = int(text) if text.isdecimal() and len(text) == 1 else 0
    name = names[number - 1] if 1 <= number <= len(names) else text
    return STRATEGIES.get(name, STRATEGIES["FULL_SHARD"])


def _check_wrap_policy(document: Document) -> None:
    """Warn if Accelerate would not shard the model layer by layer.

    Its default shards the root alone, so that all parameters are all-gathered at once (accelerate 1.15,
    utils/fsdp_utils.py, ``fsdp2_prepare_auto_wrap_policy``).
    """
    keys = ("fsdp_config", "fsdp_auto_wrap_policy")
    policy = document.get(*keys)
    if isinstance(policy, str) and policy.upper() == WRAP_POLICY:
        return
    units = "the whole model as one unit" if policy in (None, "NO_WRAP") else "other units"
    warn_user(
        f"{document.locate(*keys)} is {policy!r}: Accelerate then shards {units}; the plan shards each "
        f"decoder layer, as {WRAP_POLICY} does.",
        UserWarning,
    )


def _read_recomputation(document: Document, recipe: Recipe) -> FileFields:
    """Return the recipe's recomputation fields: Accelerate recomputes all layers, whole, or none."""
    keys = ("fsdp_config", "fsdp_activation_checkpointing")
    recomputes = bool(document.read_flag(*keys))
    if recomputes == (recipe.recompute == "full" and recipe.recompute_interval == 1):
        return {}
    return {"recompute": (keys, "full" if recomputes else "none"), "recompute_interval": (keys, 1)}


def _read_degrees(document: Document, stored: Fsdp2Layout | None, cluster: Cluster | None) -> FileFields:
    """Return the degrees. ``shard`` stays None, the remaining ranks, unless the stored layout sets it."""
    part = "parallelism_config"
    sizes = {
        field: document.read_number(part, key, low=1, high=2**20) for field, key in PARALLEL_KEYS.items()
    }
    degrees = {field: sizes[field] or 1 for field in ("replicate", "tp", "cp")}
    shard, num_replicas = sizes["shard"], prod(degrees.values())
    # If the degrees do not divide the GPUs, the layout raises the error.
    if cluster is not None and cluster.num_gpus % num_replicas == 0:
        # None and the remaining ranks mean the same; a plan that is read again must equal the exported one.
        remaining = cluster.num_gpus // num_replicas
        is_open = stored is None or stored.shard is None
        # accelerate's default is 1: it stops unless the product is the number of processes
        # (parallelism_config.py, _validate_accelerator).
        if shard is None and stored is None and num_replicas > 1 and remaining > 1:
            allowed = (
                f"{remaining}, the other ranks of {cluster}: accelerate's default is 1, with which it stops"
            )
            document.refuse((part, PARALLEL_KEYS["shard"]), allowed, Value(remaining))
        shard = None if shard in (None, remaining) and is_open else shard or remaining
    return {
        field: ((part, PARALLEL_KEYS[field]), size) for field, size in {**degrees, "shard": shard}.items()
    }


def _find_deepspeed_file(document: Document, file: Path) -> Path | None:
    """Return the JSON that the configuration names; None if DeepSpeed's options are inline."""
    part = "deepspeed_config"
    keys = (part, "deepspeed_config_file")
    planned = (keys[1], "gradient_accumulation_steps", *INLINE_DEEPSPEED, *STARTING_DEEPSPEED)
    document.check_keys((part,), planned, OTHER_DEEPSPEED)
    name = document.get(*keys)
    if name is None:
        return None
    for repeated in (*((part, key) for key in REFUSED_WITH_FILE), ("mixed_precision",)):
        if document.get(*repeated) is not None:
            document.refuse(repeated, f"nothing: it belongs in {name}, and accelerate stops", "leave it out")
    if not isinstance(name, str):
        document.refuse(keys, "the path of a JSON file", "'ds_config.json'")
    # Accelerate opens it from the current folder, exports start in their own.
    paths = [path for path in (file.parent / name, expand_home(name)) if path.is_file()]
    if not paths:
        allowed = "an existing file, relative to this file's folder or the current one"
        document.refuse(keys, allowed, f"the whole path of {Path(name).name}")
    if len({path.read_bytes() for path in paths}) > 1:
        allowed = (
            f"one file: {paths[0]} and {paths[1]} differ, and accelerate opens that of its current folder"
        )
        document.refuse(keys, allowed, repr(str(paths[0].absolute())))
    return paths[0]


def _read_inline_deepspeed(document: Document, parts: PlanParts) -> Plan:
    """Read the few inline DeepSpeed options; the others have DeepSpeed's defaults."""
    part = "deepspeed_config"
    # DeepSpeedPlugin's own default is stage 2 (accelerate/utils/dataclasses.py).
    layout = parts.layout if isinstance(parts.layout, ZeroLayout) else ZeroLayout()
    stage = document.read_number(part, "zero_stage", low=0, high=3)
    stage = 2 if stage is None else stage
    layout_fields: FileFields = {"stage": ((part, "zero_stage"), stage)}
    for field, key in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_params", "offload_param_device"),
    ):
        device = document.read_choice(part, key, among=("none", "cpu", "nvme"))
        # ``accelerate config`` asks for it in stage 2 too, where DeepSpeed ignores it.
        if field == "offload_params" and stage < 3 and device not in (None, "none"):
            document.add_ignored_key((part, key), IGNORED_OFFLOAD)
            device = None
        layout_fields[field] = ((part, key), None if device == "none" else device)
    # The file has the micro-batches of a rank, the recipe the global batch: the cluster converts them.
    # "auto", the plugin's default, is the number that the script passes to Accelerator.
    steps_keys = (part, "gradient_accumulation_steps")
    is_auto = document.get(*steps_keys) == "auto"
    steps = None if is_auto else document.read_number(*steps_keys, low=1, high=2**24)
    global_batch_size = None
    if steps is not None and parts.cluster is not None:
        num_data_ranks = parts.cluster.num_gpus // (layout.tp * layout.pp)
        global_batch_size = parts.recipe.micro_batch_size * steps * num_data_ranks
    recipe_fields: FileFields = {
        "precision": (("mixed_precision",), _read_precision(document, parts)),
        "global_batch_size": (steps_keys, global_batch_size),
    }
    return _build_plan(parts, document, layout, recipe_fields, layout_fields)


def _build_plan(
    parts: PlanParts, document: Document, start: Layout, recipe_fields: FileFields, layout_fields: FileFields
) -> Plan:
    """Return the plan of these fields of the file; other fields of the layout are those of ``start``."""
    values = {field: value for field, (_, value) in layout_fields.items()}
    return build_plan(
        parts,
        document,
        apply_to_recipe(parts.recipe, document, recipe_fields),
        {**recipe_fields, **layout_fields},
        lambda: replace_fields(start, values),
    )
