"""Units of one layer each, by a click, train on two ranks to the losses that the script had before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_mended_scripts import SECONDS, mended, told_by

from needs import needs

needs("torch")

SCRIPT = """
import gc
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, width, num_layers):
        super().__init__()
        self.token = nn.Embedding(32, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(num_layers)])
        self.head = nn.Linear(width, 32, bias=False)
        self.token.weight = self.head.weight

    def forward(self, ids):
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def configure_optimizers(self, rate):
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(16, 3)
    fully_shard(model)
    optimizer = model.configure_optimizers(1e-2)
    ids = (torch.arange(32) + 7 * dist.get_rank()).remainder(32).view(2, 16)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    units = sorted(type(each).__name__ for each in gc.get_objects() if isinstance(each, FSDPModule))
    told = {"losses": losses, "units": units, "weights": sum(p.numel() for p in model.parameters())}
    with open(f"{sys.argv[1]}/told-{dist.get_rank()}.json", "w") as file:
        json.dump(told, file)
    dist.destroy_process_group()
    os._exit(0)


main()
"""
ONE_CALL = "    fully_shard(model)\n"
OUTSIDE_IN = "    for module in model.modules():\n        fully_shard(module)\n"
INSIDE_OUT = OUTSIDE_IN.replace("model.modules()", "reversed(list(model.modules()))")
UNTIED = ("        self.token.weight = self.head.weight\n", "")
"""A weight of two modules is in one unit, whichever comes first."""
BY_LAYER = ["FSDPBlock"] * 3 + ["FSDPGPT"]


def test_a_model_of_the_scripts_own_that_was_one_unit(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    before, after = told_by(SCRIPT, tmp_path / "before"), told_by(mended(SCRIPT), tmp_path)
    assert [rank["units"] for rank in before] == [["FSDPGPT"]] * 2
    assert [rank["units"] for rank in after] == [BY_LAYER] * 2
    for was, is_now in zip(before, after, strict=True):
        assert is_now["losses"] == pytest.approx(was["losses"], rel=1e-5)
        assert is_now["weights"] == was["weights"]


def test_a_model_whose_every_module_was_a_unit(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    source = SCRIPT.replace(ONE_CALL, INSIDE_OUT).replace(*UNTIED)
    before, after = told_by(source, tmp_path / "before"), told_by(mended(source), tmp_path)
    assert [len(rank["units"]) for rank in before] == [16] * 2
    assert [rank["units"] for rank in after] == [BY_LAYER] * 2
    for was, is_now in zip(before, after, strict=True):
        assert is_now["losses"] == pytest.approx(was["losses"], rel=1e-5)


def test_a_loop_that_fails_from_the_outside_in_trains_as_one_unit_would(tmp_path: Path) -> None:
    source = SCRIPT.replace(ONE_CALL, OUTSIDE_IN)
    script = tmp_path / "train.py"
    script.write_text(source)
    failed = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
            *("--local-addr=127.0.0.1", str(script), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert failed.returncode != 0 and "in fully_shard" in failed.stderr
    (tmp_path / "whole").mkdir()
    whole, after = told_by(SCRIPT, tmp_path / "whole"), told_by(mended(source), tmp_path)
    assert [rank["units"] for rank in after] == [BY_LAYER] * 2
    for was, is_now in zip(whole, after, strict=True):
        assert is_now["losses"] == pytest.approx(was["losses"], rel=1e-5)
