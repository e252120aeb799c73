"""Predictions compared with stored rehearsals (tests/fixtures/rehearsals): frameworks on fake tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.accuracy.measurement_kinds import tensor_bytes
from tests.accuracy.rows import ROOT
from tests.accuracy.scoring import compute_percentile, format_gib

import shardscope as ss

STORED = ROOT / "tests" / "fixtures" / "rehearsals"
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "gather_buffers")


class Rehearsed(NamedTuple):
    """One stored rehearsal and the prediction, each at the peak of its largest stage."""

    name: str
    plan: ss.Plan
    stored: dict[str, int]
    predicted: dict[str, int]

    @property
    def error(self) -> float:
        """Predicted over rehearsed, less one, over all tensors."""
        return sum(self.predicted.values()) / max(1, sum(self.stored.values())) - 1

    def component_error(self, name: str) -> float:
        """Return the error of one component as a share of the whole."""
        return (self.predicted.get(name, 0) - self.stored.get(name, 0)) / max(1, sum(self.stored.values()))


def stored_files() -> list[Path]:
    """Return the fixtures, sorted by name."""
    return sorted(STORED.glob("*.jsonl"))


def read_rehearsals(files: Iterable[Path]) -> tuple[list[Rehearsed], list[str]]:
    """Return every stored rehearsal, and the names of those whose plan now raises ``ValueError``."""
    rehearsals: list[Rehearsed] = []
    refused: list[str] = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            name = f"{path.stem}:{row.get('name', number)}"
            try:
                plan = ss.Plan.from_json(row["plan"]) if isinstance(row["plan"], str) else _plan(row["plan"])
                rehearsals.append(Rehearsed(name, plan, _stored_peak(row), _predicted_peak(plan)))
            except ValueError as error:
                refused.append(f"{name}: {str(error)[:120]}")
    return rehearsals, refused


def _plan(data: Mapping[str, Any]) -> ss.Plan:
    fields = {key: value for key, value in data.items() if key not in ("shardscope", "version")}
    return ss.Plan.from_dict(fields)


def _stored_peak(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the components at the stored peak: over all phases of all stages, or as the row has them."""
    stages = row.get("stages") or row.get("by_stage")
    if not stages:
        return {name: int(row["components"].get(name, 0)) for name in COMPONENTS}
    moments = [moment["components"] for stage in stages for moment in stage["moments"]]
    fullest = max(moments, key=lambda parts: sum(parts.get(name, 0) for name in COMPONENTS))
    return {name: int(fullest.get(name, 0)) for name in COMPONENTS}


def _predicted_peak(plan: ss.Plan) -> dict[str, int]:
    moments = [moment for stage in plan.memory().by_stage for moment in stage.phases]
    fullest = max(moments, key=tensor_bytes).components
    return {name: fullest[name] for name in COMPONENTS}  # type: ignore[index]


def rehearsal_report(rows: list[Rehearsed], refused: list[str]) -> str:
    """Return the section of docs/accuracy.md."""
    if not rows and not refused:
        return ""
    lines = [
        "## Against rehearsals",
        "",
        f"{len(rows)} stored rehearsals (tests/fixtures/rehearsals): the framework's own code on fake "
        "tensors, with every allocation tracked. Errors are of all tensors at the peak; errors of components "
        "are shares of that total. Goal: 95 % of the plans within 1 %, none beyond 3 %. Result for the "
        f"stored plans: {_format_verdict(rows)}.",
        "",
        "The stored plans are not unseen: the errors that they showed have been fixed. The `held-out` "
        "samples were drawn with seeds of their own from everything that a rehearsal supports (no quantized "
        "base; no kernel, loss or optimizer that it rejects), and rehearsed before any formula was compared "
        "with them. In that first comparison 76 % of the FSDP2 plans were within 1 %, 90 % of DDP, 68 % of "
        "ZeRO and 90 % of Megatron. A later, independent sample (seed 77701 of "
        "`tests/accuracy/wide_sampling.py`: 128 plans, with pipelines, tensor parallelism and offload) had "
        "84 % within 1 %, 89 % within 3 % and a worst error of -39 % at first. Later samples, 203 plans "
        "from new seeds: 68 of 69 within 1 %, worst -1.3 %, for DDP, FSDP2, tensor and pipeline parallelism "
        "and Megatron (seed 78812); 129 of 134 within 1 % and 130 within 3 %, worst -12.9 %, for ZeRO with "
        "offload, NVMe and AutoTP (seed 78802). Three have every family of the catalogue, quantized bases "
        "and all optimizers. Seed 20261129, 212 plans: 195 within 1 %, 204 within 3 %, worst +25.6 % "
        "(offloaded activations of routed experts, since corrected). Seed 20261130, 179 plans: 164 within "
        "1 %, 176 within 3 %, worst -13.5 % (phi-2 under ZeRO-3, whose head has a bias, with a bucket "
        "smaller than the head). The last one, with odd lengths, DoRA and chunked losses too, 186 plans: "
        "168 within 1 %, 179 within 3 %, worst -24.2 % (experts' gradients that ZeRO-3 offloads, since "
        "corrected; next "
        "+19.7 %, an fp32 QLoRA of Falcon with one adapter, corrected later). `mixed-fine-tunes`, 98 usual "
        "fine-tunes and pretrainings of the catalogue's models: 94 within 1 %, 96 within 3 %, worst +7.3 % "
        "(Falcon under DDP, since corrected). Of 40 plans of GLM-4.5 Air only the 29 in 16 bits are stored: "
        "of the 11 in fp32 two were 4 and 7 % too high. Of 45 plans of SmolLM3 and OLMo 3 with eager "
        "attention, dropout, DoRA or quantized bases, which are not stored, 40 were within 1 %, worst "
        "+10.3 %. `mixed-fp32` is a later sample of that kind, 66 plans in fp32 of nine models, many with "
        "dropout or eager attention: 53 within 1 %, 60 within 3 %, worst -24.8 % (eager attention with "
        "dropout, since corrected; in bf16 it was about 5 % too low); all are stored. "
        "OLMo 3 32B beyond its window was 11 % too low, GLM-4.5 Air under ZeRO-1 10 % too high and selective "
        "recomputation with dropout under ZeRO-3 5 % too high; all three have been corrected, and with them "
        "Gemma 3 in fp32 or before Ampere, up to 16 % too low. Known and not corrected: a QLoRA of one "
        "layer of GLM-4 in a short sequence, 17 % too high in forward. Of 101 further plans of one to four "
        "layers, half of them chosen because these corrections changed their predictions, 76 were within 1 % "
        "and 90 within 3 %. Not corrected: LoRA under ZeRO-3 of two layers of GLM-4, 26 % too high (the head "
        "is all-gathered later; 0.6 % too low with eight layers), LoRA of the feed-forward only in one layer "
        "of OLMo 3 under ZeRO-3, 16 % too high, and LoRA with selective recomputation of Gemma 3 in fp32, up "
        "to 7 % too low. "
        "**On unseen plans both goals, 95 % within 1 % and none beyond 3 %, are missed.** Plans whose "
        "rehearsal fails are not part of a sample.",
        "",
        "Rehearsals are independent evidence only in part. Where a kernel has no CPU build, the rehearsal "
        "runs a substitute that allocates and saves the tensors that the kernel's source does: CUDA's fused "
        "attention and other operators (`rehearsal/gpu_operators.py`), Transformer Engine's modules for "
        "Megatron (`frameworks/megatron/rehearsal/fused_modules.py`), bitsandbytes' quantization "
        "(`rehearsal/quantization.py`). The same authors wrote the formulas from the same sources. For the "
        "tensors that those kernels save, and for everything that both leave out (the attention kernel of an "
        "older GPU, library workspaces, the allocator), agreement means that two programs are consistent, "
        "not that a GPU behaves like them. The frameworks' own Python is independent: sharding, buckets, "
        "all-gathers, hooks, the order of frees.",
        "",
        "| sample | plans | within 1 % | within 3 % | median | worst | " + " | ".join(COMPONENTS) + " |",
        "|---" * (6 + len(COMPONENTS)) + "|",
    ]
    groups: dict[str, list[Rehearsed]] = defaultdict(list)
    for row in rows:
        groups[row.name.partition(":")[0]].append(row)
    for name, some in [*sorted(groups.items()), ("all", rows)]:
        if some:
            lines.append(f"| {name} | {_format_figures(some)} |")
    worst = sorted(rows, key=lambda row: -abs(row.error))[:10]
    lines += [
        "",
        "The largest errors:",
        "",
        "| rehearsal | plan | rehearsed, GiB | predicted, GiB | error | components with the largest error |",
        "|---|---|---|---|---|---|",
    ]
    for row in worst:
        plan = row.plan
        lines.append(
            f"| {row.name} | {plan.architecture.name}, {plan.layout.description} on {plan.world_size}, "
            f"{plan.recipe.method}, {plan.recipe.precision}, recompute {plan.recipe.recompute} | "
            f"{format_gib(sum(row.stored.values()))} | {format_gib(sum(row.predicted.values()))} | "
            f"{100 * row.error:+.1f} % | {_format_components(row)} |"
        )
    lines += ["", *(f"- raises ValueError: {name}" for name in refused)]
    return "\n".join(lines).rstrip()


def _format_verdict(rows: list[Rehearsed]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    within = sum(error <= 0.01 for error in errors) / max(1, len(errors))
    return "reached" if rows and within >= 0.95 and errors[-1] <= 0.03 else "**missed**"


def _format_figures(rows: list[Rehearsed]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    within = [sum(error <= limit for error in errors) / len(errors) for limit in (0.01, 0.03)]
    parts = []
    for name in COMPONENTS:
        shares = sorted(abs(row.component_error(name)) for row in rows)
        parts.append(f"{100 * compute_percentile(shares, 0.9):.1f} %")
    return (
        f"{len(rows)} | {100 * within[0]:.1f} % | {100 * within[1]:.1f} % | "
        f"{100 * compute_percentile(errors, 0.5):.2f} % | {100 * errors[-1]:.1f} % | " + " | ".join(parts)
    )


def _format_components(row: Rehearsed) -> str:
    largest = sorted(COMPONENTS, key=lambda name: -abs(row.component_error(name)))[:2]
    return ", ".join(f"{name} {100 * row.component_error(name):+.1f} %" for name in largest)


if __name__ == "__main__":
    # Imported here because recording rehearsals needs torch, and reading them does not.
    from tests.accuracy import rehearsal_samples

    rehearsal_samples.main()
