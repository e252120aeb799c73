"""The layouts that a search asks: those of one framework that differ in whole numbers only, one row each.

Each framework's own ``grid.py`` says which those are, by the checks that its layouts make themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.core.arrays.deduplicate import rows_alike, value_codes
from shardscope.core.arrays.varied import Varied
from shardscope.core.fixes import as_it_is

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe

Columns = dict[str, "NDArray[np.int64]"]
"""Whole numbers by name, one of each for every row."""

DEGREES = ("data_parallel", "replicate", "tp", "pp", "vpp", "cp", "ep")
MICRO_BATCH_SIZE = "micro_batch_size"
DATA_PARALLEL = "data_parallel"
PER_STEP = "sequences_at_once"
"""Sequences that all data-parallel ranks take at once: their number times the micro-batch."""


def _nothing(layout: Any, recipe: Any) -> None:
    """What :attr:`Grid.check` asks by default."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Layouts of one framework and micro-batch sizes, by row."""

    layout: Layout
    """What all of them have in common, its degrees 1."""
    columns: Columns
    """The fields of the layout that differ, ``micro_batch_size`` and ``data_parallel``. Grids of one
    framework may share them: then what they decide is told once."""
    check: Callable[[Layout, Recipe], object] = _nothing
    """Raises ``ValueError`` for a recipe with which none of them can run."""


def passing(check: Callable[..., object], values: Iterable[Any]) -> list[Any]:
    """Those values that ``check(value)`` does not refuse (``check(*value)`` of tuples)."""
    with as_it_is():  # nobody reads the fixes
        return [value for value in values if _passes(check, value if isinstance(value, tuple) else (value,))]


def crossed(
    layout: Layout,
    cluster: Cluster,
    recipe: Recipe,
    degrees: Mapping[tuple[str, ...], Sequence[tuple[int, ...]]],
    beside: tuple[str, ...] = (),
) -> Columns:
    """Every combination of ``degrees`` and micro-batch sizes whose ranks and sequences come out even.

    ``degrees`` are values of fields, several fields at once where these hang together. All but those
    ``beside`` take their share of the GPUs.
    """
    found: Columns = {"taken": np.ones(1, np.int64)}
    for names, values in degrees.items():
        rows = np.array(values, np.int64).reshape(len(values), len(names))
        places, choices = _pairs(len(found["taken"]), len(rows))
        found = {name: column[places] for name, column in found.items()}
        for number, name in enumerate(names):
            found[name] = rows[choices, number]
            if name not in beside and name != "vpp":
                found["taken"] = found["taken"] * found[name]
        found = kept(found, cluster.num_gpus % found["taken"] == 0)
    left = cluster.num_gpus // found.pop("taken")
    spread = Varied(type(layout), layout, **found).spread(left)
    found[DATA_PARALLEL] = np.broadcast_to(spread.data_parallel, left.shape)
    sizes = np.array(micro_batch_sizes(recipe), np.int64)
    places, choices = _pairs(len(left), len(sizes))
    found = {name: column[places] for name, column in found.items()}
    found[MICRO_BATCH_SIZE] = sizes[choices]
    found[PER_STEP] = found[MICRO_BATCH_SIZE] * found[DATA_PARALLEL]
    return kept(found, recipe.global_batch_size % found[PER_STEP] == 0)


def micro_batch_sizes(recipe: Recipe) -> list[int]:
    """Powers of two up to the global batch, and the recipe's own."""
    most = min(recipe.global_batch_size, 2**16)
    return sorted({*(1 << power for power in range(most.bit_length())), recipe.micro_batch_size})


def allowed(columns: Columns, names: Sequence[str], check: Callable[..., object]) -> Columns:
    """The rows that ``check`` of their numbers does not refuse; it is asked once for each distinct one."""
    if not len(columns[names[0]]):
        return columns
    found = rows_alike([value_codes(columns[name]) for name in names])
    rows = zip(*(columns[name][found.rows].tolist() for name in names), strict=True)
    with as_it_is():
        told = [_passes(check, row) for row in rows]
    return kept(columns, np.array(told)[found.codes])


def kept(columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    """Those rows; the very same columns where these are all."""
    return columns if rows.all() else {name: column[rows] for name, column in columns.items()}


def _passes(check: Callable[..., object], values: tuple[Any, ...]) -> bool:
    try:
        check(*values)
    except ValueError:
        return False
    return True


def _pairs(first: int, second: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.repeat(np.arange(first), second), np.tile(np.arange(second), first)
