"""What a search costs: every plan for Llama 3.1 405B on 16,384 GPUs, asked for the first time and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

MODEL, CLUSTER = "llama-3.1-405b", "2048x8xh100-sxm-80gb"
SEQ_LEN, GLOBAL_BATCH_SIZE = 8192, 2048
"""16.8 million tokens a step, as its report has them in the end (Llama 3, table 4)."""
NUM_PROCESSES = 3
AGAIN = 3

_SEARCH = """
import json, sys, time
import shardscope as ss
model, cluster, seq_len, batch, again = json.loads(sys.argv[1])
nouns = ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(seq_len=seq_len, global_batch_size=batch)
found = []
for _ in range(1 + again):
    wall, cpu = time.perf_counter(), time.process_time()
    ranking = ss.search(*nouns)
    found.append((time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps({"plans": ranking.num_evaluated, "feasible": ranking.num_feasible, "seconds": found}))
"""


class Measured(NamedTuple):
    """One search over all frameworks, the fastest of several; numpy keeps to one core."""

    num_plans: int
    num_feasible: int
    first_seconds: float
    """In a fresh process: whatever is counted once is counted."""
    again_seconds: float
    """Asked again, as after a change of price or headroom."""
    again_cpu_seconds: float
    """The processor's own time of that: what others on the machine take is left out."""

    @property
    def plans_per_second(self) -> float:
        """Plans evaluated in a second of one core: memory, and the step of those that fit."""
        return self.num_plans / self.again_cpu_seconds


def measure() -> Measured:
    """Search in several fresh processes, and several times in each."""
    question = json.dumps([MODEL, CLUSTER, SEQ_LEN, GLOBAL_BATCH_SIZE, AGAIN])
    # As where people have installed it: with its modules' bytecode, which the first process writes.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    first, again = [], []
    for _ in range(NUM_PROCESSES):
        done = subprocess.run(
            [sys.executable, "-c", _SEARCH, question],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        told = json.loads(done.stdout)
        first.append(told["seconds"][0][0])
        again += told["seconds"][1:]
    return Measured(
        told["plans"],
        told["feasible"],
        min(first),
        min(wall for wall, _ in again),
        min(cpu for _, cpu in again),
    )
