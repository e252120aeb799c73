"""Runs that published torch's allocated bytes and nvidia-smi's figure: the memory beyond tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tests.accuracy.measurement_kinds import find_kind
from tests.accuracy.memory_band import gaps_report
from tests.accuracy.scoring import Scored, compute_percentile

HEADING = "Allocated bytes and nvidia-smi's figure of the same run"
"""Heading of the section, which :mod:`~tests.accuracy.error_reasons` refers to."""


class Pair(NamedTuple):
    """Two measurements of one run."""

    allocated: Scored
    nvidia_smi: Scored

    @property
    def ratio(self) -> float:
        """Return nvidia-smi's figure over the allocated bytes."""
        return self.nvidia_smi.measured / self.allocated.measured

    @property
    def has_room(self) -> bool:
        """Return whether the GPU was not nearly full: the allocator frees its cache before it raises."""
        usable = self.nvidia_smi.mapped.plan.cluster.usable_bytes_per_gpu
        return self.nvidia_smi.measured < 0.85 * usable

    @property
    def group(self) -> str:
        """Return the group by the two properties that change the ratio most: logits at the peak, one GPU."""
        logits = self.allocated.predicted.components.get("logits", 0)
        where = "logits at the peak" if logits else "no logits at the peak"
        return f"{'one GPU' if self.nvidia_smi.mapped.plan.world_size == 1 else 'several GPUs'}, {where}"


def list_pairs(rows: Sequence[Scored]) -> list[Pair]:
    """List every run with both figures among ``rows``."""
    by_id = {str(row.mapped.row.get("id")): row for row in rows}
    return [
        Pair(by_id[str(first)], row)
        for row in rows
        if (first := row.mapped.row.get("same_run")) in by_id and find_kind(row.mapped.row) == "nvidia-smi"
    ]


def pairs_report(rows: Sequence[Scored]) -> str:
    """Return the section of docs/accuracy.md."""
    pairs = list_pairs(rows)
    if not pairs:
        return ""
    lines = [
        f"## {HEADING}",
        "",
        f"{len(pairs)} runs of FMS-acceleration published both figures. The table has the ratio of "
        "nvidia-smi's figure to torch's allocated bytes. The difference is CUDA contexts, communicators, "
        "libraries, memory that the caching allocator keeps, and loading, when the model is whole before it "
        "is sharded. A prediction of tensors can therefore be exact and the GPU still be full.",
        "",
        "| runs | number | min | median | p90 | max | median of GPUs below 85 % | in the product's band |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.group].append(pair)
    lines += [
        f"| {name} | {_format_figures(some)} |" for name, some in [*sorted(groups.items()), ("all", pairs)]
    ]
    return "\n".join([*lines, *gaps_report(rows), *_explain_qwen(rows, groups)])


def _explain_qwen(rows: Sequence[Scored], groups: dict[str, list[Pair]]) -> list[str]:
    """Explain why the rows of Qwen's README exceed their tensors."""
    qwen = [row for row in rows if "Qwen" in row.group[0]]
    similar = groups.get("one GPU, logits at the peak")
    if not qwen or not similar:
        return []
    ratios = sorted(row.measured / row.predicted.point for row in qwen)
    of_product = median(row.measured / row.product.point for row in qwen)
    under = sum(row.error < 0 for row in qwen)
    return [
        "",
        f"Qwen (v1)'s {len(qwen)} rows do not state which memory was read, nor whether a GB is decimal. They "
        f"are compared with tensors, and {under} are above the prediction. The scripts and the packages of "
        "that time explain a part (`tests/accuracy/qwen_code.py`): peft 0.6 keeps adapters, their gradients "
        "and moments in fp32; QLoRA runs under DeepSpeed's ZeRO-2 in fp16 even on one GPU, with two buckets "
        "of 200 million elements; AutoGPTQ dequantizes every matrix of a recomputed layer. Recomputation, "
        "batch, padding and flash attention follow the scripts and the README. The remaining ratio of "
        f"measured bytes to tensors is {ratios[0]:.2f} to {ratios[-1]:.2f}, with a median of "
        f"{median(ratios):.2f} (product: {of_product:.2f}). In the runs above on one GPU with logits at the "
        f"peak, nvidia-smi reports {_format_span(similar)}. So Qwen's figures were most likely read from "
        "nvidia-smi. If their GB are decimal, as in the inference table of the same README (14B in bf16 "
        "after 2,048 tokens: weights and cache are 30.0 decimal GB, the table has 30.15), the unit explains "
        "7 points. No constant was fitted to these rows.",
    ]


def _format_span(some: Sequence[Pair]) -> str:
    """Format the smallest and the largest ratio of some runs, and the median."""
    ratios = sorted(pair.ratio for pair in some)
    span = f"{ratios[0]:.2f} to {ratios[-1]:.2f} times the allocated bytes"
    return f"{span}, with a median of {median(ratios):.2f}"


def _format_figures(some: list[Pair]) -> str:
    ratios = sorted(pair.ratio for pair in some)
    roomy = [pair.ratio for pair in some if pair.has_room]
    inside = sum(pair.nvidia_smi.by_product.inside for pair in some)
    return (
        f"{len(some)} | {ratios[0]:.2f} | {median(ratios):.2f} | {compute_percentile(ratios, 0.9):.2f} | "
        f"{ratios[-1]:.2f} | {f'{median(roomy):.2f}' if roomy else '–'} | {inside} of {len(some)}"
    )
