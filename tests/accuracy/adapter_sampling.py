"""LoRA where adapters are on every projection and no logits hide what a layer holds: every framework in turn.

Samples of other plans have few adapters in the feed-forward, and their peaks are mostly the logits'. Here the
vocabulary is small and the sequence long, so a layer's forward, its recomputation and its backward are the
peak. ``python -m tests.accuracy.adapter_sampling`` rehearses what is not stored yet
(``<framework>-adapters.jsonl``) and compares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.accuracy.rehearsal_samples import show, store
from tests.accuracy.rehearsals import STORED

from shardscope.catalog import models
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.families.parameter_shapes import find_first_layer

MODELS = ("llama-3.1-8b", "qwen3-8b")
LAYOUTS = {
    "ddp": (Layout.ddp(),),
    "fsdp2": (Layout.fsdp2(),),
    "deepspeed": (Layout.zero(stage=2), Layout.zero(stage=3)),
}
RECIPES: tuple[dict[str, Any], ...] = (
    {},
    {"lora_dropout": 0.05},
    {"recompute": "full"},
    {"recompute": "full", "lora_dropout": 0.05},
    {"recompute": "selective"},
    {"lora_targets": ("q_proj", "v_proj")},
    {"lora_targets": ("down_proj",), "lora_dropout": 0.05},
    {"lora_targets": ("gate_proj", "up_proj")},
)


def sample_plans(framework: str) -> list[Plan]:
    """Make plans of every recipe with every model, under each layout of ``framework``."""
    cluster = Cluster.parse("8xh100-sxm-80gb")
    plans: list[Plan] = []
    for name in MODELS:
        arch = replace(models[name], name=f"2 layers of {name}", num_hidden_layers=2, vocab_size=8_000)
        every = tuple(target for target, _ in arch.layer_linears(find_first_layer(arch, False)))
        for chosen in RECIPES:
            common = {"method": "lora", "lora_rank": 16, "lora_targets": every}
            recipe = Recipe(seq_len=4096, micro_batch_size=2, global_batch_size=16, **{**common, **chosen})
            plans += [Plan(arch, cluster, recipe, layout) for layout in LAYOUTS[framework]]
    return plans


def main() -> None:
    """Make what is missing, and compare."""
    for framework in LAYOUTS:
        file = STORED / f"{framework}-adapters.jsonl"
        store(framework, sample_plans(framework), file, seed=0)
        show(framework, [file])


if __name__ == "__main__":
    main()
