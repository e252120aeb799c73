"""Recommended settings of a fine-tune, each with its reason: ``task.choices(plan)``.

The fields of a ``Finetune`` that are None resolve to the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.cluster import BEFORE_AMPERE
from shardscope.core.number_format import format_count, format_gib
from shardscope.core.recipe import DEFAULT_LORA_RANK
from shardscope.frameworks.registry import why_not_trained
from shardscope.memory.state.lora import find_adapter_targets
from shardscope.planner.checks.case import predict_memory, predict_step, replace_plan_fields
from shardscope.planner.checks.learning_rate import WARM_UP_STEPS
from shardscope.planner.checks.precision import CPU_SLOWDOWN, find_bf16_slowdown
from shardscope.planner.memory_needs import fits
from shardscope.prediction.support import FUSED_IN_EXPERTS
from shardscope.records.json_values import is_int
from shardscope.training.data.batches import count_validation_rows
from shardscope.training.optimizers.schedule import DEFAULT_SCHEDULE, DEFAULT_WARMUP, count_warmup_steps
from shardscope.training.preferences.settings import (
    DEFAULT_BETA,
    SIDES,
    describe_reference,
    estimate_reference_seconds,
)
from shardscope.training.tasks.recommended_length import Reasoned, choose_length
from shardscope.training.tasks.recommended_rate import recommend_rate

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport
    from shardscope.timing.report import StepReport
    from shardscope.training.examples.preview import Preview
    from shardscope.training.tasks.finetune import Finetune

DEFAULT_EPOCHS = 3.0
"""Passes over the data of Stanford Alpaca (Taori et al. 2023)."""
MAX_EPOCHS = 15.0
"""Passes over the 1,000 rows of LIMA (Zhou et al. 2023, arXiv:2305.11206, section 3)."""
USUAL_STEPS = 200
"""Optimizer steps for which few examples are read more than :data:`DEFAULT_EPOCHS` times. Measured:
SmolLM2-135M-Instruct learned 37 of 40 paraphrases of sixty rows in 120 steps, at 1e-3."""
TEXT_STEPS = 50
MAX_MICRO_BATCH = 64
WORTH_A_SETTING = 1.02
"""Speedup from which a larger micro-batch is recommended."""
WORTH_PACKING = 1.5
"""Examples per packed row from which packing is recommended."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The recommended value of one field, and why."""

    name: str
    """The object and its field, such as ``Recipe.seq_len`` or ``Finetune.learning_rate``."""
    value: object
    current: object
    """The plan's or the task's own value; for a task's field that is None, what it resolves to."""
    why: str
    """One sentence, with its source."""

    @property
    def field(self) -> str:
        """The field without its object."""
        return self.name.rpartition(".")[2]

    @property
    def is_current(self) -> bool:
        """Return whether the plan and the task have the recommended value."""
        return self.value == self.current

    @property
    def summary(self) -> str:
        """The value, and what it replaces."""
        value = _format_value(self.value)
        return value if self.is_current else f"{value} instead of {_format_value(self.current)}"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Recommended settings of a fine-tune: ``choices["seq_len"].why``."""

    all: tuple[Choice, ...]
    plan: Plan
    """The plan with the recommended recipe; the task's fields may stay None."""
    num_steps: int | None
    """Optimizer steps of the run with the plan as it is; None if the number of rows is not known."""
    seconds: float | None
    """Predicted duration of these steps; None if it is not known."""

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.all)

    def __getitem__(self, field: str) -> Choice:
        for choice in self.all:
            if choice.field == field:
                return choice
        known = ", ".join(choice.field for choice in self.all)
        raise KeyError(f"there is no choice {field!r}; known: {known}")

    def __str__(self) -> str:
        return "\n".join(f"{choice.name}: {choice.summary}. {choice.why}" for choice in self.all)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{escape(choice.name)}</code></td><td>{escape(choice.summary)}</td>"
            f"<td style='text-align: left'>{escape(choice.why)}</td></tr>"
            for choice in self.all
        )
        return f"<table><tr><th>Field</th><th>Value</th><th>Why</th></tr>{rows}</table>"


class Epochs(NamedTuple):
    """A number of epochs with its reason."""

    value: float
    why: str


def recommend(task: Finetune, plan: Plan, preview: Preview | None) -> Choices:
    """Return the recommended settings of ``task`` under ``plan``.

    ``preview`` is that of the task's examples at the plan's sequence length; None for plain text, or if the
    data have not been read.
    """
    recipe, best = plan.recipe, plan
    choices: list[Choice] = []
    # In this order, because memory and time depend on all of these, and the micro-batch on memory and time.
    settings: dict[str, Callable[[], Reasoned]] = {
        "precision": lambda: choose_precision(plan),
        "seq_len": lambda: choose_length(task, plan, preview),
        # With the recommended precision and length.
        "packing": lambda: choose_packing(task, best, preview),
    }
    if recipe.has_adapters:
        settings["lora_rank"] = lambda: choose_rank(plan)
        settings["lora_targets"] = lambda: choose_targets(plan)
    for field, choose in settings.items():
        value, why = choose()
        current = _read_recipe(plan, field)
        changed = best if value == current else _change_field(best, field, value)
        if changed is None:
            value, why = current, f"{_format_value(value)} is usual, but this plan cannot run with it. {why}"
        best = changed or best
        choices.append(Choice(name=f"Recipe.{field}", value=value, current=current, why=why))
    value, why = choose_global_batch(task, best, preview)
    best = _change_field(best, "global_batch_size", value) or best
    size = recipe.global_batch_size
    choices.append(Choice(name="Recipe.global_batch_size", value=value, current=size, why=why))
    value, why = choose_micro_batch(best, count_sequences(task))
    best = _change_field(best, "micro_batch_size", value) or best
    size = recipe.micro_batch_size
    choices.append(Choice(name="Recipe.micro_batch_size", value=value, current=size, why=why))
    length = estimate_length(task, plan, preview)
    task_fields = _choose_task_fields(task, plan, best, length, preview)
    return Choices(
        all=(*choices, *task_fields), plan=best, num_steps=length.num_steps, seconds=length.seconds
    )


class Length(NamedTuple):
    """Length of a run; None where it is not known, and no epochs for a text."""

    num_steps: int | None
    num_epochs: float | None
    seconds: float | None


def estimate_length(task: Finetune, plan: Plan, preview: Preview | None) -> Length:
    """Return the length of the run of ``task`` with ``plan``; validations are not included in its time."""
    num_steps, epochs = task.planned_steps, task.num_epochs
    steps_per_epoch = _count_steps_per_epoch(task, plan, preview)
    if num_steps is None and steps_per_epoch is not None:
        epochs = recommend_epochs(steps_per_epoch).value if epochs is None else epochs
        num_steps = max(1, math.ceil(epochs * steps_per_epoch))
    step = None if num_steps is None else predict_step(plan)
    seconds = None if step is None or num_steps is None else num_steps * step.seconds
    if task.objective == "dpo" and step is not None and seconds is not None:
        num_pairs = None if preview is None else preview.num_rows
        seconds += estimate_reference_seconds(plan, step, num_steps or 0, num_pairs)
    return Length(num_steps, epochs, seconds)


def count_sequences(task: Finetune) -> int:
    """Return the number of sequences that one row of the data is: 2 for a preference pair."""
    return SIDES if task.objective == "dpo" else 1


def _choose_task_fields(
    task: Finetune, plan: Plan, best: Plan, length: Length, preview: Preview | None
) -> Iterator[Choice]:
    num_steps = length.num_steps
    is_examples = task.plain_text is None
    rate = recommend_rate(best, on_examples=is_examples, objective=task.objective)
    current: object = task.peak_rate(plan)
    yield Choice(name="Finetune.learning_rate", value=rate.value, current=current, why=rate.why)
    yield Choice(
        name="Finetune.schedule",
        value=DEFAULT_SCHEDULE,
        current=task.schedule,
        why="A cosine from the peak to 0, as Stanford Alpaca's (Taori et al. 2023): the last steps are "
        "small, so that the loss settles.",
    )
    schedule = None if num_steps is None else task.build_schedule(plan, num_steps)
    default = None if num_steps is None else count_warmup_steps(DEFAULT_WARMUP, num_steps)
    yield Choice(
        name="Finetune.warmup",
        value=default,
        current=None if schedule is None else schedule.warmup_steps,
        why=f"{100 * DEFAULT_WARMUP:.0f} % of the steps, as Stanford Alpaca's and QLoRA's (Dettmers et al. "
        f"2023, arXiv:2305.14314): AdamW's second moment settles over about {WARM_UP_STEPS} (Ma & Yarats "
        "2021, arXiv:1910.04209), which is too many for a short run.",
    )
    if task.objective == "dpo":
        yield Choice(
            name="Finetune.dpo_beta",
            value=DEFAULT_BETA,
            current=task.dpo_beta,
            why="That of Rafailov et al. 2023 (arXiv:2305.18290, appendix B), and trl's default; less of it "
            f"lets the model go further from the reference. {describe_reference(plan)}",
        )
    if not is_examples:
        yield Choice(
            name="Finetune.num_steps",
            value=TEXT_STEPS,
            current=task.planned_steps,
            why="A text of any length has no usual number of steps: this one shows within minutes whether "
            "the loss falls.",
        )
        return
    if task.streaming:
        return  # A stream has no epochs, and no usual number of steps.
    value, why = recommend_epochs(_count_steps_per_epoch(task, best, preview))
    current = (
        format_count(task.planned_steps, "step")
        if task.planned_steps
        else length.num_epochs or DEFAULT_EPOCHS
    )
    yield Choice(
        name="Finetune.num_epochs",
        value=value,
        current=current,
        why=why,
    )


# ---- Epochs


def recommend_epochs(steps_per_epoch: float | None) -> Epochs:
    """Return the passes over the examples; ``steps_per_epoch`` is None if their number is not known."""
    if steps_per_epoch is None or DEFAULT_EPOCHS * steps_per_epoch >= USUAL_STEPS:
        return Epochs(
            DEFAULT_EPOCHS,
            "Three passes over the data, as Stanford Alpaca's (Taori et al. 2023); a validation loss with "
            "early_stopping tells whether fewer are better.",
        )
    epochs = float(min(MAX_EPOCHS, math.ceil(USUAL_STEPS / steps_per_epoch)))
    return Epochs(
        epochs,
        "Few examples: three passes would be "
        f"{format_count(math.ceil(DEFAULT_EPOCHS * steps_per_epoch), 'step')}, "
        f"{epochs:g} are {math.ceil(epochs * steps_per_epoch):,}. LIMA's 1,000 rows were read "
        f"{MAX_EPOCHS:g} times (Zhou et al. 2023, arXiv:2305.11206); a validation loss with early_stopping "
        "tells whether fewer are better.",
    )


def _count_steps_per_epoch(task: Finetune, plan: Plan, preview: Preview | None) -> float | None:
    """Return the steps that read each example once; None if the number of examples is not known.

    Nor is it where the sequence length of ``preview`` leaves no row an answer to learn.
    """
    if preview is None or not preview.counts.num_examples:
        return None
    counts, num_rows = preview.counts, preview.num_rows
    if isinstance(task.validation, float):
        num_rows -= count_validation_rows(num_rows, task.validation)
    num_samples = num_rows * counts.num_examples / max(1, counts.num_rows)
    if plan.recipe.packing:
        num_samples /= preview.compute_packing_gain(plan.recipe.seq_len)
    return num_samples * count_sequences(task) / plan.recipe.global_batch_size


# ---- The recipe


def _explain_fp32_on_cpu(plan: Plan) -> str:
    slowdown = find_bf16_slowdown(plan.cluster)
    if slowdown is None:
        least, most = CPU_SLOWDOWN
        return (
            f"On CPU ranks without bf16 instructions a step took {least:g} to {most:g} times as long in bf16 "
            "as in fp32 (SmolLM2-135M-Instruct on two cores with AVX-512, docs/fine_tuning.md). ss.calibrate "
            "measures both on this one."
        )
    measured = f"By ss.calibrate, matmuls of these ranks take {slowdown:.2g} times as long in bf16 as in fp32"
    if slowdown > 1:
        return f"{measured}."
    return f"{measured}: bf16-mixed may be faster here. fp32 rounds nothing."


def choose_precision(plan: Plan) -> Reasoned:
    """Return the precision for the plan's GPUs or CPU ranks."""
    gpu = plan.cluster.gpu
    if gpu.vendor == "cpu":
        return Reasoned("fp32", _explain_fp32_on_cpu(plan))
    if gpu.architecture in BEFORE_AMPERE:
        return Reasoned(
            "fp16-mixed",
            f"{gpu.name} has no bf16 in its matrix units, which came with Ampere; fp16 needs a loss scale "
            "(Micikevicius et al. 2018, section 3.2).",
        )
    return Reasoned(
        "bf16-mixed",
        "bf16 has fp32's range and needs no loss scale (Kalamkar et al. 2019, arXiv:1905.12322); fp32 master "
        "weights keep small updates (Micikevicius et al. 2018, section 3.1).",
    )


def choose_packing(task: Finetune, plan: Plan, preview: Preview | None) -> Reasoned:
    """Return whether several examples should share a row: where that makes an epoch much shorter."""
    now, seq_len = plan.recipe.packing, plan.recipe.seq_len
    if task.objective == "dpo":
        return Reasoned(False, "The two sides of a preference pair are rows of their own.")
    if preview is None:
        if task.plain_text is None:
            return Reasoned(now, "task.preview() shows what packing wins.")
        return Reasoned(False, "A text is cut into full windows, which have no padding to save.")
    gain = preview.compute_packing_gain(seq_len)
    if gain <= 1:
        return Reasoned(False, f"No two examples fit into {seq_len:,} tokens together.")
    wins = f"Packing puts {gain:.1f} examples of these data into a row of {seq_len:,} tokens"
    if gain < WORTH_PACKING:
        cost = "the mask that separates them takes memory, and attention the time of a full row"
        return Reasoned(now, f"{wins}; {cost}.")
    num_windows = preview.num_rows / gain
    num_steps = math.ceil(DEFAULT_EPOCHS * num_windows / plan.degrees.data_parallel)
    if task.planned_steps is None and num_steps < USUAL_STEPS:
        # With the smallest batch: each rank reads one window.
        most = format_count(num_steps, "step")
        return Reasoned(now, f"{wins}, but three passes over so few would be at most {most}.")
    unpacked, packed = (replace_plan_fields(plan, recipe={"packing": packing}) for packing in (False, True))
    steps = [None if one is None else predict_step(one) for one in (unpacked, packed)]
    if steps[0] is not None and steps[1] is not None and steps[1].seconds >= gain * steps[0].seconds:
        return Reasoned(False, f"{wins}, but a step takes as many times as long by plan.step().")
    return Reasoned(
        True,
        f"{wins}, {gain:.1f} times fewer steps per epoch, and no example sees another (position ids restart, "
        "and attention is block-diagonal).",
    )


def choose_rank(plan: Plan) -> Reasoned:
    """Return the rank of the adapters."""
    return Reasoned(
        DEFAULT_LORA_RANK,
        "With adapters on all layers, ranks from 8 to 256 gave equal results (Dettmers et al. 2023, "
        "appendix A.1); this one costs little memory.",
    )


def choose_targets(plan: Plan) -> Reasoned:
    """Return the projections with adapters: all linear layers but experts."""
    arch = plan.architecture
    skipped = FUSED_IN_EXPERTS if arch.num_moe_layers else ()
    targets = tuple(dict.fromkeys(name for name, _ in arch.lora_shapes if name not in skipped))
    return Reasoned(
        targets,
        "Adapters on all linear layers reach full fine-tuning, on attention alone they do not (Dettmers et "
        'al. 2023, figure 2; Schulman et al. 2025, "LoRA Without Regret").',
    )


def choose_global_batch(task: Finetune, plan: Plan, preview: Preview | None) -> Reasoned:
    """Return the plan's global batch, or a smaller one where few examples would make too few steps."""
    now, ranks = plan.recipe.global_batch_size, plan.degrees.data_parallel * count_sequences(task)
    usual = "Batches of 16 to 128 sequences are usual (Dettmers et al. 2023, table 9; Taori et al. 2023)"
    steps_per_epoch = None if task.planned_steps is not None else _count_steps_per_epoch(task, plan, preview)
    if steps_per_epoch is None or DEFAULT_EPOCHS * steps_per_epoch >= WARM_UP_STEPS:
        return Reasoned(now, f"{usual}.")
    size, num_steps = now, math.ceil(DEFAULT_EPOCHS * steps_per_epoch)
    while size % (2 * ranks) == 0 and DEFAULT_EPOCHS * steps_per_epoch * now / size < WARM_UP_STEPS:
        size //= 2
    if size == now:
        return Reasoned(now, f"{usual}; this one is the smallest for {plan.degrees.data_parallel} ranks.")
    return Reasoned(
        size,
        f"{usual}, but {now:,} would make {format_count(num_steps, 'step')} of three passes over these data, "
        f"and AdamW's second moment alone settles over about {WARM_UP_STEPS} (Ma & Yarats 2021, "
        "arXiv:1910.04209).",
    )


def choose_micro_batch(plan: Plan, multiple: int = 1) -> Reasoned:
    """Return the fastest predicted micro-batch that fits, the smallest of about equal ones.

    It is a multiple of ``multiple``, the sequences of a row of the data. Where no time is predicted, as on
    CPU ranks without a calibration, it is the largest that fits.
    """
    recipe = plan.recipe
    most = min(MAX_MICRO_BATCH, recipe.global_batch_size // plan.degrees.data_parallel)
    sizes = sorted({recipe.micro_batch_size, *(2**power for power in range(max(1, most).bit_length()))})
    fitting: list[tuple[Plan, MemoryReport, StepReport | None]] = []
    for size in sizes:
        if size % multiple:
            continue
        changed = replace_plan_fields(plan, recipe={"micro_batch_size": size})
        report = None if changed is None else predict_memory(changed)
        if changed is not None and report is not None and fits(changed, report):
            fitting.append((changed, report, predict_step(changed)))
    if predict_memory(plan) is None:
        why = "No memory is predicted for this plan: plan.rehearse() counts it."
        return Reasoned(recipe.micro_batch_size, why)
    if not fitting:
        return Reasoned(recipe.micro_batch_size, "No micro-batch fits: plan.repairs() names what would.")
    rates = [0.0 if step is None else step.tokens_per_second for _, _, step in fitting]
    index = next(i for i, rate in enumerate(rates) if rate * WORTH_A_SETTING >= max(rates))
    best, report, _ = fitting[index if all(rates) else -1]
    kind = "The fastest that fits by plan.step()" if all(rates) else "The largest that fits"
    return Reasoned(
        best.recipe.micro_batch_size,
        f"{kind}: {format_gib(report.peak_bytes)} of {format_gib(report.usable_bytes)} GiB by plan.memory(). "
        "It changes speed and memory only.",
    )


def _change_field(plan: Plan, field: str, value: object) -> Plan | None:
    """Return ``plan`` with another field of its recipe, or None if it could not be trained."""
    fields = {field: value}
    if field == "global_batch_size":  # The present micro-batch may be larger; it is chosen afterwards.
        fields["micro_batch_size"] = 1
    changed = replace_plan_fields(plan, recipe=fields)
    if changed is None:
        return None
    # A plan that is not trained as it is, for another reason, has recommendations, too.
    return changed if why_not_trained(changed) is None or why_not_trained(plan) is not None else None


def _read_recipe(plan: Plan, field: str) -> object:
    """Return a field of the recipe, or what it resolves to."""
    if field == "lora_rank":
        return plan.recipe.adapter_rank
    if field == "lora_targets":
        return find_adapter_targets(plan.architecture, plan.recipe)
    return getattr(plan.recipe, field)


def _format_value(value: object) -> str:
    """Return a value as text."""
    if isinstance(value, tuple):
        return ", ".join(str(name) for name in value)
    if isinstance(value, float):
        return f"{value:g}"
    if is_int(value):
        return f"{value:,}"
    return str(value)
