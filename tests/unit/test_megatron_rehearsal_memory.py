"""What rehearsals of Megatron hold of this machine: no real tensors, and nothing once they have ended."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from planning import MOE
from tests.needs import few
from torch._subclasses import fake_tensor

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.rehearsal.rehearse import _StageRehearsal, rehearse

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
SMALL = replace(ss.Architecture.of_size("60m"), num_hidden_layers=2)
EXPERTS = replace(MOE, num_hidden_layers=2)


def played(arch: ss.Architecture, recipe: dict[str, Any], **layout: Any) -> None:
    plan = Plan(arch, EIGHT, ss.Recipe(seq_len=256, **recipe), ss.Layout.megatron(**layout))
    rehearse(plan, lambda words, fraction: None)


@pytest.mark.parametrize("precision", few(["fp32", "bf16-mixed", "fp16-mixed"], ["bf16-mixed"]))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_operator_runs_on_real_tensors(
    monkeypatch: pytest.MonkeyPatch, precision: str, optimizer: str
) -> None:
    """What has no fake counterpart torch would run on real zeros of the same sizes: once 21 GB of them."""

    def fallback(mode: Any, operator: Any, *args: Any) -> None:
        raise AssertionError(f"{operator} would run on real tensors")

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", fallback)
    played(SMALL, {"precision": precision, "optimizer": optimizer}, distributed_optimizer=False)


@pytest.mark.parametrize("arch", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_nothing_outlives_a_rehearsal(monkeypatch: pytest.MonkeyPatch, arch: ss.Architecture) -> None:
    build, made = _StageRehearsal._build, []

    def kept_weakly(self: _StageRehearsal, tracker: Any) -> Any:
        chunks, optimizer = build(self, tracker)
        made.extend(weakref.ref(parameter) for chunk in chunks for parameter in chunk.parameters())
        return chunks, optimizer

    monkeypatch.setattr(_StageRehearsal, "_build", kept_weakly)
    played(arch, {}, pp=2)
    gc.collect()
    assert len(made) > 10 and not any(parameter() is not None for parameter in made)
    assert not fake_tensor.FakeTensorMode.cache
