"""Loading of transformers weights into the model chunks of this rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardscope.frameworks.megatron.weights.conversion import Part, megatron_tensor, places
from shardscope.frameworks.megatron.weights.main_copies import MainWeights

if TYPE_CHECKING:
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
    chunks: Sequence[Any],
    state: Mapping[str, Any],
    arch: Architecture,
    optimizer: Any = None,
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
        model = unwrapped(chunk)
        part = part_of(model)
        mine = local_parameters(model)
        wanted = {place.name: place for place in places(arch, part)}
        if wanted.keys() != mine.keys():
            raise RuntimeError(
                f"the model chunk and the mapping of {arch.model_type} differ: only the chunk has "
                f"{sorted(mine.keys() - wanted.keys())}, only the mapping "
                f"{sorted(wanted.keys() - mine.keys())}"
            )
        for name, parameter in mine.items():
            value = megatron_tensor(state, arch, wanted[name], part)
            if value.shape != parameter.shape:
                raise RuntimeError(f"{name} is {tuple(parameter.shape)} here and {tuple(value.shape)} there")
            main.write(parameter, value.to(parameter.device))


def part_of(model: Any) -> Part:
    """Return the part of the whole model that a ``GPTModel`` of this rank holds."""
    from megatron.core import parallel_state

    return Part(
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


def local_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return a chunk's parameters under the names of Megatron's local modules."""
    found = {}
    for name, parameter in model.named_parameters():
        for spelling, ours in _TRANSFORMER_ENGINE:
            name = spelling.sub(ours, name)
        found[name] = parameter
    return found


def unwrapped(chunk: Any) -> Any:
    """Return the ``GPTModel`` inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def mute_padding(chunks: Sequence[Any], arch: Architecture) -> None:
    """Exclude the padding rows of the vocabulary from the loss, as transformers has none.

    Megatron-core's softmax includes them. Call this once, after the chunks are built; without padding it does
    nothing.
    """
    for chunk in chunks:
        model = unwrapped(chunk)
        if model.post_process:
            width = model.output_layer.output_size_per_partition
            real = max(arch.vocab_size - part_of(model).tp_rank * width, 0)
            if real < width:
                model.output_layer.register_forward_hook(_Muted(real))


class _Muted:
    """A forward hook that sets the logits from ``num_real`` on to their dtype's minimum."""

    def __init__(self, num_real: int) -> None:
        self.num_real = num_real

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        logits, bias = output
        padding = torch.arange(logits.shape[-1], device=logits.device) >= self.num_real
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias
