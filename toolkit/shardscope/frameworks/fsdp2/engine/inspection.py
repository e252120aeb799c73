"""Checks that a module is sharded by ``fully_shard`` as the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.training.optimizers.gradients import local_shard


def check_sharded(parameters: Mapping[str, torch.Tensor], planned: tuple[int, ...], tp: int) -> None:
    """Raise ``RuntimeError`` unless all parameters are DTensors sharded over a mesh of ``planned`` sizes.

    With ``tp`` > 1 that mesh has one more axis, over which all matrices must be sharded.
    """
    unsharded = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if unsharded:
        raise RuntimeError(
            f"the plan says FSDP2, and {len(unsharded)} of {len(parameters)} parameters are not sharded "
            f"(not DTensors): {', '.join(unsharded[:3])}"
        )
    # Axes are (replicate,) shard (, tp): with one replica the mesh has no replicate axis.
    shard_axis = len(planned) - 1
    if tp > 1:
        planned = (*planned, tp)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        mesh = tuple(parameter.device_mesh.shape)
        if mesh != planned or not _is_sharded(parameter, shard_axis):
            raise RuntimeError(
                f"the plan shards over a mesh of {planned}, and {name} is {parameter.placements} over {mesh}"
            )
    # Vectors (norms, q_norm) are replicated over tensor-parallel ranks.
    unsharded = [
        name
        for name, parameter in parameters.items()
        if parameter.ndim > 1 and not is_tensor_parallel(parameter, tp)
    ]
    if tp > 1 and unsharded:
        raise RuntimeError(
            f"the plan shards matrices over tp={tp} ranks, and {len(unsharded)} are not: "
            f"{', '.join(unsharded[:3])}"
        )


def list_groups(module: torch.nn.Module) -> Iterator[FSDPParamGroup]:
    """Yield the ``FSDPParamGroup`` objects of ``module``; none if ``fully_shard`` was not called on it."""
    if isinstance(module, FSDPModule):
        state = module._get_fsdp_state()
        # A list since torch 2.13, one group before.
        groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
        yield from (group for group in groups if group)


def check_resharding(layers: Sequence[torch.nn.Module], planned: bool | int) -> bool | int | None:
    """Return the ``reshard_after_forward`` of ``layers``; None without layers.

    False keeps the parameters all-gathered, True reshards them, an int reshards them to that many ranks.
    Raises ``RuntimeError`` unless all layers do as ``planned``.
    """
    values = {_get_resharding(group) for layer in layers for group in list_groups(layer)}
    if values - {planned} or (layers and not values):
        raise RuntimeError(
            f"the plan says reshard_after_forward={planned}, and the layers have "
            f"{' and '.join(sorted(map(str, values))) or 'no group of their own'}"
        )
    return planned if values else None


def _get_resharding(group: FSDPParamGroup) -> bool | int:
    # torch stores no post-forward mesh for False, the group's own for True, and a smaller one for an int
    # (torch 2.13, _fully_shard/_fsdp_init.py, _get_post_forward_mesh_info).
    after = group.post_forward_mesh_info
    if after is None or after is group.mesh_info:
        return after is not None
    return int(after.shard_mesh_size)


def describe_prefetch(units: Iterable[torch.nn.Module]) -> dict[str, str]:
    """Return the kind of prefetching in forward and in backward.

    "implicit" is torch's default; "explicit" means that modules to prefetch were set.
    """
    # set_modules_to_forward_prefetch fills these lists; without them FSDP2 prefetches implicitly.
    states = [
        module._get_fsdp_state()
        for unit in units
        for module in unit.modules()
        if isinstance(module, FSDPModule)
    ]
    return {
        direction: "explicit"
        if any(getattr(state, f"_states_to_{direction}_prefetch") for state in states)
        else "implicit"
        for direction in ("forward", "backward")
    }


def check_shard_device(
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
        policy_names = " and ".join(sorted("'cpu'" if policy else "None" for policy in policies))
        raise RuntimeError(f"the plan says offload={planned!r}, and FSDP2 has {policy_names or 'no policy'}")
    # The policy says what FSDP2 will do; the shards themselves show that it was done.
    planned_device = planned or device.type
    devices = {local_shard(parameter).device.type for parameter in parameters}
    if devices != {planned_device}:
        raise RuntimeError(
            f"the plan has shards on {planned_device}, and they are on {' and '.join(sorted(devices))}"
        )
    return planned


def is_tensor_parallel(parameter: torch.Tensor, tp: int) -> bool:
    """Return whether ``parameter`` is sharded over the tensor-parallel ranks."""
    if tp == 1 or not isinstance(parameter, DTensor):
        return False
    # make_mesh() makes tp the innermost mesh axis.
    return _is_sharded(parameter, len(parameter.placements) - 1)


def _is_sharded(parameter: DTensor, axis: int) -> bool:
    # FSDP2 shards a tensor-parallel shard along the same dimension as a _StridedShard, which is no Shard
    # (torch 2.13, tensor/placement_types.py).
    return isinstance(parameter.placements[axis], Shard | _StridedShard)


def count_weights(
    parameters: Mapping[str, torch.nn.Parameter],
    group: ProcessGroup,
    num_shards: int,
    num_holders: int,
    copies: Callable[[torch.nn.Parameter], int],
    device: torch.device,
) -> tuple[int, int]:
    """Return (elements on this rank, elements of the model that ``group`` is sharded over).

    ``copies`` returns how many ranks of the group have the same shard of a parameter, ``num_holders`` is its
    maximum. Raises ``RuntimeError`` if the shards do not add up to the whole model.
    """
    num_local = num_unique = num_total = 0
    for parameter in parameters.values():
        number = local_shard(parameter).numel()
        num_local += number
        # Scale each shard's count to num_holders replicas, so that the sums are integers.
        num_unique += number * num_holders // copies(parameter)
        num_total += parameter.numel()
    sums = torch.tensor([num_unique * num_shards, num_total], dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    num_sharded, expected = (int(number) // (num_shards * num_holders) for number in sums.tolist())
    if num_sharded != expected:
        raise RuntimeError(f"the shards have {num_sharded:,} weights, and the model has {expected:,}")
    return num_local, expected


def count_placements(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the number of parameters by placement."""
    return dict(Counter(str(tuple(getattr(p, "placements", ()))) for p in parameters.values()))
