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
"""Rows of role ``judge`` that checks of pieces once read: for these pieces they are no fresh rows. Of
Moonlight's (mbskill) the pieces are options of a plan by now."""

MISSING: dict[OwnCode, str] = {
    "torchtitan_policy": "yes: a selective recomputation that names its operations",
    "bf16_optimizer": "in part: ZeRO's stage 0 in a pipeline has it, over transformers' modules",
    "no_ddp": "yes: one GPU without DDP",
    "kbit_training": "yes: what is not quantised in fp32, as prepare_model_for_kbit_training leaves it",
    "zero2_over_gptq": "yes: a base in 4 bits under ZeRO, which is refused",
    "no_buckets": "yes: one GPU without DDP",
}
"""Pieces that users of the product would say as an option; the others are code of one source or time."""


class Without(NamedTuple):
    """One row, whose plan has a piece of foreign code beside it."""

    row: Scored
    with_error: float
    """Absolute, with all that ran beside the plan."""
    without_error: float
    """Absolute, with all of it but the piece."""


def score_without(name: OwnCode, rows: Sequence[Scored]) -> list[Without]:
    """Score every row with which the piece ran, without it."""
    results = []
    for row in rows:
        own = row.mapped.own_code
        # A run that is measured twice counts once: as tensors, which is what the pieces are.
        if name in own and not row.mapped.row.get("same_run"):
            rest = tuple(other for other in own if other != name)
            report = add_own_code(row.mapped.plan, row.mapped.plan.memory(), rest)
            error = predict_measured_kind(row.mapped.row, report).point / row.measured - 1
            results.append(Without(row, abs(row.error), abs(error)))
    return results


def ablation_report(rows: Sequence[Scored]) -> str:
    """The section of docs/accuracy.md about what ran beside plans."""
    named: dict[OwnCode, set[str]] = defaultdict(set)
    for row in rows:
        for name in row.mapped.own_code:
            named[name].add(read_source(row.mapped.row))
    if not named:
        return ""
    lines = [
        "## What ran beside the plans",
        "",
        "Kernels, hooks and options that no plan says, counted from the sources of what ran "
        "(`tests/accuracy/own_code.py`): the median of absolute errors with each piece and without it. "
        "Checks of the pieces read rows of role `calibration` only "
        "(`tests/unit/accuracy/test_accuracy_own_code.py`). When they were written they also read "
        f"{len(SEEN)} rows of role `judge`, which are apart here: for these pieces they are not fresh.",
        "",
        "The last column says whether users would want it as an option of a plan: those are gaps of the "
        "product; the others are code of one source or of its time.",
        "",
        "| what | source | calibration: rows, with, without | judge, fresh | judge, once read | an option? |",
        "|---|---|---|---|---|---|",
    ]
    for name, sources in sorted(named.items()):
        found = score_without(name, rows)
        of_role: dict[str, list[Without]] = defaultdict(list)
        for one in found:
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
