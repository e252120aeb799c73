"""Runs that published both what torch had allocated and what nvidia-smi saw: between them is no tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tests.accuracy.measurement_kinds import find_kind
from tests.accuracy.memory_band import gaps_report
from tests.accuracy.scoring import Scored, compute_percentile


class Pair(NamedTuple):
    """One run, twice measured."""

    allocated: Scored
    seen: Scored

    @property
    def ratio(self) -> float:
        """Return nvidia-smi's figure over the allocated bytes."""
        return self.seen.measured / self.allocated.measured

    @property
    def has_room(self) -> bool:
        """Return whether the GPU was not nearly full: the allocator frees its cache before it raises."""
        return self.seen.measured < 0.85 * self.seen.mapped.plan.cluster.usable_bytes_per_gpu

    @property
    def group(self) -> str:
        """Where the ratio differs most: whether logits of all tokens are there, and on how many GPUs."""
        logits = self.allocated.predicted.components.get("logits", 0)
        where = "logits at the peak" if logits else "no logits at the peak"
        return f"{'one GPU' if self.seen.mapped.plan.world_size == 1 else 'several GPUs'}, {where}"


def list_pairs(rows: Sequence[Scored]) -> list[Pair]:
    """List every run with both figures among ``rows``."""
    by_id = {str(row.mapped.row.get("id")): row for row in rows}
    return [
        Pair(by_id[str(first)], row)
        for row in rows
        if (first := row.mapped.row.get("same_run")) in by_id and find_kind(row.mapped.row) == "nvidia-smi"
    ]


def pairs_report(rows: Sequence[Scored]) -> str:
    """The section of docs/accuracy.md."""
    found = list_pairs(rows)
    if not found:
        return ""
    lines = [
        "## What nvidia-smi sees beyond tensors",
        "",
        f"{len(found)} runs of FMS-acceleration published both figures: how many times what torch had "
        "allocated nvidia-smi saw (contexts, communicators, libraries, what the caching allocator holds, and "
        "the load, where a model is whole before it is sharded). Tensors may be right to the percent and the "
        "card full all the same.",
        "",
        "| runs | number | least | median | p90 | most | cards not nearly full: median | inside, alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in found:
        groups[pair.group].append(pair)
    lines += [
        f"| {name} | {_format_figures(some)} |" for name, some in [*sorted(groups.items()), ("all", found)]
    ]
    return "\n".join([*lines, *gaps_report(rows), *_explain_qwen(rows, groups)])


def _explain_qwen(rows: Sequence[Scored], groups: dict[str, list[Pair]]) -> list[str]:
    """Explain why the rows of Qwen's README exceed their tensors."""
    theirs = [row for row in rows if "Qwen" in row.group[0]]
    alike = groups.get("one GPU, logits at the peak")
    if not theirs or not alike:
        return []
    ratios = {
        name: sorted(row.measured / row.predicted.point for row in some)
        for name, some in (("alone", [row.by_product for row in theirs]), ("described", theirs))
    }
    under = sum(row.error < 0 for row in theirs)
    return [
        "",
        f"Qwen (v1)'s {len(theirs)} rows do not say what was read, nor which gigabyte; they are held against "
        f"tensors, and {under} lie above them. What its scripts and the packages of that time say explains a "
        "part (`tests/accuracy/qwen_code.py`): peft 0.6 keeps adapters, their gradients and moments in fp32; "
        "Q-LoRA runs under DeepSpeed's ZeRO-2 in fp16 even on one GPU, with two buckets of 200 million "
        "numbers, and AutoGPTQ multiplies every matrix of a recomputed layer out. Recomputation, batch, "
        "padding and flash attention are as planned, by the scripts and the README. What is left is "
        f"{ratios['described'][0]:.2f} to {ratios['described'][-1]:.2f} times the tensors, in the median "
        f"{median(ratios['described']):.2f} ({median(ratios['alone']):.2f} by the product alone): as in the "
        f"runs above on one GPU with logits at their peak, where nvidia-smi saw {_format_span(alike)}. So "
        "they were most likely read off nvidia-smi. If their GB are decimal, as those of the same README's "
        "inference table are (14B in bf16 after 2,048 tokens: weights and cache are 30.0 decimal GB, printed "
        "are 30.15), 7 points of it are the unit. No constant was fitted to any of this.",
    ]


def _format_span(some: Sequence[Pair]) -> str:
    """Format the smallest and the largest ratio of some runs, and the median."""
    ratios = sorted(pair.ratio for pair in some)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f} times what was allocated, in the median {median(ratios):.2f}"


def _format_figures(some: list[Pair]) -> str:
    ratios = sorted(pair.ratio for pair in some)
    roomy = [pair.ratio for pair in some if pair.has_room]
    inside = sum(pair.seen.by_product.inside for pair in some)
    return (
        f"{len(some)} | {ratios[0]:.2f} | {median(ratios):.2f} | {compute_percentile(ratios, 0.9):.2f} | "
        f"{ratios[-1]:.2f} | {f'{median(roomy):.2f}' if roomy else '–'} | {inside} of {len(some)}"
    )
