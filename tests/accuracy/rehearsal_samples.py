"""``python -m tests.accuracy.rehearsals --make N [--framework ddp ...]``: sampled plans rehearsed and stored.

Stored are JSON lines in ``tests/fixtures/rehearsals/<framework>.jsonl``, one plan each::

    {"name": "3", "seed": 0, "plan": {...}, "stages": [{"stage", "num_layers", "moments", "note", ...}],
     "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "seconds": 1.4}

``plan`` is ``Plan.to_dict()``, ``stages`` are ``RehearsedStage.to_dict()``: bytes of tensors by component at
the peaks of a step, without communication, runtime and fragmentation. Without ``--make`` it prints what is
stored beside today's predictions, worst first.

``--wide`` draws from :mod:`wide_sampling` instead, with a seed of its own, into
``<framework>-held-out.jsonl``; plans that no engine runs are passed over, and their names stay free.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from tests.accuracy import wide_sampling
from tests.accuracy.rehearsals import COMPONENTS, STORED, Rehearsed, read_rehearsals
from tests.accuracy.sampling import LAYOUTS, sample_plans

from shardscope.core.plan import Plan

SEED = 0
HELD_OUT_SEEDS = {1: 20_261_121, 2: 20_261_122}
"""Of samples that no formula had seen when they were drawn: the second one after the first was looked at."""


def stored_file(framework: str, *, wide: int = 0) -> Path:
    """Return the file of the rehearsals of one framework's sample."""
    ending = {0: "", 1: "-held-out"}.get(wide, f"-held-out-{wide}")
    return STORED / f"{framework}{ending}.jsonl"


def rehearse_samples(framework: str, count: int, *, wide: int = 0) -> None:
    """Rehearse those of the first ``count`` sampled plans that are not stored yet, one after another."""
    seed = HELD_OUT_SEEDS[wide] if wide else SEED
    sampled = (wide_sampling.sample_plans if wide else sample_plans)(framework, seed, count)
    store(framework, sampled, stored_file(framework, wide=wide), seed)


def store(framework: str, sampled: list[Plan], file: Path, seed: int) -> None:
    """Rehearse those plans that ``file`` does not have yet, and append each to it."""
    STORED.mkdir(parents=True, exist_ok=True)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    done = {json.loads(line)["name"] for line in lines}
    module: Any = import_module(f"shardscope.frameworks.{framework.partition('-')[0]}.rehearsal.rehearse")
    versions = {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}
    for index, plan in enumerate(sampled):
        if str(index) in done:
            continue
        began = time.monotonic()
        try:
            stages = module.rehearse(plan, lambda words, fraction: None)
        except Exception as problem:
            print(f"{framework} {index}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
            continue
        row = {
            "name": str(index),
            "seed": seed,
            "plan": plan.to_dict(),
            "stages": [stage.to_dict() for stage in stages],
            "versions": versions,
            "seconds": round(time.monotonic() - began, 1),
        }
        with file.open("a", encoding="utf-8") as stored:
            stored.write(json.dumps(row) + "\n")


def is_same(stored: Plan, drawn: Plan) -> bool:
    """Return whether two plans are equal except for the prices of their GPUs."""
    one, other = stored.to_dict(), drawn.to_dict()
    return {**one, "cluster": other["cluster"]} == other and stored.world_size == drawn.world_size


def in_words(one: Rehearsed) -> str:
    """One line: the error, the plan, and which components it comes from."""
    arch, recipe, layout = one.plan.architecture, one.plan.recipe, one.plan.layout
    parts = {name: one.component_error(name) for name in COMPONENTS}
    shares = " ".join(f"{name}{100 * share:+.1f}" for name, share in parts.items() if abs(share) > 5e-4)
    return (
        f"{100 * one.error:+7.2f} %  {one.name:10s} "
        f"{arch.model_type} h{arch.hidden_size} L{arch.num_hidden_layers} v{arch.vocab_size} "
        f"s{recipe.seq_len} b{recipe.micro_batch_size}x{one.plan.num_micro_batches} {recipe.precision} "
        f"{recipe.method} {recipe.recompute} {recipe.optimizer} {one.plan.world_size} ranks "
        f"{getattr(layout, 'replicate', '')} {getattr(layout, 'reshard_after_forward', '')} | {shares}"
    )


def show(name: str, files: list[Path]) -> None:
    """Stored rehearsals beside today's predictions, worst first."""
    rows, refused = read_rehearsals(files)
    rows.sort(key=lambda one: -abs(one.error))
    for one in rows:
        print(in_words(one))
    print("\n".join(refused))
    close = [sum(abs(one.error) <= limit for one in rows) for limit in (0.01, 0.03)]
    if rows:
        worst = 100 * abs(rows[0].error)
        shares = f"{close[0]} within 1 %, {close[1]} within 3 % of {len(rows)}"
        print(f"{name}: {shares}, worst {worst:.2f} %")


def main() -> None:
    """Make, and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.rehearsals", description=__doc__)
    parser.add_argument("--make", type=int, default=0, metavar="N", help="rehearse the first N sampled plans")
    parser.add_argument("--framework", nargs="+", default=sorted(LAYOUTS), choices=sorted(LAYOUTS))
    parser.add_argument(
        "--wide",
        type=int,
        nargs="?",
        default=0,
        const=1,
        choices=(0, *HELD_OUT_SEEDS),
        help="a held-out sample over the whole space",
    )
    chosen = parser.parse_args()
    for framework in chosen.framework:
        if chosen.make:
            rehearse_samples(framework, chosen.make, wide=chosen.wide)
        file = stored_file(framework, wide=chosen.wide)
        show(framework, [file] if file.exists() else [])


if __name__ == "__main__":
    main()
