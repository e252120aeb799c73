"""A plain FSDP2 pre-training script, as who knows FSDP2 writes it; ``torchrun bare_fsdp2.py job.json``.

The yardstick of ``python -m benchmarks``: it imports nothing of Shardscope, logs no more than when a step has
ended, and takes the same model, text, order of the text, optimizer and clipping from ``job.json``.
"""

import torch
import torch.distributed as dist
from bare_job import batches, cosine, job, say_loss, say_step_ended
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**job["config"]))
model.train()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
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
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)

for batch in batches():
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    say_step_ended()

say_loss(loss)
dist.destroy_process_group()
