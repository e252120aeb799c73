"""The single changes that may save memory, each as a new plan and the words that a button would say.

Nothing here knows a framework: its layout class lists its fields and their values (``Layout.choices``), and
what of a recipe it can run (``shardscope.prediction.support``). What a Plan refuses is no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.layout import divisors
from shardscope.prediction.support import supported

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


class Change(NamedTuple):
    """One change of one plan."""

    words: str
    plan: Plan


OFFLOADS = {
    "offload": "training state",
    "offload_optimizer": "the optimizer",
    "offload_params": "parameters",
}
"""Fields of layouts that say what is kept outside of the GPU."""

Ladder = list[Change]
"""Steps of one kind, the smallest first: of those that fit, the first is enough."""

RECIPE_WORDS: dict[tuple[str, Any], str] = {
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
    ("precision", "bf16"): "Pure bf16, without fp32 originals",
}
"""Values that save memory and leave the task what it is, the least intrusive of each field first."""

SAME_ALGORITHM = {
    "adamw": ("adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
    "paged_adamw": ("paged_adamw_8bit",),
}
"""Optimizers that take another's place without changing what is learnt; others are a person's decision."""

LESS_PRECISE = {"fp32": ("bf16-mixed", "bf16"), "bf16-mixed": ("bf16",)}

DEGREE_WORDS = {
    "tp": "Tensor parallel",
    "pp": "Pipeline stages",
    "cp": "Context parallel",
    "ep": "Expert parallel",
    "vpp": "Interleaved chunks",
    "stage": "ZeRO stage",
    "replicate": "Shard over more ranks",
}

LAYOUT_WORDS: dict[tuple[str, Any], str] = {
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
"""The last ones help where it is the host that has too little."""


def ladders(plan: Plan) -> Iterator[Ladder]:
    """Every kind of change that can run, each as its steps."""
    yield from _recipe_ladders(plan)
    yield _micro_batches(plan)
    yield from _layout_ladders(plan)
    yield from _sharding_ladders(plan)


def _recipe_ladders(plan: Plan) -> Iterator[Ladder]:
    recipe, layout = plan.recipe, plan.layout
    for (field, value), words in RECIPE_WORDS.items():
        current = getattr(recipe, field)
        if value == current or value not in supported(layout, field) or not _saves(recipe, field, value):
            continue
        yield _made([(words, partial(_with_recipe, plan, {field: value}))])
    if recipe.recompute != "none" and recipe.recompute_interval > 1:
        lower = range(recipe.recompute_interval - 1, 0, -1)
        yield _made(
            (
                f"Recompute every {step} layers" if step > 1 else "Recompute every layer",
                partial(_with_recipe, plan, {"recompute_interval": step}),
            )
            for step in lower
        )


def _saves(recipe: Recipe, field: str, value: Any) -> bool:
    """Whether a value is a step towards less memory from where the recipe is."""
    current = getattr(recipe, field)
    if field == "optimizer":
        return value in SAME_ALGORITHM.get(current, ())
    if field == "precision":
        return value in LESS_PRECISE.get(current, ())
    if field == "method":
        return (current, value) in (("full", "lora"), ("full", "qlora"), ("lora", "qlora"))
    if field == "recompute":
        return (current, value) != ("full", "selective")
    return True


def _micro_batches(plan: Plan) -> Ladder:
    micro = plan.recipe.micro_batch_size
    smaller = [size for size in reversed(divisors(micro)) if size < micro]
    return _made(
        (f"Micro-batch {size} instead of {micro}", partial(_with_recipe, plan, {"micro_batch_size": size}))
        for size in smaller
    )


def _layout_ladders(plan: Plan) -> Iterator[Ladder]:
    """Each field of the layout: degrees a step at a time, switches one by one."""
    layout = plan.layout
    for field, values in type(layout).choices.items():
        current = getattr(layout, field)
        if field in DEGREE_WORDS:
            ladder = _degree_steps(plan, field, current, values)
            yield _made(
                (_degree_words(plan, field, value, current), partial(_with_layout, plan, {field: value}))
                for value in ladder
            )
            continue
        for value in values or ():
            words = LAYOUT_WORDS.get((field, value))
            if words and value != current:
                yield _made([(words, partial(_with_layout, plan, {field: value}))])


def _degree_steps(plan: Plan, field: str, current: int, values: tuple[Any, ...] | None) -> list[int]:
    """Values a step at a time in the direction that saves: fewer copies, more of anything else."""
    choices = list(values) if values else divisors(plan.world_size)
    if field == "replicate":
        return [value for value in reversed(choices) if value < current]
    return [value for value in choices if value > current]


def _degree_words(plan: Plan, field: str, value: int, current: int) -> str:
    if field != "replicate":
        return f"{DEGREE_WORDS[field]} {value} instead of {current}"
    ranks = plan.degrees.shard * plan.degrees.cp
    return f"Shard over {ranks * current // value} ranks instead of {ranks}"


def _sharding_ladders(plan: Plan) -> Iterator[Ladder]:
    """Where every rank holds all state in full: another framework that shards it, or moves it to the host.

    As it comes; where that is not enough, or there is nobody to shard with, with its offloads one by one.
    """
    from shardscope.frameworks.registry import frameworks

    degrees = plan.degrees
    if degrees.shard > 1 or (degrees.data_parallel == 1 and plan.world_size > 1):
        return
    for framework in frameworks.values():
        other = framework.layout_class()
        if isinstance(plan.layout, framework.layout_class):
            continue
        if plan.recipe.kernels and plan.recipe.kernels not in other.supported_kernels:
            continue
        # Only what runs the same modules: another framework's own model is another plan, not a fix of this.
        if other.default_kernels != plan.layout.default_kernels:
            continue
        title = other.description
        steps: list[tuple[str, Callable[[], Plan]]] = []
        moved: list[str] = []
        if plan.world_size > 1:
            steps.append((f"Shard training state with {title}", partial(replace, plan, layout=other)))
        for field in [field for field in OFFLOADS if field in other.choices]:
            other, moved = replace(other, **{field: "cpu"}), [*moved, OFFLOADS[field]]
            words = f"Offload {' and '.join(moved)} to the host with {title}"
            steps.append((words, partial(replace, plan, layout=other)))
        yield _made(steps)


def _with_recipe(plan: Plan, changed: dict[str, Any]) -> Plan:
    return replace(plan, recipe=replace(plan.recipe, **changed))


def _with_layout(plan: Plan, changed: dict[str, Any]) -> Plan:
    """The plan with one field of its layout changed; a degree that was derived is derived anew."""
    layout: Layout = plan.layout
    if "shard" in layout.__dataclass_fields__:
        changed = {"shard": None, **changed}
    return replace(plan, layout=replace(layout, **changed))


def _made(steps: Iterable[tuple[str, Callable[[], Plan]]]) -> Ladder:
    """The steps whose plan can run."""
    found: Ladder = []
    for words, make in steps:
        plan = _tried(make)
        if plan is not None:
            found.append(Change(words, plan))
    return found


def _tried(make: Callable[[], Plan]) -> Plan | None:
    try:
        return make()
    except ValueError:
        return None
