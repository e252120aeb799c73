"""Check of megatron-core's process groups, modules and optimizers against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardscope.core.number_format import format_count
from shardscope.frameworks.megatron.engine.context_parallel import check_attention
from shardscope.frameworks.megatron.engine.model import choose_attention, flatten_optimizers
from shardscope.frameworks.megatron.layout import get_layout

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

    from shardscope.core.plan import Plan


def read_back(
    plan: Plan, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, data_rank: int
) -> dict[str, object]:
    """Describe what megatron-core built, as JSON. Raises ``RuntimeError`` if it contradicts ``plan``."""
    layout = get_layout(plan)
    degrees, arch = plan.degrees, plan.architecture
    groups = _read_groups()
    _check_equal(
        groups,
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
    record = {**groups, **_read_modules(chunks), **_read_optimizer(chunks, optimizer)}
    experts = arch.mixture_of_experts
    _check_equal(
        record,
        {
            # With many stages, the first and the last may have no layers.
            "core_attention": [choose_attention(plan).__name__] if record["num_layers_here"] else [],
            "recompute": plan.recipe.recompute,
            "sequence_parallel": layout.splits_sequence,
            "distributed_optimizer": layout.distributed_optimizer,
            "num_layers_here": plan.stage_layers[groups["stage"]],
            "num_attention_heads_here": arch.num_attention_heads // degrees.tp,
            # A stage may have dense layers only.
            "num_experts_here": experts.num_experts // degrees.ep
            if experts and record["num_experts_here"]
            else 0,
        },
    )
    record |= check_attention(plan, chunks)
    layers = _gather_layers(record)
    if layers != list(range(plan.architecture.num_hidden_layers)):
        raise RuntimeError(f"the stages have layers {layers} of {plan.architecture.num_hidden_layers}")
    return record


def _check_equal(record: Mapping[str, object], planned: Mapping[str, object]) -> None:
    for name, value in planned.items():
        if record[name] != value:
            raise RuntimeError(
                f"the plan says {name.replace('_', ' ')} {value}, and Megatron-core has {record[name]}"
            )


def _read_groups() -> dict[str, int]:
    from megatron.core import parallel_state as state

    return {
        "tensor_parallel": state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": state.get_pipeline_model_parallel_world_size(),
        # None without the interleaved schedule.
        "virtual_pipeline": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context_parallel": state.get_context_parallel_world_size(),
        "expert_parallel": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel": state.get_expert_tensor_parallel_world_size(),
        "data_parallel": state.get_data_parallel_world_size(),
        "data_rank": state.get_data_parallel_rank(),
        "stage": state.get_pipeline_model_parallel_rank(),
    }


def _read_modules(chunks: list[DistributedDataParallel]) -> dict[str, object]:
    layers = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
    attention = layers[0].self_attention if layers else None
    experts = {
        module.num_local_experts for chunk in chunks for module in chunk.modules() if _has_experts(module)
    }
    qkv = getattr(attention, "linear_qkv", None)
    return {
        "module": type(chunks[0].module).__name__,
        # megatron-core numbers the whole model's layers from 1 (transformer_layer.py).
        "layers_here": [int(layer.layer_number) - 1 for layer in layers],
        "num_layers_here": len(layers),
        "num_attention_heads_here": getattr(attention, "num_attention_heads_per_partition", None),
        "qkv_shape_here": None if qkv is None else list(qkv.weight.shape),
        "core_attention": sorted({type(layer.self_attention.core_attention).__name__ for layer in layers}),
        "recompute": chunks[0].module.decoder.config.recompute_granularity or "none",
        "sequence_parallel": bool(getattr(qkv, "sequence_parallel", False)),
        "num_experts_here": max(experts, default=0),
        "num_chunks": len(chunks),
    }


def _has_experts(module: torch.nn.Module) -> bool:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return isinstance(module, MoELayer)


def _read_optimizer(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> dict[str, object]:
    """Return the optimizer's class, and the elements that this rank holds and updates."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = [part for part in flatten_optimizers(optimizer) if part.optimizer is not None]
    updated = sum(
        parameter.numel()
        for part in parts
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    )
    num_weights = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    is_distributed = all(isinstance(part, DistributedOptimizer) for part in parts)
    # The distributed optimizer updates this rank's shard of the buffers; any other one, all weights.
    if not is_distributed and updated != num_weights:
        raise RuntimeError(f"the optimizer updates {updated:,} of this rank's {num_weights:,} weights")
    return {
        "optimizer": " and ".join(sorted({type(part).__name__ for part in parts})),
        "inner_optimizer": " and ".join(sorted({type(part.optimizer).__name__ for part in parts})),
        "distributed_optimizer": is_distributed,
        "num_weights_here": num_weights,
        "num_weights_updated_here": updated,
        "overlap_grad_reduce": bool(chunks[0].ddp_config.overlap_grad_reduce),
        "overlap_param_gather": bool(chunks[0].ddp_config.overlap_param_gather),
    }


def _gather_layers(record: Mapping[str, object]) -> list[int]:
    """Return the layers of all stages in order, as one rank of each stage reports them. Collective."""
    of_ranks: list[tuple[int, list[int]]] = [(0, [])] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (record["stage"], record["layers_here"]))
    # The ranks of one stage report the same layers.
    by_stage = dict(of_ranks)
    return sorted(layer for layers in by_stage.values() for layer in layers)


def describe_built(record: Mapping[str, object], where: str) -> str:
    """Describe the result of :func:`read_back` in a sentence; ``where`` is for example "(gloo, cpu)"."""
    degrees = [
        f"{degree} {record[name]}"
        for degree, name in (
            ("tp", "tensor_parallel"),
            ("pp", "pipeline_parallel"),
            ("vpp", "virtual_pipeline"),
            ("cp", "context_parallel"),
            ("ep", "expert_parallel"),
            ("dp", "data_parallel"),
        )
        if record[name] != 1
    ]
    ranks = ", ".join(degrees) or "one rank"
    sequence = " with sequence parallelism" if record["sequence_parallel"] else ""
    # Rank 0 reports. If its stage has no layers, it has no attention class to name.
    names, num_chunks = record["core_attention"], record["num_chunks"]
    assert isinstance(names, list) and isinstance(num_chunks, int)
    attention = f" with {' and '.join(names)}" if names else ""
    context = f", sharded sequences{attention}" if record["context_parallel"] != 1 else ""
    state = "its state sharded" if record["distributed_optimizer"] else "its state replicated on each rank"
    return (
        f"Megatron-core: {record['module']} in {format_count(num_chunks, 'chunk')} a rank, {ranks}{sequence} "
        f"{where}, {record['optimizer']}, {state}{context}"
    )
