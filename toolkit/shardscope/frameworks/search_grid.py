"""Layouts that a search evaluates: one grid has the layouts of one framework, as rows of integer columns.

Each framework's own ``search_grid.py`` enumerates them, with the checks of its layout class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardscope.core.fixes import without_fix_search
from shardscope.frameworks.distinct_values import encode_values, find_distinct, find_distinct_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe

Columns = dict[str, "NDArray[np.int64]"]
"""Integer columns by name, all of the same length."""
Row = Mapping[str, int]
"""One row of such columns, by name."""
Value = TypeVar("Value")

DEGREES = ("data_parallel", "replicate", "tp", "pp", "vpp", "cp", "ep")
MICRO_BATCH_SIZE = "micro_batch_size"
DATA_PARALLEL = "data_parallel"
SEQUENCES_AT_ONCE = "sequences_at_once"
"""Name of the column of sequences per micro-batch over all data-parallel ranks."""


def _accept_any(layout: Layout, recipe: Recipe) -> None:
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


def filter_valid(check: Callable[[Value], object], values: Iterable[Value]) -> list[Value]:
    """Return the values for which ``check`` does not raise ``ValueError``."""
    with without_fix_search():  # Suggested fixes are not shown here, so do not compute them.
        return [value for value in values if is_valid(check, value)]


def is_valid(check: Callable[[Value], object], value: Value) -> bool:
    """Return whether ``check(value)`` does not raise ``ValueError``."""
    try:
        check(value)
    except ValueError:
        return False
    return True


def combine_degrees(
    cluster: Cluster,
    recipe: Recipe,
    degrees: Mapping[tuple[str, ...], Sequence[int] | Sequence[tuple[int, ...]]],
    within_data_parallel: tuple[str, ...] = (),
) -> Columns:
    """Return all combinations of ``degrees`` and micro-batch sizes that divide the GPUs and the global batch.

    ``degrees`` has the values of fields; fields that depend on each other share one entry, with tuples. The
    product of all degrees divides the number of GPUs, except vpp and those ``within_data_parallel`` (ep).
    """
    columns: Columns = {}
    num_ranks = np.ones(1, np.int64)  # ranks of one replica so far, by row
    for names, values in degrees.items():
        choices = np.array(values, np.int64).reshape(len(values), len(names))
        rows, choice_rows = _pair_rows(len(num_ranks), len(choices))
        columns = {name: column[rows] for name, column in columns.items()}
        num_ranks = num_ranks[rows]
        for number, name in enumerate(names):
            columns[name] = choices[choice_rows, number]
            if name not in within_data_parallel and name != "vpp":
                num_ranks = num_ranks * columns[name]
        # Drop rows before the next degree: the full product of all degrees would not fit in memory.
        divides = cluster.num_gpus % num_ranks == 0
        columns, num_ranks = select_rows(columns, divides), num_ranks[divides]
    # The remaining ranks are data-parallel. HSDP's "replicate" is a field, but part of data parallelism.
    columns[DATA_PARALLEL] = cluster.num_gpus // num_ranks * columns.get("replicate", 1)
    # Pair each combination of degrees with each micro-batch size.
    sizes = np.array(list_micro_batch_sizes(recipe), np.int64)
    rows, size_rows = _pair_rows(len(num_ranks), len(sizes))
    columns = {name: column[rows] for name, column in columns.items()}
    columns[MICRO_BATCH_SIZE] = sizes[size_rows]
    columns[SEQUENCES_AT_ONCE] = columns[MICRO_BATCH_SIZE] * columns[DATA_PARALLEL]
    # Every rank runs the same number of micro-batches.
    return select_rows(columns, recipe.global_batch_size % columns[SEQUENCES_AT_ONCE] == 0)


def list_micro_batch_sizes(recipe: Recipe) -> list[int]:
    """Return the powers of two up to the global batch size, and the recipe's own size."""
    # Larger micro-batches than 65,536 sequences only make the table longer: none fits on a GPU.
    largest = min(recipe.global_batch_size, 2**16)
    return sorted({*(1 << power for power in range(largest.bit_length())), recipe.micro_batch_size})


def filter_rows(columns: Columns, names: Sequence[str], check: Callable[[Row], object]) -> Columns:
    """Return the rows for which ``check`` does not raise ``ValueError``.

    It gets the columns ``names`` of a row, and is called once for equal rows.
    """
    if not len(columns[names[0]]):
        return columns
    # Check each distinct row once: a check constructs a layout.
    distinct = find_distinct_rows([encode_values(columns[name]) for name in names])
    values = zip(*(columns[name][distinct.rows].tolist() for name in names), strict=True)
    rows = [dict(zip(names, row, strict=True)) for row in values]
    with without_fix_search():
        passes = [is_valid(check, row) for row in rows]
    return select_rows(columns, np.array(passes)[distinct.codes])


def select_rows(columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    """Return the selected rows; the same ``columns`` object if all are selected."""
    return columns if rows.all() else {name: column[rows] for name, column in columns.items()}


class DegreeFilter:
    """Selection of rows by which degrees are above 1, with results cached by the identity of the columns.

    Equal selections of the same columns are the same object.
    """

    def __init__(self) -> None:
        self._above: dict[int, tuple[list[dict[str, int]], NDArray[np.int64]]] = {}
        self._selected: dict[tuple[int, bytes], Columns] = {}

    def select(self, columns: Columns, check: Callable[[dict[str, int]], object]) -> Columns:
        """Return the rows for which ``check`` does not raise ``ValueError``; the same object if all are.

        It gets the degrees of a row with 2 for all above 1, and is called once for each combination.
        """
        if id(columns) not in self._above:
            self._above[id(columns)] = _find_degrees_above_one(columns)
        kinds, kind_of = self._above[id(columns)]
        with without_fix_search():
            passes = np.array([is_valid(check, degrees) for degrees in kinds], bool)
        if passes.all():
            return columns
        key = id(columns), passes.tobytes()
        if key not in self._selected:
            self._selected[key] = select_rows(columns, passes[kind_of])
        return self._selected[key]


def _find_degrees_above_one(columns: Columns) -> tuple[list[dict[str, int]], NDArray[np.int64]]:
    """Return all combinations of degrees above 1 (written as 1 and 2), and the combination of each row."""
    names: list[str] = [name for name in ("tp", "pp", "cp", "ep") if name in columns]
    kind_of = np.zeros(len(columns[MICRO_BATCH_SIZE]), np.int64)
    for name in names:
        kind_of = 2 * kind_of + (columns[name] > 1)
    distinct = find_distinct(kind_of, 2 ** len(names))
    kinds = [{name: min(int(columns[name][row]), 2) for name in names} for row in distinct.rows]
    return kinds, distinct.codes


def _pair_rows(first: int, second: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row indices of all pairs of a row of the first and a row of the second table."""
    return np.repeat(np.arange(first), second), np.tile(np.arange(second), first)
