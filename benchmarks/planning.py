"""What the planner costs: importing it, and one prediction of memory or of time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import shardscope as ss

NUM_IMPORTS = 7
NUM_PREDICTIONS = 300

_IMPORT = """
import json, sys, time
start = time.perf_counter()
import shardscope
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({"torch", "pandas", "plotly", "transformers"} & set(sys.modules))]))
"""


def import_seconds() -> tuple[float, list[str]]:
    """Seconds that ``import shardscope`` takes in a fresh interpreter, and what heavy it brought along."""
    runs = []
    for _ in range(NUM_IMPORTS):
        done = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
    return median(seconds for seconds, _ in runs), runs[0][1]


STAGED = "llama-3.1-405b, FSDP2 tp8 pp16"
"""Its first, middle and last stages are each computed as a whole plan is: shown, but beside the budget."""


def make_plans() -> dict[str, ss.Plan]:
    """Make usual plans of each framework, and one with as long a pipeline as plans have."""
    recipe = ss.Recipe(seq_len=8192, global_batch_size=1024)
    small, large = ss.models["llama-3.1-8b"], ss.models["llama-3.1-405b"]
    node, many = ss.Cluster.parse("8xh100-sxm-80gb"), ss.Cluster.parse("128x8xh100-sxm-80gb")
    return {
        "llama-3.1-8b, DDP on 8 GPUs": ss.Plan(small, node, recipe, ss.Layout.ddp()),
        "llama-3.1-8b, FSDP2 on 8 GPUs": ss.Plan(small, node, recipe, ss.Layout.fsdp2()),
        "llama-3.1-8b, ZeRO-3 on 8 GPUs": ss.Plan(small, node, recipe, ss.Layout.zero(3)),
        "llama-3.1-70b, Megatron tp8 pp4": ss.Plan(
            ss.models["llama-3.1-70b"],
            ss.Cluster.parse("8x8xh100-sxm-80gb"),
            recipe,
            ss.Layout.megatron(tp=8, pp=4),
        ),
        "llama-3.1-405b, Megatron tp8 pp16": ss.Plan(large, many, recipe, ss.Layout.megatron(tp=8, pp=16)),
        STAGED: ss.Plan(large, many, recipe, ss.Layout.fsdp2(tp=8, pp=16)),
    }


def memory_microseconds() -> dict[str, tuple[float, float]]:
    """Median microseconds of ``plan.memory()``: on a plan just made, as under a slider, and asked again."""
    return {name: _fresh_and_again(plan, ss.Plan.memory) for name, plan in make_plans().items()}


def step_microseconds() -> dict[str, tuple[float, float]]:
    """The same of ``plan.step()``."""
    return {name: _fresh_and_again(plan, ss.Plan.step) for name, plan in make_plans().items()}


def _fresh_and_again(plan: ss.Plan, ask: Callable[[ss.Plan], object]) -> tuple[float, float]:
    nouns = (plan.architecture, plan.cluster, plan.recipe, plan.layout)
    ask(plan)
    fresh = [ss.Plan(*nouns) for _ in range(NUM_PREDICTIONS)]
    return _median_microseconds(fresh, ask), _median_microseconds([plan] * NUM_PREDICTIONS, ask)


def _median_microseconds(plans: list[ss.Plan], ask: Callable[[ss.Plan], object]) -> float:
    seconds = []
    for plan in plans:
        start = time.perf_counter()
        ask(plan)
        seconds.append(time.perf_counter() - start)
    return 1e6 * median(seconds)
