"""Scripts that were mended click by click train on two ranks as the findings said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from needs import needs
from shardscope.planner.preflight import findings_in

needs("torch")

SECONDS = 120

# Both end by os._exit: interpreters that ended after FSDP2 on gloo were seen to abort, once in some dozens of
# times ("terminate called without an active exception"), whatever they had run.
OLD = """
import functools
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    data = TensorDataset(torch.arange(16.0)[:, None].expand(16, 8) / 16)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        use_orig_params=True,
        limit_all_gathers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    losses, seen = [], []
    for epoch in range(4):
        rows = []
        for (batch,) in loader:
            loss = (model(batch).float() - 1).pow(2).mean()
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            rows += (batch[:, 0] * 16).int().tolist()
        seen.append(rows)
    layer = model[0]
    saved = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, saved):
        state = model.state_dict()
    told = {
        "saved": {name: (type(value).__name__, list(value.shape)) for name, value in state.items()},
        "losses": losses,
        "seen": seen,
        "units": sum("FSDP" in type(module).__name__ for module in model.modules()),
        "kinds": sorted({type(parameter).__name__ for parameter in model.parameters()}),
        "reduced_in": str(layer._get_fsdp_state()._mp_policy.reduce_dtype),
        "gathered_again": layer._get_fsdp_state()._fsdp_param_group._reshard_after_forward,
    }
    with open(f"{sys.argv[1]}/told-{dist.get_rank()}.json", "w") as file:
        json.dump(told, file)
    dist.destroy_process_group()
    os._exit(0)


main()
"""


WHOLE = """
import gc
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes))
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(32).view(2, 16)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    units = sorted(type(each).__name__ for each in gc.get_objects() if isinstance(each, FSDPModule))
    with open(f"{sys.argv[1]}/told-{dist.get_rank()}.json", "w") as file:
        json.dump({"losses": losses, "units": units}, file)
    dist.destroy_process_group()
    os._exit(0)


main()
"""


def mended(text: str) -> str:
    """After a click on every button that there is."""
    while found := [finding for finding in findings_in(text) if finding.source]:
        assert found[0].source is not None
        text = found[0].source
    return text


def told_by(text: str, folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks of the script told."""
    script = folder / "train.mended.py"
    script.write_text(text)
    # As every run of ours does: with torch's two threads a group ranks abort now and then (runs/gloo.py).
    (folder / "sitecustomize.py").write_text(
        "from shardscope.runs.gloo import use_one_thread\nuse_one_thread()\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--local-addr=127.0.0.1", str(script), str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


def test_an_fsdp1_script_becomes_one_of_fsdp2_that_trains(tmp_path: Path) -> None:
    told = told_by(mended(OLD), tmp_path)
    for rank in told:
        # Each layer and the model.
        assert rank["units"] == 4
        assert rank["kinds"] == ["DTensor"]
        assert rank["reduced_in"] == "torch.float32"
        assert rank["gathered_again"] is False
        assert rank["losses"][-1] < rank["losses"][0] / 2
        # Another order each epoch.
        assert len({tuple(rows) for rows in rank["seen"]}) == 4
    blocks = {f"{block}.up.weight": ["Tensor", [32, 8]] for block in range(3)}
    assert blocks.items() <= told[0]["saved"].items() and len(told[0]["saved"]) == 12
    assert told[1]["saved"] == {}
    for own, others in zip(told[0]["seen"], told[1]["seen"], strict=True):
        assert sorted(own + others) == list(range(16))


def test_a_model_that_was_one_unit_has_one_for_each_layer(tmp_path: Path) -> None:
    needs("transformers")
    (tmp_path / "before").mkdir()
    (before, _), (after, _) = told_by(WHOLE, tmp_path / "before"), told_by(mended(WHOLE), tmp_path)
    assert before["units"] == ["FSDPLlamaForCausalLM"]
    assert after["units"] == ["FSDPLlamaDecoderLayer"] * 3 + ["FSDPLlamaForCausalLM"]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
