"""Loading of transformers weights into the model chunks of this rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardscope.frameworks.megatron.weights.conversion import (
    ChunkSlice,
    TensorSource,
    build_shard,
    list_parameters,
)
from shardscope.frameworks.megatron.weights.main_weights import MainWeights

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

    from shardscope.core.architecture import Architecture

_TRANSFORMER_ENGINE = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_"), "input_layernorm."),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_"), "pre_mlp_layernorm."),
    (
        re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$"),
        r"mlp.experts.local_experts.\3.linear_fc\1.\2",
    ),
)
"""Transformer Engine's parameter names and those of Megatron's local modules, as regular expressions."""


def load_hf(
    chunks: Sequence[DistributedDataParallel],
    state: Mapping[str, TensorSource],
    arch: Architecture,
    optimizer: MegatronOptimizer | None = None,
) -> None:
    """Copy this rank's shards of ``state`` (a transformers model's ``state_dict()``) into its model chunks.

    Tensors are accessed one by one, so ``state`` may load each lazily.

    ``chunks`` are ``GPTModel``s, wrapped or not (``DistributedDataParallel``, ``Float16Module``), after
    ``initialize_model_parallel``. Without ``optimizer``, call this before the optimizer is built, which
    copies the weights. With ``optimizer``, its fp32 main weights get the values of ``state`` without rounding
    to 16 bits. Raises ``RuntimeError`` if a parameter gets no value, or one of another shape.
    """
    main = MainWeights(optimizer)
    for chunk in chunks:
        model = unwrap(chunk)
        part = read_slice(model)
        parameters = get_local_parameters(model)
        mapped = {parameter.name: parameter for parameter in list_parameters(arch, part)}
        # Compare names before copying anything: an incomplete mapping would train uninitialized weights.
        if mapped.keys() != parameters.keys():
            raise RuntimeError(
                f"the model chunk and the mapping of {arch.model_type} differ: only the chunk has "
                f"{sorted(parameters.keys() - mapped.keys())}, only the mapping "
                f"{sorted(mapped.keys() - parameters.keys())}"
            )
        for name, parameter in parameters.items():
            value = build_shard(state, arch, mapped[name], part)
            if value.shape != parameter.shape:
                raise RuntimeError(
                    f"{name} has shape {tuple(parameter.shape)}, its weights {tuple(value.shape)}"
                )
            main.write(parameter, value.to(parameter.device))


def read_slice(model: GPTModel) -> ChunkSlice:
    """Return the part of the whole model that a ``GPTModel`` of this rank holds."""
    from megatron.core import parallel_state

    return ChunkSlice(
        # megatron-core numbers the whole model's layers from 1 (transformer_layer.py).
        layers=tuple(layer.layer_number - 1 for layer in model.decoder.layers),
        embedding=model.pre_process,
        head=model.post_process,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def get_local_parameters(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Return a chunk's parameters under the names of Megatron's local modules."""
    parameters = {}
    for name, parameter in model.named_parameters():
        for pattern, replacement in _TRANSFORMER_ENGINE:
            name = pattern.sub(replacement, name)
        parameters[name] = parameter
    return parameters


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """Return the ``GPTModel`` inside its wrappers."""
    inner: GPTModel = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def mute_padding(chunks: Sequence[DistributedDataParallel], arch: Architecture) -> None:
    """Exclude the padding rows of the vocabulary from the loss, as transformers has none.

    Megatron-core's softmax includes them. Call this once, after the chunks are built; without padding it does
    nothing.
    """
    for chunk in chunks:
        model = unwrap(chunk)
        if model.post_process:
            width = model.output_layer.output_size_per_partition
            # This rank's rows of the real vocabulary: all, some, or none of them.
            num_real = max(arch.vocab_size - read_slice(model).tp_rank * width, 0)
            if num_real < width:
                model.output_layer.register_forward_hook(partial(_mute_logits, num_real))


def _mute_logits(
    num_real: int,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Set the logits from ``num_real`` on to their dtype's minimum; a forward hook."""
    logits, bias = output
    padding = torch.arange(logits.shape[-1], device=logits.device) >= num_real
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias
