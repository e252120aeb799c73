"""Transfer of every pipeline stage's whole tensors to rank 0, which writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardscope.training.weights.pretrained import FullTensors

Spec = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and type of a tensor."""


class StageTensor(NamedTuple):
    """One tensor of this rank's stage."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gather: Callable[[], torch.Tensor]
    """Collective that all-gathers the tensor on every rank of the stage, on its device."""


def send_stages_to_rank_0(
    tensors: Iterable[StageTensor], *, stage: int, num_stages: int, device: torch.device
) -> FullTensors:
    """Yield the tensors stage by stage, in host memory on rank 0 and None on all other ranks.

    Collective: every rank must iterate over it. Each stage is a range of consecutive ranks, whose first rank
    sends to rank 0.
    """
    # All ranks exchange the names, shapes and types first: rank 0 cannot know those of the other stages.
    own_tensors = list(tensors)
    rank, ranks_per_stage = dist.get_rank(), dist.get_world_size() // num_stages
    specs: list[list[Spec]] = [[]] * dist.get_world_size()
    dist.all_gather_object(specs, [(tensor.name, tensor.shape, tensor.dtype) for tensor in own_tensors])
    for number in range(num_stages):
        first = number * ranks_per_stage
        for index, (name, shape, dtype) in enumerate(specs[first]):
            tensor = None
            if number == stage:
                tensor = own_tensors[index].gather()
                # The first stage's first rank is rank 0 itself.
                if number > 0 and rank == first:
                    dist.send(tensor, 0)
            elif rank == 0:
                # On the device, not in host memory, which NCCL cannot receive into.
                tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(tensor, first)
            yield name, tensor.cpu() if tensor is not None and rank == 0 else None
