"""Client optimizers over ZeRO's flat buffers: DeepSpeed takes them, and they keep what is predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.requirements import needs, thorough

from shardscope.memory.state.optimizers import compute_flat_state

pytestmark = thorough()

SCRIPT = """
import importlib, json, torch, deepspeed, bitsandbytes as bnb
# By this name: deepspeed.comm.torch is torch itself.
backend = importlib.import_module("deepspeed.comm.torch")
# Collectives through shared memory compile for half a minute in a new environment; one rank has none.
backend.build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
found = {}
for name, make in (("adamw_8bit", bnb.optim.AdamW8bit), ("adafactor", torch.optim.Adafactor)):
    for stage in (1, 2, 3):
        there, back = (torch.nn.Linear(*sizes, bias=False) for sizes in ((96, 160), (160, 96)))
        model = torch.nn.Sequential(there, back)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000},
        }
        engine, zero, _, _ = deepspeed.initialize(
            model=model, optimizer=make(model.parameters()), config=config
        )
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 96, dtype=torch.bfloat16)).float().pow(2).sum())
            engine.step()
        assert type(zero.optimizer) is make
        storages = {}
        for state in zero.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        found[f"{name} {stage}"] = sum(storages.values())
print("FOUND", json.dumps(found))
"""


def test_zero_trains_with_each_optimizer_and_its_state_is_as_predicted() -> None:
    needs("deepspeed")
    needs("bitsandbytes")
    alone = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **alone, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    line = next(line for line in ran.stdout.splitlines() if line.startswith("FOUND"))
    record = json.loads(line.removeprefix("FOUND"))
    numel = 2 * 96 * 160
    assert record == {
        f"{name} {stage}": compute_flat_state(name, numel)
        for name in ("adamw_8bit", "adafactor")
        for stage in (1, 2, 3)
    }
