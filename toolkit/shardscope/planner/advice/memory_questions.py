"""The questions about memory: from one GPU that holds everything to state on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count, format_gib
from shardscope.planner.advice import layout_ladder, words
from shardscope.planner.advice.path import describe_figures
from shardscope.planner.advice.trials import compute_state_bytes, is_state_too_large

if TYPE_CHECKING:
    from shardscope.planner.advice.path import Path

TIGHT_FROM, LARGE_FROM = 25e9, 80e9
"""Parameter counts of the usual range "30B to 70B" (Gemma 27B to Qwen 72B), and of "over 70B"."""


def ask_what_trains(path: Path) -> None:
    """Ask whether all weights or only adapters train, which decides the training state."""
    arch, recipe = path.bench.architecture, path.bench.recipe
    state = compute_state_bytes(path.bench)
    state_text = "" if state is None else f", {format_gib(state)} GiB of training state in all"
    if recipe.has_adapters:
        base = recipe.base_quantization or recipe.precision.removesuffix("-mixed")
        answer = f"Adapters of rank {recipe.adapter_rank} only: fine-tuning."
        number = f"{words.format_count(arch.num_parameters)} frozen parameters in {base}{state_text}"
        why = "A frozen base needs no gradients and no optimizer state, so far fewer GPUs are enough."
    else:
        answer = "All weights: pretraining, or fine-tuning in full."
        number = f"{words.format_count(arch.num_parameters)} parameters{state_text}"
        why = (
            "Both hold the same: weights, gradients and the optimizer's state of every parameter. Adapters "
            "(LoRA) would keep gradients and state for a small share of them."
        )
    path.record_turn(
        "", "Fine-tune or pretrain: do all weights train, or only adapters?", answer, number, why, taken=True
    )


def ask_one_gpu(path: Path) -> None:
    """Ask whether everything fits on one GPU at the requested micro-batch, or with more accumulation or
    recomputation."""
    recipe = path.bench.recipe
    micro, rank = recipe.micro_batch_size, words.name_device(path.bench.cluster)
    outcome = path.choose_rung("whole", layout_ladder.build_unsharded())
    if path.bench.cluster.num_gpus == 1:
        how = "one process, and nothing to spread (DDP of one rank)"
        why = f"With one {rank} there is nobody to share with, so this is the place to start."
    else:
        how = f"DDP, a copy on every {rank}"
        why = "The simplest that there is: each rank holds everything, and only gradients travel."
    question = f"Does everything fit on one {rank}, with micro-batch {micro}?"
    if outcome.best and not outcome.is_eased:
        path.record_turn("whole", question, f"Yes: {how}.", describe_figures(outcome.best), why, outcome.best)
        path.set_current("whole", outcome.best)
        return
    if outcome.wanted is None:
        path.record_turn("", question, path.explain_misfit(outcome._replace(nearest=None)), "", why)
    else:
        tight = "Only just: of runs that need over 80 % of their GPU's memory some run out of it."
        answer = tight if outcome.wanted.fits else f"No: {words.describe_shortage(outcome.wanted)}."
        path.record_turn("", question, answer, words.describe_needs(outcome.wanted), why, outcome.wanted)
    if outcome.best:
        accumulates = outcome.best.plan.recipe.micro_batch_size < micro
        question = (
            "With gradient accumulation over a smaller micro-batch?"
            if accumulates
            else "With layers recomputed in backward, or the loss in chunks?"
        )
        answer = f"Yes: {how}, with {words.describe_recipe_changes(outcome.best, recipe)}."
        why = "Accumulation costs next to nothing, recomputation some time; neither needs another framework."
        path.record_turn("whole", question, answer, describe_figures(outcome.best), why, outcome.best)
        path.set_current("whole", outcome.best)
    elif outcome.nearest and outcome.nearest is not outcome.wanted:
        question = "With gradient accumulation over a smaller micro-batch, or layers recomputed in backward?"
        why = "Both save activations; weights, gradients and the optimizer's state stay what they are."
        answer = path.explain_misfit(outcome)
        if is_state_too_large(outcome.nearest):
            answer = "No: what stays on the GPU between two steps is too much by itself."
        path.record_turn("", question, answer, path.describe_needs(outcome), why, outcome.nearest)


def ask_sharded_optimizer(path: Path) -> None:
    """Ask whether the plan fits with sharded gradients and optimizer only, which moves less than full
    sharding."""
    if path.is_settled:
        return
    path.try_rung(
        "gathered_once",
        layout_ladder.build_sharded_optimizer(path.bench.cluster),
        f"With gradients and optimizer split over {_count_ranks(path)}, weights whole?",
        "ZeRO-2, which is FSDP2 with reshard_after_forward=False: weights are gathered once for a "
        "micro-batch and not twice, so it moves less than full sharding.",
    )


def _count_ranks(path: Path) -> str:
    return format_count(path.bench.cluster.num_gpus, words.name_device(path.bench.cluster))


def ask_full_sharding(path: Path) -> None:
    """Ask whether the plan fits with full sharding."""
    if path.is_settled:
        return
    path.try_rung(
        "sharded",
        layout_ladder.build_fully_sharded(path.bench.cluster),
        "With the weights split as well?",
        "Full sharding (FSDP2, ZeRO-3): each layer is gathered when it runs and freed after it, in forward "
        "and again in backward.",
    )


def ask_split_inside_a_node(path: Path) -> None:
    """Ask about tensor or context parallelism between 30B and 70B if memory is tight, and if full sharding
    did not fit."""
    size, current = path.bench.architecture.num_parameters, path.current
    is_tight = current is not None and (not path.is_settled or current.report.is_tight)
    is_middling = TIGHT_FROM <= size <= LARGE_FROM
    rung = layout_ladder.build_split_inside_a_node(path.bench.cluster)
    # With one GPU, or a large prime number of them, there is no degree that divides evenly.
    if not rung.layouts or not (current is None or (is_middling and is_tight)):
        return
    middling = f"{words.format_count(size)} and tight: with" if is_middling else "With"
    path.try_rung(
        "split",
        rung,
        f"{middling} matrices or sequences split over some GPUs of a node?",
        "FSDP2 with tensor or context parallelism: a GPU then has a part of each layer, or of each "
        "sequence's activations. Every layer waits for a transfer, so it comes after sharding.",
    )


def ask_offload(path: Path) -> None:
    """Ask about offload, to the host and then to NVMe, if nothing fits without it."""
    if path.bench.cluster.gpu.vendor == "cpu":
        return
    if path.current is None:
        path.try_rung(
            "host",
            layout_ladder.build_on_host(),
            "Only with training state in host memory?",
            "DeepSpeed ZeRO-3 with CPU offload: state crosses the host link, and the host's processors take "
            "the optimizer's step. Slower, but it runs.",
        )
    if path.current is None:
        path.try_rung(
            "nvme",
            layout_ladder.build_on_drives(),
            "Only with training state on NVMe?",
            "DeepSpeed ZeRO-Infinity: the last resort on few GPUs, for drives are slower still.",
        )
