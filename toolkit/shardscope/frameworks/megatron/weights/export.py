"""Export of the model chunks of all ranks to transformers, gathered tensor by tensor on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shardscope.frameworks.megatron.hf_names import layer_prefix
from shardscope.frameworks.megatron.weights.conversion import Part, Place, hf_tensors, join, places
from shardscope.frameworks.megatron.weights.load import local_parameters, part_of, unwrapped
from shardscope.frameworks.megatron.weights.main_copies import MainWeights, data_group
from shardscope.training.weights.pretrained import MAX_FILE_BYTES, write_pretrained

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def export_hf(
    chunks: Sequence[Any],
    arch: Architecture,
    hf_config: Any,
    path: Path,
    optimizer: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder (config.json, model*.safetensors) for ``AutoModelForCausalLM.from_pretrained``.

    Collective over all ranks. ``hf_config`` is the transformers config of the model that was loaded. With
    ``optimizer`` the fp32 main weights are written, without it the weights in the dtype of the chunks. Rank 0
    holds one file's tensors at a time.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config)
    write_pretrained(path, skeleton, full_tensors(chunks, arch, optimizer), max_file_bytes=max_file_bytes)


def to_hf(chunks: Sequence[Any], arch: Architecture, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """Return the whole model's transformers state dict, on the CPU of rank 0; empty on other ranks.

    Collective over all ranks. A tied head is included once, as the embedding.
    """
    return {name: tensor for name, tensor in full_tensors(chunks, arch, optimizer) if tensor is not None}


def full_tensors(
    chunks: Sequence[Any], arch: Architecture, optimizer: Any = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (transformers name, whole tensor) layer by layer; the tensor is None except on rank 0.

    Collective: all ranks must iterate to the end. Each tensor is gathered on the first rank of its pipeline
    stage, then sent to rank 0.
    """
    wait_for_weights(chunks)
    main, shapes = MainWeights(optimizer), _shapes(arch)
    models = [unwrapped(chunk) for chunk in chunks]
    device = next(models[0].parameters()).device
    for stage in _stages(models, main):
        for number, part in enumerate(stage.parts):
            mine = local_parameters(models[number]) if stage.here else None
            for place in _once(arch, part):
                found = _gathered(mine, place, arch, main) if mine is not None else None
                for index, own_name in enumerate(place.pair.hf):
                    name = place.prefix + own_name
                    tensor = found[index] if found is not None else None
                    yield name, _on_rank_zero(tensor, stage, shapes[name], device)


class _Stage(NamedTuple):
    """One pipeline stage; every rank has the same description except ``here``."""

    parts: tuple[Part, ...]
    """Parts of the stage's first rank, one for each chunk."""
    writer: int
    """Global rank of the stage's first rank, which gathers its tensors."""
    here: bool
    """Whether this rank belongs to the stage."""
    dtype: torch.dtype


def _stages(models: Sequence[Any], main: MainWeights) -> list[_Stage]:
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    first = parallel_state.get_tensor_model_parallel_rank() == data == 0
    dtype = main.dtype_of(next(models[0].parameters()))
    said = (stage, tuple(part_of(model) for model in models), dtype) if first else None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    found = {
        number: _Stage(parts, rank, number == stage, kind)
        for rank, (number, parts, kind) in ((r, s) for r, s in enumerate(everyone) if s is not None)
    }
    return [found[number] for number in sorted(found)]


def _once(arch: Architecture, part: Part) -> Iterator[Place]:
    """Yield the places of a part, with only the first expert of a layer and without a tied head."""
    for place in places(arch, part):
        tied = place.pair.megatron == "output_layer.weight" and arch.tie_word_embeddings
        if place.expert in (None, 0) and not tied:
            yield place


def _gathered(
    mine: dict[str, torch.nn.Parameter], place: Place, arch: Architecture, main: MainWeights
) -> tuple[torch.Tensor, ...] | None:
    """Gather one parameter, or that of all experts, as transformers tensors on the stage's first rank.

    Returns None on its other ranks. Collective over the stage.
    """
    from megatron.core import parallel_state

    if place.expert is None:
        value = main.read(mine[place.name])
        if dist.get_rank(data_group(mine[place.name])):
            return None
        parts = _gather(value, parallel_state.get_tensor_model_parallel_group())
        return hf_tensors(join(parts, place.pair), arch, place.pair) if parts else None
    whole = []
    names = [place.name.replace("local_experts.0.", f"local_experts.{i}.") for i in range(_num_local(arch))]
    for name in names:
        value = main.read(mine[name])
        if dist.get_rank(data_group(mine[name])):
            continue
        parts = _gather(value, parallel_state.get_expert_tensor_parallel_group())
        if parts:
            whole.append(join(parts, place.pair))
    if not whole:
        return None
    stacks = _gather(torch.stack(whole), parallel_state.get_expert_model_parallel_group())
    return (torch.cat(stacks),) if stacks else None


def _num_local(arch: Architecture) -> int:
    from megatron.core import parallel_state

    assert arch.mixture_of_experts is not None
    return arch.mixture_of_experts.num_experts // int(parallel_state.get_expert_model_parallel_world_size())


def _gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Gather a group's tensors, all of one shape, on its first rank; empty on the others."""
    size = dist.get_world_size(group)
    if size == 1:
        return [tensor]
    tensor = tensor.contiguous()
    found = [torch.empty_like(tensor) for _ in range(size)] if dist.get_rank(group) == 0 else None
    dist.gather(tensor, found, dst=dist.get_global_rank(group, 0), group=group)
    return found or []


def _on_rank_zero(
    tensor: torch.Tensor | None, stage: _Stage, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    """Send the tensor from its stage's first rank to rank 0's host memory; None on other ranks."""
    if stage.writer == 0:
        return tensor.cpu() if tensor is not None else None
    if tensor is not None:
        dist.send(tensor.contiguous(), dst=0)
    if dist.get_rank():
        return None
    arriving = torch.empty(shape, dtype=stage.dtype, device=device)
    dist.recv(arriving, src=stage.writer)
    return arriving.cpu()


def _shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model, by transformers name."""
    found = {parameter.name: parameter.shape for parameter in arch.outer_shapes}
    for layer in range(arch.num_hidden_layers):
        prefix = layer_prefix(arch, layer)
        found |= {prefix + parameter.name: parameter.shape for parameter in arch.layer_shapes(layer)}
    return found


def wait_for_weights(chunks: Sequence[Any]) -> None:
    """All-gather now the weights that the distributed optimizer defers to the next forward."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            chunk.start_param_sync(force_sync=True)
