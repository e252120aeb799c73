"""Check of megatron-core's process groups, modules and optimizers against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardscope.core.number_format import count
from shardscope.frameworks.megatron.engine.context_parallel import check_attention
from shardscope.frameworks.megatron.engine.model import attention_of, leaves
from shardscope.frameworks.megatron.layout import MegatronLayout

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def read_back(plan: Plan, chunks: list[Any], optimizer: Any, data_rank: int) -> dict[str, Any]:
    """Describe what megatron-core built, as JSON. Raises ``RuntimeError`` if it contradicts ``plan``."""
    layout = plan.layout
    assert isinstance(layout, MegatronLayout)
    degrees, arch = plan.degrees, plan.architecture
    found = _groups()
    _compare(
        found,
        {
            "tensor_parallel": degrees.tp,
            "pipeline_parallel": degrees.pp,
            "virtual_pipeline": degrees.vpp,
            "context_parallel": degrees.cp,
            "expert_parallel": degrees.ep,
            "data_parallel": degrees.data_parallel,
            "data_rank": data_rank,
        },
    )
    found |= {**_modules(chunks), **_optimizer(chunks, optimizer)}
    experts = arch.mixture_of_experts
    _compare(
        found,
        {
            # With many stages, the first and the last may have no layers.
            "core_attention": [attention_of(plan).__name__] if found["num_layers_here"] else [],
            "recompute": plan.recipe.recompute,
            "sequence_parallel": layout.splits_sequence,
            "distributed_optimizer": layout.distributed_optimizer,
            "num_layers_here": plan.stage_layers[found["stage"]],
            "num_attention_heads_here": arch.num_attention_heads // degrees.tp,
            "num_experts_here": experts.num_experts // degrees.ep
            if experts and found["num_experts_here"]
            else 0,
        },
    )
    found |= check_attention(plan, chunks)
    layers = _all_layers(found)
    if layers != list(range(plan.architecture.num_hidden_layers)):
        raise RuntimeError(f"the stages hold layers {layers} of {plan.architecture.num_hidden_layers}")
    return found


def _compare(found: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    for name, value in planned.items():
        if found[name] != value:
            raise RuntimeError(
                f"the plan says {name.replace('_', ' ')} {value}, and Megatron-core has {found[name]}"
            )


def _groups() -> dict[str, Any]:
    from megatron.core import parallel_state as state

    return {
        "tensor_parallel": state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context_parallel": state.get_context_parallel_world_size(),
        "expert_parallel": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel": state.get_expert_tensor_parallel_world_size(),
        "data_parallel": state.get_data_parallel_world_size(),
        "data_rank": state.get_data_parallel_rank(),
        "stage": state.get_pipeline_model_parallel_rank(),
    }


def _modules(chunks: list[Any]) -> dict[str, Any]:
    layers = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
    attention = layers[0].self_attention if layers else None
    experts = {
        module.num_local_experts for chunk in chunks for module in chunk.modules() if _has_experts(module)
    }
    product = getattr(attention, "linear_qkv", None)
    return {
        "module": type(chunks[0].module).__name__,
        "layers_here": [int(layer.layer_number) - 1 for layer in layers],
        "num_layers_here": len(layers),
        "num_attention_heads_here": getattr(attention, "num_attention_heads_per_partition", None),
        "qkv_shape_here": None if product is None else list(product.weight.shape),
        "core_attention": sorted({type(layer.self_attention.core_attention).__name__ for layer in layers}),
        "recompute": chunks[0].module.decoder.config.recompute_granularity or "none",
        "sequence_parallel": bool(getattr(product, "sequence_parallel", False)),
        "num_experts_here": max(experts, default=0),
        "num_chunks": len(chunks),
    }


def _has_experts(module: torch.nn.Module) -> bool:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return isinstance(module, MoELayer)


def _optimizer(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's class, and the elements that this rank holds and updates."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = [part for part in leaves(optimizer) if part.optimizer is not None]
    updated = sum(
        parameter.numel()
        for part in parts
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    )
    held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    is_distributed = all(isinstance(part, DistributedOptimizer) for part in parts)
    if not is_distributed and updated != held:
        raise RuntimeError(f"the optimizer updates {updated:,} of this rank's {held:,} weights")
    return {
        "optimizer": " and ".join(sorted({type(part).__name__ for part in parts})),
        "inner_optimizer": " and ".join(sorted({type(part.optimizer).__name__ for part in parts})),
        "distributed_optimizer": is_distributed,
        "num_weights_here": held,
        "num_weights_updated_here": updated,
        "overlap_grad_reduce": bool(chunks[0].ddp_config.overlap_grad_reduce),
        "overlap_param_gather": bool(chunks[0].ddp_config.overlap_param_gather),
    }


def _all_layers(found: Mapping[str, Any]) -> list[int]:
    """Return the layers of all stages in order, as one rank of each stage reports them. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found["stage"], found["layers_here"]))
    by_stage = dict(everyone)
    return sorted(layer for layers in by_stage.values() for layer in layers)


def describe_built(found: Mapping[str, Any], where: str) -> str:
    """Describe the findings in one sentence; ``where`` is for example "(gloo, cpu)"."""
    named = [
        f"{word} {found[name]}"
        for word, name in (
            ("tp", "tensor_parallel"),
            ("pp", "pipeline_parallel"),
            ("vpp", "virtual_pipeline"),
            ("cp", "context_parallel"),
            ("ep", "expert_parallel"),
            ("dp", "data_parallel"),
        )
        if found[name] > 1
    ]
    cut = ", ".join(named) or "one rank"
    sequence = " with sequence parallelism" if found["sequence_parallel"] else ""
    # Rank 0 reports. If its stage has no layers, it has no attention class to name.
    under = f" under {' and '.join(found['core_attention'])}" if found["core_attention"] else ""
    parts = f", sequences in parts{under}" if found["context_parallel"] > 1 else ""
    shares = "its state in shares" if found["distributed_optimizer"] else "its state whole on each rank"
    return (
        f"Megatron-core: {found['module']} in {count(found['num_chunks'], 'chunk')} a rank, {cut}{sequence} "
        f"{where}, {found['optimizer']}, {shares}{parts}"
    )
