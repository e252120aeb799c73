"""Single changes that may save memory, each as a new plan with the text of its button.

This module has no framework-specific code: a layout class lists its fields and their values
(``Layout.choices``), and :mod:`shardscope.prediction.support` the supported recipe fields. Invalid plans are
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.cluster import BEFORE_AMPERE
from shardscope.core.layout import list_divisors
from shardscope.core.serialization import replace_fields
from shardscope.prediction.support import list_supported

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan


class Change(NamedTuple):
    """One change of a plan."""

    text: str
    plan: Plan


OFFLOADS = {
    "offload": "training state",
    "offload_optimizer": "the optimizer",
    "offload_params": "parameters",
}
"""Layout fields for offloading, with the name of the offloaded state."""

Ladder = list[Change]
"""Changes of one kind, the smallest first: the first one that fits is sufficient."""

RECIPE_TEXTS: dict[tuple[str, object], str] = {
    ("recompute", "selective"): "Recompute selectively",
    ("recompute", "full"): "Recompute whole layers",
    ("recompute", "offload"): "Offload activations to the host",
    ("optimizer", "adamw_8bit"): "Optimizer state in 8 bits",
    ("optimizer", "paged_adamw"): "Page the optimizer to the host",
    ("optimizer", "paged_adamw_8bit"): "Optimizer state in 8 bits, paged",
    ("loss", "chunked"): "Compute the loss in chunks",
    ("loss", "fused"): "Fuse head and loss",
    ("attention", "sdpa"): "Fused attention (sdpa)",
    ("attention", "flash"): "FlashAttention",
    ("kernels", "liger"): "Liger kernels",
    ("kernels", "compiled"): "Compile the modules",
    ("method", "lora"): "Train LoRA adapters only",
    ("method", "qlora"): "Train adapters over a 4-bit base (QLoRA)",
    ("precision", "bf16-mixed"): "Mixed precision (bf16)",
    ("precision", "fp16-mixed"): "Mixed precision (fp16)",
    ("precision", "bf16"): "Pure bf16, without fp32 originals",
}
"""Recipe values that save memory, the least intrusive of each field first."""

SAME_ALGORITHM = {
    "adamw": ("adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
    "paged_adamw": ("paged_adamw_8bit",),
}
"""Optimizers that can be replaced with the same loss curve; any other replacement is the user's decision."""

LESS_PRECISE = {"fp32": ("bf16-mixed", "bf16"), "bf16-mixed": ("bf16",)}
LESS_PRECISE_BEFORE_AMPERE = {"fp32": ("fp16-mixed",)}
"""The same for GPUs whose matrix units have no bf16."""

DEGREE_TEXTS = {
    "tp": "Tensor parallel",
    "pp": "Pipeline stages",
    "cp": "Context parallel",
    "ep": "Expert parallel",
    "vpp": "Interleaved chunks",
    "stage": "ZeRO stage",
    "replicate": "Shard over more ranks",
}

LAYOUT_TEXTS: dict[tuple[str, object], str] = {
    ("reshard_after_forward", True): "Reshard after forward",
    ("pipeline_schedule", "1F1B"): "Go backward as soon as a micro-batch can (1F1B), not after all forwards",
    ("offload", "cpu"): "Offload training state to the host",
    ("offload_optimizer", "cpu"): "Offload the optimizer to the host",
    ("offload_optimizer", "nvme"): "Offload the optimizer to NVMe",
    ("offload_params", "cpu"): "Offload parameters to the host",
    ("offload_params", "nvme"): "Offload parameters to NVMe",
    ("sequence_parallel", True): "Split the sequence within tensor parallel ranks",
    ("distributed_optimizer", True): "Split the optimizer over data-parallel ranks",
    ("offload", None): "Keep training state on the GPU",
    ("offload_optimizer", None): "Keep the optimizer on the GPU",
    ("offload_params", None): "Keep parameters on the GPU",
}
"""The last three help if host memory is too small."""


def list_ladders(plan: Plan) -> Iterator[Ladder]:
    """Yield the ladders of all kinds of changes."""
    yield from _list_recipe_ladders(plan)
    yield _build_micro_batch_ladder(plan)
    yield from _list_layout_ladders(plan)
    yield from _list_sharding_ladders(plan)


def _list_recipe_ladders(plan: Plan) -> Iterator[Ladder]:
    recipe, layout = plan.recipe, plan.layout
    for (field, value), text in RECIPE_TEXTS.items():
        current = getattr(recipe, field)
        # Skip values that would not save memory or that the framework does not support.
        if (
            value == current
            or value not in list_supported(layout, field)
            or not _saves_memory(plan, field, value)
        ):
            continue
        yield _build_ladder([(text, partial(_replace_recipe_fields, plan, {field: value}))])
    # A smaller interval recomputes more layers, so it is a ladder of its own.
    if recipe.recompute != "none" and recipe.recompute_interval > 1:
        lower = range(recipe.recompute_interval - 1, 0, -1)
        yield _build_ladder(
            (
                f"Recompute every {step} layers" if step > 1 else "Recompute every layer",
                partial(_replace_recipe_fields, plan, {"recompute_interval": step}),
            )
            for step in lower
        )


def _saves_memory(plan: Plan, field: str, value: object) -> bool:
    """Return whether a value of the recipe saves memory compared with the current one."""
    current = getattr(plan.recipe, field)
    # The dictionaries above list replacements that keep the algorithm, or narrow the number format.
    if field == "optimizer":
        return value in SAME_ALGORITHM.get(current, ())
    if field == "precision":
        is_old = plan.cluster.gpu.architecture in BEFORE_AMPERE
        return value in (LESS_PRECISE_BEFORE_AMPERE if is_old else LESS_PRECISE).get(current, ())
    if field == "method":
        return (current, value) in (("full", "lora"), ("full", "qlora"), ("lora", "qlora"))
    # "selective" saves more activations than "full", so it is no saving for a plan with full recomputation.
    if field == "recompute":
        return (current, value) != ("full", "selective")
    return True


def _build_micro_batch_ladder(plan: Plan) -> Ladder:
    micro = plan.recipe.micro_batch_size
    smaller = [size for size in reversed(list_divisors(micro)) if size < micro]
    return _build_ladder(
        (
            f"Micro-batch {size} instead of {micro}",
            partial(_replace_recipe_fields, plan, {"micro_batch_size": size}),
        )
        for size in smaller
    )


def _list_layout_ladders(plan: Plan) -> Iterator[Ladder]:
    """Yield a ladder for each layout field: degrees in steps, options one by one."""
    layout = plan.layout
    for field, values in type(layout).choices.items():
        current = getattr(layout, field)
        # Degrees are numbers with an order: a ladder from the smallest step on. Options are alternatives: one
        # ladder each.
        if field in DEGREE_TEXTS:
            ladder = _list_degree_steps(plan, field, current, values)
            yield _build_ladder(
                (
                    _describe_degree(plan, field, value, current),
                    partial(_replace_layout_fields, plan, {field: value}),
                )
                for value in ladder
            )
            continue
        for value in values or ():
            text = LAYOUT_TEXTS.get((field, value))
            if text and value != current:
                yield _build_ladder([(text, partial(_replace_layout_fields, plan, {field: value}))])


def _list_degree_steps(plan: Plan, field: str, current: int, values: tuple[object, ...] | None) -> list[int]:
    """Return the values in the direction that saves memory: fewer replicas, higher values of other
    degrees."""
    choices = [value for value in values or list_divisors(plan.world_size) if isinstance(value, int)]
    # Fewer replicas mean that each one is sharded over more ranks.
    if field == "replicate":
        return [value for value in reversed(choices) if value < current]
    return [value for value in choices if value > current]


def _describe_degree(plan: Plan, field: str, value: int, current: int) -> str:
    if field != "replicate":
        return f"{DEGREE_TEXTS[field]} {value} instead of {current}"
    ranks = plan.degrees.shard * plan.degrees.cp
    return f"Shard over {ranks * current // value} ranks instead of {ranks}"


def _list_sharding_ladders(plan: Plan) -> Iterator[Ladder]:
    """Yield other frameworks that shard or offload the training state, if every rank holds all of it.

    Each framework comes with its defaults first, then with its offloads, one after another.
    """
    from shardscope.frameworks.registry import frameworks

    degrees = plan.degrees
    # Every rank of a plan without shards holds all training state: only then another framework is a single
    # change.
    if degrees.shard > 1 or (degrees.data_parallel == 1 and plan.world_size > 1):
        return
    for framework in frameworks.values():
        other = framework.layout_class()
        if isinstance(plan.layout, framework.layout_class):
            continue
        if plan.recipe.kernels and plan.recipe.kernels not in other.supported_kernels:
            continue
        # Only frameworks with the same modules: another implementation of the model is not a fix.
        if other.default_kernels != plan.layout.default_kernels:
            continue
        # Each step adds one offload to the previous ones: the optimizer first, because it is the largest
        # state and is used once a step.
        title = other.description
        steps: list[tuple[str, Callable[[], Plan]]] = []
        moved: list[str] = []
        if plan.world_size > 1:
            steps.append((f"Shard training state with {title}", partial(replace, plan, layout=other)))
        for field in [field for field in OFFLOADS if field in other.choices]:
            other, moved = replace(other, **{field: "cpu"}), [*moved, OFFLOADS[field]]
            text = f"Offload {' and '.join(moved)} to the host with {title}"
            steps.append((text, partial(replace, plan, layout=other)))
        yield _build_ladder(steps)


def _replace_recipe_fields(plan: Plan, changed: Mapping[str, object]) -> Plan:
    return replace(plan, recipe=replace_fields(plan.recipe, changed))


def _replace_layout_fields(plan: Plan, changed: Mapping[str, object]) -> Plan:
    """Return the plan with changed layout fields; the number of shards is derived again."""
    layout: Layout = plan.layout
    if "shard" in layout.__dataclass_fields__:
        changed = {"shard": None, **changed}
    return replace(plan, layout=replace_fields(layout, changed))


def _build_ladder(steps: Iterable[tuple[str, Callable[[], Plan]]]) -> Ladder:
    """Return the changes whose plans can run."""
    ladder: Ladder = []
    for text, make in steps:
        plan = _try_change(make)
        if plan is not None:
            ladder.append(Change(text, plan))
    return ladder


def _try_change(make: Callable[[], Plan]) -> Plan | None:
    try:
        return make()
    except ValueError:
        return None
