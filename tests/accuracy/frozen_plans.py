"""Plans and questions whose answers :mod:`same_numbers` stores, drawn once by a fixed seed.

The plans come from five sources: the two samples of every framework that are also rehearsed
(:mod:`sampling`, :mod:`wide_sampling`), the samples of adapters and optimizers, :func:`draw_catalogue`, which
takes each model of the catalogue at its full size under each framework, and :func:`list_packed`. They are
stored as plan JSON: a later change of a sampler, a catalogue entry or a default does not change a stored
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from random import Random
from typing import Any, NamedTuple

from tests.accuracy import adapter_sampling, recipe_sampling, sampling, wide_sampling
from tests.unit.random_plans import ANY_OPTIONS, ANY_RECIPE

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.prediction.support import list_supported

SEED = 26
SAMPLED = 60
"""Plans of each part of a framework's space, from each of the two general samples."""
FROM_CATALOGUE = 5
"""Plans of each model of the catalogue under each framework."""
ATTEMPTS = 20
"""Draws for one model and framework before it is left out: Megatron has no layers for some families."""

CLUSTERS = (
    "h100-sxm-80gb",
    "8xh100-sxm-80gb",
    "8xh100-sxm-80gb",
    "6xh100-sxm-80gb",
    "8x8xh100-sxm-80gb",
    "8x8xh100-sxm-80gb",
    "64x8xh100-sxm-80gb",
    "8xa100-sxm-40gb",
    "4x8xa100-sxm-80gb",
    "8xh200-sxm-141gb",
    "16x8xb200-sxm-180gb",
    "18x4xgb200-186gb",
    "8xmi300x-192gb",
    "4x8xmi325x-256gb",
    "8xv100-sxm-32gb",
    "4xt4-16gb",
    "4xl4-24gb",
    "8xa10g-24gb",
    "2xrtx-4090-24gb",
    "2xcpu",
    "2xcpu",
)
NVME_BYTES = 15 * 10**12
NVME_BYTES_PER_SECOND = 6e9


class Question(NamedTuple):
    """Arguments of ``search`` and ``recommend``."""

    architecture: ss.Architecture
    cluster: ss.Cluster
    recipe: ss.Recipe


def draw_plans() -> list[ss.Plan]:
    """Return every plan, each once."""
    plans: list[ss.Plan] = []
    for sampler in (sampling, wide_sampling):
        for name in sampler.LAYOUTS:
            plans += sampler.plans(name, SEED, SAMPLED)
    for name in recipe_sampling.FRAMEWORKS:
        plans += recipe_sampling.sample_plans(name, SEED, SAMPLED)
    for name in adapter_sampling.LAYOUTS:
        plans += adapter_sampling.sample_plans(name)
    plans += draw_catalogue()
    plans += list_packed()
    return list({plan.to_json(): plan for plan in plans}.values())


def draw_catalogue() -> Iterator[ss.Plan]:
    """Yield plans of each model of the catalogue under each framework, with varied recipes and layouts."""
    for name, arch in ss.models.items():
        # Experts have options of their own, which one plan in a few turns on.
        wanted = FROM_CATALOGUE * (3 if arch.mixture_of_experts else 1)
        for framework in frameworks:
            draw = Random(f"{SEED} {name} {framework}")
            drawn = (_draw_plan(draw, arch, framework) for _ in range(ATTEMPTS))
            yield from islice((plan for plan in drawn if plan is not None), wanted)


def list_packed() -> Iterator[ss.Plan]:
    """Yield plans with packed documents, which SDPA separates by a mask."""
    layouts = (ss.Layout.ddp(), ss.Layout.fsdp2(), ss.Layout.zero(stage=2), ss.Layout.zero(stage=3))
    recipes: tuple[dict[str, Any], ...] = (
        {},
        {"method": "lora", "recompute": "full"},
        {"precision": "fp32", "seq_len": 1020},
    )
    for name in ("llama-3.2-1b", "qwen3-0.6b", "gpt2", "gemma-2b", "smollm2-135m"):
        for cluster in ("8xh100-sxm-80gb", "2xcpu"):
            for layout, changes in product(layouts, recipes):
                fields = {"seq_len": 1024, "micro_batch_size": 2, "global_batch_size": 32, **changes}
                recipe = ss.Recipe(packing=True, **fields)
                with suppress(ValueError):
                    yield ss.Plan(ss.models[name], ss.Cluster.parse(cluster), recipe, layout)


def _draw_cluster(draw: Random) -> ss.Cluster:
    cluster = ss.Cluster.parse(draw.choice(CLUSTERS))
    if draw.random() < 0.3:
        return replace(cluster, nvme_bytes=NVME_BYTES, nvme_bandwidth_bytes_per_second=NVME_BYTES_PER_SECOND)
    return cluster


def _draw_plan(draw: Random, arch: ss.Architecture, framework: str) -> ss.Plan | None:
    """Return a plan with a layout as the Studio's picker offers them; None if it is refused."""
    cluster = _draw_cluster(draw)
    micro = draw.choice((1, 1, 2, 4))
    longest = arch.max_position_embeddings
    recipe = ss.Recipe(
        seq_len=min(longest, draw.choice((512, 1024, 2048, 4096, 4096, 8192, 32_768))),
        micro_batch_size=micro,
        global_batch_size=micro * cluster.num_gpus * draw.choice((1, 1, 2, 8)),
    )
    layout = frameworks[framework].layout_class()
    try:
        for field in layout.choices:
            if draw.random() < 0.5:
                offered = layout.list_valid_values(arch, cluster, recipe)[field]
                wanted = {f: getattr(layout, f) for f in layout.choices} | {field: draw.choice(offered)}
                layout = layout.find_nearest_valid(wanted, arch, cluster, recipe)
        plan = ss.Plan(arch, cluster, recipe, layout)
    except (ValueError, IndexError):
        return None
    layout = _vary_fields(draw, layout, ANY_OPTIONS[framework], lambda one: replace(plan, layout=one))
    linears = tuple(dict.fromkeys(target for target, _ in arch.lora_shapes))
    values = ANY_RECIPE | {"lora_targets": (None, linears[:1], linears[-1:], linears)}
    for field in values:
        if listed := list_supported(layout, field):
            values[field] = tuple(value for value in values[field] if value is None or value in listed)
    plan = replace(plan, layout=layout)
    varied = _vary_fields(draw, recipe, values, lambda one: replace(plan, recipe=one))
    # Each of these needs another choice beside it, and comes together by chance once in hundreds of plans.
    for changes in ({"attention": "flash", "packing": True}, {"method": "lora", "quantization": "nf4"}):
        if draw.random() < 0.1:
            varied = _change(varied, changes, lambda one: replace(plan, recipe=one))
    return replace(plan, recipe=varied)


def _vary_fields(
    draw: Random, noun: Any, values: dict[str, tuple[Any, ...]], check: Callable[[Any], object]
) -> Any:
    """Return ``noun`` with about a third of the fields changed; a value that is refused stays as it was."""
    for field, choices in values.items():
        if draw.random() > 0.35 or (field.startswith("lora_") and not noun.has_adapters):
            continue
        noun = _change(noun, {field: draw.choice(choices)}, check)
    return noun


def _change(noun: Any, changes: dict[str, Any], check: Callable[[Any], object]) -> Any:
    """Return ``noun`` with ``changes``, or as it was if they are refused."""
    try:
        changed = replace(noun, **changes)
        check(changed)
    except ValueError:
        return noun
    return changed


def draw_questions() -> list[Question]:
    """Return models with clusters and recipes: what fits easily, what fits barely and what does not fit."""
    asked: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("llama-3.1-8b", "h100-sxm-80gb", {}),
        ("llama-3.1-8b", "8xh100-sxm-80gb", {}),
        ("llama-3.1-8b", "2xrtx-4090-24gb", {"method": "qlora"}),
        ("llama-3.1-8b", "4xl4-24gb", {"method": "lora"}),
        ("llama-3.1-70b", "8xh100-sxm-80gb", {}),
        ("llama-3.1-70b", "8x8xh100-sxm-80gb", {"global_batch_size": 512}),
        ("llama-3.1-70b", "8xmi300x-192gb", {"seq_len": 8192}),
        ("llama-3.1-405b", "64x8xh100-sxm-80gb", {"global_batch_size": 1024, "seq_len": 8192}),
        ("qwen2.5-7b", "8xa100-sxm-40gb", {"precision": "bf16"}),
        ("qwen3-30b-a3b", "8xh100-sxm-80gb", {}),
        ("qwen3-235b-a22b", "16x8xb200-sxm-180gb", {"global_batch_size": 1024}),
        ("mixtral-8x7b", "4x8xa100-sxm-80gb", {"global_batch_size": 256}),
        ("gemma-2-9b", "8xh100-sxm-80gb", {"recompute": "full"}),
        ("mistral-7b", "6xh100-sxm-80gb", {"global_batch_size": 48}),
        ("mistral-7b", "6xh100-sxm-80gb", {"global_batch_size": 64}),
        ("gpt2-xl", "8xv100-sxm-32gb", {"precision": "fp16-mixed", "seq_len": 1024}),
        ("deepseek-v3", "64x8xh100-sxm-80gb", {"global_batch_size": 1024}),
        ("phi-4", "8xa10g-24gb", {"method": "lora", "seq_len": 2048}),
        ("smollm2-135m", "4xt4-16gb", {"precision": "fp16-mixed", "seq_len": 2048}),
        ("smollm2-135m", "2xcpu", {"precision": "fp32", "seq_len": 512, "global_batch_size": 8}),
    )
    return [
        Question(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe))
        for model, cluster, recipe in asked
    ]
