"""Run folders as runs leave them, written without launching any."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

from tests.saved_checkpoints import write_checkpoint

import shardscope as ss
from shardscope.machine.processes import identify_machine, read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.runs.task_fields import record_task_fields
from shardscope.training.checkpoints.folders import checkpoint_path

PLAN = ss.Plan(
    ss.Architecture.of_size("2m"),
    ss.Cluster.parse("2xcpu"),
    ss.Recipe(seq_len=64, global_batch_size=2),
    ss.Layout.ddp(),
)
CREATED = 1_763_000_000.0
TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.0, "dur": 5.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 20.0, "dur": 5.0},
    ]
}


def write_run(
    name: str,
    status: str = "finished",
    *,
    parent: Path | str = "runs",
    number: int = 0,
    num_done: int = 20,
    num_steps: int = 40,
    reason: str = "",
    task: ss.Pretrain | None = None,
    checkpoint: int | None = None,
    has_trace: bool = False,
    is_own_task: bool = False,
    plan: ss.Plan = PLAN,
    created: float = CREATED,
) -> Path:
    """Write the folder of a run, the supervisor of which is this process; ``number`` orders runs in time."""
    folder = RunFolder(Path(parent) / name)
    folder.create()
    task = ss.Pretrain(num_steps=num_steps) if task is None else task
    began = created + 100.0 * number
    description = {
        "name": name,
        "asked_name": name,
        "created": began,
        "machine": identify_machine(),
        "plan": json.loads(plan.to_json()),
        "task": "__main__.train" if is_own_task else "shardscope.training.tasks.pretrain.Pretrain",
        "asked": None if is_own_task else record_task_fields(task),
        "trains_the_plan": not is_own_task,
        "num_steps": None if is_own_task else task.num_steps,
        "world_size": plan.world_size,
        "device": "cpu",
        "predicted": {"step_seconds": 0.21},
    }
    write_json(folder.run_json, description, as_is=("machine",))
    is_live = status in ("starting", "running", "stopping")
    me = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
    write_json(folder.supervisor, me, as_is=("machine",))
    append_line(folder.status, {"time": began, "status": "starting", "reason": "coming up"})
    if status != "starting":
        end = {"time": began + 63.0, "status": status, "reason": reason or f"it is {status}"}
        append_line(folder.status, end)
    for rank in range(plan.world_size):
        for step in range(num_done):
            append_line(folder.events(rank), make_metrics(step, rank, began))
        folder.log(rank).write_text(f"rank {rank} is up\n" + ("" if is_live else "rank is done\n"))
    if checkpoint is not None:
        position = {"num_steps_done": checkpoint, "seed": task.seed}
        write_checkpoint(checkpoint_path(folder.path, checkpoint), position)
    if has_trace:
        for rank in range(plan.world_size):
            with gzip.open(folder.trace(rank), "wt") as file:
                json.dump({**TRACE, "distributedInfo": {"rank": rank, "world_size": plan.world_size}}, file)
    return folder.path


def make_metrics(step: int, rank: int, began: float) -> dict[str, Any]:
    """Make one line as ``Pretrain`` logs it; the first step is far slower than all others."""
    seconds = 2.4 if step == 0 else 0.25 + 0.01 * math.sin(step) + 0.004 * rank
    return {
        "step": step,
        "rank": rank,
        "time": began + 5 + step,
        "loss": 7.6 * math.exp(-step / 30) + 0.05 * math.cos(3 * step),
        "learning_rate": 1e-3 * min(1.0, (step + 1) / 4),
        "grad_norm": 1.4 + 0.3 * math.cos(step),
        "step_seconds": seconds,
        "tokens_per_second": 64 / seconds,
        "tokens_per_second_all_ranks": 128 / seconds,
        "memory_bytes": 310 * 2**20,
        "peak_memory_bytes": 355 * 2**20,
        "rss_bytes": 500 * 2**20,
    }


def write_failure(path: Path, rank: int, error: str) -> None:
    """Write the exception that ended ``rank``, into its record and its log."""
    folder = RunFolder(path)
    record = {"rank": rank, "time": CREATED, "monotonic": 5.0, "type": "ValueError", "traceback": error}
    summary = f"raised {error.strip().splitlines()[-1]}"
    write_json(folder.error(rank), {**record, "summary": summary, "peer_lost": False})
    with folder.log(rank).open("a") as log:
        log.write(error)
