"""Models too large to build whole on every rank: built without memory, sharded, filled shard by shard."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardscope.core.arrays.arithmetic import ceil_div
from shardscope.training.model.on_meta import give_memory
from shardscope.training.weights.initial_weights import InitialWeights, Region


def check_has_weights(model: torch.nn.Module) -> None:
    """Raise ``ValueError`` if ``model`` has parameters without values: it would train on what memory held."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(
            f"build_model gives {len(empty)} parameters on the meta device ({', '.join(empty[:3])}), which "
            "have no values; allowed: real weights. Nearest fix: build without torch.device('meta'), and set "
            "engine.fresh_weights = True before setup for a decoder from random weights."
        )


def materialise(
    model: torch.nn.Module, weights: InitialWeights, *, device: torch.device, compute: torch.device
) -> None:
    """Give every sharded parameter memory on ``device``, and this rank's part of ``weights``.

    Buffers go where forward reads them, to ``compute``. 1 rank or 64 start from the same model.
    """
    give_memory(model, device, buffers_on=compute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            weights.write(name, parameter.shape, own_region(parameter), own)


def own_region(parameter: torch.Tensor) -> Region:
    """What of ``parameter`` this rank keeps, cut as ``Shard`` cuts: equal runs, the last ones short or empty.

    Of a ``DTensor`` along its mesh; of any other tensor all.
    """
    found = [range(size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        # The last axis cut first: under a tensor-parallel cut FSDP2 shards what that left (_StridedShard).
        for axis, placement in reversed(list(enumerate(parameter.placements))):
            if isinstance(placement, Shard | _StridedShard):
                run = found[placement.dim]
                each = ceil_div(len(run), parameter.device_mesh.size(axis))
                first = each * parameter.device_mesh.get_local_rank(axis)
                found[placement.dim] = run[first : first + each]
    return found
