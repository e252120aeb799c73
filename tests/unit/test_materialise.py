"""Weights of models too large to build whole: drawn shard by shard, and the same on any number of ranks."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardscope.frameworks.fsdp2.export_script import FILL
from shardscope.frameworks.fsdp2.materialise import materialise
from shardscope.rehearsal.world import fake_ranks
from shardscope.training.initial_weights import FreshWeights, all_of

CPU = torch.device("cpu")


def drawn(shape: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """What one of so many ranks keeps of a parameter of that shape."""
    model = torch.nn.Module()
    with fake_ranks(ranks, rank):
        mesh = init_device_mesh("cpu", (ranks,))
        whole = torch.nn.Parameter(torch.empty(shape, device="meta"))
        model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        materialise(model, FreshWeights(model, seed=7, device=CPU), device=CPU, compute=CPU)
        return model.weight.to_local().detach()


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (3, 4, 3)])
def test_the_number_of_ranks_changes_no_weight(shape: tuple[int, ...]) -> None:
    alone = drawn(shape, 1, 0)
    parts = [drawn(shape, 4, rank) for rank in range(4)]
    assert torch.equal(torch.cat(parts), alone)
    assert alone.std() > 0


def test_experts_are_drawn_one_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = []
    empty = torch.empty

    def noted(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)
        largest.append(made.numel() if not made.is_meta else 0)
        return made

    monkeypatch.setattr(torch, "empty", noted)
    drawn((8, 5, 3), 4, 1)
    assert max(largest) == 5 * 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.q_proj.weight", (6, 4)),
        ("layers.0.q_proj.bias", (6,)),
        ("norm.weight", (6,)),
        ("layers.0.q_proj.lora_A.default.weight", (2, 16)),
        ("layers.0.q_proj.lora_B.default.weight", (6, 2)),
    ],
)
def test_an_exported_script_draws_the_same(name: str, shape: tuple[int, ...]) -> None:
    script: dict[str, Any] = {"torch": torch}
    exec(FILL, script)
    wanted = torch.empty(shape)
    FreshWeights(torch.nn.Module(), seed=0, device=CPU).write(
        name, wanted.shape, all_of(wanted.shape), wanted
    )
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    assert torch.equal(script["drawn"](name, torch.empty(shape), 0.02, generator, shape), wanted)
    if "lora_A" in name:
        assert 0.2 < wanted.abs().max() <= 16**-0.5
