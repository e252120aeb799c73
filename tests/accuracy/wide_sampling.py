"""Plans drawn over everything that a layout's support lists name: a sample to hold formulas against, unseen.

:mod:`sampling` draws the families, recipes and layouts that most people train. Here every family of the
catalogue comes as often as any other, half of the models have a published one's widths, and each choice of a
recipe takes any value that the layout offers. Plans that no engine runs are drawn too: a rehearsal
passes them over, so that a seed means the same plans whatever engines learn.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.accuracy import sampling

from shardscope.catalog import models
from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.prediction.support import list_supported

MAX_HIDDEN = 8192
"""Of published models, the widest that are drawn."""
USUAL = {
    "method": ("full", 0.5),
    "precision": ("bf16-mixed", 0.5),
    "optimizer": ("adamw", 0.6),
    "recompute": ("none", 0.4),
    "kernels": (None, 0.9),
    "attention": (None, 0.85),
    "loss": (None, 0.85),
    "quantization": (None, 1.0),
}
"""The usual value of each choice, and how often it is taken without looking at the others."""
CPU_SHARE = 0.08
FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text"),
    *("glm", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite"),
    *("llama", "mistral", "mixtral", "nemotron", "olmo2", "phi"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)
"""Those of the catalogue when the samples were stored: one more would change every plan of a seed."""


def draw_architecture(draw: Random) -> Architecture:
    """Draw a few layers of any family: sizes as :mod:`sampling` draws them, or a published model's."""
    if draw.random() < 0.4:
        return sampling.draw_architecture(draw)
    family = draw.choice(FAMILIES)
    published = [one for one in models.values() if one.model_type == family and one.hidden_size <= MAX_HIDDEN]
    model = draw.choice(published)
    layers = draw.choice((1, 2, 3, 4, 6))
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if model.sliding_window_layers:
        share = model.sliding_window_layers / model.num_hidden_layers
        changes["sliding_window_layers"] = round(share * layers)
    if model.mixture_of_experts:
        dense = min(model.mixture_of_experts.first_k_dense_replace, layers - 1)
        changes["mixture_of_experts"] = replace(model.mixture_of_experts, first_k_dense_replace=dense)
    if draw.random() < 0.4:
        changes["vocab_size"] = draw.choice((8_003, 32_000))
    return replace(model, name=f"{layers} layers of {model.name}", **changes)


def draw_recipe(draw: Random, layout: Layout, arch: Architecture, data_parallel: int) -> Recipe:
    """Draw every choice that the layout offers."""
    chosen: dict[str, Any] = {}
    for field, (usual, share) in USUAL.items():
        values = list_supported(layout, field)
        chosen[field] = usual if draw.random() < share or not values else draw.choice(values)
    adapted = chosen["method"] != "full"
    if chosen["recompute"] != "none":
        chosen["recompute_interval"] = draw.choice((1, 1, 2, 3))
    if adapted:
        chosen["lora_rank"] = draw.choice((None, 8, 64))
        chosen["lora_dropout"] = draw.choice((0.0, 0.0, 0.05))
        chosen["lora_targets"] = _draw_lora_targets(draw, arch)
    if draw.random() < 0.06:
        chosen["dropout"] = 0.1
    if chosen["attention"] == "flash":
        chosen["packing"] = draw.random() < 0.3
    micro = draw.choice((1, 1, 2, 4))
    return Recipe(
        seq_len=draw.choice((128, 512, 1024, 2048, 4096, 8192)),
        micro_batch_size=micro,
        global_batch_size=micro * data_parallel * draw.choice((1, 1, 1, 2, 4)),
        **chosen,
    )


def _draw_lora_targets(draw: Random, arch: Architecture) -> tuple[str, ...] | None:
    """Sample the modules with adapters: the default of the recipe, all projections, or one of them."""
    every = tuple(
        dict.fromkeys(name for i in range(arch.num_hidden_layers) for name, _ in arch.layer_linears(i))
    )
    return draw.choice((None, every, (draw.choice(every),)))


def draw_fsdp2(draw: Random, world_size: int) -> Layout:
    """Draw replicas, any number of ranks to reshard to, and shards in host memory."""
    replicate = draw.choice([degree for degree in (1, 1, 1, 2, 4) if world_size % degree == 0])
    shard = world_size // replicate
    divisors = [degree for degree in (2, 3, 4, 6, 8, 16) if shard % degree == 0]
    reshard = draw.choice((True, True, False, *(draw.choice(divisors) for _ in divisors[:1])))
    offload = draw.choice((None,) * 7 + ("cpu",))
    return Layout.fsdp2(replicate=replicate, reshard_after_forward=reshard, offload=offload)


LAYOUTS = {**sampling.LAYOUTS, "fsdp2": draw_fsdp2}
"""How each framework's layouts are drawn here."""


def sample_plans(framework: str, seed: int, count: int) -> list[Plan]:
    """Sample ``count`` plans of one framework; the same seed gives the same ones, a larger count more."""
    plans: list[Plan] = []
    draw = Random(f"wide {framework} {seed}")
    while len(plans) < count:
        name = draw.choice(sampling.CLUSTERS)
        cluster = Cluster.parse("2xcpu" if draw.random() < CPU_SHARE else name)
        arch = draw_architecture(draw)
        try:
            layout = LAYOUTS[framework](draw, cluster.num_gpus)
            free = layout.compute_degrees(arch, cluster, Recipe())
            drawn = draw_recipe(draw, layout, arch, free.data_parallel)
            plans.append(Plan(arch, cluster, drawn, sampling.make_runnable(layout, arch, drawn)))
        except ValueError:
            continue
    return plans
