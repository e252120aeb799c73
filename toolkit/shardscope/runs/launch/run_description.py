"""The content of ``run.json``: plan, task, prediction and versions of a run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.machine.processes import identify_machine
from shardscope.records.json_values import is_int
from shardscope.runs.backends.node_checks import read_versions
from shardscope.runs.explain.measured_step import predict_step
from shardscope.runs.launch.packing import describe_task
from shardscope.runs.task_fields import record_task_fields
from shardscope.training.tasks.text_task import TextTask

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def describe_run(plan: Plan, task: object, *, outlive_kernel: bool, retries: int) -> dict[str, object]:
    """Return the content of ``run.json``, without the run's name and its backend's fields.

    It holds no environment variables and no free text of the task: both may contain secrets.
    """
    return {
        "shardscope_run": 1,
        "created": time.time(),
        "machine": identify_machine(),
        "plan": json.loads(plan.to_json()),
        "predicted": predict_step(plan),
        "task": describe_task(task),
        "asked": record_task_fields(task),
        "base": task.frozen_base() if isinstance(task, TextTask) else None,
        "trains_the_plan": trains_the_plan(task),
        "saves_when_asked": getattr(task, "saves_when_asked", True) is not False,
        "num_steps": _read_num_steps(task),
        "world_size": plan.world_size,
        "device": "cuda" if plan.on_gpu else "cpu",
        "outlive_kernel": outlive_kernel,
        "retries": retries,
        "versions": read_versions(),
        "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        "pythonpath": os.environ.get("PYTHONPATH"),
    }


def trains_the_plan(task: object) -> bool:
    """Return whether ``task`` trains the plan's model, so that the predicted memory holds for it."""
    return getattr(task, "trains_the_plan", False) is True


def _read_num_steps(task: object) -> int | None:
    """Return the number of steps of a built-in task, else None."""
    num_steps = getattr(task, "planned_steps", None) if trains_the_plan(task) else None
    return num_steps if is_int(num_steps) else None
