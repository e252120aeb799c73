"""What ``fully_shard`` really made of a module: read off its parameters, and held against the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.training.gradients import local


def check_sharded(parameters: Mapping[str, torch.Tensor], planned: tuple[int, ...], tp: int) -> None:
    """Raise ``RuntimeError`` unless all are DTensors in shards over a mesh of ``planned`` sizes.

    With ``tp`` > 1 that mesh has one more axis, over which all matrices are cut.
    """
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if whole:
        raise RuntimeError(
            f"the plan says FSDP2, and {len(whole)} of {len(parameters)} parameters are not sharded "
            f"(not DTensors): {', '.join(whole[:3])}"
        )
    shard_axis = len(planned) - 1
    if tp > 1:
        planned = (*planned, tp)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        mesh = tuple(parameter.device_mesh.shape)
        if mesh != planned or not _is_cut(parameter, shard_axis):
            raise RuntimeError(
                f"the plan shards over a mesh of {planned}, and {name} is {parameter.placements} over {mesh}"
            )
    uncut = [
        name for name, parameter in parameters.items() if parameter.ndim > 1 and not is_tp_cut(parameter, tp)
    ]
    if tp > 1 and uncut:
        raise RuntimeError(
            f"the plan cuts matrices over tp={tp} ranks, and {len(uncut)} are whole: {', '.join(uncut[:3])}"
        )


def is_tp_cut(parameter: Any, tp: int) -> bool:
    """Whether tensor-parallel ranks have parts of ``parameter`` of their own."""
    return tp > 1 and _is_cut(parameter, len(parameter.placements) - 1)


def _is_cut(parameter: DTensor, axis: int) -> bool:
    return isinstance(parameter.placements[axis], Shard | _StridedShard)


def count_weights(
    parameters: Mapping[str, torch.nn.Parameter],
    group: Any,
    num_shards: int,
    num_holders: int,
    copies: Callable[[torch.nn.Parameter], int],
    device: torch.device,
) -> tuple[int, int]:
    """(weights that this rank holds, weights of the model that all ranks of ``group`` hold between them).

    ``copies`` tells on how many ranks of the group the same part of a parameter is, ``num_holders`` on how
    many at most. Raises ``RuntimeError`` if parts do not make up the whole.
    """
    held = once = whole = 0
    for parameter in parameters.values():
        number = local(parameter).numel()
        held += number
        # What fewer ranks hold counts as often as what most of them do, so that sums are whole numbers.
        once += number * num_holders // copies(parameter)
        whole += parameter.numel()
    sums = torch.tensor([once * num_shards, whole], dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    found, expected = (int(number) // (num_shards * num_holders) for number in sums.tolist())
    if found != expected:
        raise RuntimeError(f"the shards hold {found:,} weights, and the model has {expected:,}")
    return held, expected


def placements_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """How many parameters are placed how."""
    return dict(Counter(str(tuple(getattr(p, "placements", ()))) for p in parameters.values()))
