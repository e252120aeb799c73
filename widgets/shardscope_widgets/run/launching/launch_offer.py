"""The launch offer of the main button: the plan on its GPUs, the task on CPU ranks, or a tiny model."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass, replace

import shardscope as ss
from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib
from shardscope.core.recipe import Precision
from shardscope.frameworks.registry import check_trained, why_not_trained
from shardscope.machine.processes import explain_missing_linux
from shardscope.memory.report import MemoryReport
from shardscope.planner.cpu_trial import build_cpu_trial
from shardscope.planner.memory_needs import find_shortages
from shardscope.planner.verdict import assess_plan
from shardscope.runs.task_source import uses_engine
from shardscope_widgets.kit.display_names import count_devices
from shardscope_widgets.pickers.schedulers import Queue
from shardscope_widgets.pickers.task import NO_WEIGHTS, TaskPicker

TRIAL_RANKS = 2
CPU_PRECISION: Precision = "fp32"
"""Precision of a fine-tune on CPU ranks, as ``choose_precision`` recommends it with its reason."""
CPU_SEQ_LEN = 512
"""Maximum sequence length of a full-size model trained on CPU ranks because its GPUs are missing."""
TRIAL = f"Try a tiny model on {TRIAL_RANKS} CPU ranks"
LAUNCHING = "Train this plan on this machine"
TRYING = "Train a tiny model of this family on CPU ranks of this machine, with the same framework"


@dataclass(frozen=True, kw_only=True)
class LaunchOffer:
    """The task that the main button would launch, and how."""

    label: str
    plan: ss.Plan | None = None
    """The plan to run, or None if nothing can be launched, with the reason in ``note``."""
    note: str = ""
    is_trial: bool = False
    """Whether a tiny model with random weights replaces the plan's model."""
    place: str = ""
    """The queue that the plan is submitted to; empty for this machine."""

    @property
    def tooltip(self) -> str:
        """The button's tooltip."""
        usual = f"Submit this plan as a job to {self.place}" if self.place else LAUNCHING
        return self.note or (TRYING if self.is_trial else usual)


def build_offer(
    plan: ss.Plan, machine: ss.Cluster, report: MemoryReport, task: TaskPicker, queue: Queue | None = None
) -> LaunchOffer:
    """Return the offer for ``plan`` on ``machine``, or with a ``queue`` as its job.

    For a job it is the plan itself: ``launch`` checks that the queue has its GPUs. On this machine it is the
    plan if its GPUs are present. Otherwise a fine-tune or the user's own code on CPU ranks if enough memory
    is free, else a tiny model with random weights, which the label mentions.
    """
    if task.form is not None and task.missing:
        return LaunchOffer(label=task.verb, note=task.missing)
    label = f"{task.verb} on {count_devices(plan.cluster)}"
    reason = explain_missing_linux("Launching")
    if reason is not None:
        return LaunchOffer(label=label, note=reason)
    # Looked up, not imported: torch takes seconds to import, and planning needs none of these.
    missing = [
        module for module in ("torch", "accelerate", "transformers") if not importlib.util.find_spec(module)
    ]
    if missing:
        return LaunchOffer(
            label=label, note=f'Training needs {", ".join(missing)}: pip install "shardscope[train]"'
        )
    if task.mode == "own":
        offer = _offer_own_code(plan, machine, task, label, is_job=queue is not None)
        return offer if queue is None else replace(offer, place=queue.label)
    warning = NO_WEIGHTS if task.adapts_random_weights(plan) else ""
    too_large = ""
    if queue is not None or _is_on_machine(plan, machine):
        too_large = _describe_shortage(plan, report)
        if too_large and queue is not None:
            return LaunchOffer(label=label, note=too_large)
        if not too_large:
            refusal = why_not_trained(plan)
            if refusal:
                return LaunchOffer(label=label, note=refusal)
            verdict = assess_plan(plan, report)
            note = "" if verdict.state == "fits" else verdict.reason
            place = "" if queue is None else queue.label
            return LaunchOffer(label=label, plan=plan, note=_join_sentences(warning, note), place=place)
    # Fine-tuning the real weights slowly is worth more than a trial with random ones.
    elif task.mode == "finetune":
        moved = _move_to_cpu(plan)
        if moved is not None:
            return LaunchOffer(label=_label_on_ranks(task), plan=moved, note=_describe_move(plan, moved))
    return _offer_trial(plan, _join_sentences(warning, too_large), task)


def _offer_own_code(
    plan: ss.Plan, machine: ss.Cluster, task: TaskPicker, label: str, *, is_job: bool
) -> LaunchOffer:
    """Return the offer to run the user's code, which has its own model and memory."""
    is_here = is_job or _is_on_machine(plan, machine)
    label = label if is_here else _label_on_ranks(task)
    try:
        code = task.build_task(plan)
    except ValueError:  # The error is shown at its input.
        return LaunchOffer(label=label)
    if is_here:
        return _check_code(label, code, plan, "")
    refused = LaunchOffer(label=label, note=f"{count_devices(plan.cluster)} are not on this machine.")
    for layout in _list_cpu_layouts(plan):
        moved = _change_to_cpu(plan, layout, plan.recipe.precision)
        # The user's code may ignore the plan's model: a tiny one then only provides ranks.
        if moved is None or not _fits_free_memory(moved):
            try:
                moved = build_cpu_trial(replace(plan, layout=layout), TRIAL_RANKS).plan
            except ValueError:
                continue
        offer = _check_code(label, code, moved, _describe_move(plan, moved))
        if offer.plan is not None:
            return offer
        refused = offer
    return refused


def _check_code(label: str, code: object, plan: ss.Plan, note: str) -> LaunchOffer:
    """Return the offer to run ``code`` with ``plan``, or one with only the error if ``code`` rejects it."""
    check = getattr(code, "check", None)
    try:
        if callable(check):
            check(plan)
        # Code that uses the engine needs one that trains this plan; other code brings its own model.
        elif uses_engine(code):
            check_trained(plan)
    except ValueError as error:
        return LaunchOffer(label=label, note=str(error))
    return LaunchOffer(label=label, plan=plan, note=note)


def _label_on_ranks(task: TaskPicker) -> str:
    return f"{task.verb} on {TRIAL_RANKS} CPU ranks"


def _join_sentences(*sentences: str) -> str:
    return " ".join(sentence.strip() for sentence in sentences if sentence)


def _is_on_machine(plan: ss.Plan, machine: ss.Cluster) -> bool:
    cluster = plan.cluster
    is_cpu = cluster.gpu.name == "cpu"
    return (
        cluster.num_nodes == 1
        and cluster.gpu.name == machine.gpu.name
        and (is_cpu or cluster.gpus_per_node <= machine.gpus_per_node)
    )


def _move_to_cpu(plan: ss.Plan) -> ss.Plan | None:
    """Return the same model and method on CPU ranks of this machine, if it runs and fits into free memory.

    Sequences and batches are shortened: a CPU would take minutes for a step sized for GPUs. The precision is
    the one that is fast on CPU ranks, if the plan can be trained in it.
    """
    precisions = dict.fromkeys((CPU_PRECISION, plan.recipe.precision))
    for layout, precision in itertools.product(_list_cpu_layouts(plan), precisions):
        moved = _change_to_cpu(plan, layout, precision)
        if moved is not None and why_not_trained(moved) is None and _fits_free_memory(moved):
            return moved
    return None


def _list_cpu_layouts(plan: ss.Plan) -> tuple[ss.Layout, ...]:
    # The plan's own framework first, then those that are part of torch.
    return (type(plan.layout)(), ss.Layout.fsdp2(), ss.Layout.ddp())


def _change_to_cpu(plan: ss.Plan, layout: ss.Layout, precision: Precision) -> ss.Plan | None:
    """Return the model of ``plan`` with ``layout`` on CPU ranks of this machine; None if it cannot run."""
    recipe = replace(
        plan.recipe,
        precision=precision,
        seq_len=min(plan.recipe.seq_len, CPU_SEQ_LEN, plan.architecture.max_position_embeddings),
        micro_batch_size=1,
        global_batch_size=TRIAL_RANKS,
    )
    try:
        moved = ss.Plan(plan.architecture, ss.Cluster.parse(f"{TRIAL_RANKS}xcpu"), recipe, layout)
        # Without a memory prediction it could not be compared with the free memory.
        moved.memory()
    except ValueError:
        return None
    return moved


def _fits_free_memory(plan: ss.Plan) -> bool:
    import psutil  # Training has it; Pyodide, which only plans, does not.

    return plan.world_size * plan.memory().peak_bytes < psutil.virtual_memory().available


def _describe_move(plan: ss.Plan, moved: ss.Plan) -> str:
    """Return the differences between ``plan`` and its version on CPU ranks, as sentences."""
    before, now = plan.recipe, moved.recipe
    parts = [f"{moved.architecture.num_parameters:,} parameters"] * (moved.architecture != plan.architecture)
    parts.append(moved.layout.description)
    if now.precision != before.precision:
        parts.append(f"{now.precision}, which is faster there, instead of {before.precision}")
    for name, unit in (("seq_len", "tokens per sequence"), ("global_batch_size", "sequences per step")):
        if getattr(now, name) != getattr(before, name):
            parts.append(f"{getattr(now, name):,} instead of {getattr(before, name):,} {unit}")
    missing = f"{count_devices(plan.cluster)} are not on this machine."
    return f"{missing} On {TRIAL_RANKS} CPU ranks: {', '.join(parts)}."


def _offer_trial(plan: ss.Plan, warning: str, task: TaskPicker) -> LaunchOffer:
    try:
        trial = build_cpu_trial(plan, TRIAL_RANKS)
        check_trained(trial.plan)
    except ValueError as error:
        return LaunchOffer(label=TRIAL, note=str(error))
    weights = "random weights in place of the folder's, " if task.mode == "finetune" else ""
    differences = ", ".join(trial.differences)
    note = f"Trial run: the same framework on this machine, with {weights}{differences}."
    return LaunchOffer(label=TRIAL, plan=trial.plan, is_trial=True, note=_join_sentences(warning, note))


def _describe_shortage(plan: ss.Plan, report: MemoryReport) -> str:
    """Return which memory is too small in any case; for the GPU, the low end of the band counts."""
    if report.low_bytes > report.usable_bytes:
        have, least = format_gib(report.usable_bytes), format_gib(report.low_bytes)
        unit = name_device(plan.cluster)
        return f"The plan needs at least {least} GiB on each {unit}, of which {have} are usable."
    for shortage in find_shortages(plan, report):
        if shortage.name != "GPU memory":
            return (
                f"The plan needs {format_gib(shortage.needed_bytes)} GiB of {shortage.name} on each node, "
                f"which has {format_gib(shortage.room_bytes or 0)}."
            )
    return ""
