"""Which fault befalls which task, on how many ranks: drawn from a seed, the same wherever it is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak import tasks
from tests.soak.faults import FAULTS, Fault

import shardscope as ss

PRETRAIN_SHARE = 0.15
"""Of the launches whose task may be any: real training takes seconds to come up."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One launch of the soak."""

    seed: int
    number: int
    """From 1."""
    fault: Fault

    @property
    def chance(self) -> random.Random:
        """Its own, from the beginning each time."""
        return random.Random(f"{self.seed}/{self.number}")

    def work(self) -> tuple[ss.Plan, Any, str]:
        """The plan, the task, and both in words."""
        chance = self.chance
        ranks = chance.choice([1, 2, 2, 3])
        if self.fault.work is not None:
            task = self.fault.work(chance, ranks)
            return _plan(ranks, ss.Layout.ddp()), task, f"{type(task).__name__} on {_ranks(ranks)}"
        if chance.random() < PRETRAIN_SHARE:
            name, layout = chance.choice([("ddp", ss.Layout.ddp()), ("fsdp2", ss.Layout.fsdp2())])
            # One rank has nothing to shard.
            plan = _plan(max(2, ranks), layout)
            return plan, ss.Pretrain(num_steps=tasks.FOREVER), f"Pretrain {name} on {_ranks(plan.world_size)}"
        together = chance.random() < 0.5
        kind = "collective steps" if together else "steps"
        return _plan(ranks, ss.Layout.ddp()), tasks.Steps(together=together), f"{kind} on {_ranks(ranks)}"


def choices(seed: int, launches: int, faults: Sequence[Fault] = FAULTS) -> Iterator[Choice]:
    """Every fault once before any comes again, in an order of chance."""
    deck: list[Fault] = []
    shuffle = random.Random(seed)
    for number in range(1, launches + 1):
        if not deck:
            deck = shuffle.sample(list(faults), len(faults))
        yield Choice(seed=seed, number=number, fault=deck.pop())


def _plan(ranks: int, layout: ss.Layout) -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=ranks)
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse(f"{ranks}xcpu"), recipe, layout)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"
