"""Import of a plan from an accelerate configuration: DDP, FSDP2, or the DeepSpeed JSON that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import refuse
from shardscope.core.recipe import Recipe
from shardscope.core.text_positions import KeyPath
from shardscope.frameworks.ddp.layout import DdpLayout
from shardscope.frameworks.deepspeed.files import read as deepspeed
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.formats.accelerate_config import MIXED
from shardscope.frameworks.formats.documents import Document, read_json, read_text, read_yaml
from shardscope.frameworks.formats.sidecar_files import (
    PlanParts,
    apply_to_recipe,
    build_plan,
    load_plan_parts,
)
from shardscope.frameworks.formats.unsupported_fields import read_noted_fields
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan

TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
"""Supported values of ``distributed_type``."""
TOP_LEVEL = (
    *("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu"),
    *("fsdp_config", "parallelism_config", "deepspeed_config"),
)
OTHERS: Mapping[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "machine_rank": 0,
    "gpu_ids": "all",
    "main_process_ip": None,
    "main_process_port": 29500,
    "rdzv_backend": "static",
    "same_network": True,
    "main_training_function": "main",
    "enable_cpu_affinity": False,
    "debug": False,
    "fp8_config": {"backend": "AO"},
    "megatron_lm_config": {},
    "mpirun_config": {},
    "downcast_bf16": "no",
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
"""``ClusterConfig``'s other keys, and what ``accelerate config`` writes by itself."""
FSDP = ("version", "reshard_after_forward", "offload_params", "activation_checkpointing", "sharding_strategy")
OTHER_FSDP: Mapping[str, Any] = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
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
PARALLEL: Mapping[str, str] = {
    "replicate": "parallelism_config_dp_replicate_size",
    "shard": "parallelism_config_dp_shard_size",
    "tp": "parallelism_config_tp_size",
    "cp": "parallelism_config_cp_size",
}
OTHER_PARALLEL: Mapping[str, Any] = {
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length": None,
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": None,
}
RECIPE = frozenset(field.name for field in fields(Recipe))
STRATEGIES = {
    "FULL_SHARD": "fsdp_version: 2 with fsdp_reshard_after_forward: true",
    "SHARD_GRAD_OP": "fsdp_version: 2 with fsdp_reshard_after_forward: false",
    "HYBRID_SHARD": "fsdp_version: 2 with parallelism_config_dp_replicate_size",
    "NO_SHARD": "distributed_type: MULTI_GPU",
}
"""FSDP1's strategies -> the equivalent options today."""
INLINE = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
}
"""Keys of ``deepspeed_config`` that stand for a JSON's (accelerate/utils/dataclasses.py, DeepSpeedPlugin)."""
OTHER_DEEPSPEED = (
    *("deepspeed_multinode_launcher", "zero3_init_flag", "zero3_save_16bit_model", "gradient_clipping"),
    *("deepspeed_moe_layer_cls_names", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    "deepspeed_inclusion_filter",
)


def read(
    file: str | Path,
    architecture: Architecture | None = None,
    cluster: Cluster | None = None,
    recipe: Recipe | None = None,
) -> Plan:
    """Read a plan; see :meth:`shardscope.core.plan.Plan.from_accelerate`."""
    document = read_json(file) if str(file).endswith(".json") else read_yaml(file)
    document.check_keys((), TOP_LEVEL, OTHERS)
    if document.get("distributed_type") is None:
        refuse(f"{document.name}, distributed_type", None, ", ".join(TYPES), "distributed_type: FSDP")
    kind = document.read_choice("distributed_type", among=TYPES)
    rest = load_plan_parts(file, architecture, cluster, recipe)
    _check_ranks(document, rest)
    if kind == "DEEPSPEED":
        path = _deepspeed_file(document, Path(file).expanduser())
        return deepspeed.read(path, architecture, cluster, recipe) if path else _inline(document, rest)
    recipe_noted, layout_noted = read_noted_fields(
        document, read_text(file), Fsdp2Layout if kind == "FSDP" else DdpLayout
    )
    if rest.is_recipe_open:
        rest = replace(rest, recipe=apply_to_recipe(rest.recipe, document, recipe_noted))
    said: dict[str, tuple[KeyPath, Any]] = {
        "precision": (("mixed_precision",), _precision(document, rest.recipe))
    }
    if kind != "FSDP":
        return build_plan(rest, document, apply_to_recipe(rest.recipe, document, said), said, DdpLayout)
    start, layout_says = _fsdp(document, rest)
    if rest.layout is None:
        layout_says = {**layout_noted, **layout_says}
    said |= _recomputation(document, rest.recipe)
    values = {field: value for field, (_, value) in layout_says.items()}
    return build_plan(
        rest,
        document,
        apply_to_recipe(rest.recipe, document, said),
        {**said, **layout_says},
        lambda: replace(start, **values),
    )


def _check_ranks(document: Document, rest: PlanParts) -> None:
    """What the file says of machines and processes has to be what the cluster has, once there is one."""
    said = {key: document.read_number(key, low=-1) for key in ("num_processes", "num_machines")}
    use_cpu = document.read_flag("use_cpu")
    cluster = rest.cluster
    if cluster is None:
        return
    for key, number in (("num_processes", cluster.num_gpus), ("num_machines", cluster.num_nodes)):
        if said[key] not in (None, -1, number):
            document.refuse((key,), f"{number}, as {cluster} has", f"cluster=..., or {key}: {number}")
    is_cpu = cluster.gpu.vendor == "cpu"
    if use_cpu not in (None, is_cpu):
        document.refuse(("use_cpu",), f"{str(is_cpu).lower()} with {cluster}", str(is_cpu).lower())


def _precision(document: Document, recipe: Recipe) -> str | None:
    value = document.get("mixed_precision")
    if value is False:
        value = "no"  # YAML reads a bare no as false
    if value is None or MIXED[recipe.precision] == value:
        return None
    names = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-mixed", "no": "fp32"}
    if not isinstance(value, str) or value not in names:
        document.refuse(("mixed_precision",), ", ".join(map(repr, names)), "'bf16'")
    return names[value]


def _fsdp(document: Document, rest: PlanParts) -> tuple[Fsdp2Layout, dict[str, tuple[KeyPath, Any]]]:
    """The layout to begin with, and field -> (key, value) of what the file says of it."""
    part = "fsdp_config"
    document.check_keys((part,), [f"fsdp_{name}" for name in FSDP], OTHER_FSDP)
    document.check_keys(("parallelism_config",), PARALLEL.values(), OTHER_PARALLEL)
    version = document.read_number(part, "fsdp_version", low=1, high=2)
    strategy = document.get(part, "fsdp_sharding_strategy")
    if version != 2 or strategy is not None:
        instead = STRATEGIES.get(str(strategy), STRATEGIES["FULL_SHARD"])
        key = "fsdp_version" if document.get(part, "fsdp_version") is not None else "fsdp_sharding_strategy"
        allowed = "2: FSDP1 is not planned here" if key == "fsdp_version" else "nothing: FSDP2 has none"
        document.refuse((part, key), allowed, instead)
    before = rest.layout if isinstance(rest.layout, Fsdp2Layout) else None
    says = _parallel(document, before, rest.cluster)
    reshard = document.read_flag(part, "fsdp_reshard_after_forward")
    says["reshard_after_forward"] = (
        (part, "fsdp_reshard_after_forward"),
        True if reshard is None else reshard,
    )
    offload = "cpu" if document.read_flag(part, "fsdp_offload_params") else None
    says["offload"] = ((part, "fsdp_offload_params"), offload)
    if before is not None and not isinstance(before.reshard_after_forward, bool) and reshard is not False:
        # A group as large as the whole one, which an export writes as true.
        says["reshard_after_forward"] = (says["reshard_after_forward"][0], before.reshard_after_forward)
    return before or Fsdp2Layout(), says


def _recomputation(document: Document, recipe: Recipe) -> dict[str, tuple[KeyPath, Any]]:
    """Field -> (key, value): the format knows whole layers, all of them, or nothing."""
    keys = ("fsdp_config", "fsdp_activation_checkpointing")
    wanted = bool(document.read_flag(*keys))
    if wanted == (recipe.recompute == "full" and recipe.recompute_interval == 1):
        return {}
    return {"recompute": (keys, "full" if wanted else "none"), "recompute_interval": (keys, 1)}


def _parallel(
    document: Document, before: Fsdp2Layout | None, cluster: Cluster | None
) -> dict[str, tuple[KeyPath, Any]]:
    """Field -> (key, value) of the degrees; ``shard`` stays open where it takes what the others leave."""
    part = "parallelism_config"
    sizes = {field: document.read_number(part, key, low=1, high=2**20) for field, key in PARALLEL.items()}
    says: dict[str, tuple[KeyPath, Any]] = {
        field: ((part, PARALLEL[field]), sizes[field] or 1) for field in ("replicate", "tp", "cp")
    }
    shard = sizes["shard"]
    others = prod(size for _, size in says.values())
    if cluster is not None and cluster.num_gpus % others == 0:  # else the layout refuses the others
        left = cluster.num_gpus // others
        was_open = before is None or before.shard is None
        shard = None if shard in (None, left) and was_open else shard or left
    says["shard"] = ((part, PARALLEL["shard"]), shard)
    return says


def _deepspeed_file(document: Document, file: Path) -> Path | None:
    """The JSON that the configuration names; None where it says a few options itself."""
    part = "deepspeed_config"
    keys = (part, "deepspeed_config_file")
    document.check_keys((part,), (keys[1], "gradient_accumulation_steps", *INLINE), OTHER_DEEPSPEED)
    named = document.get(*keys)
    if named is None:
        return None
    if not isinstance(named, str):
        document.refuse(keys, "the path of a JSON file", "'ds_config.json'")
    path = file.parent / named
    if not path.is_file():
        document.refuse(keys, "a file that exists, from this file's folder on", "'ds_config.json'")
    return path


def _inline(document: Document, rest: PlanParts) -> Plan:
    """Read the few inline DeepSpeed options; the others have DeepSpeed's defaults."""
    part = "deepspeed_config"
    layout = rest.layout if isinstance(rest.layout, ZeroLayout) else ZeroLayout()
    stage = document.read_number(part, "zero_stage", low=0, high=3)
    says: dict[str, tuple[KeyPath, Any]] = {"stage": ((part, "zero_stage"), 2 if stage is None else stage)}
    for field, key in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_params", "offload_param_device"),
    ):
        device = document.read_choice(part, key, among=("none", "cpu", "nvme"))
        says[field] = ((part, key), None if device == "none" else device)
    values = {field: value for field, (_, value) in says.items()}
    steps = document.read_number(part, "gradient_accumulation_steps", low=1, high=2**24)
    total = None
    if steps is not None and rest.cluster is not None:
        total = rest.recipe.micro_batch_size * steps * (rest.cluster.num_gpus // (layout.tp * layout.pp))
    said: dict[str, tuple[KeyPath, Any]] = {
        "precision": (("mixed_precision",), _precision(document, rest.recipe)),
        "global_batch_size": ((part, "gradient_accumulation_steps"), total),
    }
    recipe = apply_to_recipe(rest.recipe, document, said)
    return build_plan(rest, document, recipe, {**said, **says}, lambda: replace(layout, **values))
