"""Learning rates by step: those of transformers' schedulers, but for the warm-up, which begins above 0."""

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
from shardscope.training.tasks import text_task

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
    if kind != "constant":
        # A step of the warm-up has the rate that transformers gives the next one, and its last step the peak.
        expected[:num_warmup] = [*expected[1:num_warmup], PEAK][:num_warmup]
    task = ss.Pretrain(learning_rate=PEAK, schedule=kind, warmup=warmup)
    assert list_rates(task, num_steps) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_default_is_a_short_warm_up_above_0_then_a_cosine_to_0() -> None:
    rates = list_rates(ss.Pretrain(learning_rate=1.0, num_steps=100), 100)
    rise = [1 / 3, 2 / 3, 1.0]
    fall = [0.5 * (1 + math.cos(math.pi * step / 97)) for step in range(97)]
    assert rates == pytest.approx([*rise, *fall], rel=1e-12)


def test_a_constant_schedule_has_no_warm_up() -> None:
    for warmup in (0.03, 5):
        task = ss.Pretrain(learning_rate=PEAK, schedule="constant", warmup=warmup)
        assert list_rates(task, 30) == [PEAK] * 30
    task = ss.Pretrain(num_steps=2000, schedule="constant")
    (finding,) = [finding for finding in PLAN.findings(task) if finding.name == "short-warm-up"]
    assert finding.task == replace(task, schedule="constant_with_warmup", warmup=40)


def test_the_default_warm_up_is_long_enough() -> None:
    for num_steps in (1, 10, 50, 333, 1000, 5000):
        findings = PLAN.findings(ss.Pretrain(num_steps=num_steps))
        assert not [finding for finding in findings if finding.name == "short-warm-up"]


def test_a_share_of_the_steps_is_compared_with_the_steps_that_adam_needs() -> None:
    def has_finding(warmup: float) -> bool:
        findings = PLAN.findings(ss.Pretrain(num_steps=1000, warmup=warmup))
        return any(finding.name == "short-warm-up" for finding in findings)

    assert has_finding(0.01) and not has_finding(0.05)


def test_the_schedule_is_recorded() -> None:
    fields = record_task_fields(ss.Pretrain(schedule="linear", warmup=0.1))
    assert fields is not None and fields["schedule"] == "linear" and fields["warmup"] == 0.1
    assert Schedule(peak=PEAK, num_steps=9, warmup_steps=2, kind="linear").describe() == {
        "num_steps": 9,
        "learning_rate": PEAK,
        "schedule": "linear",
        "warmup": 2,
    }


def test_a_resumed_run_has_the_same_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_task, "find_resumable", lambda field, value: value)
    asked = record_task_fields(ss.Pretrain(schedule="linear", warmup=0.1))
    description = json.loads(json.dumps({"asked": asked}))
    task = _make_task(ss.Pretrain, description, tmp_path)
    assert (task.schedule, task.warmup) == ("linear", 0.1)


@pytest.mark.parametrize("num_steps", [7, 50, 5000])
@pytest.mark.parametrize("recorded", [{}, {"lr_scheduler_type": None, "warmup_steps": None}])
def test_a_resumed_run_of_an_older_version_has_its_schedule(
    recorded: dict[str, Any], num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a cosine to a tenth after a tenth of the steps, at most 100."""
    monkeypatch.setattr(text_task, "find_resumable", lambda field, value: value)
    asked = dict(record_task_fields(ss.Pretrain(num_steps=num_steps, learning_rate=PEAK)) or {})
    del asked["schedule"], asked["warmup"]
    description = json.loads(json.dumps({"asked": {**asked, **recorded}}))
    rates = list_rates(_make_task(ss.Pretrain, description, tmp_path), num_steps)
    warmup = min(100, num_steps // 10)
    for step, rate in enumerate(rates):
        done = (step - warmup) / max(1, num_steps - warmup)
        share = (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        assert rate == pytest.approx(PEAK * share, rel=1e-12)
