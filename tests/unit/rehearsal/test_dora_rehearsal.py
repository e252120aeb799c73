"""Tests of predictions against rehearsals of DoRA: saved outputs, and the matrices of its norms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.in_process_rehearsal import list_stages
from tests.requirements import few, needs, skip_from_torch

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.rehearsal.result import TENSOR_COMPONENTS

needs("torch")
needs("peft")

LAYOUTS = {"ddp": ss.Layout.ddp(), "fsdp2": ss.Layout.fsdp2()}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = [
    (layout, precision, recompute, targets, seq_len)
    for layout in LAYOUTS
    for precision in ("fp32", "bf16", "bf16-mixed")
    for recompute in ("none", "full")
    for targets in (None, PROJECTIONS)
    for seq_len in (128, 1024)
]


@pytest.mark.parametrize(
    ("layout", "precision", "recompute", "targets", "seq_len"),
    few(
        CASES,
        [("fsdp2", "bf16-mixed", "full", PROJECTIONS, 128)],
    ),
)
def test_the_peak_agrees_with_a_rehearsal(
    layout: str, precision: str, recompute: str, targets: tuple[str, ...] | None, seq_len: int
) -> None:
    if (layout, precision, targets, seq_len) == ("fsdp2", "fp32", None, 128):
        skip_from_torch("2.15", "needs 2 % less under FSDP2 in fp32")
    # The vocabulary is small, so that the peak is in a layer and not at the logits.
    arch = replace(Architecture.of_size("10m"), num_hidden_layers=4, vocab_size=2048, name="small")
    recipe = ss.Recipe(
        method="lora",
        use_dora=True,
        lora_targets=targets,
        precision=precision,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        seq_len=seq_len,
        global_batch_size=8,
    )
    plan = ss.Plan(arch, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, LAYOUTS[layout])
    (rehearsed,) = list_stages(plan)
    predicted = max(
        sum(phase.components[name] for name in TENSOR_COMPONENTS if name in phase.components)
        for phase in plan.memory().worst_stage.phases
    )
    # The worst of the 48 cases is 1.01 % too low: 40 MiB under FSDP2 in fp32.
    assert predicted == pytest.approx(rehearsed.peak.num_bytes, rel=0.011)
