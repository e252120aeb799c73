"""Checks that a module is sharded by ``fully_shard`` as the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.training.optimizers.gradients import local_shard


def check_sharded(parameters: Mapping[str, torch.Tensor], planned: tuple[int, ...], tp: int) -> None:
    """Raise ``RuntimeError`` unless all parameters are DTensors sharded over a mesh of ``planned`` sizes.

    With ``tp`` > 1 that mesh has one more axis, over which all matrices must be sharded.
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


def list_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the ``FSDPParamGroup`` objects of ``module``; none if ``fully_shard`` was not called on it."""
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        # A list since torch 2.13, one group before.
        groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
        yield from (group for group in groups if group)


def check_resharding(layers: Sequence[torch.nn.Module], planned: bool | int) -> bool | int | None:
    """Return the ``reshard_after_forward`` of ``layers``; None without layers.

    False keeps the parameters all-gathered, True reshards them, an int reshards them to that many ranks.
    Raises ``RuntimeError`` unless all layers do as ``planned``.
    """
    found = {_resharded(group) for layer in layers for group in list_groups(layer)}
    if found - {planned} or len(found) < bool(layers):
        raise RuntimeError(
            f"the plan says reshard_after_forward={planned}, and the layers have "
            f"{' and '.join(sorted(map(str, found))) or 'no group of their own'}"
        )
    return planned if found else None


def _resharded(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None or after is group.mesh_info:
        return after is not None
    return int(after.shard_mesh_size)


def prefetch_of(units: Iterable[torch.nn.Module]) -> dict[str, str]:
    """Return the kind of prefetching in forward and in backward.

    "implicit" is torch's default; "explicit" means that modules to prefetch were set.
    """
    states: list[Any] = [
        module._get_fsdp_state()
        for unit in units
        for module in unit.modules()
        if isinstance(module, FSDPModule)
    ]
    return {
        way: "explicit"
        if any(getattr(state, f"_states_to_{way}_prefetch") for state in states)
        else "implicit"
        for way in ("forward", "backward")
    }


def check_home(
    units: Iterable[torch.nn.Module],
    parameters: Iterable[torch.Tensor],
    planned: str | None,
    device: torch.device,
) -> str | None:
    """Return where shards are stored, as a value of ``Layout.offload``: "cpu", or None for ``device``.

    Raises ``RuntimeError`` if a group's offload policy or the device of a shard is not as ``planned``.
    """
    groups = [group for unit in units for module in unit.modules() for group in list_groups(module)]
    policies = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    if policies != {planned == "cpu"}:
        shown = " and ".join(sorted("'cpu'" if policy else "None" for policy in policies))
        raise RuntimeError(f"the plan says offload={planned!r}, and FSDP2 has {shown or 'no policy'}")
    home = planned or device.type
    homes = {local_shard(parameter).device.type for parameter in parameters}
    if homes != {home}:
        raise RuntimeError(f"the plan keeps shards on {home}, and they are on {' and '.join(sorted(homes))}")
    return planned


def is_tp_cut(parameter: Any, tp: int) -> bool:
    """Return whether ``parameter`` is sharded over the tensor-parallel ranks."""
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
    """Return (elements on this rank, elements of the model that ``group`` is sharded over).

    ``copies`` returns how many ranks of the group have the same shard of a parameter, ``num_holders`` is its
    maximum. Raises ``RuntimeError`` if the shards do not add up to the whole model.
    """
    held = once = whole = 0
    for parameter in parameters.values():
        number = local_shard(parameter).numel()
        held += number
        # Scale each shard's count to num_holders replicas, so that the sums are integers.
        once += number * num_holders // copies(parameter)
        whole += parameter.numel()
    sums = torch.tensor([once * num_shards, whole], dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    found, expected = (int(number) // (num_shards * num_holders) for number in sums.tolist())
    if found != expected:
        raise RuntimeError(f"the shards hold {found:,} weights, and the model has {expected:,}")
    return held, expected


def placements_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the number of parameters by placement."""
    return dict(Counter(str(tuple(getattr(p, "placements", ()))) for p in parameters.values()))
