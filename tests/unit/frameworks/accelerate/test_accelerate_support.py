"""Whether Accelerate can run a plan: scripts, advice and exported files give the same answer."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from shardscope.frameworks.accelerate import plugins
from shardscope.frameworks.accelerate.limits import why_not_started
from shardscope.frameworks.formats.exported import Exported
from shardscope.planner.advice.last_questions import ask_one_script

H100S = "2x8xh100-sxm-80gb"
NVME = {"stage3_prefetch_bucket_size": 10**6, "offload_optimizer_buffer_count": 6}


def run_script() -> None:
    """A user's script that does nothing."""


def build_plan(model: str, layout: ss.Layout) -> ss.Plan:
    return ss.Plan(ss.models[model], ss.Cluster.parse(H100S), ss.Recipe(global_batch_size=64), layout)


def import_export(framework: str) -> Any:
    """Return the framework's export module."""
    return import_module(f"shardscope.frameworks.{framework}.files.export")


def find_advice(plan: ss.Plan) -> str:
    """Return the advice about ``plan``."""
    answers: list[str] = []
    current = SimpleNamespace(plan=plan)
    path: Any = SimpleNamespace(
        current=current, familiar=(), record_turn=lambda *turn, **_: answers.append(turn[2])
    )
    ask_one_script(path)
    return answers[0]


@pytest.mark.parametrize(
    ("model", "layout", "starts"),
    [
        ("mixtral-8x7b", ss.Layout.megatron(tp=4, pp=2, vpp=16), False),
        ("llama-3.1-8b", ss.Layout.megatron(tp=4, pp=2, vpp=2), False),
        ("llama-3.1-8b", ss.Layout.megatron(tp=4, pp=2), True),
        ("llama-3.2-3b", ss.Layout.megatron(pp=8), False),
        ("llama-3.1-8b", ss.Layout.megatron(overlap_grad_reduce=True), False),
        ("llama-3.1-8b", ss.Layout.zero(3, offload_optimizer="nvme", offload_params="nvme", **NVME), True),
        ("llama-3.1-8b", ss.Layout.zero(3, zero_hpz_partition_size=8), True),
        ("llama-3.1-8b", ss.Layout.zero(1, pp=2), False),
        ("mixtral-8x7b", ss.Layout.zero(1, ep=4), False),
        ("llama-3.1-8b", ss.Layout.fsdp2(pp=2), False),
        ("llama-3.1-8b", ss.Layout.fsdp2(replicate=2), True),
        ("gpt2", ss.Layout.ddp(), True),
    ],
)
def test_script_advice_and_exported_files_agree(
    model: str, layout: ss.Layout, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model == "gpt2":
        plan = ss.Plan(ss.models[model], ss.Cluster.parse(H100S), ss.Recipe(seq_len=1024), layout)
    else:
        plan = build_plan(model, layout)
    monkeypatch.setattr(plugins, "has_megatron_lm", lambda: True)
    assert (why_not_started(plan) is None) == starts
    try:
        ss.Script(run_script).check(plan)
    except ValueError as error:
        assert not starts and str(error) == why_not_started(plan)
    else:
        assert starts
    assert (" starts this plan through " in find_advice(plan)) == starts
    assert ("does not start this plan" in find_advice(plan)) != starts
    (file,) = [
        f for f in import_export(layout.framework).render_files(plan) if f.name == "accelerate_config.yaml"
    ]
    if layout.framework != "megatron":
        assert isinstance(file, Exported) == starts
    else:
        assert not isinstance(file, Exported)
        assert ("ss.Script starts" in file.why) == starts, "Megatron-LM has its own files"


def test_only_the_script_reports_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "has_megatron_lm", lambda: False)
    plan = build_plan("llama-3.1-8b", ss.Layout.megatron(tp=8))
    assert why_not_started(plan) is None and " starts this plan through " in find_advice(plan)
    with pytest.raises(ValueError, match=r"megatron\.training"):
        ss.Script(run_script).check(plan)
