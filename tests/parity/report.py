"""The parity table as people read it: lines as rows end, and docs/parity.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tests.parity.comparison import FILES_TOLERANCE, LOSS_TOLERANCE, NORM_TOLERANCE, Outcome
from tests.parity.rank_training import CLIPPED_TO, NUM_STEPS, WARMUP_STEPS
from tests.parity.speed import Speed
from tests.parity.table import GLOBAL_ROWS, NUM_LAYERS, SEQ_LEN

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"

_HOW = f"""Every row trains the same {NUM_LAYERS}-layer Llama (or the same Mixtral of four experts) for
{NUM_STEPS} optimizer steps in fp32: the same weights, the same batches of {GLOBAL_ROWS} sequences of
{SEQ_LEN} tokens, cut among its ranks and into micro-batches, labels that start at another place in each row,
{WARMUP_STEPS} steps of warm-up, gradients clipped to {CLIPPED_TO:g}, AdamW with decay on matrices. The single
process is plain PyTorch, with no engine of ours and the whole batch at once. Vectors of the fresh model
differ from one another and its matrices are wide, so that weights in the wrong place, heads in the wrong
order and labels counted twice all show. Rows of LoRA train adapters of rank 32 on every projection; the base
under them is frozen, of QLoRA in NF4 with double quantisation, and the single process's is peft's and
bitsandbytes' own.

A row holds if the loss of every step on every rank is within {LOSS_TOLERANCE:g} of the single process's, the
norm of the whole gradient within {NORM_TOLERANCE:g} of it (relative), and if the bytes of parameters,
gradients and optimizer state that ranks held when the optimizer stepped are `plan.memory().at("optimizer")`,
to the byte (of a pipeline for each stage; without step counters, one number a tensor, and without what ZeRO's
update makes beside its state and frees again; of state on NVMe its files, within {FILES_TOLERANCE:.1%}, for
which that row's Llama has more tokens: ZeRO writes none under a mebibyte). Each row is a run of its own,
launched by `ss.launch`, with the engine that its plan names."""

_NOT_RUN = """## What was never run by us on several GPUs

All of it. The rows above are CPU ranks over gloo: the frameworks' own code, every collective a real one, but
no CUDA kernel and no NCCL. What they cannot show is anything of a GPU's own: overlap of streams, kernels of
Transformer Engine and Apex, fused optimizers on a device, NCCL's order of sums, pinned memory, memory as
CUDA's allocator counts it. `make verify`, or `notebooks/90_verify_this_machine.ipynb`, runs this table and a
short check of speed and memory on the GPUs of your machine, in minutes, and writes a report that can be
sent back.

Megatron-core's context parallelism was run by us only through a stand-in for Transformer Engine's attention,
which gathers keys and values over gloo (tests/runs/test_megatron_context.py): what of a batch a rank has,
angles, loss, gradients, state and checkpoints are Megatron-core's and ours, that attention is not. A run
compares the real one with attention to a whole sequence before its first step, and ends where they differ;
tests/gpu/test_megatron_context_gpu.py trains with it where there are two GPUs and Transformer Engine."""


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
    """Return the verdict; equal curves over other bytes than planned do not hold."""
    return "bytes differ" if outcome.verdict == "same" and not outcome.holds else outcome.verdict


def bytes_words(outcome: Outcome) -> str:
    """Describe whether the measured bytes equal the planned ones."""
    off = [stage.words for stage in outcome.bytes_by_stage if stage.words != "exact"]
    return "bytes exact" if not off else f"bytes: {' / '.join(off)}"


def format_document(outcomes: Sequence[Outcome], *, device: str, versions: str) -> str:
    """Format the whole report as Markdown; ``device`` describes the ranks."""
    held = [outcome for outcome in outcomes if outcome.verdict == "same"]
    parts = [
        "# One loss curve",
        "Written by `make parity`; do not edit.",
        _HOW,
        f"Run on {device}, with {versions}. {len(held)} of {len(outcomes)} rows equal the single process.",
        format_table(outcomes),
        what_they_were(outcomes),
        without_a_run(outcomes),
        _NOT_RUN,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Format the rows with their numbers."""
    lines = [
        "| row | ranks | verdict | loss, furthest off | gradient norm | loss, first to last | bytes held |",
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


def what_they_were(outcomes: Sequence[Outcome]) -> str:
    """List the setups that the engines recorded."""
    said = [f"- {outcome.row.name}: {outcome.sentence}" for outcome in outcomes if outcome.sentence]
    return "\n".join(["## What each row found that it was", "", *said])


def without_a_run(outcomes: Sequence[Outcome]) -> str:
    """Rows that have no curve, and what stops them; an empty text if there are none."""
    said = [
        f"- {outcome.row.name}, {outcome.verdict}: {outcome.why}{_format_call(outcome)}"
        for outcome in outcomes
        if outcome.verdict not in ("same", "differs")
    ]
    return "\n".join(["## Rows that did not run, and what stops them", "", *said]) if said else ""


def _format_call(outcome: Outcome) -> str:
    call = outcome.row.stopping_call
    return f" The call that stops it on CPU ranks: {call}." if call and outcome.verdict == "refused" else ""


def speed_table(speeds: Sequence[Speed]) -> str:
    """Tokens a second and bytes at the peak, each beside what was predicted."""
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
