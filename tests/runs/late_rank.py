"""Once imported by a launcher, rank 1 takes a second longer than rank 0 to join the process group."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

SECONDS_LATE = 1.0
JOINED = 0.0

_join = dist.init_process_group


def _join_late(*arguments: Any, **options: Any) -> None:
    global JOINED
    _join(*arguments, **options)
    time.sleep(SECONDS_LATE * int(os.environ["RANK"]))
    JOINED = time.monotonic()


dist.init_process_group = _join_late
