"""Export of the model chunks of all ranks to transformers, gathered tensor by tensor on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shardscope.frameworks.megatron.hf_names import get_layer_prefix
from shardscope.frameworks.megatron.weights.conversion import (
    ChunkParameter,
    ChunkSlice,
    join_shards,
    list_parameters,
    split_tensor,
)
from shardscope.frameworks.megatron.weights.load import get_local_parameters, read_slice, unwrap
from shardscope.frameworks.megatron.weights.main_weights import MainWeights, get_data_group
from shardscope.training.weights.pretrained import MAX_FILE_BYTES, write_pretrained

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer
    from transformers import PretrainedConfig

    from shardscope.core.architecture import Architecture


def export_hf(
    chunks: Sequence[DistributedDataParallel],
    arch: Architecture,
    hf_config: PretrainedConfig,
    path: Path,
    optimizer: MegatronOptimizer | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder (config.json, model*.safetensors) for ``AutoModelForCausalLM.from_pretrained``.

    Collective over all ranks. ``hf_config`` is the transformers config of the model that was loaded. With
    ``optimizer`` the fp32 main weights are written, without it the weights in the dtype of the chunks. Rank 0
    holds one file's tensors at a time.
    """
    from transformers import AutoModelForCausalLM

    # On meta: only its class, config and names are read, and rank 0 could not hold all of its weights.
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config)
    write_pretrained(path, skeleton, gather_tensors(chunks, arch, optimizer), max_file_bytes=max_file_bytes)


def gather_tensors(
    chunks: Sequence[DistributedDataParallel], arch: Architecture, optimizer: MegatronOptimizer | None = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (transformers name, whole tensor) layer by layer; the tensor is None except on rank 0.

    Collective: all ranks must iterate to the end. Each tensor is gathered on the first rank of its pipeline
    stage, then sent to rank 0.
    """
    wait_for_weights(chunks)
    main, shapes = MainWeights(optimizer), _list_shapes(arch)
    models = [unwrap(chunk) for chunk in chunks]
    device = next(models[0].parameters()).device
    for stage in _list_stages(models, main):
        for number, part in enumerate(stage.parts):
            local = get_local_parameters(models[number]) if stage.is_local else None
            for parameter in _list_distinct(arch, part):
                tensors = _gather_parameter(local, parameter, arch, main) if local is not None else None
                for index, leaf in enumerate(parameter.mapping.hf):
                    name = parameter.prefix + leaf
                    tensor = tensors[index] if tensors is not None else None
                    yield name, _send_to_rank_zero(tensor, stage, shapes[name], device)


class _Stage(NamedTuple):
    """One pipeline stage; every rank has the same description except ``is_local``."""

    parts: tuple[ChunkSlice, ...]
    """Parts of the stage's first rank, one for each chunk."""
    writer: int
    """Global rank of the stage's first rank, which gathers its tensors."""
    is_local: bool
    """Whether this rank belongs to the stage."""
    dtype: torch.dtype


def _list_stages(models: Sequence[GPTModel], main: MainWeights) -> list[_Stage]:
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    first = parallel_state.get_tensor_model_parallel_rank() == data == 0
    dtype = main.get_read_dtype(next(models[0].parameters()))
    # Only the first rank of each stage describes it.
    description = (stage, tuple(read_slice(model) for model in models), dtype) if first else None
    descriptions: list[tuple[int, tuple[ChunkSlice, ...], torch.dtype] | None] = [
        None
    ] * dist.get_world_size()
    dist.all_gather_object(descriptions, description)
    by_number = {}
    for rank, of_rank in enumerate(descriptions):
        if of_rank is not None:
            number, parts, stage_dtype = of_rank
            by_number[number] = _Stage(parts, rank, number == stage, stage_dtype)
    return [by_number[number] for number in sorted(by_number)]


def _list_distinct(arch: Architecture, part: ChunkSlice) -> Iterator[ChunkParameter]:
    """Yield the parameters of a chunk, with only the first expert of a layer and without a tied head."""
    for parameter in list_parameters(arch, part):
        tied = parameter.mapping.megatron == "output_layer.weight" and arch.tie_word_embeddings
        if parameter.expert in (None, 0) and not tied:
            yield parameter


def _gather_parameter(
    local: dict[str, torch.nn.Parameter], parameter: ChunkParameter, arch: Architecture, main: MainWeights
) -> tuple[torch.Tensor, ...] | None:
    """Gather one parameter, or that of all experts, as transformers tensors on the stage's first rank.

    Returns None on its other ranks. Collective over the stage.
    """
    from megatron.core import parallel_state

    if parameter.expert is None:
        value = main.read(local[parameter.name])
        # Data-parallel ranks have replicas of this shard: the first one takes part in the gather.
        if dist.get_rank(get_data_group(local[parameter.name])):
            return None
        parts = _gather_shards(value, parallel_state.get_tensor_model_parallel_group())
        return split_tensor(join_shards(parts, parameter.mapping), arch, parameter.mapping) if parts else None
    # Experts one by one over their own tensor-parallel group, then their stacks over the expert-parallel one.
    experts = []
    names = [
        parameter.name.replace("local_experts.0.", f"local_experts.{i}.")
        for i in range(_count_local_experts(arch))
    ]
    for name in names:
        value = main.read(local[name])
        if dist.get_rank(get_data_group(local[name])):
            continue
        parts = _gather_shards(value, parallel_state.get_expert_tensor_parallel_group())
        if parts:
            experts.append(join_shards(parts, parameter.mapping))
    if not experts:
        return None
    stacks = _gather_shards(torch.stack(experts), parallel_state.get_expert_model_parallel_group())
    return (torch.cat(stacks),) if stacks else None


def _count_local_experts(arch: Architecture) -> int:
    from megatron.core import parallel_state

    assert arch.mixture_of_experts is not None
    return arch.mixture_of_experts.num_experts // int(parallel_state.get_expert_model_parallel_world_size())


def _gather_shards(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather a group's tensors, all of one shape, on its first rank; empty on the others."""
    size = dist.get_world_size(group)
    if size == 1:
        return [tensor]
    tensor = tensor.contiguous()
    tensors = [torch.empty_like(tensor) for _ in range(size)] if dist.get_rank(group) == 0 else None
    dist.gather(tensor, tensors, dst=dist.get_global_rank(group, 0), group=group)
    return tensors or []


def _send_to_rank_zero(
    tensor: torch.Tensor | None, stage: _Stage, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    """Send the tensor from its stage's first rank to rank 0's host memory; None on other ranks."""
    # The first stage's first rank is rank 0 itself.
    if stage.writer == 0:
        return tensor.cpu() if tensor is not None else None
    if tensor is not None:
        dist.send(tensor.contiguous(), dst=0)
    if dist.get_rank():
        return None
    # On the device, not in host memory, which NCCL cannot receive into.
    received = torch.empty(shape, dtype=stage.dtype, device=device)
    dist.recv(received, src=stage.writer)
    return received.cpu()


def _list_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model, by transformers name."""
    shapes = {parameter.name: parameter.shape for parameter in arch.outer_shapes}
    for layer in range(arch.num_hidden_layers):
        prefix = get_layer_prefix(arch, layer)
        shapes |= {prefix + parameter.name: parameter.shape for parameter in arch.layer_shapes(layer)}
    return shapes


def wait_for_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """All-gather now the weights that the distributed optimizer defers to the next forward."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            chunk.start_param_sync(force_sync=True)
