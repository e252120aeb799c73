"""DDP and FSDP2 plans over recipes that :mod:`sampling` draws none of: optimizers, losses, quantized bases.

Small in depth and width, so that a plan is rehearsed in seconds. Each plan has at least one of the choices,
and what a layout refuses together is drawn again. ``python -m tests.accuracy.recipe_sampling --make N``
rehearses the first N of each and stores them (:mod:`rehearsal_samples`) in ``<framework>-recipes.jsonl``
or, of the other seed, ``<framework>-recipes-held-out.jsonl``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

from tests.accuracy import sampling, wide_sampling
from tests.accuracy.rehearsal_samples import show, store
from tests.accuracy.rehearsals import STORED

from shardscope.core.architecture import Architecture
from shardscope.core.cluster import Cluster
from shardscope.core.layout import Layout
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.frameworks.limits import REHEARSED

SEEDS = {"recipes": 20_261_121, "recipes-held-out": 20_261_122}
"""Of two samples: the second was drawn once formulas had been fixed by the first."""
FRAMEWORKS = ("ddp", "fsdp2")
MAX_PARAMETERS = 1_500_000_000
OPTIMIZERS = ("adamw_foreach", "adamw_8bit", "adafactor", "lion", "muon")
BASES: tuple[dict[str, Any], ...] = (
    {"method": "qlora"},
    {"method": "lora", "quantization": "nf4"},
    {"method": "lora", "quantization": "int8"},
)


def draw_architecture(draw: Random) -> Architecture:
    """Sample an architecture as :mod:`wide_sampling` does, but none that takes long."""
    while True:
        found = wide_sampling.draw_architecture(draw)
        if found.num_parameters <= MAX_PARAMETERS:
            return found


def draw_choices(draw: Random) -> dict[str, Any]:
    """Draw at least one of the new values; two half of the time."""
    chosen: dict[str, Any] = {}
    for name in draw.sample(
        ("optimizer", "loss", "recompute", "base", "base", "dropout"), draw.choice((1, 2, 2))
    ):
        if name == "optimizer":
            chosen["optimizer"] = draw.choice(OPTIMIZERS)
        elif name == "loss":
            chosen["loss"] = "chunked"
        elif name == "recompute":
            chosen |= {"recompute": "offload", "recompute_interval": draw.choice((1, 1, 2))}
        elif name == "base":
            chosen |= draw.choice(BASES) | {
                "lora_rank": draw.choice((None, 8, 64)),
                "lora_dropout": draw.choice((0.0, 0.05)),
            }
        else:
            chosen["dropout"] = 0.1
    return chosen


def draw_recipe(draw: Random, data_parallel: int) -> Recipe:
    """Draw the usual choices, and over them the new ones."""
    micro = draw.choice((1, 1, 2))
    values: dict[str, Any] = {
        "seq_len": draw.choice((256, 512, 1024, 2048)),
        "micro_batch_size": micro,
        "global_batch_size": micro * data_parallel * draw.choice((1, 1, 2)),
        "precision": draw.choice(("bf16-mixed", "bf16-mixed", "bf16", "bf16", "fp32")),
        "recompute": draw.choice(("none", "none", "full", "selective")),
    }
    return Recipe(**(values | draw_choices(draw)))


def sample_plans(framework: str, seed: int, count: int) -> list[Plan]:
    """Sample ``count`` "ddp" or "fsdp2" plans for rehearsals; larger counts begin with the same."""
    plans: list[Plan] = []
    draw = Random(f"recipes {framework} {seed}")
    while len(plans) < count:
        name = "2xcpu" if draw.random() < wide_sampling.CPU_SHARE else draw.choice(sampling.CLUSTERS)
        cluster, arch = Cluster.parse(name), draw_architecture(draw)
        layout: Layout = wide_sampling.LAYOUTS[framework](draw, cluster.num_gpus)
        try:
            free = layout.compute_degrees(arch, cluster, Recipe())
            plan = Plan(arch, cluster, draw_recipe(draw, free.data_parallel), layout)
        except ValueError:
            continue
        played = all(getattr(plan.recipe, field) in values for field, values in REHEARSED.items())
        # When these were drawn, FSDP2 refused a base in NF4 beside adapters in fp32 (fsdp2-nf4-mixed).
        in_few_bits = framework == "fsdp2" and plan.recipe.base_quantization is not None
        was_refused = in_few_bits and plan.recipe.precision != "bf16"
        # A mask of biases is played, and has no formula to hold against it.
        if played and not was_refused and arch.position_embedding != "alibi":
            plans.append(plan)
    return plans


def stored_file(framework: str, sample: str = "recipes") -> Path:
    """Return the file of the rehearsals of one of the ``SEEDS``."""
    return STORED / f"{framework}-{sample}.jsonl"


def main() -> None:
    """Make what is missing, and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.recipe_sampling", description=__doc__)
    parser.add_argument("--make", type=int, default=0, metavar="N", help="rehearse the first N of each")
    parser.add_argument("--framework", nargs="+", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--sample", default="recipes", choices=sorted(SEEDS))
    chosen = parser.parse_args()
    seed = SEEDS[chosen.sample]
    for framework in chosen.framework:
        file = stored_file(framework, chosen.sample)
        if chosen.make:
            store(framework, sample_plans(framework, seed, chosen.make), file, seed)
        show(framework, [file] if file.exists() else [])


if __name__ == "__main__":
    main()
