"""Tests of predictions against rehearsals: adapters of one projection, before which little is saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.in_process_rehearsal import list_stages
from tests.requirements import needs, needs_installed

import shardscope as ss
from shardscope.catalog import models
from shardscope.rehearsal.result import TENSOR_COMPONENTS

needs("torch")
needs("peft")

ONE_GPU = ss.Cluster.parse("h100-sxm-80gb")
NF4: dict[str, Any] = {"method": "qlora", "precision": "bf16-mixed"}
INT8: dict[str, Any] = {"method": "lora", "precision": "bf16", "quantization": "int8"}


def check_peak(model: str, layout: ss.Layout, target: str, options: dict[str, Any]) -> None:
    """Compare the peaks of a two-layer model whose ``target`` has adapters."""
    # With few layers, the tensors of the first are a large part of the peak.
    arch = models[model]
    sliding = 2 if arch.sliding_window_layers else 0
    arch = replace(arch, name="small", num_hidden_layers=2, sliding_window_layers=sliding, vocab_size=32_000)
    recipe = ss.Recipe(seq_len=2048, global_batch_size=1, lora_targets=(target,), **options)
    plan = ss.Plan(arch, ONE_GPU, recipe, layout)
    (rehearsed,) = list_stages(plan)
    predicted = max(
        sum(phase.components[name] for name in TENSOR_COMPONENTS if name in phase.components)
        for phase in plan.memory().worst_stage.phases
    )
    assert predicted == pytest.approx(rehearsed.peak.num_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("model", "target", "options"),
    [
        # The activation's fp32 input is not saved either: 2 to 5 % too high.
        ("pythia-1.4b", "dense_4h_to_h", NF4),
        ("starcoder2-3b", "c_proj", NF4),
        # int8 matmuls save no input without a gradient: up to 6 % too high.
        ("pythia-1.4b", "dense_4h_to_h", INT8),
        ("phi-1.5", "fc2", INT8),
        ("phi-1.5", "dense", INT8),
        ("starcoder2-3b", "c_proj", INT8),
        ("starcoder2-3b", "o_proj", INT8),
    ],
)
def test_a_quantized_base_saves_nothing_before_the_first_adapter(
    model: str, target: str, options: dict[str, Any]
) -> None:
    check_peak(model, ss.Layout.ddp(), target, options)


@needs_installed("deepspeed")
@pytest.mark.parametrize(("model", "target"), [("pythia-1.4b", "dense"), ("phi-1.5", "fc1")])
def test_frozen_inputs_of_the_branch_without_adapters_under_zero_3(model: str, target: str) -> None:
    """Parallel attention and feed-forward: adapters of one do not give the other's input a gradient."""
    check_peak(model, ss.Layout.zero(3), target, {"method": "lora", "precision": "bf16"})


@needs_installed("deepspeed")
@pytest.mark.parametrize("target", ["dense", "dense_h_to_4h"])
def test_bucket_exists_at_the_scores_after_another_adapters_gradient(target: str) -> None:
    """Falcon 7B has its peak at attention scores: 10 % too low without ZeRO's bucket of 1 GB."""
    check_peak("falcon-7b", ss.Layout.zero(2), target, {"method": "lora", "precision": "bf16-mixed"})
