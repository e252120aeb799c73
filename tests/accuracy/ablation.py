"""Prediction errors with and without each piece of modelled publisher code, by role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tests.accuracy.measurement_kinds import predict_measured_kind
from tests.accuracy.own_code import OwnCode, add_own_code, describe
from tests.accuracy.rows import read_source
from tests.accuracy.scoring import Scored

SEEN = (
    *(f"fms-{number:04}" for number in (7, 41, 45, 50, 52, 53, 58, 59, 62, 63, 77, 80)),
    *(f"mbskill-{number:04}" for number in (1, 2, 6)),
)
"""Rows of role ``judge`` that were read when the pieces were written, so for them they are not held out.

Moonlight's pieces (mbskill) have become options of a plan."""

MISSING: dict[OwnCode, str] = {
    "torchtitan_policy": "yes: selective recomputation by a list of operators",
    "bf16_optimizer": "partly: ZeRO-0 in a pipeline has it, for transformers' modules",
    "no_ddp": "yes: one GPU without DDP",
    "kbit_training": "yes: fp32 for all parameters that are not quantized, as by "
    "prepare_model_for_kbit_training",
    "zero2_over_gptq": "yes: a 4-bit base under ZeRO, which raises ValueError",
    "no_buckets": "yes: one GPU without DDP",
}
"""Pieces that could be an option of a plan; the others are code of one source or software version."""


class Without(NamedTuple):
    """Errors of one row with and without a piece of publisher's code."""

    row: Scored
    with_error: float
    """Absolute, with all of the publisher's code."""
    without_error: float
    """Absolute, with all of it but the piece."""


def score_without(name: OwnCode, rows: Sequence[Scored]) -> list[Without]:
    """Score each row whose publisher ran the piece, without it."""
    results = []
    for row in rows:
        own = row.mapped.own_code
        # A run with two measurements counts once, by its tensors, because the pieces are tensors.
        if name in own and not row.mapped.row.get("same_run"):
            rest = tuple(other for other in own if other != name)
            report = add_own_code(row.mapped.plan, row.mapped.plan.memory(), rest)
            error = predict_measured_kind(row.mapped.row, report).point / row.measured - 1
            results.append(Without(row, abs(row.error), abs(error)))
    return results


def ablation_report(rows: Sequence[Scored]) -> str:
    """Return the section of docs/accuracy.md about publisher's code."""
    named: dict[OwnCode, set[str]] = defaultdict(set)
    for row in rows:
        for name in row.mapped.own_code:
            named[name].add(read_source(row.mapped.row))
    if not named:
        return ""
    lines = [
        "## Publisher's code, piece by piece",
        "",
        "Kernels, hooks and options that no plan can express, modelled from the source of the code that ran "
        "(`tests/accuracy/own_code.py`). A cell has the number of rows and their median absolute error with "
        "and without the piece. The tests of the pieces (`tests/unit/accuracy/test_accuracy_own_code.py`) "
        f"read `calibration` rows only. While the pieces were written, {len(SEEN)} `judge` rows were read "
        "too; they have a column of their own because they are not held out for these pieces.",
        "",
        "The last column tells whether the piece could be an option of a plan. Those are gaps of Shardscope; "
        "the other pieces belong to one source or one software version.",
        "",
        "| piece | source | calibration: rows, with, without | judge, held out | judge, read before | "
        "possible option |",
        "|---|---|---|---|---|---|",
    ]
    for name, sources in sorted(named.items()):
        of_role: dict[str, list[Without]] = defaultdict(list)
        for one in score_without(name, rows):
            of_role[_find_role(one.row)].append(one)
        cells = [_format_figures(of_role[role]) for role in ("calibration", "judge", "read")]
        cells.append(MISSING.get(name, "no"))
        lines.append(f"| {describe(name)} | {', '.join(sorted(sources))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _find_role(row: Scored) -> str:
    return "read" if row.mapped.row.get("id") in SEEN else str(row.mapped.row.get("role") or "judge")


def _format_figures(some: list[Without]) -> str:
    if not some:
        return "–"
    errors = [median(one.with_error for one in some), median(one.without_error for one in some)]
    return f"{len(some)}, {100 * errors[0]:.1f} %, {100 * errors[1]:.1f} %"
