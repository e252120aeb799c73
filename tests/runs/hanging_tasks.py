"""A task whose run has a story: it prints a token, gets on, and then hangs in a collective."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def stuck_elsewhere() -> None:
    """Block rank 1 while rank 0 waits for it."""
    time.sleep(1000)


def hangs(ctx: Any) -> None:
    """Twelve steps together; then rank 1 does not come to the collective."""
    import torch
    import torch.distributed as dist

    print("my key is", os.environ["STORY_API_KEY"], "and my token hf_" + "a1B2" * 8)
    sys.stdout.write(os.environ["STORY_API_KEY"][:7])
    sys.stdout.flush()
    time.sleep(0.05)
    print(os.environ["STORY_API_KEY"][7:])
    for step in range(12):
        dist.all_reduce(torch.ones(1))
        ctx.log(loss=1.0 / (step + 1), note=f"key {os.environ['STORY_API_KEY']}")
        time.sleep(0.01)
    if ctx.rank == 1:
        stuck_elsewhere()
    dist.all_reduce(torch.ones(1))


def waits_in_silence(ctx: Any) -> None:
    """Logs nothing, and rank 1 does not come to the collective."""
    import torch
    import torch.distributed as dist

    if ctx.rank == 1:
        stuck_elsewhere()
    dist.all_reduce(torch.ones(1))
