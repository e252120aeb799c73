"""A plain FSDP2 pre-training script, as who knows FSDP2 writes it; ``torchrun bare_fsdp2.py job.json``.

The yardstick of ``python -m benchmarks``: it imports nothing of Shardscope, logs no more than when a step has
ended, and takes the same model, text, order of the text, optimizer and clipping from ``job.json``.
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

job = json.loads(Path(sys.argv[1]).read_text())
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

text = Path(job["text"]).read_text(encoding="utf-8")
ids = np.asarray(Tokenizer.from_file(job["tokenizer"]).encode(text).ids, dtype=np.int32)
num_windows = len(ids) // job["seq_len"]
windows = ids[: num_windows * job["seq_len"]].reshape(num_windows, job["seq_len"])
order = np.random.default_rng([0, 0]).permutation(num_windows)

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**job["config"]))
model.train()
mesh = init_device_mesh("cpu", (world_size,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
fully_shard(model, mesh=mesh)
decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=job["learning_rate"],
    betas=(0.9, 0.95),
    fused=True,
)
cosine = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: 0.1 + 0.9 * (1 + math.cos(math.pi * step / job["num_steps"])) / 2
)

for step in range(job["num_steps"]):
    first = (step * world_size + rank) * job["rows"]
    batch = torch.from_numpy(windows[order[first : first + job["rows"]]].astype(np.int64))
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    cosine.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(json.dumps({"time": time.time()}), flush=True)

mean = loss.detach()
dist.all_reduce(mean)
if rank == 0:
    print(json.dumps({"loss": mean.item() / world_size}), flush=True)
dist.destroy_process_group()
