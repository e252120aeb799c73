"""Tensor parallelism of transformers modules: the plan for ``parallelize_module``.

It is PyTorch's plan for a decoder (torchtitan, ``models/llama3/infra/parallelize.py``): column-parallel, then
row-parallel projections, norms and the residual stream sharded along the sequence, and the vocabulary sharded
for embedding, head and loss. Unsharded sequences exist only inside attention and feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardscope.training.model.on_meta import find_tied_names, tie_parameters
from shardscope.training.model.recompute import decoder_layers

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc")
"""Column-parallel projections, which read the residual stream: each rank has some of their outputs."""
ROWS = ("o_proj", "down_proj", "c_proj")
"""Row-parallel projections into the stream: each rank has some of their inputs, and outputs are summed."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of single heads, which each rank applies to its own heads."""


def parallelize(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to ``model``, a transformers causal language model, over ``mesh``, in place.

    Every rank must have the same weights, or parameters on meta: no weights are sent. The loss and its
    backward must run under ``torch.distributed.tensor.parallel.loss_parallel``. Raises ``ValueError`` for a
    module with parameters that the plan does not cover.
    """
    tied = find_tied_names(model)
    outer = {name: style for name, style in _outer_plan().items() if _has(model, name)}
    parallelize_module(model, mesh, outer, src_data_rank=None)
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, _layer_plan(layer), src_data_rank=None)
    tie_parameters(model, tied)


def _has(model: torch.nn.Module, name: str) -> bool:
    """Return whether ``model`` has the module with parameters: a pipeline stage lacks some of them."""
    return any(
        found == name and any(True for _ in module.parameters()) for found, module in model.named_modules()
    )


def _outer_plan() -> dict[str, ParallelStyle]:
    """Return the styles of embedding, final norm and head.

    The embedding's output is sharded along the sequence, the head's output along the vocabulary.
    """
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def _layer_plan(layer: torch.nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of one decoder layer's modules.

    Attention and feed-forward all-gather the sequence; their outputs and the norms are sharded along it.
    Raises ``ValueError`` for other modules with parameters.
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in COLUMNS:
            plan[name] = ColwiseParallel()
        elif leaf in ROWS:
            plan[name] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        elif leaf in HEAD_NORMS:
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif "." not in name and leaf.endswith("norm"):
            plan[name] = SequenceParallel()
        elif leaf == "self_attn":
            plan[name] = _whole_sequence(keyword="hidden_states")
        elif leaf == "mlp":
            plan[name] = _whole_sequence()
        elif any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"{type(layer).__name__}.{name} has parameters, and no place in the plan")
    return plan


def _whole_sequence(keyword: str | None = None) -> ParallelStyle:
    if keyword is None:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    whole: dict[str, Any] = {keyword: Replicate()}
    return PrepareModuleInput(input_kwarg_layouts={keyword: Shard(1)}, desired_input_kwarg_layouts=whole)
