"""What the plain scripts share, none of it a framework's: the job, its text in order, and what they say.

Of Shardscope it imports nothing. A job file is written by ``benchmarks/training.py``.
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

job = json.loads(Path(sys.argv[1]).read_text())


def batches():
    """Token ids of this rank, one (rows, seq_len) int64 tensor a step, in the order that seed 0 gives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = Path(job["text"]).read_text(encoding="utf-8")
    ids = np.asarray(Tokenizer.from_file(job["tokenizer"]).encode(text).ids, dtype=np.int32)
    num_windows = len(ids) // job["seq_len"]
    windows = ids[: num_windows * job["seq_len"]].reshape(num_windows, job["seq_len"])
    order = np.random.default_rng([0, 0]).permutation(num_windows)
    for step in range(job["num_steps"]):
        first = (step * world_size + rank) * job["rows"]
        yield torch.from_numpy(windows[order[first : first + job["rows"]]].astype(np.int64))


def cosine(step):
    """The share of the learning rate in ``step``: a half cosine down to a tenth."""
    return 0.1 + 0.9 * (1 + math.cos(math.pi * step / job["num_steps"])) / 2


def say_step_ended():
    if dist.get_rank() == 0:
        print(json.dumps({"time": time.time()}), flush=True)


def say_loss(loss):
    mean = loss.detach()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(json.dumps({"loss": mean.item() / dist.get_world_size()}), flush=True)
