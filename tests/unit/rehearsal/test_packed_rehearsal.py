"""Predicted memory of packed documents against rehearsals: the mask that all layers share, counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.in_process_rehearsal import rehearse_in_this_process
from tests.requirements import few, needs, sample, skip_without

import shardscope as ss

needs("torch")
needs("transformers")

ARCH = replace(ss.models["smollm2-135m"], num_hidden_layers=2)
LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "zero-2": ss.Layout.zero(stage=2),
    "zero-3": ss.Layout.zero(stage=3),
}
RECIPES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "fp32": {"precision": "fp32"},
    "recomputed": {"precision": "bf16", "recompute": "full"},
    "selective": {"recompute": "selective"},
    "lora": {"method": "lora"},
}
CASES = [
    (name, recipe, cluster)
    for name in LAYOUTS
    for recipe in RECIPES
    for cluster in ("2xcpu", "2xa100-sxm-80gb")
]
FEW = [
    ("ddp", "lora", "2xcpu"),
    ("fsdp2", "recomputed", "2xa100-sxm-80gb"),
    ("zero-2", "selective", "2xa100-sxm-80gb"),
]


@sample(1)
@pytest.mark.parametrize(("name", "recipe", "cluster"), few(CASES, FEW))
def test_predicted_memory_of_packed_windows_is_the_rehearsed_one(
    name: str, recipe: str, cluster: str
) -> None:
    if name.startswith("zero"):
        skip_without("deepspeed")
    # No multiple of 8: the mask's rows are longer, or CUDA's kernel would copy it in each layer.
    fields = {"seq_len": 1021, "micro_batch_size": 3, "global_batch_size": 12, **RECIPES[recipe]}
    packed = ss.Recipe(packing=True, **fields)
    plan = ss.Plan(ARCH, ss.Cluster.parse(cluster), packed, LAYOUTS[name])
    predicted, rehearsed = plan.memory(), rehearse_in_this_process(plan)
    assert sum_tensors(predicted) == pytest.approx(sum_tensors(rehearsed), rel=1e-3)
    # A mask of each layer, or none, would be seen.
    mask = 3 * 1021 * 1024 * (4 if recipe == "fp32" else 2)
    assert mask > 1.5e-3 * sum_tensors(rehearsed)


def sum_tensors(report: Any) -> int:
    names = ("parameters", "gradients", "optimizer", "gather_buffers", "activations", "logits")
    return sum(report.components[name] for name in names)
