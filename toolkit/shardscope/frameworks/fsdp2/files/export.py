"""Exported files of FSDP2 plans: ``fully_shard``'s arguments, Accelerate's YAML, the Trainer's arguments and
train.py."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardscope.frameworks.accelerate.limits import why_not_accelerate_fsdp
from shardscope.frameworks.formats.accelerate_config import list_absent_files, render_accelerate_files
from shardscope.frameworks.formats.commands import add_commands
from shardscope.frameworks.formats.comment_fields import find_missing_fields
from shardscope.frameworks.formats.exported import Absent, Exported, describe_plan
from shardscope.frameworks.formats.train_file import PACKAGES, render_train_files
from shardscope.frameworks.formats.training_arguments import ARGUMENTS_FILE, render_training_arguments
from shardscope.frameworks.fsdp2.files import TRAINED_VALUES
from shardscope.frameworks.fsdp2.layout import get_layout, get_reshard_after_forward

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MIXED = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16", "fp8-mixed": "bfloat16"}
LAYOUT_FIELDS = ("shard", "replicate", "reshard_after_forward", "tp", "cp", "offload")
"""Layout fields that the exported files contain."""


def render_files(plan: Plan) -> list[Exported | Absent]:
    """Return the files that an export of an FSDP2 plan writes in addition to its JSON."""
    return [
        _render_arguments(plan),
        *_render_accelerate(plan),
        *add_commands(plan, *render_train_files(plan, TRAINED_VALUES), packages=PACKAGES),
    ]


def _render_arguments(plan: Plan) -> Exported:
    """Return the arguments of ``init_device_mesh``, ``fully_shard`` and its policies as a JSON file."""
    layout = get_layout(plan)
    degrees = plan.degrees
    kind = MIXED.get(plan.recipe.precision)
    # Outermost first, as Fsdp2Engine.make_mesh does; cp is an axis of its own, which the engine
    # merges into the shards.
    axes = {name: getattr(degrees, name) for name in ("pp", "replicate", "shard", "cp", "tp")}
    mesh = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
    offload = layout.offload == "cpu"
    contained = {"shard", "replicate", "reshard_after_forward", "tp", "pp", "cp", "offload", "vpp"}
    values = {
        "shardscope": {
            "what": describe_plan(plan),
            "other_plan_fields": dict(find_missing_fields(plan, (), contained)),
        },
        "init_device_mesh": {"mesh_shape": list(mesh.values()), "mesh_dim_names": list(mesh)},
        "fully_shard": {
            "units": "each decoder layer, then the root",
            # With cp each rank has a part of the same sequences, so gradients are reduced over it too.
            "mesh": _describe_mesh(degrees.replicate, degrees.cp),
            "reshard_after_forward": get_reshard_after_forward(plan),
            "root_reshard_after_forward": None,
        },
        "MixedPrecisionPolicy": {"param_dtype": kind, "reduce_dtype": "float32" if kind else None},
        "CPUOffloadPolicy": {"pin_memory": plan.on_gpu} if offload else None,
        "model_chunks_per_stage": degrees.vpp if degrees.pp > 1 else None,
    }
    return Exported(
        name="fsdp2_arguments.json",
        what="arguments of init_device_mesh, fully_shard, MixedPrecisionPolicy and CPUOffloadPolicy",
        text=json.dumps(values, indent=2) + "\n",
    )


def _describe_mesh(replicate: int, cp: int) -> str:
    """Return the part of the mesh that ``fully_shard`` gets: all axes of data, and ``cp``."""
    axes = [*(["replicate"] if replicate > 1 else []), "shard", *(["cp"] if cp > 1 else [])]
    flattened = ", with 'shard' and 'cp' flattened to one axis" if cp > 1 else ""
    return f"mesh[{', '.join(map(repr, axes))}]{flattened}"


def _render_accelerate(plan: Plan) -> list[Exported | Absent]:
    """Return Accelerate's YAML and the Trainer's arguments, or why a plan has none."""
    why = why_not_accelerate_fsdp(plan)
    if why is not None:
        return [*list_absent_files(why), Absent(name=ARGUMENTS_FILE, why=why)]
    layout = get_layout(plan)
    degrees, recipe = plan.degrees, plan.recipe
    # Accelerate wraps every decoder layer: it has no interval and no selective recomputation.
    checkpointing = recipe.recompute == "full" and recipe.recompute_interval == 1
    recipe_fields = {"recompute"} if checkpointing or recipe.recompute == "none" else set()
    # Accelerate and the Trainer take a boolean: resharding to fewer ranks becomes True.
    reshard, offload = bool(get_reshard_after_forward(plan)), layout.offload == "cpu"
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshard,
        "fsdp_offload_params": offload,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": checkpointing,
    }
    sections: dict[str, object] = {"fsdp_config": fsdp}
    notes = []
    # The plugin alone shards over all ranks; other axes of the mesh are a configuration of their own
    # (accelerate 1.15, parallelism_config.py).
    if degrees.replicate > 1 or degrees.tp > 1 or degrees.cp > 1:
        sections["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": degrees.replicate,
            "parallelism_config_dp_shard_size": degrees.shard,
            "parallelism_config_tp_size": degrees.tp,
            "parallelism_config_cp_size": degrees.cp,
        }
    # Accelerate's default mixed precision policy has one type for both.
    if recipe.precision.endswith("-mixed"):
        half = "fp16" if recipe.precision == "fp16-mixed" else "bf16"
        notes.append(
            f"Accelerate reduces gradients in {half}, the plan in fp32: "
            "FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script changes that."
        )
    # The Trainer's own names of the same options (transformers, TrainingArguments.fsdp_config).
    trainer = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": reshard,
            "cpu_offload": offload,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": checkpointing,
        },
    }
    trainer_notes = list(notes)
    if "parallelism_config" in sections:
        trainer_notes.insert(
            0, "Replicas, tp and cp are in accelerate_config.yaml: launch this with accelerate_launch.sh."
        )
    return [
        *render_accelerate_files(
            plan, "FSDP", sections, recipe_fields=recipe_fields, layout_fields=LAYOUT_FIELDS, notes=notes
        ),
        render_training_arguments(
            plan,
            trainer,
            eight_bit="adamw_torch_8bit",
            recipe_fields=recipe_fields,
            layout_fields=LAYOUT_FIELDS,
            notes=trainer_notes,
            checkpoints=False,
        ),
    ]
