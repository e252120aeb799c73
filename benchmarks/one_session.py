"""``python -m benchmarks.one_session ...`` is torchrun whose ranks stay in its session, as Shardscope's do.

Linux shares a busy machine's cores out by session (sched(7), autogroup), and torchrun starts each rank in a
session of its own: beside other work its ranks get more than those of a job in one session, and a ratio would
tell of that. No priority makes up for it: in one session, the share of a rank that waits is the other's.
"""

from __future__ import annotations

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

# Read there for two things: whether a rank begins a session, and whether it or its group gets a signal.
subprocess_handler.IS_WINDOWS = True

if __name__ == "__main__":
    run.main()
