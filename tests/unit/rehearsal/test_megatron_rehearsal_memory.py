"""Host memory of Megatron rehearsals: no real tensors, and none left afterwards."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_plans import MOE
from tests.requirements import few, thorough
from torch._subclasses import fake_tensor

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.rehearsal.rehearse import rehearse

pytestmark = thorough()

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
SMALL = replace(ss.Architecture.of_size("60m"), num_hidden_layers=2)
EXPERTS = replace(MOE, num_hidden_layers=2)


def run_rehearsal(arch: ss.Architecture, recipe: dict[str, Any], **layout: Any) -> None:
    plan = Plan(arch, EIGHT, ss.Recipe(seq_len=256, **recipe), ss.Layout.megatron(**layout))
    rehearse(plan, lambda words, fraction: None)


@pytest.mark.parametrize("precision", few(["fp32", "bf16-mixed", "fp16-mixed"], ["bf16-mixed"]))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_operator_runs_on_real_tensors(
    monkeypatch: pytest.MonkeyPatch, precision: str, optimizer: str
) -> None:
    """torch runs an operator without a fake version on real zeros of the same sizes: once 21 GB of them."""

    def raise_assertion_error(mode: Any, operator: Any, *args: Any) -> None:
        raise AssertionError(f"{operator} would run on real tensors")

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", raise_assertion_error)
    run_rehearsal(SMALL, {"precision": precision, "optimizer": optimizer}, distributed_optimizer=False)


def count_fake_parameters() -> int:
    gc.collect()
    fakes = [each for each in gc.get_objects() if type(each) is fake_tensor.FakeTensor]
    return sum(isinstance(each, torch.nn.Parameter) for each in fakes)


@pytest.mark.parametrize("arch", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_fake_tensors_are_freed_after_a_rehearsal(arch: ss.Architecture) -> None:
    before = count_fake_parameters()
    run_rehearsal(arch, {}, pp=2)
    assert count_fake_parameters() <= before
    assert not fake_tensor.FakeTensorMode.cache
