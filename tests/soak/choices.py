"""Random choice of faults, tasks and numbers of ranks, reproducible from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak import tasks
from tests.soak.faults import FAULTS, Fault

import shardscope as ss

PRETRAIN_SHARE = 0.15
"""Share of real training among the launches with any task; it takes seconds to start."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One launch of the soak."""

    seed: int
    number: int
    """From 1."""
    fault: Fault

    def make_rng(self) -> random.Random:
        """Return this choice's random number generator, in its initial state."""
        return random.Random(f"{self.seed}/{self.number}")

    def build_task(self) -> tuple[ss.Plan, Any, str]:
        """Return the plan, the task, and a description of both."""
        rng = self.make_rng()
        ranks = rng.choice([1, 2, 2, 3])
        if self.fault.make_task is not None:
            task = self.fault.make_task(rng, ranks)
            return (
                _make_plan(ranks, ss.Layout.ddp()),
                task,
                f"{type(task).__name__} on {_format_ranks(ranks)}",
            )
        if rng.random() < PRETRAIN_SHARE:
            name, layout = rng.choice([("ddp", ss.Layout.ddp()), ("fsdp2", ss.Layout.fsdp2())])
            # One rank has nothing to shard.
            plan = _make_plan(max(2, ranks), layout)
            return (
                plan,
                ss.Pretrain(num_steps=tasks.FOREVER),
                f"Pretrain {name} on {_format_ranks(plan.world_size)}",
            )
        is_collective = rng.random() < 0.5
        kind = "collective steps" if is_collective else "steps"
        return (
            _make_plan(ranks, ss.Layout.ddp()),
            tasks.Steps(collective=is_collective),
            f"{kind} on {_format_ranks(ranks)}",
        )


def draw_choices(seed: int, launches: int, faults: Sequence[Fault] = FAULTS) -> Iterator[Choice]:
    """Yield choices in random order, each fault once before any is repeated."""
    deck: list[Fault] = []
    shuffle = random.Random(seed)
    for number in range(1, launches + 1):
        if not deck:
            deck = shuffle.sample(list(faults), len(faults))
        yield Choice(seed=seed, number=number, fault=deck.pop())


def _make_plan(ranks: int, layout: ss.Layout) -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=ranks)
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse(f"{ranks}xcpu"), recipe, layout)


def _format_ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"
