"""Step times of small kernels: vTrain's GPT models on 2 to 8 A100, limited by kernel launches.

``python -m tests.accuracy.launch_bound`` fits the constant of ``[passes.megatron]`` in
catalog/efficiency.toml that comes from these rows: the kernels that unfused attention adds, twice as many in
backward as in forward. Rows of one layout are nearly equal, so the fit uses half of the layouts, not half of
the rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean, median
from typing import NamedTuple

from tests.accuracy.catalog_predictions import ignore_calibrations
from tests.accuracy.rows import MEASURED

import shardscope as ss
from shardscope.catalog import load_efficiency
from shardscope.timing.rates import look_up_rates

FILE = MEASURED / "vtrain" / "single_half.csv"
_KEYS = (
    "num_gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len", "tp", "dp", "pp",
)  # fmt: skip
_HOW = """\
720 iterations of GPT models on 2 to 8 A100 (VIA-Research/vTrain, MIT; Megatron-DeepSpeed, fp16, full
recomputation, unfused attention). The kernels of such small models take less time than the host needs to
launch them. vTrain, which profiles the machine first, reports a mean error of 8.37 % on the whole file.
Dropout is 0.1, Megatron's default; the file does not state it, but without it the mean error is at least
10.2 % in both halves. One constant was fitted on these rows: the number of kernels that unfused attention
adds, with the smallest mean error on the calibration layouts (`python -m tests.accuracy.launch_bound`).

The rows are not independent measurements. Where dp = pp = 1, rows of one width, micro-batch and tp are
exactly linear in layers and micro-batches: the file has sums of timed pieces rather than timed iterations.
And nearly all held-out layouts share width, micro-batch and tp with a calibration layout."""


class Iteration(NamedTuple):
    """One row and its error."""

    row: dict[str, int]
    position: int
    error: float
    """Predicted over measured seconds, less one."""

    @property
    def is_calibration(self) -> bool:
        """Return whether constants may be fitted on the row's layout."""
        row = self.row
        return (row["hidden"] // 1024 + int(math.log2(row["tp"])) + int(math.log2(row["pp"]))) % 2 == 0


@cache
def _make_architecture(hidden: int, heads: int, layers: int, seq_len: int) -> ss.Architecture:
    sizes = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": seq_len}
    return ss.Architecture.from_hf({"model_type": "gpt2", "vocab_size": 51200, **sizes})


def make_plan(row: dict[str, int]) -> ss.Plan:
    """Return the plan of one row."""
    recipe = ss.Recipe(
        seq_len=row["seq_len"],
        micro_batch_size=row["micro_batch"],
        global_batch_size=row["global_batch"],
        precision="fp16-mixed",
        attention="eager",
        recompute="full",
        dropout=0.1,
    )
    layout = ss.Layout.megatron(
        tp=row["tp"], pp=row["pp"], sequence_parallel=False, distributed_optimizer=False
    )
    architecture = _make_architecture(row["hidden"], row["heads"], row["layers"], row["seq_len"])
    return ss.Plan(architecture, ss.Cluster.parse(f"{row['num_gpus']}xa100-sxm-80gb"), recipe, layout)


def score_iterations() -> list[Iteration]:
    """Predict every row."""
    scored = []
    with FILE.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        next(lines)
        for position, line in enumerate(lines):
            row = dict(zip(_KEYS, map(int, line), strict=False))
            measured = float(line[len(_KEYS)]) / 1e3
            scored.append(Iteration(row, position, make_plan(row).step().seconds / measured - 1))
    return scored


def launch_bound_report() -> str:
    """Return the section of docs/accuracy.md."""
    scored = score_iterations()
    groups: list[tuple[str, Callable[[Iteration], bool]]] = [
        ("all", lambda one: True),
        ("calibration layouts", lambda one: one.is_calibration),
        ("held-out layouts", lambda one: not one.is_calibration),
        ("even rows", lambda one: one.position % 2 == 0),
        ("odd rows", lambda one: one.position % 2 == 1),
    ]
    for key, name in (("micro_batch", "micro-batch"), ("hidden", "hidden size"), ("tp", "tp"), ("pp", "pp")):
        for value in sorted({one.row[key] for one in scored}):
            groups.append((f"{name} {value}", lambda one, key=key, value=value: one.row[key] == value))  # type: ignore[misc]
    lines = ["## Steps limited by kernel launches", "", _HOW, ""]
    lines += ["| rows | number | mean error | median signed error |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(_format_row(name, [one for one in scored if holds(one)]) for name, holds in groups)]
    )


def _format_row(name: str, some: Sequence[Iteration]) -> str:
    size = mean(abs(one.error) for one in some)
    return f"| {name} | {len(some)} | {100 * size:.1f} % | {100 * median(one.error for one in some):+.1f} % |"


def fit_eager_kernels() -> int:
    """Return the number of forward kernels with the smallest mean error on the calibration layouts.

    The rows do not separate forward from backward, which is assumed to have twice as many.
    """
    constants = load_efficiency()["passes"]["megatron"]
    stored = dict(constants)
    errors: dict[int, float] = {}
    try:
        for forward in range(1, 16):
            constants.update(kernels_eager_forward=forward, kernels_eager_backward=2 * forward)
            look_up_rates.cache_clear()
            errors[forward] = mean(abs(one.error) for one in score_iterations() if one.is_calibration)
    finally:
        constants.update(stored)
        look_up_rates.cache_clear()
    return min(errors, key=errors.__getitem__)


if __name__ == "__main__":
    with ignore_calibrations():
        print("kernels_eager_forward =", fit_eager_kernels())
