"""A plan as adapters receive it: its four parts in full, and what follows from them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from math import prod
from typing import Any

import shardscope as ss
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.modules.attention import is_eager


def describe_plan(name: str, plan: ss.Plan, *, is_timed: bool = False, **more: str | None) -> dict[str, Any]:
    """Describe ``plan`` as JSON values, under the id ``name``; with seconds if ``is_timed``.

    ``more`` may have a zero-bubble ``schedule`` that ran, and a version of ``transformer_engine``.
    """
    arch, cluster = plan.architecture, plan.cluster
    return {
        "id": name,
        "is_timed": is_timed,
        "schedule": None,
        "transformer_engine": None,
        **more,
        "architecture": arch.to_dict(),
        "recipe": plan.recipe.to_dict(),
        "layout": plan.layout.to_dict(),
        "degrees": asdict(plan.degrees),
        "gpu": cluster.gpu.to_dict(),
        "gpus_per_node": cluster.gpus_per_node,
        "num_nodes": cluster.num_nodes,
        "world_size": plan.world_size,
        "links": {
            "intra_node": cluster.intra_node_link.bandwidth_bytes_per_second,
            "inter_node": cluster.inter_node_link.bandwidth_bytes_per_second,
        },
        "num_micro_batches": plan.num_micro_batches,
        "stage_layers": plan.stage_layers,
        "sequence_parallel": plan.layout.splits_sequence,
        "zero_stage": find_zero_stage(plan.layout.to_dict()),
        "has_unfused_attention": is_eager(arch, find_modules(plan)),
        "num_parameters": arch.num_parameters,
        "num_dense_layers": arch.num_hidden_layers - arch.num_moe_layers,
        "largest_module_parameters": count_largest_module(arch),
        "hf_config": _build_hf_config(arch),
    }


def find_zero_stage(layout: dict[str, Any]) -> int:
    """Return the ZeRO stage that shards as much as the layout does."""
    stages = {
        "ddp": 0,
        "fsdp2": 3 if layout.get("reshard_after_forward") else 2,
        "deepspeed": layout.get("stage", 0),
        "megatron": int(layout.get("distributed_optimizer", 0)),
    }
    return stages[layout["framework"]]


def count_largest_module(arch: ss.Architecture) -> int:
    """Count the parameters of the module that has most of its own, as DeepSpeed does."""
    layers = {arch.is_moe_layer(index): arch.layer_shapes(index) for index in range(arch.num_hidden_layers)}
    largest = 0
    for parameters in (arch.outer_shapes, *layers.values()):
        sizes: Counter[str] = Counter()
        for parameter in parameters:
            sizes[parameter.name.rpartition(".")[0]] += prod(parameter.shape)
        largest = max(largest, *sizes.values())
    return largest


def _build_hf_config(arch: ss.Architecture) -> str | None:
    """Return the transformers config that the model is trained from, as JSON; None without one."""
    from transformers import AutoConfig

    from shardscope.training.model.model import config_values

    try:
        values = config_values(arch)
        AutoConfig.for_model(arch.model_type, **values)
    except ValueError:
        return None
    return json.dumps({"model_type": arch.model_type, **values}, sort_keys=True)
