"""Learning rates by step: those of transformers' schedulers, and the default, which has not changed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs

import shardscope as ss
from shardscope.runs.resume import _make_task
from shardscope.runs.task_fields import record_task_fields
from shardscope.training.optimizers.schedule import SCHEDULER_TYPES, Schedule

PEAK = 3e-4
PLAN = ss.Plan(
    ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
)


def list_rates(task: ss.Pretrain, num_steps: int) -> list[float]:
    schedule = task.build_schedule(PLAN, num_steps)
    return [schedule.learning_rate_at(step) for step in range(num_steps)]


@pytest.mark.parametrize("kind", SCHEDULER_TYPES)
@pytest.mark.parametrize(("num_steps", "warmup"), [(40, 7), (40, 0), (40, 40), (1, 0), (25, 0.1), (3, 0.5)])
def test_rates_are_those_of_transformers(kind: Any, num_steps: int, warmup: float) -> None:
    torch = needs("torch")
    needs("transformers")
    from transformers import TrainingArguments, get_scheduler

    # Its own count of warm-up steps, without the rest of TrainingArguments.
    arguments: Any = type("Arguments", (), {"warmup_steps": warmup})()
    num_warmup = TrainingArguments.get_warmup_steps(arguments, num_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    options = {"min_lr_rate": 0.1} if kind == "cosine_with_min_lr" else {}
    scheduler = get_scheduler(kind, optimizer, num_warmup, num_steps, scheduler_specific_kwargs=options)
    expected = []
    for _ in range(num_steps):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    warmup_steps = None if kind == "constant" else warmup
    task = ss.Pretrain(learning_rate=PEAK, lr_scheduler_type=kind, warmup_steps=warmup_steps)
    assert list_rates(task, num_steps) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_default_is_a_warm_up_above_0_then_a_cosine_to_a_tenth() -> None:
    rates = list_rates(ss.Pretrain(learning_rate=1.0, num_steps=100), 100)
    rise = [(step + 1) / 10 for step in range(10)]
    fall = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 90)) for step in range(90)]
    assert rates == pytest.approx([*rise, *fall], rel=1e-12)
    assert PLAN and ss.Pretrain(num_steps=5000).build_schedule(PLAN, 5000).warmup_steps == 100


def test_a_constant_schedule_has_no_warm_up() -> None:
    with pytest.raises(ValueError, match=r"^Pretrain.warmup_steps is 5; .*constant_with_warmup"):
        ss.Pretrain(lr_scheduler_type="constant", warmup_steps=5)
    assert list_rates(ss.Pretrain(learning_rate=PEAK, lr_scheduler_type="constant"), 30) == [PEAK] * 30
    task = ss.Pretrain(num_steps=2000, lr_scheduler_type="constant")
    (finding,) = [finding for finding in PLAN.findings(task) if finding.name == "short-warm-up"]
    assert finding.task == replace(task, lr_scheduler_type="constant_with_warmup", warmup_steps=40)


def test_a_share_of_the_steps_is_compared_with_the_steps_that_adam_needs() -> None:
    def has_finding(warmup: float) -> bool:
        findings = PLAN.findings(ss.Pretrain(num_steps=1000, warmup_steps=warmup))
        return any(finding.name == "short-warm-up" for finding in findings)

    assert has_finding(0.01) and not has_finding(0.05)


def test_the_schedule_is_recorded() -> None:
    fields = record_task_fields(ss.Pretrain(lr_scheduler_type="linear", warmup_steps=0.1))
    assert fields is not None and fields["lr_scheduler_type"] == "linear" and fields["warmup_steps"] == 0.1
    assert Schedule(peak=PEAK, num_steps=9, warmup_steps=2, kind="linear").describe() == {
        "num_steps": 9,
        "learning_rate": PEAK,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
    }


def test_a_resumed_run_has_the_same_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ss.Pretrain, "_find_resumable", lambda self, value: value)
    asked = record_task_fields(ss.Pretrain(lr_scheduler_type="linear", warmup_steps=0.1))
    description = json.loads(json.dumps({"asked": asked}))
    task = _make_task(ss.Pretrain, description, tmp_path)
    assert (task.lr_scheduler_type, task.warmup_steps) == ("linear", 0.1)
    # Runs of older versions had the default.
    del description["asked"]["lr_scheduler_type"]
    assert _make_task(ss.Pretrain, description, tmp_path).lr_scheduler_type is None
