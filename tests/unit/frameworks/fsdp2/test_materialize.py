"""Tests of weights that FSDP2 initializes shard by shard, equal on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardscope.frameworks.fsdp2.engine.engine import materialize
from shardscope.rehearsal.fake_world import fake_ranks
from shardscope.training.weights.initial_weights import FreshWeights

CPU = torch.device("cpu")


def initialize_shard(shape: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """Return the shard of a parameter with ``shape`` that ``rank`` of ``ranks`` initializes."""
    model = torch.nn.Module()
    with fake_ranks(ranks, rank):
        mesh = init_device_mesh("cpu", (ranks,))
        whole = torch.nn.Parameter(torch.empty(shape, device="meta"))
        model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        materialize(model, FreshWeights(model, seed=7, device=CPU), device=CPU, compute=CPU)
        return model.weight.to_local().detach()


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (3, 4, 3)])
def test_initial_weights_do_not_depend_on_the_number_of_ranks(shape: tuple[int, ...]) -> None:
    unsharded = initialize_shard(shape, 1, 0)
    shards = [initialize_shard(shape, 4, rank) for rank in range(4)]
    assert torch.equal(torch.cat(shards), unsharded)
    assert unsharded.std() > 0


def test_experts_are_initialized_one_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    empty = torch.empty

    def record(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        sizes.append(tensor.numel() if not tensor.is_meta else 0)
        return tensor

    monkeypatch.setattr(torch, "empty", record)
    initialize_shard((8, 5, 3), 4, 1)
    assert max(sizes) == 5 * 3
