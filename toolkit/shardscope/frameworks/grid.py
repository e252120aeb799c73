"""Layouts that a search evaluates: one grid has the layouts of one framework, as rows of integer columns.

Each framework's own ``grid.py`` enumerates them, with the checks of its layout class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.core.fixes import without_fix_search

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe

Columns = dict[str, "NDArray[np.int64]"]
"""Integer columns by name, all of the same length."""

DEGREES = ("data_parallel", "replicate", "tp", "pp", "vpp", "cp", "ep")
MICRO_BATCH_SIZE = "micro_batch_size"
DATA_PARALLEL = "data_parallel"
SEQUENCES_AT_ONCE = "sequences_at_once"
"""Name of the column of sequences per micro-batch over all data-parallel ranks."""


def _accept_any(layout: Any, recipe: Any) -> None:
    """Accept every recipe: the default of :attr:`Grid.check`."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Layouts of one framework with micro-batch sizes, one per row."""

    layout: Layout
    """Common fields of all rows, with degrees of 1."""
    columns: Columns
    """Layout fields that differ by row, ``micro_batch_size`` and ``data_parallel``. Grids of one framework
    may share them, so that results that depend on them alone are computed once."""
    check: Callable[[Layout, Recipe], object] = _accept_any
    """Function that raises ``ValueError`` for a recipe that no row can run."""


def filter_valid(check: Callable[..., object], values: Iterable[Any]) -> list[Any]:
    """Return the values for which ``check(value)``, or ``check(*value)`` of a tuple, raises nothing."""
    with without_fix_search():  # Suggested fixes are not shown here, so do not compute them.
        return [
            value for value in values if _is_valid(check, value if isinstance(value, tuple) else (value,))
        ]


def combine_degrees(
    cluster: Cluster,
    recipe: Recipe,
    degrees: Mapping[tuple[str, ...], Sequence[tuple[int, ...]]],
    beside: tuple[str, ...] = (),
) -> Columns:
    """Return all combinations of ``degrees`` and micro-batch sizes that divide the GPUs and the global batch.

    ``degrees`` has the values of fields; fields that depend on each other share one entry. Each degree except
    vpp and those in ``beside`` divides the number of GPUs.
    """
    found: Columns = {"taken": np.ones(1, np.int64)}
    for names, values in degrees.items():
        rows = np.array(values, np.int64).reshape(len(values), len(names))
        places, choices = _pair_rows(len(found["taken"]), len(rows))
        found = {name: column[places] for name, column in found.items()}
        for number, name in enumerate(names):
            found[name] = rows[choices, number]
            if name not in beside and name != "vpp":
                found["taken"] = found["taken"] * found[name]
        found = select_rows(found, cluster.num_gpus % found["taken"] == 0)
    left = cluster.num_gpus // found.pop("taken")
    found[DATA_PARALLEL] = left * found.get("replicate", 1)
    sizes = np.array(list_micro_batch_sizes(recipe), np.int64)
    places, choices = _pair_rows(len(left), len(sizes))
    found = {name: column[places] for name, column in found.items()}
    found[MICRO_BATCH_SIZE] = sizes[choices]
    found[SEQUENCES_AT_ONCE] = found[MICRO_BATCH_SIZE] * found[DATA_PARALLEL]
    return select_rows(found, recipe.global_batch_size % found[SEQUENCES_AT_ONCE] == 0)


def list_micro_batch_sizes(recipe: Recipe) -> list[int]:
    """Return the powers of two up to the global batch size, and the recipe's own size."""
    most = min(recipe.global_batch_size, 2**16)
    return sorted({*(1 << power for power in range(most.bit_length())), recipe.micro_batch_size})


def filter_rows(columns: Columns, names: Sequence[str], check: Callable[..., object]) -> Columns:
    """Return the rows for which ``check`` of columns ``names`` raises nothing; equal rows count once."""
    if not len(columns[names[0]]):
        return columns
    codes = np.zeros(len(columns[names[0]]), np.int64)
    for name in names:
        values, indices = np.unique(columns[name], return_inverse=True)
        codes = codes * len(values) + indices
    _, first_rows, row_codes = np.unique(codes, return_index=True, return_inverse=True)
    rows = zip(*(columns[name][first_rows].tolist() for name in names), strict=True)
    with without_fix_search():
        passes = [_is_valid(check, row) for row in rows]
    return select_rows(columns, np.array(passes)[row_codes])


def select_rows(columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    """Return the selected rows; the same ``columns`` object if all are selected."""
    return columns if rows.all() else {name: column[rows] for name, column in columns.items()}


def _is_valid(check: Callable[..., object], values: tuple[Any, ...]) -> bool:
    try:
        check(*values)
    except ValueError:
        return False
    return True


def _pair_rows(first: int, second: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.repeat(np.arange(first), second), np.tile(np.arange(second), first)
