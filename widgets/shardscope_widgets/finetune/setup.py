"""From the inputs of a fine-tune to its plan and task, with recommended settings for all that is not set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import shardscope as ss
from shardscope.core.errors import FieldError, Value, refuse
from shardscope.core.number_format import format_gib
from shardscope.core.recipe import Method
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import why_not_trained
from shardscope.machine.user_folders import expand_home
from shardscope.memory.report import MemoryReport
from shardscope.planner.memory_needs import fits
from shardscope.training.examples.preview import Preview
from shardscope.training.tasks.choices import (
    Choices,
    Length,
    choose_micro_batch,
    count_sequences,
    estimate_length,
    recommend,
)
from shardscope.training.weights.example_models import EXAMPLES, find_example
from shardscope.training.weights.hub_folder import find_in_cache, is_hub_name
from shardscope_widgets.run.launching.launch_offer import CPU_PRECISION, CPU_SEQ_LEN, TRIAL_RANKS

EXAMPLE = "smollm2-135m-instruct"
GPU_SEQ_LEN = 2048
CPU_BATCH, GPU_BATCH = 8, 32
"""Sequences per step before the data are known; ``choose_global_batch`` lowers them for few rows."""
VALIDATION, PATIENCE = 0.1, 3
MIN_ROWS, MIN_TEXT_BYTES = 50, 200_000
"""Data from which a tenth is held out for validation: at least five rows, or some windows of a text. The loss
of one or two rows would end a run by chance."""
SAMPLE_PROMPTS, SAMPLE_TOKENS = 3, 32
ADAPTER_FIELDS = ("lora_rank", "lora_alpha", "lora_targets")
RECIPE_FIELDS = (*ADAPTER_FIELDS, "seq_len", "global_batch_size", "packing")
"""Settings of the recipe; the others are the task's."""
READING_FIELDS = ("loss_on", "bad_rows")
"""Settings of the task on which it depends what the data are read as."""

Settings = Mapping[str, object]
"""Field -> value that the user typed, instead of the recommended one."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A fine-tune that can be launched."""

    plan: ss.Plan
    task: ss.Finetune
    report: MemoryReport
    choices: Choices
    length: Length


def find_weights(text: str) -> Path | None:
    """Return the folder that ``text`` names: a path, an example model, or a model of the Hub in its cache.

    None for a model that would have to be downloaded first.
    """
    path = expand_home(text)
    is_path = os.path.exists(path)  # noqa: PTH110 - raises nothing for a long text
    if is_path or not (text in EXAMPLES or is_hub_name(text)):
        return path
    return find_example(text) if text in EXAMPLES else find_in_cache(text)


def build_first_plan(
    weights: Path, machine: ss.Cluster, method: Method, settings: Settings, seq_len: int | None
) -> ss.Plan:
    """Return a plan before the data are known. Raises ``ValueError`` naming the field.

    ``seq_len`` is the length that fits the data, once they are known; one in ``settings`` takes precedence.
    """
    architecture = ss.Architecture.from_hf(weights)
    is_cpu = machine.gpu.vendor == "cpu"
    # A scheduler's node may have a single core.
    cluster = ss.Cluster.parse(f"{min(TRIAL_RANKS, machine.gpus_per_node)}xcpu") if is_cpu else machine
    longest, typed = architecture.max_position_embeddings, settings.get("seq_len")
    usual = min(longest, CPU_SEQ_LEN if is_cpu else GPU_SEQ_LEN)
    if isinstance(typed, int) and typed > longest:
        refuse(
            "Recipe.seq_len",
            typed,
            f"at most {longest:,} tokens, for which the model was made",
            Value(longest),
        )
    ranks = cluster.num_gpus
    recipe = ss.Recipe(
        method=method,
        seq_len=seq_len or usual,
        micro_batch_size=1,
        global_batch_size=ranks * max(1, (CPU_BATCH if is_cpu else GPU_BATCH) // ranks),
        precision=CPU_PRECISION if is_cpu else "bf16-mixed",
    )
    own = _select_recipe_settings(settings, method)
    return ss.Plan(architecture, cluster, replace_fields(recipe, own), ss.Layout.ddp())


def _select_recipe_settings(settings: Settings, method: Method) -> dict[str, object]:
    """Return the user's settings of the recipe; those of adapters only with adapters."""
    ignored = ADAPTER_FIELDS if method == "full" else ()
    return {name: settings[name] for name in RECIPE_FIELDS if name in settings and name not in ignored}


def build_setup(base: ss.Finetune, first: ss.Plan, settings: Settings, preview: Preview | None) -> Setup:
    """Return the recommended plan and task for ``base`` and the inputs. Raises ``ValueError``.

    DDP if it fits, else FSDP2, else FSDP2 with recomputation. ``preview`` is None for plain text.
    """
    task = _complete_task(base, settings, preview)
    refusal: str | None = None
    tightest: MemoryReport | None = None
    for layout, recompute in (
        (ss.Layout.ddp(), "none"),
        (ss.Layout.fsdp2(), "none"),
        (ss.Layout.fsdp2(), "full"),
    ):
        candidate = replace(
            first, layout=layout, recipe=replace_fields(first.recipe, {"recompute": recompute})
        )
        choices = recommend(task, candidate, preview)
        plan = _apply_settings(choices.plan, settings, count_sequences(task))
        if (reason := why_not_trained(plan)) is not None:
            refusal = reason
            continue
        report = plan.memory()
        if fits(plan, report):
            return Setup(
                plan=plan,
                task=task,
                report=report,
                choices=choices,
                length=estimate_length(task, plan, preview),
            )
        tightest = report
    raise _describe_refusal(first.recipe.method, tightest, refusal or "")


def _describe_refusal(method: Method, report: MemoryReport | None, refusal: str) -> FieldError:
    """Return the error for the method: its memory in ``report`` does not fit, or it cannot be trained."""
    if report is None:
        allowed = "a method that can be trained here"
        return FieldError("Recipe.method", method, allowed, "LoRA", refusal.rstrip("."))
    needs, has = format_gib(report.peak_bytes), format_gib(report.usable_bytes)
    return FieldError(
        "Recipe.method",
        method,
        "a method whose memory fits",
        "LoRA, or a smaller model" if method == "full" else "a smaller model",
        f"It needs {needs} GiB on each rank, of {has}",
    )


def _apply_settings(plan: ss.Plan, settings: Settings, num_sequences: int) -> ss.Plan:
    """Return the recommended ``plan`` with the user's own values, and a micro-batch for them.

    ``num_sequences`` is the number of sequences in one row of the data: two for a preference pair.
    """
    own = _select_recipe_settings(settings, plan.recipe.method)
    if all(getattr(plan.recipe, name) == value for name, value in own.items()):
        return plan
    changed = replace(plan, recipe=replace_fields(plan.recipe, {**own, "micro_batch_size": 1}))
    size = choose_micro_batch(changed, num_sequences).value
    return replace(changed, recipe=replace_fields(changed.recipe, {"micro_batch_size": size}))


def _complete_task(base: ss.Finetune, settings: Settings, preview: Preview | None) -> ss.Finetune:
    """Return ``base`` with the user's values, and validation and samples where the data allow them."""
    fields: dict[str, object] = {"export": True}
    if preview is not None and preview.format.name != "text":
        fields |= {"samples": SAMPLE_PROMPTS, "max_new_tokens": SAMPLE_TOKENS}
    own = {
        name: value
        for name, value in settings.items()
        if name not in (*RECIPE_FIELDS, *READING_FIELDS, "validation")
    }
    if "samples" in own:
        fields["max_new_tokens"] = SAMPLE_TOKENS
    return replace_fields(hold_out(base, preview, settings), {**fields, **own})


def hold_out(task: ss.Finetune, preview: Preview | None, settings: Settings) -> ss.Finetune:
    """Return ``task`` with a part of its data held out for validation, if they are enough.

    The user's own ``validation`` takes precedence, also over their number.
    """
    if "validation" in settings:
        validation = settings["validation"]
        patience = None if validation is None else PATIENCE
        return replace_fields(task, {"validation": validation, "early_stopping": patience})
    text = task.plain_text
    is_enough = (
        preview.num_rows >= MIN_ROWS
        if preview
        else text is not None and text.stat().st_size >= MIN_TEXT_BYTES
    )
    return replace_fields(task, {"validation": VALIDATION, "early_stopping": PATIENCE}) if is_enough else task
