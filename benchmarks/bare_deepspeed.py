"""A plain ZeRO-3 script, as who knows DeepSpeed writes it; ``torchrun bare_deepspeed.py job.json``.

The yardstick of ``python -m benchmarks``: it imports nothing of Shardscope, logs no more than when a step has
ended, and takes the same model, text, order of the text, optimizer and clipping from ``job.json``.
"""

import os

import torch
import torch.distributed as dist
from bare_job import batches, cosine, job, say_loss, say_step_ended
from transformers import LlamaConfig, LlamaForCausalLM

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

deepspeed.init_distributed("gloo")

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**job["config"]))
model.train()
decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=job["learning_rate"],
    betas=(0.9, 0.95),
    fused=True,
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
config = {
    "train_micro_batch_size_per_gpu": job["rows"],
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "steps_per_print": 10**9,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)

for batch in batches():
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    say_step_ended()

say_loss(loss)
dist.destroy_process_group()
