"""What the main button would start: the plan on its GPUs, the task on CPU ranks, or a tiny model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import psutil

import shardscope as ss
from shardscope.frameworks.cpu_rehearsal import rehearsal_of
from shardscope.frameworks.registry import check_trained, why_not_trained
from shardscope.memory.report import MemoryReport
from shardscope.memory.words import gib
from shardscope.planner.room import shortages
from shardscope.planner.verdict import assess
from shardscope_widgets.kit.words import device_count
from shardscope_widgets.pickers.task import TaskPicker

TRIAL_RANKS = 2
TRIAL = f"Try a tiny model on {TRIAL_RANKS} CPU ranks"
LAUNCHING = "Train this plan on this machine"
TRYING = "Train a tiny model of this family on CPU ranks of this machine, with the same framework"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What pressing the main button would start."""

    label: str
    plan: ss.Plan | None = None
    """None: nothing can be started, and ``note`` says why."""
    note: str = ""
    is_trial: bool = False
    """Whether a tiny model with random weights stands for the plan's model."""

    @property
    def tooltip(self) -> str:
        """The button's tooltip."""
        return self.note or (TRYING if self.is_trial else LAUNCHING)


def offer_for(plan: ss.Plan, machine: ss.Cluster, report: MemoryReport, task: TaskPicker) -> Offer:
    """Return the offer for ``plan`` on ``machine``.

    The plan itself where its GPUs are here; a fine-tune or the user's own code on CPU ranks where they are
    not and the model's memory is free; else a tiny model with random weights, which the label says.
    """
    label = f"{task.verb} on {device_count(plan.cluster)}"
    missing = [
        module for module in ("torch", "accelerate", "transformers") if not importlib.util.find_spec(module)
    ]
    if missing:
        return Offer(
            label=label, note=f'Training needs {", ".join(missing)}: pip install "shardscope[train]"'
        )
    too_large = ""
    if _is_here(plan, machine):
        too_large = _why_too_large(plan, report)
        if not too_large:
            refusal = why_not_trained(plan)
            if refusal:
                return Offer(label=label, note=refusal)
            verdict = assess(plan, report)
            return Offer(label=label, plan=plan, note="" if verdict.state == "fits" else verdict.reason)
    elif task.kind != "pretrain":
        here = _on_cpu_ranks(plan)
        if here is not None:
            note = f"{device_count(plan.cluster)} are not here: the same task on {TRIAL_RANKS} CPU ranks."
            return Offer(label=f"{task.verb} on {TRIAL_RANKS} CPU ranks", plan=here, note=note)
        if task.kind == "own":
            return Offer(label=label, note=f"{device_count(plan.cluster)} are not on this machine.")
    return _trial(plan, too_large, task)


def _is_here(plan: ss.Plan, machine: ss.Cluster) -> bool:
    cluster = plan.cluster
    is_cpu = cluster.gpu.name == "cpu"
    return (
        cluster.num_nodes == 1
        and cluster.gpu.name == machine.gpu.name
        and (is_cpu or cluster.gpus_per_node <= machine.gpus_per_node)
    )


def _on_cpu_ranks(plan: ss.Plan) -> ss.Plan | None:
    """Return the same model and recipe on CPU ranks of this machine, if they run and fit in what is free."""
    cluster = ss.Cluster.parse(f"{TRIAL_RANKS}xcpu")
    batch = TRIAL_RANKS * plan.recipe.micro_batch_size
    recipe = replace(plan.recipe, global_batch_size=batch)
    free = psutil.virtual_memory().available
    for layout in (type(plan.layout)(), ss.Layout.fsdp2(), ss.Layout.ddp()):
        try:
            moved = ss.Plan(plan.architecture, cluster, recipe, layout)
            report = moved.memory()
        except ValueError:
            continue
        if why_not_trained(moved) is None and TRIAL_RANKS * report.peak_bytes < free:
            return moved
    return None


def _trial(plan: ss.Plan, too_large: str, task: TaskPicker) -> Offer:
    try:
        trial = rehearsal_of(plan, TRIAL_RANKS)
        check_trained(trial.plan)
    except ValueError as error:
        return Offer(label=TRIAL, note=str(error))
    weights = "random weights, not the folder's, and " if task.kind == "finetune" else ""
    differences = ", ".join(trial.differences)
    note = f"{too_large}A trial: the same framework on this machine, with {weights}{differences}."
    return Offer(label=TRIAL, plan=trial.plan, is_trial=True, note=note)


def _why_too_large(plan: ss.Plan, report: MemoryReport) -> str:
    """Return what is too little in any case: of the GPU's memory the low end of the band counts."""
    if report.low_bytes > report.usable_bytes:
        have, least = gib(report.usable_bytes), gib(report.low_bytes)
        return f"This machine has {have} GiB, and at least {least} are needed. "
    for place in shortages(plan, report):
        if place.name != "GPU memory":
            return (
                f"A node has {gib(place.room_bytes or 0)} GiB of {place.name}, and "
                f"{gib(place.needed_bytes)} are needed. "
            )
    return ""
