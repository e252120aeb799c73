"""What ``fully_shard`` really made of a module: read off its parameters, and held against the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.training.optimizers.gradients import local


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


def groups_of(module: torch.nn.Module) -> Iterator[Any]:
    """The groups of parameters that ``fully_shard`` gathers at once, of a module that it was called on."""
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        # A list since torch 2.13, one group before.
        groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
        yield from (group for group in groups if group)


def check_resharding(layers: Sequence[torch.nn.Module], planned: bool | int) -> bool | int | None:
    """What becomes of the gathered weights of ``layers`` after their forward; None without layers.

    False: they stay; True: only this rank's shards do; a number: shards over so many ranks. Raises
    ``RuntimeError`` unless all do as ``planned``.
    """
    found = {_resharded(group) for layer in layers for group in groups_of(layer)}
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
    """Who orders the gathers ahead in forward and in backward: torch ("implicit"), or a list ("explicit")."""
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
    """Where shards wait between their uses, as ``Layout.offload`` says it: "cpu", None for ``device``.

    Raises ``RuntimeError`` if a group's policy, or where a shard really is, is not as ``planned``.
    """
    groups = [group for unit in units for module in unit.modules() for group in groups_of(module)]
    policies = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    if policies != {planned == "cpu"}:
        shown = " and ".join(sorted("'cpu'" if policy else "None" for policy in policies))
        raise RuntimeError(f"the plan says offload={planned!r}, and FSDP2 has {shown or 'no policy'}")
    home = planned or device.type
    homes = {local(parameter).device.type for parameter in parameters}
    if homes != {home}:
        raise RuntimeError(f"the plan keeps shards on {home}, and they are on {' and '.join(sorted(homes))}")
    return planned


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
