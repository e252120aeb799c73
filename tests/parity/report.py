"""The parity table as text: a line for each finished row, and docs/parity.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tests.parity.comparison import FILES_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE, Outcome
from tests.parity.rank_training import CLIPPED_TO, NUM_STEPS, WARMUP_STEPS
from tests.parity.speed import Speed
from tests.parity.table import GLOBAL_ROWS, NUM_LAYERS, SEQ_LEN

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"

_HOW = f"""Every layout of the table trains the same {NUM_LAYERS}-layer Llama (or the same Mixtral with four
experts) for {NUM_STEPS} optimizer steps in fp32, from the same weights, on the same batches of
{GLOBAL_ROWS} sequences of {SEQ_LEN} tokens, which are divided among ranks and micro-batches. The ignored
labels at the start of a sequence differ in number. The learning rate warms up for {WARMUP_STEPS} steps,
gradients are clipped to {CLIPPED_TO:g}, and AdamW decays matrices only. The reference is a single process
of plain PyTorch, without Shardscope's engines, that trains on the whole batch at once. All vectors of the
initial model differ and its matrices have large values, so a misplaced weight, a wrong order of heads or a
label that counts twice changes the loss. LoRA rows train adapters of rank 32 on every projection over a
frozen base, which QLoRA quantizes to NF4 with double quantization; their reference uses peft and
bitsandbytes.

A row passes if three things hold. The loss of every step on every rank is within {LOSS_TOLERANCE:g} of the
reference. The norm of the whole gradient is within {NORM_TOLERANCE:g} (relative). The bytes of parameters,
gradients and optimizer state on every rank during the optimizer step equal `plan.memory().at("optimizer")`,
for each pipeline stage. Step counters (one number per tensor) and the buffers that ZeRO's update allocates
and frees are not counted. State on NVMe is compared by its files, within {FILES_TOLERANCE:.1%}; that row's
Llama has a larger vocabulary, because ZeRO writes no file below 1 MiB. Each row is a separate run, launched
by `ss.launch` with the engine of its plan."""

_NOT_RUN = """## Not tested on several GPUs

None of these layouts has been run on several GPUs. The rows above are CPU ranks over gloo: they run the
frameworks' own code with real collectives, but no CUDA kernel and no NCCL. So they do not test overlapping
streams, kernels of Transformer Engine and Apex, fused optimizers, NCCL's order of summation, pinned memory
or CUDA's allocator. `make verify`, or `notebooks/90_verify_this_machine.ipynb`, runs this table and a short
check of speed and memory on the GPUs of your machine, in minutes, and writes a report that you can send us.

Megatron-core's context parallelism was tested only with a substitute for Transformer Engine's attention,
which all-gathers keys and values over gloo (tests/runs/test_megatron_context.py). Sharding of the batch,
rotary embeddings, loss, gradients, optimizer state and checkpoints are the real ones; the attention is not.
Before its first step a run compares the real attention with attention over a whole sequence, and fails if
they differ. tests/gpu/test_megatron_context_gpu.py trains with it on two GPUs with Transformer Engine."""


def format_line(outcome: Outcome) -> str:
    """Format one row, as it ends."""
    row = outcome.row
    head = f"{row.name:<38} {row.num_ranks} {format_verdict(outcome):<12}"
    if outcome.verdict in ("same", "differs"):
        loss = _format_difference(outcome.loss_difference)
        norm = _format_difference(outcome.norm_difference)
        curve = f"{outcome.first_loss:.4f} -> {outcome.last_loss:.4f}"
        tail = f"loss {loss}  norm {norm}  {curve}  {bytes_words(outcome)}"
        why = f"  {outcome.why}" if outcome.why else ""
    else:
        tail, why = outcome.why, ""
    return f"{head} {tail}{why}".rstrip()


def format_verdict(outcome: Outcome) -> str:
    """Return the verdict: "bytes differ" for equal curves with other bytes than predicted."""
    return "bytes differ" if outcome.verdict == "same" and not outcome.holds else outcome.verdict


def bytes_words(outcome: Outcome) -> str:
    """Describe whether the measured bytes equal the planned ones."""
    off = [stage.words for stage in outcome.bytes_by_stage if stage.words != "exact"]
    return "bytes exact" if not off else f"bytes: {' / '.join(off)}"


def format_document(outcomes: Sequence[Outcome], *, device: str, versions: str) -> str:
    """Format the whole report as Markdown; ``device`` describes the ranks."""
    same = [outcome for outcome in outcomes if outcome.verdict == "same"]
    parts = [
        "# Training parity: every layout has the same loss curve",
        "Written by `make parity`; do not edit.",
        _HOW,
        f"Run on {device}, with {versions}. {len(same)} of {len(outcomes)} rows equal the single process.",
        format_table(outcomes),
        list_setups(outcomes),
        list_missing_runs(outcomes),
        _NOT_RUN,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Format the rows with their numbers."""
    lines = [
        "| layout | ranks | result | largest loss difference | gradient norm difference | "
        "loss, first to last | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        ran = outcome.verdict in ("same", "differs")
        cells = [
            outcome.row.name,
            str(outcome.row.num_ranks),
            format_verdict(outcome) if outcome.holds else f"**{format_verdict(outcome)}**",
            f"{_format_difference(outcome.loss_difference)} (step {outcome.at_step + 1})" if ran else "–",
            _format_difference(outcome.norm_difference) if ran else "–",
            f"{outcome.first_loss:.4f} to {outcome.last_loss:.4f}" if ran else "–",
            (bytes_words(outcome).removeprefix("bytes").lstrip(": ") if ran else "–"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def list_setups(outcomes: Sequence[Outcome]) -> str:
    """List the setups that the engines recorded."""
    setups = [f"- {outcome.row.name}: {outcome.sentence}" for outcome in outcomes if outcome.sentence]
    return "\n".join(["## Setup that each run recorded", "", *setups])


def list_missing_runs(outcomes: Sequence[Outcome]) -> str:
    """List the rows without a curve, with the reason; an empty text if there are none."""
    reasons = [
        f"- {outcome.row.name}, {outcome.verdict}: {outcome.why}{_format_call(outcome)}"
        for outcome in outcomes
        if outcome.verdict not in ("same", "differs")
    ]
    return "\n".join(["## Layouts that did not run", "", *reasons]) if reasons else ""


def _format_call(outcome: Outcome) -> str:
    call = outcome.row.stopping_call
    return f" On CPU ranks it fails in {call}." if call and outcome.verdict == "refused" else ""


def speed_table(speeds: Sequence[Speed]) -> str:
    """Format measured and predicted tokens/s and peak bytes."""
    lines = [
        "| framework | tokens/s, all ranks | predicted | tensors at the peak | predicted |",
        "|---|---|---|---|---|",
    ]
    for speed in speeds:
        if speed.tokens_per_second is None:
            lines.append(f"| {speed.name} | {speed.why} | | | |")
            continue
        rate, expected = speed.tokens_per_second, speed.predicted_tokens_per_second
        cells = [
            speed.name,
            f"{rate:,.0f}",
            "not known here" if expected is None else f"{expected:,.0f}",
            _format_mib(speed.measured_bytes),
            _format_mib(speed.predicted_bytes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_mib(num_bytes: int | None) -> str:
    return "not measured" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def _format_difference(difference: float) -> str:
    if not math.isfinite(difference):
        return "infinite"
    return "0" if difference == 0 else f"{difference:.1e}"
