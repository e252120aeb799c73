"""FSDP2 for a user's script: Accelerate's FSDP plugin, version 2, with its ``ParallelismConfig``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import count
from shardscope.frameworks.accelerate.plugins import contradicts
from shardscope.frameworks.fsdp2.layout import get_reshard_after_forward

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def check_installed(plan: Plan) -> None:
    """Check nothing: the engine's own requirements suffice."""


def distributed_types(plan: Plan) -> tuple[str, ...]:
    """Return the one distributed type of all meshes."""
    return ("FSDP",)


def environment(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the variables for ``FullyShardedDataParallelPlugin`` (accelerate/utils/dataclasses.py) and
    ``ParallelismConfig`` (accelerate/parallelism_config.py)."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    checkpointing = recipe.recompute == "full" and recipe.recompute_interval == 1
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": _said(get_reshard_after_forward(plan)),
        "FSDP_OFFLOAD_PARAMS": _said(layout.offload == "cpu"),
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        # Weights are broadcast from rank 0, so ranks need not use the same seed.
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": _said(checkpointing),
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(degrees.replicate),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(degrees.shard),
        "PARALLELISM_CONFIG_TP_SIZE": str(degrees.tp),
        "PARALLELISM_CONFIG_CP_SIZE": str(degrees.cp),
        "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    }


def told(plan: Plan, accelerator: Any) -> None:
    """Set fp32 gradient reduction, as the plan assumes; environment variables cannot express it."""
    from torch import float32
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    if policy is not None and policy == MixedPrecisionPolicy(*[policy.param_dtype] * 3):
        # Only if the policy is Accelerate's default: a script may set another.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype, reduce_dtype=float32, output_dtype=policy.output_dtype
        )


def read_back(plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
    """Check and describe the DTensors' mesh, the shards' device, and resharding after forward."""
    from torch.distributed.tensor import DTensor, Shard

    from shardscope.training.optimizers.gradients import local_shard

    parameters = dict(model.named_parameters())
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if whole:
        shown = ", ".join(whole[:3])
        raise contradicts("FSDP2", f"a model with {count(len(whole), 'whole parameter')} ({shown})")
    planned = _mesh(plan)
    sharded: Any
    for name, sharded in parameters.items():
        mesh = tuple(sharded.device_mesh.shape)
        if mesh != planned or not any(isinstance(placement, Shard) for placement in sharded.placements):
            raise contradicts(f"shards over a mesh of {planned}", f"{name} {sharded.placements} over {mesh}")
    first: Any = next(iter(parameters.values()))
    homes = {local_shard(parameter).device.type for parameter in parameters.values()}
    home = "cpu" if getattr(plan.layout, "offload", None) == "cpu" else accelerator.device.type
    if homes != {home}:
        raise contradicts(f"shards on {home}", f"shards on {' and '.join(sorted(homes))}")
    reshards = _reshards(model)
    # The root, and the head with its norm, are used again at once and never resharded.
    found, planned_so = reshards[True] > 0, bool(get_reshard_after_forward(plan))
    if found != planned_so and reshards.total() > 1:
        raise contradicts(f"reshard_after_forward={planned_so}", f"reshard_after_forward={found}")
    policy = model._get_fsdp_state()._mp_policy
    shards = planned[-2] if plan.degrees.tp > 1 else planned[-1]
    return {
        "module": type(model).__name__,
        "mesh_shape": list(planned),
        "mesh_axes": list(first.device_mesh.mesh_dim_names or ()),
        "num_sharded_tensors": len(parameters),
        "num_weights_here": sum(local_shard(parameter).numel() for parameter in parameters.values()),
        "placements": dict(Counter(str(tuple(p.placements)) for p in parameters.values())),
        "reshard_after_forward": {str(value): number for value, number in reshards.items()},
        "parameters_on": home,
        "param_dtype": str(policy.param_dtype).removeprefix("torch."),
        "reduce_dtype": str(policy.reduce_dtype).removeprefix("torch."),
        "words": f"FSDP2: all {len(parameters)} parameter tensors are DTensors, sharded over "
        f"{count(shards, 'rank')}",
    }


def _mesh(plan: Plan) -> tuple[int, ...]:
    """Return the shape of Accelerate's mesh: replicas, shards (including cp), tp."""
    degrees = plan.degrees
    shape = (*((degrees.replicate,) * (degrees.replicate > 1)), degrees.shard * degrees.cp)
    return (*shape, degrees.tp) if degrees.tp > 1 else shape


def _reshards(model: Any) -> Counter[bool]:
    """Count the parameter groups that are resharded after forward, and those that are not."""
    from shardscope.frameworks.fsdp2.engine.inspection import groups_of

    groups = (group for module in model.modules() for group in groups_of(module))
    return Counter(group.post_forward_mesh_info is not None for group in groups)


def _said(value: object) -> str:
    return str(bool(value)).lower()
