"""Scripts of FSDP1 that were mended click by click learn on two ranks what they learned before."""

from __future__ import annotations

from pathlib import Path

import pytest

from needs import needs

torch = needs("torch")

from test_mended_scripts import mended, told_by  # noqa: E402

# Both end by os._exit, as those of test_mended_scripts.py do.
HEAD = """
import contextlib
import functools
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

FOLDER = sys.argv[1]


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tell(**told):
    with open(f"{FOLDER}/told-{dist.get_rank()}.json", "w") as file:
        json.dump(told, file)
    dist.destroy_process_group()
    os._exit(0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rows = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(rank))
    losses = []
"""

BY_HAND = """
    model = Net(32)
    for i, layer in enumerate(model.layers):
        model.layers[i] = FSDP(layer, device_id=torch.cuda.current_device())
    model = FSDP(model, device_id=torch.cuda.current_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            loss = (model(rows[step]) - 1).pow(2).mean()
            loss.backward()
        if step % 2:
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{FOLDER}/weights")
    tell(losses=losses)


main()
"""

BY_SIZE = """
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)
    strategy = ShardingStrategy.HYBRID_SHARD
    model = Net(65_536)
    model = FSDP(
        model, auto_wrap_policy=policy, sharding_strategy=strategy, device_id=torch.cuda.current_device()
    )
    names = [type(module).__name__ for module in model.modules()]
    units = sum(name.startswith(("FSDP", "FullySharded")) for name in names)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = (model(rows[step]) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    state = model.state_dict()
    if rank == 0:
        torch.save(state, f"{FOLDER}/weights")
    tell(losses=losses, units=units)


main()
"""


def on_the_cpu(script: str) -> str:
    """With nodes of one GPU, for which FSDP1 itself averages nothing (torch 2.13 makes NO_SHARD of them)."""
    return (
        script.replace("torch.cuda.current_device()", 'torch.device("cpu")')
        .replace("torch.cuda.device_count()", "1")
        .replace('"cuda"', '"cpu"')
        .replace("HYBRID_SHARD", "FULL_SHARD")
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model's, of one file or of a folder of parts."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = folder / "weights"
    if file.is_dir():
        dcp_to_torch_save(file, file := folder / "whole")
    found = torch.load(file, weights_only=True)
    state: dict[str, torch.Tensor] = found.get("model", found)
    return state


@pytest.mark.parametrize("body", [BY_HAND, BY_SIZE], ids=["by hand", "by size"])
def test_a_mended_script_learns_what_the_old_one_did(body: str, tmp_path: Path) -> None:
    script = HEAD + body
    after = mended(script)
    assert "FSDP(" not in after and after.count(" fully_shard(") == 2
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder in folders:
        folder.mkdir()
    before, now = (told_by(on_the_cpu(text), at) for text, at in zip((script, after), folders, strict=True))
    for one, other in zip(before, now, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert one.get("units") == other.get("units")
    old, new = map(weights, folders)
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor)
    assert (folders[1] / "weights").is_dir()
