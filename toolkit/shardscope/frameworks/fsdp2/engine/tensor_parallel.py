"""Tensor parallelism of transformers modules: the plan for ``parallelize_module``.

It is PyTorch's plan for a decoder (torchtitan, ``models/llama3/infra/parallelize.py``): column-parallel, then
row-parallel projections, norms and the residual stream sharded along the sequence, and the vocabulary sharded
for embedding, head and loss. Unsharded sequences exist only inside attention and feed-forward.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardscope.training.model.meta_device import find_tied_names, tie_parameters
from shardscope.training.model.recompute import list_decoder_layers

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc")
"""Column-parallel projections, which read the residual stream: each rank has some of their outputs."""
ROWS = ("o_proj", "down_proj", "c_proj")
"""Row-parallel projections into the stream: each rank has some of their inputs, and outputs are summed."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of single heads, which each rank applies to its own heads."""


def apply_tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to ``model``, a transformers causal language model, over ``mesh``, in place.

    Every rank must have the same weights, or parameters on meta: no weights are sent. The loss and its
    backward must run under ``torch.distributed.tensor.parallel.loss_parallel``. Raises ``ValueError`` for a
    module with parameters that the plan does not cover.
    """
    # distribute_module replaces each module's parameters by DTensors of its own (torch 2.13,
    # distributed/tensor/_api.py), so a tied embedding and head would become two parameters.
    tied = find_tied_names(model)
    # A pipeline stage lacks the embedding or the head, and has an Identity in place of the norm.
    modules = dict(model.named_modules())
    outer_styles = {
        name: style
        for name, style in _build_outer_styles().items()
        if name in modules and _has_parameters(modules[name])
    }
    # src_data_rank=None: every rank shards its own copy, where the default would scatter rank 0's.
    parallelize_module(model, mesh, outer_styles, src_data_rank=None)
    for layer in list_decoder_layers(model):
        parallelize_module(layer, mesh, _build_layer_styles(layer), src_data_rank=None)
    tie_parameters(model, tied)


def _has_parameters(module: torch.nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def _build_outer_styles() -> dict[str, ParallelStyle]:
    """Return the styles of embedding, final norm and head.

    The embedding's output is sharded along the sequence, the head's output along the vocabulary.
    """
    # use_local_output=False keeps DTensors, from which the norms and loss_parallel read how they are sharded.
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def _build_layer_styles(layer: torch.nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of one decoder layer's modules.

    Attention and feed-forward all-gather the sequence; their outputs and the norms are sharded along it.
    Raises ``ValueError`` for other modules with parameters.
    """
    styles: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in COLUMNS:
            styles[name] = ColwiseParallel()
        elif leaf in ROWS:
            # Each rank has a partial sum of all outputs: they are reduce-scattered along the sequence.
            styles[name] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        elif leaf in HEAD_NORMS:
            # (batch, sequence, heads, head dimension): the dimension that is sharded here is the heads'.
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        # The layer's own norms, which read the residual stream; those of attention are HEAD_NORMS.
        elif "." not in name and leaf.endswith("norm"):
            styles[name] = SequenceParallel()
        elif leaf == "self_attn":
            # transformers' decoder layers call self_attn(hidden_states=...), and mlp(x).
            styles[name] = _gather_sequence(keyword="hidden_states")
        elif leaf == "mlp":
            styles[name] = _gather_sequence()
        elif _has_parameters(module, recurse=False):
            raise ValueError(
                f"{type(layer).__name__}.{name} has parameters, and no tensor-parallel style; allowed: "
                "projections of attention and feed-forward, and norms. Nearest fix: tp=1."
            )
    return styles


def _gather_sequence(keyword: str | None = None) -> ParallelStyle:
    """Return the style that all-gathers a module's input along the sequence: its first, or ``keyword``."""
    if keyword is None:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    sharded: dict[str, Placement] = {keyword: Shard(1)}
    full: dict[str, Placement] = {keyword: Replicate()}
    return PrepareModuleInput(input_kwarg_layouts=sharded, desired_input_kwarg_layouts=full)
