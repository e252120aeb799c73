"""``python -m tests.accuracy.own_runs``: plans drawn by a seed, run on CPU ranks; writes measured/own.jsonl.

The third proof of a prediction, beside rehearsals and others' figures: the run that follows it. Each plan
is the tiny twin that the Studio's button launches (``build_cpu_trial``), over every family in the catalogue
and what the engines train of a recipe. The run itself counts its tensors (``training/accounting/census.py``).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.accuracy.own_rows import append, own_rows
from tests.accuracy.rows import OWN

import shardscope as ss
from shardscope.frameworks.registry import check_trained
from shardscope.planner.cpu_trial import build_cpu_trial

COUNTED = "tensors of the fullest CPU rank, counted in one step"
CHOICES: dict[str, tuple[Any, ...]] = {
    "seq_len": (64, 96, 128),
    "micro_batch_size": (1, 2, 4),
    "precision": ("bf16-mixed", "bf16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "adamw", "adamw_foreach", "sgd", "lion", "adafactor", "muon"),
    "recompute": ("none", "none", "selective", "full"),
    "loss": ("full", "full", "chunked"),
    "method": ("full", "full", "lora"),
}
NUM_STEPS = 3
"""The third is the one that counts (``WATCHED_STEPS``)."""


def draw_plan(draw: random.Random) -> ss.Plan | None:
    """Draw a plan that CPU ranks can train; None where the draw is refused."""
    values = {name: draw.choice(of) for name, of in CHOICES.items()}
    if values["recompute"] != "none":
        values["recompute_interval"] = draw.choice((1, 1, 2))
    if values["method"] == "lora":
        values["lora_rank"] = draw.choice((4, 16))
    ranks = draw.choice((2, 2, 4))
    layout = draw.choice((
        ss.Layout.ddp(),
        ss.Layout.fsdp2(),
        ss.Layout.fsdp2(reshard_after_forward=False),
        ss.Layout.fsdp2(replicate=2),
    ))  # fmt: skip
    arch = ss.models[draw.choice(sorted(ss.models))]
    batches = draw.choice((1, 2))
    try:
        big = ss.Plan(arch, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.ddp())
        small = build_cpu_trial(big, ranks).plan
        recipe = ss.Recipe(**values, global_batch_size=ranks * batches * values["micro_batch_size"])
        plan = replace(small, recipe=recipe, layout=layout)
        plan.memory()
        check_trained(plan)
    except ValueError:
        return None
    return plan


def run(plan: ss.Plan, folder: Path) -> dict[str, Any]:
    """The row of one real run, in ``folder``. Raises ``RuntimeError`` if it did not finish."""
    started = ss.launch(plan, ss.Pretrain(num_steps=NUM_STEPS), folder=folder)
    if started.wait(timeout=240) != "finished":
        raise RuntimeError(f"{started.status}: {started.reason}\n{started.error}")
    report = started.memory()
    versions = {name: version(name) for name in ("torch", "transformers")}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    (row, *_) = own_rows(plan, report.tensor_bytes, {}, date=date, versions=versions)
    print(
        f"{report.error:+.2%}  {plan.architecture.name}, {plan.layout.description}, {plan.recipe}", flush=True
    )
    return row | {"memory_kind": f"allocated ({COUNTED})"}


def main() -> int:
    """Draw, run, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--write", type=Path, default=OWN)
    chosen = parser.parse_args()
    draw, rows, refused = random.Random(chosen.seed), [], 0
    while len(rows) < chosen.count:
        plan = draw_plan(draw)
        if plan is None:
            refused += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = run(plan, Path(folder))
        row["id"] = f"own-cpu-{chosen.seed}-{len(rows)}"
        rows.append(row)
        append(chosen.write, [row])
    print(f"{len(rows)} runs; {refused} draws that no engine trains were left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
